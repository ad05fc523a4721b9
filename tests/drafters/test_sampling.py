"""Drafts are drawn as the request draws text: against a loop that runs the processors one after the other."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import logits_process as stock

from hf_hyperdflash.drafters.sampling import (
    DraftRequest,
    DraftSampler,
    draft_batch,
    without_state,
)
from hf_hyperdflash.trees.draws import sample_index
from hf_hyperdflash.trees.growth import DraftStep, DraftVocabulary
from hf_hyperdflash.trees.tree import ANCHOR, DraftTree

from ..conftest import prompt
from ..helpers.draft_trees import parents_and_tokens, path_to
from ..helpers.enumerated_draws import every_outcome
from ..helpers.schedules import Asked

VOCAB = 16


class Remembering(LogitsProcessor):
    """A user's own, which may keep what it was called with: drafts are not for it."""

    def __call__(self, input_ids, scores):
        raise AssertionError("was called with a draft")


class Warmer(stock.TemperatureLogitsWarper):
    """A user's own, too, whatever it derives from."""

    def __call__(self, input_ids, scores):
        raise AssertionError("was called with a draft")


STATELESS = {
    "MinLengthLogitsProcessor": (12, 3),
    "MinNewTokensLengthLogitsProcessor": (6, 6, 3),
    "TemperatureLogitsWarper": (0.7,),
    "RepetitionPenaltyLogitsProcessor": (1.7,),
    "EncoderRepetitionPenaltyLogitsProcessor": (1.4, torch.tensor([[3, 4, 5]])),
    "TopPLogitsWarper": (0.8,),
    "TopKLogitsWarper": (5,),
    "TopHLogitsWarper": (0.5,),
    "MinPLogitsWarper": (0.1,),
    "TypicalLogitsWarper": (0.8,),
    "EpsilonLogitsWarper": (0.03,),
    "EtaLogitsWarper": (0.03,),
    "NoRepeatNGramLogitsProcessor": (2,),
    "EncoderNoRepeatNGramLogitsProcessor": (2, torch.tensor([[3, 4, 5]])),
    "SequenceBiasLogitsProcessor": ([[[3], 2.0], [[4, 5], -3.0]],),
    "NoBadWordsLogitsProcessor": ([[2], [4, 5]],),
    "ForcedBOSTokenLogitsProcessor": (3,),
    "ForcedEOSTokenLogitsProcessor": (10, 3),
    "InfNanRemoveLogitsProcessor": (),
    "ExponentialDecayLengthPenalty": ((2, 1.3), 3, 6),
    "LogitNormalization": (),
    "SuppressTokensAtBeginLogitsProcessor": ([2, 3], 7),
    "SuppressTokensLogitsProcessor": ([2, 3],),
    "WatermarkLogitsProcessor": (VOCAB, "cpu"),
}
PENALTY = inspect.signature(RepetitionPenaltyLogitsProcessor.__init__).parameters
HERE = [name for name in STATELESS if hasattr(stock, name)]  # not every version has each


# Of these, those that look at nothing but scores: what they leave of several drafts can be drawn at once.
WITHOUT_TEXT = {
    "TemperatureLogitsWarper", "TopPLogitsWarper", "TopKLogitsWarper", "TopHLogitsWarper", "MinPLogitsWarper",
    "TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "InfNanRemoveLogitsProcessor",
    "LogitNormalization", "SuppressTokensLogitsProcessor",
}  # fmt: skip


def made(name: str) -> LogitsProcessor:
    return getattr(stock, name)(*STATELESS[name])


@pytest.mark.parametrize("name", HERE)
def test_a_known_processor_runs_on_drafts_and_keeps_no_state(name):
    used, fresh = made(name), made(name)
    assert list(without_state(LogitsProcessorList([used]))) == [used]
    for seed in range(4):  # what it is called with before changes nothing
        used(prompt(5 + seed, seed, VOCAB), torch.randn(1, VOCAB))
    ids, scores = prompt(9, 9, VOCAB), torch.randn(1, VOCAB)
    given_scores = scores.clone()
    assert torch.equal(used(ids, scores), fresh(ids, given_scores.clone())) and torch.equal(scores, given_scores)


@pytest.mark.skipif("prompt_ignore_length" not in PENALTY, reason="this version's penalty leaves no padding out")
def test_a_penalty_leaves_the_padding_out_of_every_path():
    given = stock.RepetitionPenaltyLogitsProcessor(1.7)
    given.prompt_ignore_length = torch.tensor([2])  # which 5.17 does not take for an argument
    sampler = DraftSampler(LogitsProcessorList([given]), do_sample=False)
    ids, drafts, logits = prompt(6, 1, VOCAB), torch.tensor([[3], [4], [5]]), torch.randn(3, VOCAB)
    each = [given(torch.cat([ids, drafts[k : k + 1]], dim=1), logits[k : k + 1].clone()) for k in range(3)]
    assert torch.equal(sampler.scored_after(ids, drafts, logits.clone()), torch.cat(each))
    assert torch.equal(given.prompt_ignore_length, torch.tensor([2]))  # the request's own, which verifies


def test_other_processors_do_not_run_on_drafts_and_the_order_stays():
    known = [made("TopKLogitsWarper"), made("RepetitionPenaltyLogitsProcessor"), made("TemperatureLogitsWarper")]
    others = [
        Remembering(),
        Warmer(0.5),
        stock.PrefixConstrainedLogitsProcessor(lambda batch, ids: [3], 1),
        stock.SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 16, 0, 8, torch.device("cpu")),
        stock.ClassifierFreeGuidanceLogitsProcessor(1.5),
        stock.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
    ]
    mixed = LogitsProcessorList([others[0], known[0], *others[1:4], known[1], known[2], *others[4:]])
    assert list(without_state(mixed)) == known and len(mixed) == 9


@settings(deadline=None, max_examples=80)
@given(
    st.lists(st.sampled_from(HERE), max_size=3),
    st.booleans(),
    st.integers(0, 5),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 10**6),
)
def test_drafts_are_those_of_a_naive_loop(names, do_sample, drafts, dtype, seed):
    known = [made(name) for name in names]
    sampler = DraftSampler(LogitsProcessorList([Remembering(), *known, Warmer(0.1)]), do_sample)
    torch.manual_seed(seed)
    ids, logits = prompt(6, seed, VOCAB), (torch.randn(1, drafts, VOCAB) * 3).to(dtype)
    given_logits = logits.clone()

    torch.manual_seed(seed + 1)
    text, q = ids, []
    for k in range(drafts):
        scores = logits[:, k].float()
        for processor in known:
            scores = processor(text, scores)
        assume(scores.isfinite().any())  # a forced end and a minimal length at once leave nothing to draw
        q.append(scores.softmax(-1)[0])
        token = sample_index(q[-1]) if do_sample else scores.argmax(-1)
        text = torch.cat([text, token[None]], dim=1)
    if do_sample and drafts and set(names) <= WITHOUT_TEXT:
        torch.manual_seed(seed + 1)
        text = torch.cat([ids, sample_index(torch.stack(q)).T], dim=1)
    following = torch.rand(4)

    torch.manual_seed(seed + 1)
    tree = sampler.draft_independent(ids, logits)
    assert tree.tokens.tolist() == text[0, 6:].tolist() and tree.parents == tuple(range(-1, drafts - 1))
    assert torch.equal(torch.rand(4), following) and torch.equal(logits, given_logits)
    if do_sample and drafts:
        assert torch.equal(torch.stack(tree.q), torch.stack(q))
    else:
        assert tree.q is None
    if drafts:
        torch.manual_seed(seed + 1)
        alone = sampler.grow(ids, 1, lambda *_: DraftStep(logits[:, 0]))
        assert alone.tokens.tolist() == text[0, 6:7].tolist()
        assert torch.equal(alone.q[0], q[0]) if do_sample else alone.q is None


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("most", [0, 2, 100])
def test_drafts_that_are_known_together_are_admitted_one_by_one(do_sample, most):
    torch.manual_seed(0)
    logits = torch.randn(1, 5, VOCAB) * 3
    chances = [max(row) for row in logits[0].softmax(-1).tolist()]
    schedule = Asked(refused=3, most=most)
    tree = DraftSampler(LogitsProcessorList(), do_sample, chain_admission=schedule).draft_independent(
        prompt(6), logits
    )
    assert len(tree) == min(most, 3)
    assert schedule.signals == pytest.approx(chances[: min(most, 4)])


@settings(deadline=None, max_examples=60)
@given(parents_and_tokens(VOCAB), st.lists(st.sampled_from(HERE), max_size=3), st.integers(0, 10**6))
def test_a_tree_is_scored_path_by_path(tree, names, seed):
    (parents, tokens), known = tree, [made(name) for name in names]
    drafts = DraftTree(torch.tensor(tokens, dtype=torch.long), tuple(parents))
    torch.manual_seed(seed)
    ids, logits = prompt(6, seed, VOCAB), torch.randn(len(tokens) + 1, VOCAB) * 3
    expected = []
    for node in range(ANCHOR, len(tokens)):
        text = torch.cat([ids, torch.tensor([[tokens[each] for each in path_to(node, parents)]], dtype=torch.long)], 1)
        scores = logits[node + 1 : node + 2].clone()
        for processor in known:
            scores = processor(text, scores)
        expected.append(scores)
    sampler = DraftSampler(LogitsProcessorList(known), True)
    # Some processors make NaN of what others have excluded, and that is as it is alone, too.
    assert_close(sampler.scored_tree(ids, drafts, logits), torch.cat(expected), rtol=0, atol=0, equal_nan=True)
    assert sampler.has_all_processors
    assert not DraftSampler(LogitsProcessorList([*known, Remembering()]), True).has_all_processors


def test_chains_that_are_drawn_in_step_have_the_joint_law_of_chains_that_are_drawn_alone():
    """By every way that draws can go, where one text's processor reads the drafts before, and another's does not."""
    logits = 3 * torch.randn(2, 2, 3, 3)  # of a text, a draft position, and the token before
    processors = [[stock.TemperatureLogitsWarper(0.7)], [RepetitionPenaltyLogitsProcessor(4.0)]]
    requests = [
        DraftRequest(None, torch.tensor([[text]]), None, 2 - text, DraftSampler(LogitsProcessorList(own), True))
        for text, own in enumerate(processors)
    ]
    law, of_each = {}, [{}, {}]
    for probability, trees in every_outcome(
        lambda: draft_batch(requests, lambda k, tokens, at: DraftStep(logits[at, k, tokens]))
    ):
        key = tuple(tuple(tree.tokens.tolist()) for tree in trees)
        law[key] = law.get(key, 0) + probability
    for text, each in enumerate(requests):
        for probability, tree in every_outcome(
            lambda text=text, each=each: each.sampler.grow(
                each.ids, each.num_drafts, lambda k, tokens, _: DraftStep(logits[text, k, tokens])
            )
        ):
            of_each[text][tuple(tree.tokens.tolist())] = probability
            q = [float(of_draft[token]) for of_draft, token in zip(tree.q, tree.tokens.tolist())]
            assert probability == pytest.approx(math.prod(q), rel=1e-5)
    assert len(law) == 27 and len(of_each[0]) == 9
    assert law == pytest.approx({(one, other): of_each[0][one] * of_each[1][other] for one, other in law}, abs=1e-6)


@pytest.mark.parametrize(
    ("processor", "is_whole"),
    [
        (stock.TopKLogitsWarper(3), False), (stock.TopKLogitsWarper(12), False), (TemperatureLogitsWarper(0.6), False),
        (TopPLogitsWarper(0.7), False), (TopPLogitsWarper(0.01, min_tokens_to_keep=9), False),
        (stock.MinPLogitsWarper(0.2), False), (stock.TypicalLogitsWarper(0.5), True),
        (stock.SuppressTokensLogitsProcessor([3, 9]), True),
    ],
    ids=lambda case: type(case).__name__,
)  # fmt: skip
def test_tokens_that_can_be_drafted_are_scored_alone_where_that_is_the_same(processor, is_whole):
    """Of 49,152 tokens SmolLM2's drafter has 4,096, and a request draws by `top_k=50` unless it says otherwise."""
    torch.manual_seed(0)
    vocabulary = DraftVocabulary(torch.tensor([1, 3, 4, 9, 12, 15]), VOCAB)
    sampler = DraftSampler(LogitsProcessorList([processor]), True)
    step, ids = DraftStep(torch.randn(5, 6) * 2, vocabulary=vocabulary), prompt(4)
    found = sampler.scored_step(ids, ids[:, :0].expand(5, 0), step)
    assert (found.vocabulary is None) is is_whole
    expected = processor(ids.expand(5, -1), step.whole().logits)
    assert_close(found.over_all_tokens(found.logits.softmax(-1)), expected.softmax(-1))


@pytest.mark.parametrize("name", STATELESS)
def test_a_text_without_paths_has_no_scores(name):
    """As one of a batch whose tree is complete, while others' go on."""
    sampler = DraftSampler(LogitsProcessorList([getattr(stock, name)(*STATELESS[name])]), False)
    scores = sampler.scored_after(
        prompt(6, vocab_size=VOCAB), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, VOCAB)
    )
    assert scores.shape == (0, VOCAB)
