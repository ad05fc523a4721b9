"""A text that goes on: from a cache, after an interruption, behind padding.

`test_cache_between_calls` has what callers do with a cache meanwhile."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers import DynamicCache

from hf_hyperdflash import bind
from hf_hyperdflash.decoding import continuation
from hf_hyperdflash.targets.caches.name import CACHE, cache_of

from ..conftest import half_right, half_right_about, perfect, prompt, tiny_drafter, tiny_target
from ..helpers import families
from ..helpers.tree_drafters import RandomChains, RandomTrees

GREEDILY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture
def pair(target, drafter):
    drafter.bind(target)
    return target, drafter


def turn(target, drafter, ids, cache=None, **options):
    """What is written, and the drafter's context of it."""
    asked = {**GREEDILY, "return_dict_in_generate": True, **options}
    out = target.generate(ids, assistant_model=drafter, **{CACHE: cache}, **asked)
    return out, cache_of(out)._hyperdflash_context.context


def with_turn(ids, count=7):
    return torch.cat([ids, prompt(count, seed=5)], dim=1)


# The drafter's context


def test_the_drafters_context_goes_on_with_the_cache(pair):
    """A second turn drafts from the whole conversation, as from a fresh start; of a copied cache in a copy."""
    target, drafter = pair
    out, context = turn(target, drafter, prompt(14))
    copied, second = copy.deepcopy(cache_of(out)), with_turn(out.sequences)
    fresh, expected = turn(target, drafter, second)
    drafter.flush_pending(expected)  # what waits for the next block
    for cache in (copied, cache_of(out)):
        assert context.end == len(context) == out.sequences.shape[1] - 1
        again, found = turn(target, drafter, second, cache)
        assert torch.equal(again.sequences, fresh.sequences)
        assert found.end == expected.end == len(found) == again.sequences.shape[1] - 1
        drafter.flush_pending(found)
        for x, y in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close(x[0], y[0], atol=1e-4, rtol=1e-4)


def test_a_context_is_its_drafters_own_whatever_ids_are_given_again(pair, monkeypatch):
    """Two drafters in turn on one cache: each drafts as if it were alone."""
    target, first = pair
    second = tiny_drafter(target, num_hidden_layers=1)
    out, _ = turn(target, first, prompt(14))
    monkeypatch.setattr(continuation, "id", lambda thing: 7, raising=False)  # as if `second` stood where `first` did
    again, context = turn(target, second, with_turn(out.sequences), cache_of(out))
    kept = cache_of(again)._hyperdflash_context
    assert kept.is_of(second) and not kept.is_of(first)
    assert len(context.layers) == 1 and len(context) == again.sequences.shape[1] - out.sequences.shape[1]
    assert pickle.loads(pickle.dumps(cache_of(again)))._hyperdflash_context is None


def test_a_context_that_is_not_the_caches_any_more_is_left(pair):
    """The caller takes tokens back and goes on with others: what the drafter knows of them is no context."""
    target, drafter = pair
    out, _ = turn(target, drafter, prompt(14))
    cache = cache_of(out)
    cache.crop(-4)
    kept = cache.get_seq_length()
    again, context = turn(target, drafter, with_turn(out.sequences[:, :kept]), cache)
    assert context.end == again.sequences.shape[1] - 1 and len(context) == context.end - kept


def test_a_text_that_ended_with_a_draft_goes_on():
    """Its last token is in no cache yet, like any other's; the draft counts as an accepted one."""
    target = bind(tiny_target(3, hidden_size=64))
    text = target.generate(prompt(20), do_sample=False, max_new_tokens=30)[0]
    last = next(i for i in range(22, 26) if text[i] not in text[20:i])
    drafter = perfect(target, text)
    out, context = turn(target, drafter, prompt(20), max_new_tokens=30, eos_token_id=text[last].item())
    assert out.sequences.shape[1] == last + 1 and drafter.last_stats.accepted == [last - 20]
    assert cache_of(out).get_seq_length() == last == context.end == len(context)
    again, _ = turn(target, drafter, out.sequences, cache_of(out), max_new_tokens=49 - last)
    assert torch.equal(again.sequences[0], text) and drafter.last_stats.tau > 4


# Windows


def test_a_cache_that_drafts_have_filled_keeps_no_more_than_its_window_of_plain_text():
    """Whoever drafted: we, or transformers' own loop on a bound target."""
    own = families.mistral().eval()
    target, ids = bind(copy.deepcopy(own)), prompt(9)
    options = dict(do_sample=False, max_new_tokens=30, return_dict_in_generate=True)
    text = own.generate(prompt(9), do_sample=False, max_new_tokens=60)
    drafter = half_right_about(target, text[0])
    drafter.bind(target)
    for asked in ({"assistant_model": drafter}, {"prompt_lookup_num_tokens": 3}):
        out = target.generate(ids, **options, **asked)
        is_text = torch.ones_like(out.sequences)  # also where it is the padding token
        again = target.generate(out.sequences, attention_mask=is_text, **{CACHE: cache_of(out)}, **options)
        assert torch.equal(again.sequences, text)
        windows = [layer for layer in cache_of(again).layers if getattr(layer, "sliding_window", None)]
        assert windows and all(layer.keys.shape[-2] < layer.sliding_window for layer in windows)


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
        assert cache._hyperdflash_context.is_of(drafter)  # it goes on, too
        positions = torch.cat([part for _, part, _ in drafter.seen], dim=1)[0].tolist()
        assert positions == list(range(len(positions)))


# Padding


def padded(ids, by=4):
    ids = torch.nn.functional.pad(ids, (by, 0))
    return ids, (torch.arange(ids.shape[1]) >= by).long()[None]


@pytest.mark.parametrize("chunk", [None, 6])
@pytest.mark.parametrize("family", [families.deepseek_v4, families.gemma3, families.qwen3_next, families.qwen3])
def test_left_padding_changes_nothing(family, chunk):
    """Neither the text nor what the drafter takes in, nor the next turn.

    Stock V4 pools padding with text, and its text depends on both; ours is that of the prompt alone, also for
    processors."""
    target = bind(family().eval())
    options = {**GREEDILY, "prefill_chunk_size": chunk}
    penalty = {"repetition_penalty": 1.2} if family is families.deepseek_v4 else {}
    first = target.generate(prompt(17), **options, **penalty)
    whole = target.generate(with_turn(first), attention_mask=torch.ones_like(with_turn(first)), **options)
    drafter, cache, text = RandomTrees(target, [first[0], whole[0]], target_layer_ids=(0, -1)), None, prompt(17)
    drafter.texts += [[0] * 4 + each for each in drafter.texts]
    for expected in (first, whole):
        ids, mask = padded(text)
        out, _ = turn(target, drafter, ids, cache, attention_mask=mask, **options, **penalty)
        assert torch.equal(out.sequences, padded(expected)[0])
        text, cache, penalty = with_turn(expected), cache_of(out), {}
    positions = torch.cat([part for _, part, _ in drafter.seen], dim=1)[0].tolist()
    assert positions == list(range(len(positions))) and drafter.last_stats.tau > 1


def test_padding_that_the_cache_has_seen_stays():
    """The caller has run the padded prompt himself: the positions of what follows count the padding."""
    target = bind(tiny_target(3, hidden_size=64))
    (ids, mask), cache = padded(prompt(17)), DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids[:, :13], attention_mask=mask[:, :13], **{CACHE: cache})
    options = dict(**GREEDILY, attention_mask=mask)
    expected = target.generate(ids, **{CACHE: copy.deepcopy(cache)}, **options)
    drafter = half_right(target, ids, max_new_tokens=12)
    assert torch.equal(target.generate(ids, **{CACHE: cache}, assistant_model=drafter, **options), expected)


def test_padding_is_no_context():
    """Of a target that masks padding instead of leaving it out."""
    target = bind(families.qwen3().eval())
    ids, mask = padded(prompt(9))
    _, context = turn(target, tiny_drafter(target), ids, attention_mask=mask)
    assert context.end == 13 + 12 - 1 and len(context) == 9 + 12 - 1
