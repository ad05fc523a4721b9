"""What `generate` is asked for, by every way to verify drafts: each text is the one that stock writes.

The oracle is plain greedy decoding of each text alone, by a copy of the target that was never bound. A new option is a
row of `REQUESTS`, a new way to verify one of `WAYS`.
"""

from __future__ import annotations

import copy
import functools
import math
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessor,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    WatermarkLogitsProcessor,
)
from transformers.generation import stopping_criteria

from hf_hyperdflash import AfterReasoning, GrammarProcessor, bind, capture_residual
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.targets.caches.name import cache_of

from ..conftest import CSA, HCA, MIXES, mostly_nightly, perfect, prompt, tiny_drafter, tiny_target
from ..fuzz_trees import padded_on_the_left
from ..helpers import families
from ..helpers.grammars import random_table
from ..helpers.tree_drafters import RandomChains, RandomTrees, is_wide

GREEDILY = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
STATIC = {"cache_implementation": "static", "tree_budget": 9}


class Way(NamedTuple):
    """Drafts of a kind for prompts of some lengths."""

    kind: type[RandomTrees]
    lengths: tuple[int, ...]
    asked: dict[str, Any] = {}


WAYS = {
    "chain": Way(RandomChains, (20,)),
    "tree": Way(RandomTrees, (20,)),
    "batch": Way(RandomTrees, (12, 12, 12)),
    "padded batch": Way(RandomTrees, (9, 3, 14, 1)),
    "batch of chains": Way(RandomChains, (12, 12, 12)),
    "static": Way(RandomTrees, (13,), STATIC),
    "static batch": Way(RandomTrees, (12, 12, 12), STATIC),
    "padded static batch": Way(RandomTrees, (15, 8, 17), STATIC),
}


# Callbacks of a caller's, which note what they are called with


TOLD: list[Any] = []  # copies of a processor, one a text, have it in common


class Streamer:
    def put(self, value):
        TOLD.append(value.flatten().tolist())

    def end(self):
        TOLD.append(["end"])


class Remembering(LogitsProcessor):
    """As a grammar is, which forbids what came three calls before: it must see every prefix of a text once."""

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(len(input_ids[0]) % 64)
        TOLD.append(input_ids[0].tolist())
        scores = scores.clone()
        scores[:, self.seen[-3:]] = -math.inf
        scores[:, len(self.seen) % 64] += 5  # what it has seen changes the text
        return scores


class StopsAfter(StoppingCriteria):
    """After so many calls; the caller's count stays as it is, where each text has a copy."""

    def __init__(self, count):
        self.count = count

    def __call__(self, input_ids, scores, **kwargs):
        TOLD.append(["criterion", *input_ids[0].tolist()])
        self.count -= 1
        return torch.full((len(input_ids),), self.count <= 0)


def no_fives(input_ids, scores):
    scores[:, 5] = -math.inf  # in place
    return scores


class ThinkingBudget(LogitsProcessor):
    """After so many calls a text goes on with its answer, the token 7 and then what follows."""

    def __init__(self, calls):
        self.calls, self.made = calls, 0

    def __call__(self, input_ids, scores):
        self.made += 1
        return scores.scatter(1, torch.full_like(input_ids[:, :1], 7), 100.0) if self.made == self.calls else scores


class Answered(StoppingCriteria):
    """Asks a processor, of which each text has a copy."""

    def __init__(self, budget):
        self.budget = budget

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), self.budget.made >= self.budget.calls + 3)


class TwiceEos(EosTokenCriteria):
    """Somebody's own rule in a known one's clothes."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -2:], self.eos_token_id).all(dim=-1)


class OneMore(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] > self.max_length)


def with_closures(calls):
    """The same as functions that share a variable, and one in a `functools.partial`."""
    made = 0

    def answer(input_ids, scores):
        nonlocal made
        made += 1
        return scores.scatter(1, torch.full_like(input_ids[:, :1], 7), 100.0) if made == calls else scores

    def answered(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), made >= calls + 3)

    def ban(input_ids, scores):
        return again(math, scores) if made else ban.of(input_ids, scores)

    def again(module, scores):
        return scores.index_fill(1, torch.arange(0, 6), -module.inf)

    ban.of = lambda input_ids, scores: scores
    return {"logits_processor": [answer, functools.partial(ban)], "stopping_criteria": [answered]}


def letters(pairs=False, **special):
    """A tokenizer with a letter for each token, or with 32 letters and pairs of them."""
    tokens = [chr(65 + i) for i in range(32 if pairs else 64)]
    tokens += [one + other for one, other in pairwise(tokens)] if pairs else []
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="A"))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="A", padding_side="left", **special)


def stop_strings(written, at):
    return {"stop_strings": ["".join(chr(65 + token) for token in written[at : at + 2])], "tokenizer": letters()}


SHOWN = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
# By name, what is asked for, given the text that plain decoding writes after the first prompt.
REQUESTS = {
    "one token": lambda written: {"max_new_tokens": 1},
    "two tokens": lambda written: {"max_new_tokens": 2},
    "stock processors": lambda written: {
        "repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 20, "bad_words_ids": [[5], [6, 7]],
    },
    "a configuration": lambda written: {"generation_config": GenerationConfig(**{**GREEDILY, "max_new_tokens": 9})},
    "a prompt in pieces": lambda written: {"prefill_chunk_size": 5},
    "a processor of the caller's": lambda written: {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.5)]},
    "a watermark": lambda written: {"logits_processor": [WatermarkLogitsProcessor(64, "cpu")]},
    "allowed tokens": lambda written: {"prefix_allowed_tokens_fn": lambda _, ids: list(range(len(ids) % 3, 64, 2))},
    "a memory": lambda written: {"logits_processor": [Remembering()], "stopping_criteria": [StopsAfter(17)]},
    "a memory, drawn": lambda written: {"logits_processor": [Remembering()], "do_sample": True, "top_k": 1},
    "a budget": lambda written: {
        "logits_processor": [budget := ThinkingBudget(4)], "stopping_criteria": [Answered(budget)],
    },
    "closures": lambda written: with_closures(4),
    "scores and a dictionary": lambda written: {
        **SHOWN, "logits_processor": [no_fives], "repetition_penalty": 1.2, "eos_token_id": written[7],
        "pad_token_id": 9,
    },
    **{f"an end token at {at}": lambda written, at=at: {"eos_token_id": [written[at], 1]} for at in (0, 2, 5, 10)},
    "end tokens in a tensor": lambda written: {"eos_token_id": torch.tensor([1, 2, written[7]])},  # no row for a text
    **{f"a criterion at {at}": lambda written, at=at: {"stopping_criteria": [StopsAfter(at)]} for at in (1, 4, 9)},
    "a grammar": lambda written: {"logits_processor": [GrammarProcessor(random_table(4))]},
    "a grammar, drawn": lambda written: {
        "logits_processor": [GrammarProcessor(random_table(5))], "do_sample": True, "top_k": 1, "temperature": 0.7,
    },
    "a grammar behind reasoning": lambda written: {
        "logits_processor": [GrammarProcessor(AfterReasoning(random_table(6), written[3], budget=11))],
        "eos_token_id": [*range(20)],
    },
    "two end tokens": lambda written: {"stopping_criteria": [TwiceEos([*written[4:6], 1])]},
    **{f"a stop string at {at}": lambda written, at=at: stop_strings(written, at) for at in (3, 7, 10)},
}  # fmt: skip
# Of one text alone.
ALONE = {
    "a length": lambda written: {"max_new_tokens": None, "max_length": 29},
    "one token more": lambda written: {"stopping_criteria": [OneMore(28)]},
    "a streamer": lambda written: {"streamer": Streamer()},
    "guidance": lambda written: {"guidance_scale": 1.5},
    "states": lambda written: {**SHOWN, "output_hidden_states": True, "repetition_penalty": 1.2},
    "states of drawn text": lambda written: {**ALONE["states"](written), "do_sample": True, "top_k": 1},
}
PLACES = [
    ("chain", families.deepseek_v4), ("tree", families.deepseek_v4), ("tree", families.gemma3),
    ("tree", families.qwen3_next), ("batch", families.qwen3), ("batch of chains", families.qwen3),
    ("batch", families.deepseek_v4), ("static", families.gemma3), ("static batch", families.qwen3),
]  # fmt: skip
DEAR = "batch", families.deepseek_v4  # four times as long as another: each change runs one request in four
CASES = [
    pytest.param(*place, request, marks=[pytest.mark.nightly] if place == DEAR and number % 4 else [])
    for place in PLACES for number, request in enumerate([*REQUESTS, *ALONE])
    if request in REQUESTS or len(WAYS[place[0]].lengths) == 1
]  # fmt: skip


@functools.cache
def pair_of(family):
    """A target that nobody binds, and the same one bound."""
    torch.manual_seed(0)
    own = family().eval()
    return own, bind(copy.deepcopy(own))


@functools.cache
def stock(family, request, lengths, new):
    """What plain decoding makes of each prompt, and of what it told the caller."""
    own, prompts = pair_of(family)[0], [prompt(length, seed=10 + row) for row, length in enumerate(lengths)]
    options = GREEDILY | {"max_new_tokens": new}
    written = own.generate(prompts[0], **options)[0, lengths[0] :].tolist() if request else []
    asked, made = {**REQUESTS, **ALONE}.get(request, lambda _: {}), []
    TOLD.clear()
    options |= {"return_dict_in_generate": True}
    for row in prompts:
        made.append(own.generate(row, attention_mask=torch.ones_like(row), **options | asked(written)))
    return made, list(TOLD), lambda: asked(written)


def write(way, family, request, new=24):
    """What a drafter of random drafts, some of them right, makes of the same prompts, after a look at the texts."""
    target, (expected, told, asked) = pair_of(family)[1], stock(family, request, way.lengths, new)
    texts = [each.sequences[0] for each in expected]
    prompts = [text[:length] for text, length in zip(texts, way.lengths)]
    drafter = way.kind(target, texts, seed=1, most=9)
    ids, mask = padded_on_the_left(prompts)
    options = {**GREEDILY, "max_new_tokens": new, **way.asked, **asked()}
    TOLD.clear()
    with keep_trees():
        out = target.generate(ids, attention_mask=mask, assistant_model=drafter, **options)
    assert told == TOLD if len(prompts) == 1 else sorted(told, key=str) == sorted(TOLD, key=str)
    written = [text[length:].tolist() for text, length in zip(texts, way.lengths)]
    pad, longest = options["pad_token_id"], max(map(len, written))
    expected_ids = [[*row.tolist(), *own, *[pad] * (longest - len(own))] for row, own in zip(ids, written)]
    found = out if torch.is_tensor(out) else out.sequences
    assert found.tolist() == expected_ids
    assert_counted(drafter.last_stats, written)
    return out, expected, drafter


def assert_counted(stats, written):
    """The statistics and the trees are those of the texts, row by row."""
    assert [row.tokens for row in stats.rows] == list(map(len, written))
    for name in ("tokens", "rounds", "draft_seconds", "verify_seconds", "loop_seconds"):
        assert getattr(stats, name) == pytest.approx(sum(getattr(row, name) for row in stats.rows))
    for row, new in zip(stats.rows, written):
        assert not row.rounds or min(row.draft_seconds, row.verify_seconds, row.loop_seconds) > 0
        assert len(row.trees) == row.rounds and sum(len(kept.drafts) for kept in row.trees) == row.nodes
        assert [len(kept.accepted) for kept in row.trees] == row.accepted
        told = {}
        for kept in row.trees:
            assert not kept.accepted or kept.drafts.path(kept.accepted[-1]) == kept.accepted
            assert kept.anchor == new[kept.first - 1] and kept.drafts.q is None
            own = [] if kept.own is None else [kept.own]
            told |= dict(zip(kept.tokens, kept.drafts.tokens[kept.accepted].tolist() + own, strict=True))
            depths = [kept.drafts.depths[node] for node in kept.accepted] + [0 for _ in own]
            assert [row.written[token] for token in kept.tokens] == depths
        assert told == {at: new[at] for at in told} and len(told) == sum(row.emitted)
    assert stats.draft_seconds + stats.verify_seconds < stats.loop_seconds or not stats.rounds


def assert_shown(out, expected):
    """Scores, logits and states are plain decoding's, step by step, with zeros where a text has ended."""
    for name in ("scores", "logits", "hidden_states", "attentions"):
        shown, own = getattr(out, name), [getattr(each, name) for each in expected]
        assert (shown is None) == (own[0] is None)
        for step, found in enumerate(shown or ()):
            if len(expected) > 1:
                rows = [steps[step] if step < len(steps) else torch.zeros(1, 64) for steps in own]
                torch.testing.assert_close(found, torch.cat(rows), atol=1e-3, rtol=1e-3)
                continue
            torch.testing.assert_close(found, own[0][step], atol=1e-3, rtol=1e-3)
            tensors = [found] if torch.is_tensor(found) else found
            # Nothing of a rejected draft is kept behind them.
            assert step == 0 or all(each.untyped_storage().nbytes() == each.nbytes for each in tensors)
    if len(expected) == 1:
        assert cache_of(out).get_seq_length() == cache_of(expected[0]).get_seq_length()
    else:
        assert cache_of(out) is None


@pytest.mark.parametrize(("way", "family", "asked"), CASES)
def test_the_text_is_stocks(way, family, asked):
    out, expected, _ = write(WAYS[way], family, asked)
    if not torch.is_tensor(out):
        assert_shown(out, expected)


FAMILIES = [
    *((family, way) for family in (*families.FAMILIES, *families.ALSO_MASKED) for way in ("chain", "tree")),
    *((family, "padded batch") for family in families.FAMILIES),
    *(
        (family, way) for family in families.MASKED if family not in families.ALSO_MASKED
        for way in ("static", "padded static batch")
    ),
]  # fmt: skip
# Of what is as Qwen3 to all but the mask of a draft tree.
AT_NIGHT = [
    (family, way) for family in families.ALSO_MASKED for way in ("padded batch", "static", "padded static batch")
]


@pytest.mark.parametrize(("family", "way"), mostly_nightly([*FAMILIES, *AT_NIGHT], kept=len(FAMILIES)))
def test_every_family_writes_its_own_text(family, way):
    """And the drafter takes in the residual of each text, position by position, before it drafts from it."""
    way, target = WAYS[way], pair_of(family)[1]
    if family is families.deepseek_v4_remote_code:
        way = way._replace(kind=RandomChains)
    _, expected, drafter = write(way, family, "", 40 if way.asked else 24)
    text, length = expected[0].sequences, way.lengths[0]
    assert torch.equal(target.generate(text[:, :length], **GREEDILY), text[:, : length + 24])  # bound, without drafts
    assert drafter.last_stats.tau > 1.2 and any(map(is_wide, drafter.trees)) == (way.kind is RandomTrees)
    for context, each in zip(drafter.contexts, expected, strict=True):
        text = each.sequences
        assert_heard_all(target, context.seen, text)


def assert_heard_all(target, seen, text, layer_ids=(-1,)):
    residual, positions, following = (torch.cat(parts, dim=1) for parts in zip(*seen))
    count = positions.shape[1]
    assert text.shape[1] - 2 <= count < text.shape[1] and positions[0].tolist() == list(range(count))
    assert following[0].tolist() == text[0, 1 : count + 1].tolist()
    with torch.no_grad(), capture_residual(target, layer_ids) as captured:
        target(text)
    torch.testing.assert_close(residual, captured[0][:, :count], atol=1e-3, rtol=1e-3)


def test_texts_longer_than_the_target_was_made_for_are_warned_of(monkeypatch):
    """As by transformers, where that may come."""
    told, target = [], bind(families.llama().eval())
    target.config.max_position_embeddings = 12
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", told.append)  # which a process says once
    for new, is_warned in ((5, False), (6, False), (9, True)):
        for drafter in (None, RandomChains(target, [])):
            target.generate(prompt(6), do_sample=False, max_new_tokens=new, assistant_model=drafter)
            assert bool(told) == is_warned
            told.clear()


@pytest.mark.parametrize("way", ["batch", "padded batch", "chain"])
def test_a_prompt_in_pieces_is_heard_in_pieces(way):
    """A prompt's residual is never held whole."""
    _, expected, drafter = write(WAYS[way], families.mistral, "a prompt in pieces")
    for context, each in zip(drafter.contexts, expected, strict=True):
        assert_heard_all(pair_of(families.mistral)[1], context.seen, each.sequences)
        assert max(part.shape[1] for part, *_ in context.seen) <= 6


class Steered(families.Qwen3ForCausalLM):
    """A target with an argument of its own for each text, `[batch, config.vocab_size]`."""

    def forward(self, *args, steer=None, **kwargs):
        outputs = super().forward(*args, **kwargs)
        if steer is not None:
            assert len(steer) == len(outputs.logits)
            outputs.logits = outputs.logits + steer[:, None]
        return outputs


def steered():
    target = families.qwen3()
    target.__class__ = Steered
    return target


HOLES = torch.ones(3, 9, dtype=torch.long)
HOLES[0, :4] = HOLES[1, 5] = HOLES[2, 2:5] = 0
# By name: a family, and what each of three texts has of its own, the texts along the axis before the last one.
OWN = {
    "a mask with holes": (families.gemma3, {"attention_mask": HOLES}),
    "a mask with holes, forked": (families.qwen3_next, {"attention_mask": HOLES}),
    "positions": (families.qwen3, {"position_ids": 2 * torch.arange(27).view(3, 9)}),
    "positions of three axes": (families.qwen3_5, {"position_ids": prompt(81, seed=1).view(3, 3, 9)}),
    "an argument": (steered, {"steer": 2 * torch.randn(3, 64)}),
}


@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
@pytest.mark.parametrize(("family", "given"), OWN.values(), ids=OWN)
def test_each_text_has_its_own_of_the_targets_arguments(family, given, kind):
    """Alone, and in a batch of as many as there are axes of positions."""
    own, target = pair_of(family)
    ids = torch.cat([prompt(9, seed=seed) for seed in range(3)])
    texts = []
    for row in range(3):
        one = {name: value[..., row : row + 1, :] for name, value in given.items()}
        texts.append(own.generate(ids[row : row + 1], **one, **GREEDILY)[0])
        drafter = kind(target, [texts[row]])
        alone = target.generate(ids[row : row + 1], assistant_model=drafter, **one, **GREEDILY)
        assert torch.equal(alone[0], texts[row])
        told = torch.cat([positions for _, positions, _ in drafter.seen], dim=1)
        if "position_ids" in one:  # of which a drafter hears those of the text
            assert told[0, :9].tolist() == one["position_ids"].view(-1, 9)[0].tolist()
    together = target.generate(ids, assistant_model=kind(target, texts), **given, **GREEDILY)
    assert torch.equal(together, torch.stack(texts))
    assert not torch.equal(texts[1], own.generate(ids[1:2], **GREEDILY)[0])


def eager(family):
    """Whose attention can be shown."""

    def made():
        target = family()
        target.set_attn_implementation("eager")
        return target

    return made


EAGER = [eager(family) for family in (families.deepseek_v4, families.gemma3, families.qwen3_next, families.llama)]
ALONE["attentions"] = lambda written: {**ALONE["states"](written), "output_attentions": True}


@pytest.mark.parametrize("way", ["chain", "tree"])
@pytest.mark.parametrize("family", EAGER[:3], ids=["deepseek_v4", "gemma3", "qwen3_next"])
def test_attentions_are_those_of_the_accepted_path(family, way):
    out, expected, drafter = write(WAYS[way], family, "attentions")
    assert_shown(out, expected)
    assert max(drafter.last_stats.accepted) > 1


@pytest.mark.parametrize("family", EAGER[1:], ids=["gemma3", "qwen3_next", "llama"])
def test_eager_attention_takes_the_masks_of_a_batch(family):
    write(WAYS["padded batch"], family, "")


def mixed(mix):
    """DeepSeek-V4 with other layers, windows and rates."""
    window, rates = [4, 8, 16, 7, 5][mix], [{CSA: 4, HCA: 8}, {CSA: 2, HCA: 4}, {CSA: 3, HCA: 6}][mix % 3]
    return tiny_target(mix, layer_types=MIXES[mix], sliding_window=window, compress_rates=rates, hidden_size=64)


MIXED = [functools.partial(mixed, mix) for mix in range(len(MIXES))]
# Of each mix, about where windows of compression close, from none to many.
LENGTHS = [(1, 2, 7, 8, 9, 31, 130, 300), (1, 8, 31, 300), (2, 9, 130), (1, 7, 31), (2, 8, 130)]


@pytest.mark.parametrize(("mix", "length"), [(mix, each) for mix in range(len(MIXES)) for each in LENGTHS[mix]])
def test_v4_of_any_mix_writes_its_own_text(mix, length):
    own, target = pair_of(MIXED[mix])
    ids = prompt(length, seed=mix)
    options = dict(do_sample=False, max_new_tokens=30)
    expected = own.generate(ids, **options)
    best = perfect(target, expected[0])
    for drafter in (RandomTrees(target, [expected[0]], seed=length, most=16), tiny_drafter(target), best):
        assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    stats = best.last_stats
    assert stats.accepted[:-1] == [6] * (stats.rounds - 1) and stats.emitted[:-1] == [7] * (stats.rounds - 1)
