"""A text that goes on: from a cache, after an interruption, behind padding.

`test_cache_between_calls` has what callers do with a cache meanwhile."""

from __future__ import annotations

import copy
import pickle
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

from hf_hyperdflash import PromptLookupDrafter, bind
from hf_hyperdflash.decoding import rounds
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.targets.caches.name import CACHE, cache_of

from ..conftest import (
    half_right_about,
    penalty_counts_padding,
    perfect,
    prompt,
    tiny_drafter,
    tiny_target,
)
from ..helpers import families
from ..helpers.tree_drafters import RandomChains, RandomTrees

GREEDILY = {"do_sample": False, "max_new_tokens": 12}


def turn(target, drafter, ids, cache=None, **options):
    """What is written, and what was drafted for it round by round."""
    asked = {**GREEDILY, "return_dict_in_generate": True, **options}
    with keep_trees():
        out = target.generate(ids, assistant_model=drafter, **{CACHE: cache}, **asked)
    return out, [kept.drafts.tokens.tolist() for kept in drafter.last_stats.trees]


def with_turn(ids, count=7):
    return torch.cat([ids, prompt(count, seed=5)], dim=1)


# The drafter's context


def test_a_second_turn_drafts_from_the_whole_conversation(target, drafter):
    """As from a fresh start; also from a copy of the cache. What is not known of a cache any more is no context: of
    one that was pickled, that another drafter has filled, or of which the caller took tokens back."""
    drafter.bind(target)
    other = tiny_drafter(target, num_hidden_layers=1)
    out, plain, others = (turn(target, each, prompt(14))[0] for each in (drafter, PromptLookupDrafter(target), other))
    copied, pickled = copy.deepcopy(cache_of(out)), pickle.loads(pickle.dumps(cache_of(out)))
    second, cropped = with_turn(out.sequences), [copy.deepcopy(cache_of(each)) for each in (out, plain)]
    whole, known = turn(target, drafter, second)
    _, unknown = turn(target, drafter, second, cache_of(plain))
    assert known != unknown
    caches = (copied, known), (pickled, unknown), (cache_of(others), unknown), (cache_of(out), known)
    for cache, expected in caches:
        again, drafts = turn(target, drafter, second, cache)
        assert torch.equal(again.sequences, whole.sequences) and drafts == expected
    for cache in cropped:
        cache.crop(-4)
    shorter = with_turn(out.sequences[:, : cropped[0].get_seq_length()])
    assert turn(target, drafter, shorter, cropped[0])[1] == turn(target, drafter, shorter, cropped[1])[1]


def test_a_text_that_ended_with_a_draft_goes_on():
    """Its last token is in no cache yet, like any other's; the draft counts as an accepted one."""
    target = bind(tiny_target(3, hidden_size=64))
    text = target.generate(prompt(20), do_sample=False, max_new_tokens=30)[0]
    last = next(i for i in range(22, 26) if text[i] not in text[20:i])
    drafter = perfect(target, text)
    out, _ = turn(target, drafter, prompt(20), max_new_tokens=30, eos_token_id=text[last].item())
    assert out.sequences.shape[1] == last + 1 and drafter.last_stats.accepted == [last - 20]
    assert cache_of(out).get_seq_length() == last
    again, _ = turn(target, drafter, out.sequences, cache_of(out), max_new_tokens=49 - last)
    assert torch.equal(again.sequences[0], text) and drafter.last_stats.tau > 4


# Interruptions


class StopsAt:
    """Raises at the n-th token, as a closed connection does."""

    def __init__(self, count):
        self.count, self.tokens = count, []

    def put(self, value):
        self.tokens += value.flatten().tolist()
        self.count -= 1
        if self.count < 0:  # the first put is the prompt
            raise ConnectionError("closed")

    def end(self):
        pass


@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
@pytest.mark.parametrize("family", [families.deepseek_v4, families.gemma3, families.qwen3_next])
def test_after_an_interruption_the_cache_is_that_of_the_text_so_far(family, kind):
    target, ids = bind(family().eval()), prompt(12)
    whole = target.generate(ids, do_sample=False, max_new_tokens=20)
    for count in range(1, 11):
        cache, streamer = DynamicCache(config=target.config), StopsAt(count)
        drafter = kind(target, [whole[0]], seed=count)
        options = dict(do_sample=False, **{CACHE: cache}, assistant_model=drafter)
        with pytest.raises(ConnectionError):
            target.generate(ids, max_new_tokens=20, streamer=streamer, **options)
        seen = torch.tensor([streamer.tokens])
        assert cache.get_seq_length() == seen.shape[1] - 1 == cache.layers[-1].get_seq_length(), count
        options["attention_mask"] = torch.ones_like(seen)  # a padding token among them is text here
        assert torch.equal(target.generate(seen, max_length=32, **options), whole), count
        positions = torch.cat([part for _, part, _ in drafter.seen], dim=1)[0].tolist()
        assert positions == list(range(len(positions)))


def test_a_cache_that_drafts_have_filled_keeps_no_more_than_its_window_of_plain_text():
    """Whoever drafted, we or transformers' own loop on a bound target; also where a streamer raised."""
    own = families.mistral().eval()
    target, ids = bind(copy.deepcopy(own)), prompt(9)
    text = own.generate(ids, do_sample=False, max_new_tokens=60)
    drafter = half_right_about(target, text[0])
    drafter.bind(target)
    for asked in ({"assistant_model": drafter}, {"prompt_lookup_num_tokens": 3}, {"streamer": StopsAt(6)}):
        cache = DynamicCache(config=target.config)
        drafts = {"assistant_model": drafter} if "streamer" in asked else {}
        with nullcontext() if not drafts else pytest.raises(ConnectionError):
            target.generate(ids, do_sample=False, max_new_tokens=30, **{CACHE: cache}, **asked, **drafts)
        so_far = text[:, : cache.get_seq_length() + 1]
        is_text = torch.ones_like(so_far)  # also where it is the padding token
        options = dict(do_sample=False, max_length=69, attention_mask=is_text, **{CACHE: cache})
        assert torch.equal(target.generate(so_far, **options), text)
        windows = [layer for layer in cache.layers if getattr(layer, "sliding_window", None)]
        assert windows and all(layer.keys.shape[-2] < layer.sliding_window for layer in windows)


# Padding


def padded(ids, by=4, token=0):
    ids = torch.nn.functional.pad(ids, (by, 0), value=token)
    return ids, (torch.arange(ids.shape[1]) >= by).long()[None]


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("family", [families.deepseek_v4, families.gemma3, families.qwen3_next, families.qwen3])
def test_left_padding_changes_nothing(family, chunk):
    """Neither the text nor what the drafter takes in, nor the next turn.

    Stock V4 pools padding with text, and its text depends on both; ours is that of the prompt alone, also for
    processors."""
    target = bind(family().eval())
    # A penalty that counts padding gets a token that is in the prompt, and is counted anyway.
    token = int(prompt(17)[0, 0]) if penalty_counts_padding() else 0
    options = {**GREEDILY, "prefill_chunk_size": chunk}
    penalty = {"repetition_penalty": 1.2} if family is families.deepseek_v4 else {}
    first = target.generate(prompt(17), **options, **penalty)
    whole = target.generate(with_turn(first), attention_mask=torch.ones_like(with_turn(first)), **options)
    drafter, cache, text = RandomTrees(target, [first[0], whole[0]], target_layer_ids=(0, -1)), None, prompt(17)
    drafter.texts += [[token] * 4 + each for each in drafter.texts]
    for expected in (first, whole):
        ids, mask = padded(text, token=token)
        out, _ = turn(target, drafter, ids, cache, attention_mask=mask, **options, **penalty)
        assert torch.equal(out.sequences, padded(expected, token=token)[0])
        text, cache, penalty = with_turn(expected), cache_of(out), {}
    positions = torch.cat([part for _, part, _ in drafter.seen], dim=1)[0].tolist()
    assert positions == list(range(len(positions))) and drafter.last_stats.tau > 1


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize(("by", "top_k"), [(3, 2), (9, 2), (9, 512)])  # less than any window of compressors, and more
def test_padding_that_the_cache_has_seen_stays(by, top_k, is_tree):
    """The caller has run the padded prompt himself. Then the cache holds entries that positions do not count: stock
    indexers hide as many, and other compressors hide none from a single token."""
    target = bind(tiny_target(3, hidden_size=64, index_topk=top_k))
    (ids, mask), cache = padded(prompt(17), by), DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :13], attention_mask=mask[:, :13], **{CACHE: cache})
    options = dict(do_sample=False, max_new_tokens=24, attention_mask=mask)
    expected = target.generate(ids, **{CACHE: copy.deepcopy(cache)}, **options)
    drafter = (RandomTrees if is_tree else RandomChains)(target, [expected[0]])
    assert torch.equal(target.generate(ids, **{CACHE: cache}, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("is_tree", [False, True])
def test_gaps_in_the_mask_of_a_prompt_are_in_the_cache(is_tree):
    """As padding that it has seen."""
    target, ids = bind(tiny_target(3, hidden_size=64, index_topk=2)), prompt(20)
    is_text = torch.tensor([[column != 1 and not 5 <= column < 14 for column in range(20)]]).long()
    options = dict(do_sample=False, max_new_tokens=24, attention_mask=is_text)
    expected = target.generate(ids, **options)
    drafter = (RandomTrees if is_tree else RandomChains)(target, [expected[0]])
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_stats.tau > 1.5


@pytest.mark.parametrize("length", [5, 17, 40])  # before a window has closed, and after
def test_trees_behind_a_cache_that_plain_decoding_filled_are_verified_under_a_mask(length, monkeypatch):
    """As a fresh DeepSeek-V4 verifies them: of windows that overlap, stock layers keep what the next one reads."""
    target = tiny_target(2, hidden_size=64)
    for name, weight in target.named_parameters():
        if name.endswith("position_bias"):  # zeros in a new model
            torch.nn.init.normal_(weight)
    first = target.generate(prompt(length), **GREEDILY, return_dict_in_generate=True)
    text = target.generate(first.sequences, do_sample=False, max_new_tokens=30, output_logits=True,
                           return_dict_in_generate=True)  # fmt: skip
    drafter = RandomTrees(bind(target), [text.sequences[0]])
    monkeypatch.setattr(rounds, "ForkedRound", None)
    out, _ = turn(target, drafter, first.sequences, cache_of(first), max_new_tokens=30, output_logits=True)
    assert torch.equal(out.sequences, text.sequences) and sum(drafter.last_stats.accepted) > 9
    torch.testing.assert_close(torch.stack(out.logits), torch.stack(text.logits), atol=1e-4, rtol=1e-4)
