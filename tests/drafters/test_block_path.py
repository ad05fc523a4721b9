"""A block's drafts one after the other, on real drafters and targets, against the heads' formulas."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from transformers import LogitsProcessorList, Qwen3Config, Qwen3ForCausalLM
from transformers.generation import logits_process as stock

from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.blocks.path import BlockPath
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.targets.registry import target_of

from ..conftest import mostly_nightly, prompt, tiny_target
from ..helpers import families
from ..helpers import oracle_heads as oracle
from ..helpers.enumerated_draws import every_outcome
from ..helpers.headed_drafters import headed, headless, proposed
from ..helpers.loops import in_transformers_loop

FIRST = torch.tensor([0])


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
    return tiny_target(hidden_size=64)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        (v4, {"head_candidates": 64}),
        (v4, {"draft_vocab_size": 30, "head_candidates": 0}),
        (v4, {"draft_vocab_size": 30, "head_candidates": 4}),
        (families.granite_hybrid, {"head_candidates": 0}),
        (families.granite_hybrid, {"head_candidates": 3}),
        (families.gemma2, {"head_candidates": 0}),
        (families.gemma2, {"head_candidates": 3}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),  # a function's address differs between workers
)
@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_logits_follow_the_formulas(kind, fields, family):
    """Scaled and capped where the target's are, among the block's best tokens where that is asked for."""
    target = family().eval()
    drafter, hidden = headed(target, kind, **fields), torch.randn(1, 4, 64)
    path, previous = BlockPath(drafter, target_of(target), hidden), [5, 9, 9, 60]
    for k, expected in enumerate(expected_logits(drafter, target, hidden[0], previous)):
        step = path(k, torch.tensor(previous[k : k + 1]), FIRST)
        found = step.whole().logits
        assert found.shape == (1, 64) and step.confidence is None
        kept = expected > -oracle.FAR / 2
        torch.testing.assert_close(found[0, kept], expected[kept], atol=1e-4, rtol=1e-4)
        count = fields["head_candidates"] or fields.get("draft_vocab_size", 64)

        assert not kept[drafter.config.mask_token_id] and 0 <= count - kept.sum() <= 1
        assert not found.softmax(-1)[0, ~kept].any()


# What a request makes of it


REQUESTS = {
    "plain": [],
    "penalty": [stock.RepetitionPenaltyLogitsProcessor(3.0)],
    "bad words": [stock.NoBadWordsLogitsProcessor([[2], [4, 5], [7], [9], [11]])],
    "nothing twice": [stock.NoRepeatNGramLogitsProcessor(1)],
    "cool": [stock.TemperatureLogitsWarper(0.6), stock.TopPLogitsWarper(0.9)],
}
CASES = [
    ({}, "plain"),
    ({}, "penalty"),
    ({}, "bad words"),
    ({"head_candidates": 4}, "cool"),
    ({"head_candidates": 4}, "nothing twice"),
    ({"sample_from_anchor": True, "num_draft_tokens": 5, "reducer": "stream_mean"}, "plain"),
    ({"hidden_size": 48, "reducer": "fc"}, "plain"),
    ({"draft_vocab_size": 30}, "penalty"),
    ({"conv_kernel_size": 2, "target_layer_ids": [0, -1], "reducer": "hybrid"}, "plain"),
]


@pytest.mark.parametrize(("fields", "request_name"), CASES, ids=str)
@pytest.mark.parametrize("kind", HEADS)
def test_each_draft_is_drawn_after_the_one_before(kind, fields, request_name):
    """Greedy and at random, after the request's processors, and `q` says from what."""
    target = tiny_target(layer_types=["sliding_attention"] * 2)
    drafter, processors, ids = headed(target, kind, **fields), REQUESTS[request_name], prompt(9)
    for do_sample in (False, True):
        tree, states = proposed(drafter, target, ids, do_sample, processors)
        tokens = tree.tokens.tolist()
        assert tree.is_chain and len(tokens) == len(states) == drafter.max_draft_tokens
        previous, text = [int(ids[0, -1]), *tokens[:-1]], ids
        for k, scores in enumerate(expected_logits(drafter, target, states, previous)):
            scores = scores[None].clone()
            for processor in processors:
                scores = processor(text, scores)
            if do_sample:
                torch.testing.assert_close(tree.q[k], scores.softmax(-1)[0], atol=1e-3, rtol=5e-3)
            else:
                assert scores[0, tokens[k]] >= scores.max() - 1e-4
            text = torch.cat([text, tree.tokens[None, k : k + 1]], dim=1)
        assert (tree.q is not None) == do_sample


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


@pytest.mark.parametrize("candidates", [0, 4])
@pytest.mark.parametrize("kind", HEADS)
def test_the_lm_head_reads_a_state_once(kind, candidates):
    """Not the block's where the head's own are scored over the whole vocabulary."""
    target = tiny_target(layer_types=["sliding_attention"])
    drafter, read = headed(target, kind, head_candidates=candidates), []
    hook = target.get_output_embeddings().register_forward_hook(lambda _, given, __: read.append(given[0].shape[-2]))
    tree, _ = proposed(drafter, target, prompt(9))
    hook.remove()
    assert sum(read) == len(tree.tokens) == drafter.max_draft_tokens


@pytest.mark.parametrize("kind", HEADS)
def test_a_request_that_leaves_no_candidate_still_draws(kind):
    target, ids = tiny_target(layer_types=["sliding_attention"]), prompt(9)
    drafter = headed(target, kind, head_candidates=3)
    _, states = proposed(drafter, target, ids)
    blind = states @ target.get_output_embeddings().weight.T
    best = blind.topk(3).indices.unique().tolist()
    processors = [stock.SuppressTokensLogitsProcessor(best), stock.TopKLogitsWarper(8)]
    for do_sample in (False, True):
        tree, _ = proposed(drafter, target, ids, do_sample, processors)
        assert not set(tree.tokens.tolist()) & set(best)
        for k, token in enumerate(tree.tokens.tolist()):
            left = blind[k].index_fill(0, torch.tensor(best), -math.inf)
            if do_sample:
                kept = left.masked_fill(left < left.topk(8).values[-1], -math.inf)
                torch.testing.assert_close(tree.q[k], kept.softmax(-1), atol=1e-3, rtol=1e-2)
            else:
                assert token == int(left.argmax())


@pytest.mark.parametrize("candidates", mostly_nightly([2, 0]))
@pytest.mark.parametrize("kind", HEADS)
def test_sampled_text_has_the_targets_distribution(kind, candidates):
    """Pearson's test of a text from end to end, by a target that knows the last token alone: its distribution after
    each token is known. Right code fails at one seed in 10^6 per case; the seed is fixed, so that it fails always or
    never."""
    torch.manual_seed(0)
    target = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=4, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
            head_dim=8, intermediate_size=16, initializer_range=0.3, eos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        target.model.layers[0].self_attn.o_proj.weight.zero_()
        target.model.layers[0].mlp.down_proj.weight.zero_()
        law = target(torch.arange(4)[:, None]).logits[:, 0].softmax(-1)
    drafter = headed(target, kind, head_candidates=candidates, num_draft_tokens=3, head_dim=8)
    with torch.no_grad():
        for parameter in drafter.head.parameters():
            parameter *= 3  # loud, so that a draft's distribution taken for another's shows
    drafter.bind(target)
    text = target.generate(torch.tensor([[2]]), assistant_model=drafter, do_sample=True, max_new_tokens=500)[0]
    assert drafter.last_stats.tau > 1.2  # drafts are judged, and many are taken
    seen = torch.zeros(4, 4)
    seen.index_put_((text[:-1], text[1:]), torch.ones(500), accumulate=True)
    expected = law * seen.sum(1, keepdim=True)
    assert expected.min() >= 5  # chi-square wants full cells
    statistic = ((seen - expected) ** 2 / expected).sum().double()
    assert torch.special.gammaincc(torch.tensor(6.0, dtype=torch.float64), statistic / 2) > 1e-6, (seen, expected)


@pytest.mark.parametrize(
    ("kind", "family", "fields"),
    [
        ("markov", families.granite_hybrid, {"draft_vocab_size": 40}),
        ("gated_markov", families.gemma2, {"dtype": torch.bfloat16}),
        ("recurrent", v4, {"sample_from_anchor": True}),
        ("selector", families.qwen3_next, {"conv_kernel_size": 3}),
        ("state", families.falcon_h1, {"head_candidates": 8}),
    ],
)
def test_text_with_a_head_is_the_targets_own(kind, family, fields):
    torch.manual_seed(0)
    target, ids = family().eval(), prompt(12)
    expected = target.generate(ids, do_sample=False, max_new_tokens=16)
    drafter = headed(target, kind, confidence_head=True, **fields)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=16), expected)
    assert drafter.last_stats.rounds
    drafts = in_transformers_loop(target, drafter, ids, do_sample=False, max_new_tokens=16)
    assert torch.equal(drafts, expected)


# How sure the drafter is


@pytest.mark.parametrize("reads_token", [True, False])
@pytest.mark.parametrize("kind", ["none", *HEADS])
def test_a_confidence_follows_its_formula(kind, reads_token):
    target, ids = tiny_target(layer_types=["sliding_attention"]), prompt(9)
    drafter = headed(target, kind, confidence_head=True, confidence_reads_token=reads_token)
    weights = {name: value.double().numpy() for name, value in drafter.confidence_head.state_dict().items()}
    for temperatures in (None, [0.5, 1, 2.0, 0.7, 3.0, 0.9]):
        drafter.config.confidence_temperatures = temperatures
        tree, states = proposed(drafter, target, ids, count=4)
        assert tree.confidence.shape == (4,)
        for k, token in enumerate([int(ids[0, -1]), *tree.tokens[:3].tolist()]):
            remembered = None
            if kind == "state" and reads_token:
                remembered = oracle.normed(target.get_input_embeddings().weight[token].detach().double().numpy())
            elif kind != "none" and reads_token:
                codebook = drafter.head.predecessor_codebook if kind == "selector" else drafter.head.markov_w1.weight
                remembered = codebook[token].detach().double().numpy()
            sure = oracle.confidence(
                weights, states[k].double().numpy(), remembered, temperatures[k] if temperatures else 1.0
            )
            assert float(tree.confidence[k]) == pytest.approx(sure, abs=1e-5)


@pytest.mark.parametrize("kind", HEADS)
@torch.no_grad()
def test_a_confidence_knows_no_token_from_its_own_on(kind):
    """Else how many drafts are verified would tell which they are, and sampled text would not be the target's."""
    target = tiny_target(layer_types=["sliding_attention"])
    drafter, hidden = headed(target, kind, confidence_head=True), torch.randn(1, 4, 32)

    def sure(tokens: list[int]) -> torch.Tensor:
        path = BlockPath(drafter, target_of(target), hidden)
        return torch.cat([path(k, torch.tensor([token]), FIRST).confidence for k, token in enumerate([7, *tokens])])

    one, other = sure([8, 9, 10]), sure([8, 30, 10])  # draft 1 differs
    assert torch.equal(one[:2], other[:2]) and not torch.equal(one[2], other[2])


@pytest.mark.parametrize(
    ("kind", "options"),
    [*((kind, {}) for kind in HEADS), ("state", {"tree_budget": 9}), ("markov", {"do_sample": True})],
    ids=str,
)
@pytest.mark.parametrize("candidates", [None, 7])
def test_what_the_head_chose_is_what_the_block_alone_would_not_draft(kind, options, candidates):
    """By a drafter that has the same weights and no head, asked beside it in every round."""
    target = tiny_target()
    drafter = headed(target, kind, head_candidates=candidates)
    bare, alone, made = headless(drafter), [], []
    propose = drafter.propose

    def beside(target, context, ids, positions, count, sampler):
        greedy = DraftSampler(LogitsProcessorList(), do_sample=False)
        alone.append(
            bare.propose(target_of(target), copy.deepcopy(context), ids, positions, count, greedy).tokens.tolist()
        )
        made.append(propose(target, context, ids, positions, count, sampler))
        return made[-1]

    drafter.propose = beside
    drafter.bind(target)
    options = {"do_sample": False, "max_new_tokens": 24} | options
    target.generate(prompt(9), assistant_model=drafter, **options)
    assert made and all(tree.by_head is None for tree in made) and not any(drafter.last_stats.by_head)
    alone.clear(), made.clear()
    with keep_trees():
        target.generate(prompt(9), assistant_model=drafter, **options)
    told = [by_head for tree in made for by_head in tree.by_head]
    expected = [
        token != block[depth - 1]
        for tree, block in zip(made, alone, strict=True)
        for token, depth in zip(tree.tokens.tolist(), tree.depths)
    ]
    assert told == expected and any(told)
    stats = drafter.last_stats
    assert [kept.drafts.by_head for kept in stats.trees] == [tree.by_head for tree in made]
    of_text = dict.fromkeys(range(stats.tokens), False)
    for kept in stats.trees:
        of_text |= zip(kept.tokens, [kept.drafts.by_head[node] for node in kept.accepted])
    assert stats.by_head == list(of_text.values())
