"""A block's drafts one after the other, on real drafters and targets, against the heads' formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as stock

from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.parts.heads import HEADS, run_heads
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt, tiny_target
from ..helpers import families
from ..helpers import oracle_heads as oracle
from ..helpers.enumerated_draws import every_outcome
from ..helpers.headed_drafters import headed, proposed


def expected_logits(drafter, target, hidden: torch.Tensor, previous: list[int]) -> list[torch.Tensor]:
    """`[config.vocab_size]` of each draft, from the block's states `[drafts, config.target_hidden_size]` and the token
    before each."""
    config, own = drafter.config, target.config
    weight = (drafter.lm_head if config.draft_vocab_size else target.get_output_embeddings()).weight.detach().double()
    cap, scaling = getattr(own, "final_logit_softcapping", None), getattr(own, "logits_scaling", 1.0)

    ids = drafter.draft_ids if config.draft_vocab_size else torch.arange(config.vocab_size)

    def lm_head(h: np.ndarray) -> np.ndarray:
        logits = weight.numpy() @ h
        if not config.draft_vocab_size:
            logits = logits / scaling if cap is None else cap * np.tanh(logits / cap)
        logits[ids.numpy() == config.mask_token_id] = -math.inf  # which is never drafted
        return logits

    embeds = target_of(target).embed(torch.tensor([previous]))[0].detach().double().numpy()
    weights = {name: value.double().numpy() for name, value in drafter.head.state_dict().items()}
    step, states = oracle.ORACLES[config.sequential_head](weights), hidden.detach().double().numpy()
    expected = []
    for scores in oracle.logits(step, states, previous, embeds, lm_head, config.head_candidates):
        of_all = torch.full((config.vocab_size,), -math.inf)
        of_all[ids] = torch.from_numpy(scores).float()
        of_all[config.mask_token_id] = -math.inf
        expected.append(of_all)
    return expected


def v4():
    return tiny_target(layer_types=["sliding_attention"] * 2)


REQUESTS = {
    "plain": [],
    "penalty": [stock.RepetitionPenaltyLogitsProcessor(3.0)],
    "bad words": [stock.NoBadWordsLogitsProcessor([[2], [4, 5], [7], [9], [11]])],
    "cool": [stock.TemperatureLogitsWarper(0.6), stock.TopPLogitsWarper(0.9)],
    # None of the block's best, so that another one is drawn.
    "no candidate": [stock.SuppressTokensLogitsProcessor(list(range(2, 56))), stock.TopKLogitsWarper(6)],
}
CASES = [
    (v4, {}, "penalty"),
    (v4, {"head_candidates": 4}, "cool"),
    (v4, {"head_candidates": 3}, "no candidate"),
    (v4, {"sample_from_anchor": True, "num_draft_tokens": 5, "reducer": "stream_mean"}, "bad words"),
    (v4, {"hidden_size": 48, "reducer": "fc"}, "plain"),
    (v4, {"draft_vocab_size": 30, "head_candidates": 0}, "penalty"),
    (v4, {"draft_vocab_size": 30, "head_candidates": 4}, "plain"),
    (v4, {"conv_kernel_size": 2, "target_layer_ids": [0, -1], "reducer": "hybrid"}, "plain"),
    (families.granite_hybrid, {"head_candidates": 0}, "plain"),  # which scales its logits
    (families.granite_hybrid, {"head_candidates": 3}, "plain"),
    (families.gemma2, {"head_candidates": 0}, "plain"),  # which caps them
    (families.gemma2, {"head_candidates": 3}, "cool"),
]


def named(value):
    return getattr(value, "__name__", str(value))  # a function's address differs between workers


@pytest.mark.parametrize(("family", "fields", "request_name"), CASES, ids=named)
@pytest.mark.parametrize("kind", HEADS)
def test_each_draft_is_drawn_after_the_one_before(kind, family, fields, request_name):
    """Greedy and at random, after the request's processors, among the block's best tokens where that is asked for, and
    `q` says from what."""
    target = family().eval()
    drafter, processors, ids = headed(target, kind, **fields), REQUESTS[request_name], prompt(9)
    off = dict(atol=2e-3, rtol=1e-2) if request_name == "no candidate" else dict(atol=1e-3, rtol=5e-3)
    for do_sample in (False, True):
        tree, states = proposed(drafter, target, ids, do_sample, processors)
        tokens = tree.tokens.tolist()
        assert tree.is_chain and len(tokens) == len(states) == drafter.max_draft_tokens
        previous, text = [int(ids[0, -1]), *tokens[:-1]], ids
        for k, expected in enumerate(expected_logits(drafter, target, states, previous)):
            kept = int((expected > -oracle.FAR / 2).sum())
            count = drafter.config.head_candidates or drafter.config.draft_vocab_size or 64
            assert kept < 64 and 0 <= count - kept <= 1  # without the mask token
            scores = expected[None].clone()
            for processor in processors:
                scores = processor(text, scores)
            if do_sample:
                torch.testing.assert_close(tree.q[k], scores.softmax(-1)[0], **off)
            else:
                assert scores[0, tokens[k]] >= scores.max() - off["atol"]
            text = torch.cat([text, tree.tokens[None, k : k + 1]], dim=1)
        assert (tree.q is not None) == do_sample and tree.confidence is None


@pytest.mark.parametrize("candidates", [0, 2])
@pytest.mark.parametrize("kind", HEADS)
def test_the_law_of_the_drafts_is_their_q(kind, candidates):
    """Every way that the draws can go, how probable it is, and what the drafts say of it."""
    target = tiny_target(layer_types=["sliding_attention"], vocab_size=4)  # one of which masks
    drafter = headed(target, kind, head_candidates=candidates, num_draft_tokens=3)
    ids, total, laws = prompt(6, vocab_size=4), 0.0, set()
    for probability, (tree, states) in every_outcome(lambda: proposed(drafter, target, ids, do_sample=True)):
        tokens = tree.tokens.tolist()
        expected = expected_logits(drafter, target, states, [int(ids[0, -1]), *tokens[:-1]])
        law = math.prod(float(scores.softmax(-1)[token]) for scores, token in zip(expected, tokens))
        assert law == pytest.approx(probability, rel=1e-3)
        assert math.prod(float(q[token]) for q, token in zip(tree.q, tokens)) == pytest.approx(probability, rel=1e-4)
        laws.add(round(float(tree.q[2].max()), 6))
        total += probability
    assert total == pytest.approx(1) and len(laws) >= (candidates or 3)  # the last draft's depends on those before it


# How sure the drafter is


@pytest.mark.parametrize("reads_token", [True, False])
@pytest.mark.parametrize("kind", ["none", *HEADS])
def test_a_confidence_follows_its_formula(kind, reads_token):
    target, ids = tiny_target(layer_types=["sliding_attention"]), prompt(9)
    drafter = headed(target, kind, confidence_head=True, confidence_reads_token=reads_token)
    head, weights = (
        {name: value.double().numpy() for name, value in part.state_dict().items()} if part else {}
        for part in (drafter.head, drafter.confidence_head)
    )
    for temperatures in (None, [0.5, 1, 2.0, 0.7, 3.0, 0.9]):
        drafter.config.confidence_temperatures = temperatures
        tree, states = proposed(drafter, target, ids, count=4)
        assert tree.confidence.shape == (4,)
        for k, token in enumerate([int(ids[0, -1]), *tree.tokens[:3].tolist()]):
            remembered = None
            if kind != "none" and reads_token:
                embedded = target.get_input_embeddings().weight[token].detach().double().numpy()
                remembered = oracle.remembered(kind, head, token, embedded)
            sure = oracle.confidence(
                weights, states[k].double().numpy(), remembered, temperatures[k] if temperatures else 1.0
            )
            assert float(tree.confidence[k]) == pytest.approx(sure, abs=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_a_confidence_judges_drafts_and_does_not_shape_them(kind):
    """Of a block in training: each loss has parameters of its own."""
    drafter, ids = headed(tiny_target(), kind, confidence_head=True), torch.randint(0, 64, (5,))
    hidden, embeds = (torch.randn(5, 32, requires_grad=True) for _ in range(2))
    out = run_heads(hidden, ids, embeds, drafter.head, drafter.confidence_head)
    out.confidence.sum().backward()
    assert all(part.grad is None for part in (hidden, embeds, *drafter.head.parameters()))
    assert all(part.grad.any() for part in drafter.confidence_head.parameters())
    (out.states if out.vectors is None else out.vectors @ drafter.head.table.T).square().sum().backward()
    assert all(part.grad.any() for part in drafter.head.parameters())


@pytest.mark.parametrize(("kind", "budget"), [*((kind, None) for kind in HEADS), ("state", 9)])
def test_what_the_head_chose_is_what_the_block_alone_would_not_draft(kind, budget):
    """Of each draft, and of each token of a text."""
    target, told = tiny_target(layer_types=["sliding_attention"] * 2, vocab_size=6), []
    drafter = headed(target, kind, head_state_size=7)  # of a "gru" head that chooses otherwise
    for parameter in drafter.head.parameters():
        parameter.data.mul_(2)
    for seed in range(4):
        assert proposed(drafter, target, prompt(9, seed, 6), budget=budget)[0].by_head is None  # nobody asks
        with keep_trees(), torch.no_grad():
            tree, states = proposed(drafter, target, prompt(9, seed, 6), budget=budget)
            alone = target.lm_head(states).index_fill(1, torch.tensor([1]), -torch.inf).argmax(-1).tolist()
        expected = [token != alone[depth - 1] for token, depth in zip(tree.tokens.tolist(), tree.depths)]
        assert list(tree.by_head) == expected
        told += expected
    assert any(told)
    drafter.bind(target)
    with keep_trees():
        target.generate(
            prompt(9, 0, 6), assistant_model=drafter, do_sample=False, max_new_tokens=60, tree_budget=budget
        )
    of_text = dict.fromkeys(range(drafter.last_stats.tokens), False)
    for kept in drafter.last_stats.trees:
        of_text |= zip(kept.tokens, [kept.drafts.by_head[node] for node in kept.accepted])
    assert drafter.last_stats.by_head == list(of_text.values())
