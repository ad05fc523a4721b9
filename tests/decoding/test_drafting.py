"""How much is drafted, out of what, and under which of the request's rules; and the law of what is drawn."""

from __future__ import annotations

import copy
import math
from collections import Counter

import pytest
import torch
from transformers import (
    BitsAndBytesConfig,
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
)

from hf_hyperdflash import DeepseekV4MTPDrafter, PromptLookupDrafter, bind, capture_residual, unbind
from hf_hyperdflash.decoding.request import MOST_NODES
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import CSA, mostly_nightly, perfect, prompt, tiny_drafter, tiny_target
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.headed_drafters import headed
from ..helpers.released_layouts import each_grown_alone

GREEDILY = {"do_sample": False, "max_new_tokens": 20}


@pytest.fixture
def wide():
    """A target whose LM head has full row rank (hidden = vocabulary), bound; its drafters can be told what to say."""
    return bind(tiny_target(3, hidden_size=64))


@pytest.fixture(params=[families.deepseek_v4, families.gemma3, families.qwen3_next])
def target(request):
    """One target for each way of verifying a tree."""
    torch.manual_seed(0)
    return bind(request.param().eval())


class Echo(PromptLookupDrafter):
    """Drafts a given text, as much of it as is asked for, and keeps how much that was."""

    def __init__(self, target, sequence, count):
        super().__init__(target, count)
        self.sequence, self.asked = sequence, []

    def draft(self, target, requests):
        self.asked += [each.num_drafts for each in requests]
        starts = [each.ids.shape[1] for each in requests]
        return [DraftTree.chain(self.sequence[at : at + each.num_drafts]) for at, each in zip(starts, requests)]


# How much


def test_no_more_is_drafted_than_is_asked_for_and_fits(wide):
    """What the caller sets counts, also where it is transformers' own default, 20; but not where that was filled in
    with all other defaults, as a pipeline of transformers 5.17 does before."""
    filled, _ = unbind(wide)._prepare_generation_config(GenerationConfig(max_new_tokens=20, do_sample=False))
    ids, bound = prompt(10), bind(wide)
    text = bound.generate(ids, do_sample=False, max_new_tokens=60)[0]
    drafter, echo = perfect(bound, text), Echo(bound, text, 2)

    def accepted(**asked):
        bound.generate(ids, do_sample=False, assistant_model=drafter, **asked)
        assert drafter.last_stats.draft_positions == max(drafter.last_stats.accepted, default=0)
        return drafter.last_stats.accepted

    assert [accepted(max_new_tokens=new) for new in (2, 3, 6, 9)] == [[], [1], [4], [6]]
    assert accepted(max_new_tokens=25, num_assistant_tokens=2) == [2] * 8
    assert filled.num_assistant_tokens == 20 and accepted(generation_config=filled) == [6, 6, 4]
    for asked in (19, 20):
        config = GenerationConfig(num_assistant_tokens=asked, do_sample=False)
        for given in (dict(num_assistant_tokens=asked), dict(generation_config=config)):
            bound.generate(ids, assistant_model=echo, max_new_tokens=30, **given)
            assert echo.asked[0] == asked
            echo.asked.clear()
    drafter.num_draft_tokens = 4
    assert accepted(max_new_tokens=25) == [4, 4, 4, 4, 3]
    bound.generation_config.num_assistant_tokens = 3
    assert max(accepted(max_new_tokens=60)) == 3


def test_a_tree_has_no_more_nodes_than_its_budget(target):
    ids, drafter = prompt(8).repeat(1, 3), PromptLookupDrafter(target, 9)
    target.generate(ids, assistant_model=drafter, tree_budget=2, **GREEDILY)
    assert drafter.last_stats.draft_positions <= 2 and drafter.last_stats.nodes
    drafter = tiny_drafter(target)
    drafter.bind(target)
    options = dict(do_sample=False, max_new_tokens=6)
    out = target.generate(ids, assistant_model=drafter, tree_budget=MOST_NODES, **options)
    assert torch.equal(out, target.generate(ids, **options)) and drafter.last_stats.nodes > MOST_NODES / 2


def test_a_family_that_no_test_covers_drafts_chains(caplog):
    target = families.qwen3()
    target.config.model_type = "qwen9"
    assert target_of(target).tree_verification == "chain"
    target = families.qwen3()
    target.config._attn_implementation = "flash_attention_2"  # which takes no mask
    assert target_of(target).tree_verification == "fork"
    target = families.deepseek_v4_remote_code().eval()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    target.generate(prompt(9), assistant_model=drafter, tree_budget=12, **GREEDILY)
    assert "remote_v4" in caplog.text and drafter.last_stats.nodes <= 6 * drafter.last_stats.rounds


@pytest.mark.parametrize("right", [True, False])
def test_more_drafts_than_a_cache_takes_back_by_default(wide, right):
    ids = prompt(10)
    expected = wide.generate(ids, do_sample=False, max_new_tokens=160)
    text = expected[0].clone()
    text[13:] = text[13:] if right else (text[13:] + 1) % 64
    drafter = Echo(wide, text, 150)
    out = wide.generate(ids, do_sample=False, max_new_tokens=160, assistant_model=drafter)
    assert torch.equal(out, expected) and drafter.last_stats.draft_positions > 128


def test_a_round_in_which_the_callers_code_raises_is_taken_back_whole(wide):
    """The anchor as well, where the round has no token yet; before the first token the prompt stays."""

    class Failing(LogitsProcessor):
        def __init__(self, calls):
            self.calls = calls

        def __call__(self, input_ids, scores):
            self.calls -= 1
            if not self.calls:
                raise ArithmeticError
            return scores

    ids, drafter = prompt(10), Echo(wide, torch.full((160,), 5), 140)
    options = dict(do_sample=False, max_new_tokens=160, assistant_model=drafter)
    longer = torch.cat([ids, prompt(3, seed=2)], dim=1)
    expected = wide.generate(longer, do_sample=False, max_new_tokens=160)
    for calls in (1, 2):
        cache = DynamicCache(config=wide.config)
        with pytest.raises(ArithmeticError):
            wide.generate(ids, logits_processor=[Failing(calls)], **options, **{CACHE: cache})
        assert cache.get_seq_length() == 10
        assert torch.equal(wide.generate(longer, **options, **{CACHE: cache}), expected)


# Under which rules


def test_drafts_obey_the_requests_processors(wide):
    ids, options = prompt(10), dict(do_sample=False, max_new_tokens=15, suppress_tokens=[5])
    expected = wide.generate(ids, **options)
    drafter = perfect(wide, expected[0])
    drafter.states = drafter.states + 2 * drafter.states[5]  # would rather say what may not be said
    assert torch.equal(wide.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.accepted == [6, 6]


def test_the_smallest_tree_has_one_node(wide):
    options = dict(do_sample=False, max_new_tokens=12)
    drafter = PromptLookupDrafter(wide)
    expected = wide.generate(prompt(6).repeat(1, 2), **options)
    text = wide.generate(prompt(6).repeat(1, 2), assistant_model=drafter, tree_budget=1, **options)
    assert torch.equal(text, expected) and max(drafter.last_stats.accepted) <= 1


# What follows a path


class Asking(DraftSampler):
    """Asks for the logits after some paths, side by side or one after the other, and makes no drafts of them."""

    def __init__(self, levels):
        super().__init__(LogitsProcessorList(), False)
        self.levels, self.logits = levels, []

    def grow(self, ids, count, steps, width=None):
        levels = [([int(ids[0, -1])], [0]), *self.levels]
        self.logits = [steps(k, torch.tensor(t), torch.tensor(rows)).logits for k, (t, rows) in enumerate(levels)]
        return DraftTree.chain(ids.new_empty(0))


@pytest.mark.parametrize("kind", [*HEADS, "candidates", "mtp"])
def test_what_follows_a_path_does_not_depend_on_the_paths_beside_it(kind):
    target, ids = tiny_target(layer_types=["sliding_attention"], sliding_window=4), prompt(12)
    head, candidates = ("state", 5) if kind == "candidates" else (kind, 0)
    drafter = (
        headed(target, head, head_candidates=candidates) if kind != "mtp" else DeepseekV4MTPDrafter(target.config)
    )
    drafter.bind(target)
    paths = capture_residual(target, drafter.target_layer_ids)
    with paths as captured, torch.no_grad():
        target(ids[:, :-1])
    positions = torch.arange(12)[None]

    def after(levels):
        context, sampler = drafter.new_context(), Asking(levels)
        drafter.extend(target_of(target), context, captured[0], positions[:, :-1], ids[:, 1:])
        with each_grown_alone():
            drafter.draft(target_of(target), [DraftRequest(context, ids, positions, 4, sampler)])
        return sampler.logits

    beside = after([([3, 9, 4], [0, 0, 0]), ([5, 6, 7, 8], [2, 0, 0, 1]), ([30, 31], [3, 1])])
    for k, row, path in [(1, 1, [9]), (2, 0, [4, 5]), (2, 2, [3, 7]), (3, 0, [9, 8, 30]), (3, 1, [3, 6, 31])]:
        alone = after([([token], [0]) for token in path])
        torch.testing.assert_close(beside[k][row], alone[k][0], atol=1e-5, rtol=1e-5)
    assert not torch.equal(beside[1][0], beside[1][1])


# Beside others


def test_a_target_may_be_the_assistant_once_both_are_bound(wide):
    expected = wide.generate(prompt(12), do_sample=False, max_new_tokens=30)
    for helper in (bind(tiny_target(4)), bind(copy.deepcopy(wide))):
        out = wide.generate(prompt(12), do_sample=False, max_new_tokens=30, assistant_model=helper)
        assert torch.equal(out, expected)


def test_a_target_whose_forwards_depend_on_their_width_says_so_once(caplog):
    target = families.qwen3().eval()
    unbind(bind(target))
    target.config.quantization_config = BitsAndBytesConfig(load_in_4bit=True)
    unbind(bind(target))
    assert not caplog.messages
    target.config.quantization_config = BitsAndBytesConfig(load_in_8bit=True)
    for _ in range(2):
        unbind(bind(target))
    assert len(caplog.messages) == 1


# The law


def of_eight(family):
    """A target with so few tokens that the law of two of them can be counted, and far from even."""
    torch.manual_seed(0)
    target = family().eval()
    if target.config.vocab_size > 8:
        target.resize_token_embeddings(8)
        target.config.vocab_size = 8
    with torch.no_grad():
        target.get_output_embeddings().weight *= 1.5 / target(prompt(9, vocab_size=8)).logits.std()
    return target


def small_qwen3():
    return families.qwen3(layers=1)


def small_v4():
    """Its compressor's windows of 4 close within the texts."""
    return tiny_target(vocab_size=8, layer_types=["sliding_attention", CSA])


def plain(target):
    return tiny_drafter(target, num_hidden_layers=1)


def with_head(kind):
    return lambda target: headed(target, kind, num_draft_tokens=3)


@torch.no_grad()
def law_of(target, row):
    """Of the first token after a prompt, `[8]`, which the prompt's forward gives, and of the next two, `[8 * 8]`."""

    def after(texts):
        logits = target(texts).logits[:, -1] / 0.8
        return logits.masked_fill(logits < logits.topk(5).values[:, -1:], -torch.inf).softmax(-1)

    tokens, first = torch.arange(8)[:, None], after(row[None])[0]
    one = torch.cat([row.expand(8, -1), tokens], dim=1)
    two = torch.cat([one.repeat_interleave(8, dim=0), tokens.repeat(8, 1)], dim=1)
    joint = first[:, None, None] * after(one)[:, :, None] * after(two).view(8, 8, 8)
    return first, joint.sum(0).flatten()


def assert_drawn_from(probabilities: torch.Tensor, observed: Counter) -> None:
    """Every outcome is about as frequent as it should be. A right sampler fails once in a million times at most,
    whatever its seed: by Chernoff's bound a share is as far off as `share` with a probability of exp(-draws *
    divergence) at most, to either side, and there are `2 * outcomes` of these."""
    draws = observed.total()
    for outcome, expected in enumerate(probabilities.double().tolist()):
        share = observed[outcome] / draws
        terms = [(share, expected), (1 - share, 1 - expected)]
        divergence = sum(a * math.log(a / b) if b > 0 else math.inf for a, b in terms if a > 0)
        assert draws * divergence <= math.log(2 * len(probabilities) / 1e-6), (outcome, share, expected)


# A target, a drafter, what is asked for, and how many texts are drawn of each prompt: in one forward of all rows, or
# row after row with a cache of each, which takes longer.
LAWS = [
    (small_qwen3, with_head("markov"), {"tree_budget": 7}, 600), (small_qwen3, plain, {}, 600),
    (small_qwen3, plain, {"num_assistant_tokens": "auto"}, 600),
    (small_v4, with_head("state"), {"tree_budget": 9}, 200),
    (small_v4, plain, {"num_assistant_tokens": "auto"}, 200),
    (families.granite_hybrid, plain, {}, 200),
]  # fmt: skip


# Takes seconds: hundreds of texts are drawn.
@pytest.mark.parametrize(("family", "drafter", "asked", "drawn"), mostly_nightly(LAWS, 2))
def test_drawn_texts_have_the_targets_law(family, drafter, asked, drawn):
    """Two prompts, several texts of each, processors included. A right sampler fails once in 100,000 times at most,
    whatever its seed."""
    target = of_eight(family)
    drafter = drafter(target)
    drafter.bind(target)
    rows = [prompt(length, seed=10 + length, vocab_size=8)[0] for length in (5, 2)]
    ids, mask = padded_on_the_left(rows)
    texts, neighbours, accepted = (Counter(), Counter()), (Counter(), Counter()), 0
    for _ in range(drawn // 50):
        out = target.generate(
            ids, attention_mask=mask, assistant_model=drafter, do_sample=True, num_return_sequences=50, top_k=5,
            temperature=0.8, max_new_tokens=4, **asked,
        )  # fmt: skip
        assert torch.equal(out[:, :5], ids.repeat_interleave(50, dim=0))  # a prompt's texts stand together
        for row, (_, one, other, _) in enumerate(out[:, 5:].tolist()):
            texts[row // 50][one * 8 + other] += 1
        for pair, (one, other) in enumerate(out[:, 5].view(50, 2).tolist()):
            neighbours[pair // 25][one * 8 + other] += 1
        accepted += sum(drafter.last_stats.accepted)
    assert 0 < accepted < 2 * 2 * drawn
    for row, of_texts, of_neighbours in zip(rows, texts, neighbours):
        first, law = law_of(target, row)
        assert_drawn_from(law, of_texts)
        assert_drawn_from(torch.outer(first, first).flatten(), of_neighbours)  # they know nothing of each other
        for axis in range(2):  # single tokens are drawn more often, so that less hides
            alone = Counter()
            for outcome, count in of_texts.items():
                alone[outcome // 8 ** (1 - axis) % 8] += count
            assert_drawn_from(law.view(8, 8).sum(1 - axis), alone)
