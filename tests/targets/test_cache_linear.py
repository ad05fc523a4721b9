"""Linear attention's states after crops, against caches that never saw what was taken back."""

from contextlib import contextmanager

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from hf_hyperdflash.targets.caches.linear import CallRecorder, RewindableLinearLayer, make_linear_rewindable
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.registry import target_of

from ..conftest import prompt
from ..helpers.families import (
    REWINDABLE_QWEN4,
    falcon_h1,
    glm5_next,
    granite_hybrid,
    nemotron_h,
    qwen3_next,
    qwen4_exp,
)

# Falcon-H1 has attention in the same layers, Nemotron-H layers without a state, Qwen4-Exp three states in a layer.
LINEAR = [glm5_next, qwen3_next, granite_hybrid, falcon_h1, nemotron_h, *([qwen4_exp] if REWINDABLE_QWEN4 else [])]


@contextmanager
def record_calls(target):
    recorder = CallRecorder(target_of(target).layers)
    try:
        yield
    finally:
        for handle in recorder.handles:
            handle.remove()


@pytest.fixture(scope="module", params=LINEAR, ids=lambda family: family.__name__)
def linear(request):
    torch.manual_seed(0)
    return request.param().eval()


def fresh(target):
    return make_linear_rewindable(DynamicCache(config=target.config))


@torch.no_grad()
def feed(target, cache, ids):
    return target(ids, **{CACHE: cache}, use_cache=True).logits


def linear_layers(cache):
    """Those with a state: before transformers 5.22 an MLP has such a layer, too, and puts nothing into it."""
    of_kind = [layer for layer in cache.layers if isinstance(layer, RewindableLinearLayer)]
    return [layer for layer in of_kind if any(state is not None for state in layer.conv_states.values())]


def states(cache):
    held = []
    for layer in linear_layers(cache):
        held += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        held += [getattr(layer, "keys", None), getattr(layer, "values", None)]
    return [state for state in held if state is not None]


def assert_same(cache, other):
    assert cache.get_seq_length() == other.get_seq_length()
    for one, two in zip(states(cache), states(other), strict=True):
        torch.testing.assert_close(one, two, atol=1e-4, rtol=1e-4)


def assert_refused(cache, undoable):
    """What cannot be undone; that nothing changes is seen by what follows."""
    for layer in linear_layers(cache):
        assert layer.undoable_tokens == undoable
        for count, error in ((1, ValueError), (-undoable - 1, RuntimeError)):
            with pytest.raises(error):
                layer.crop(count)


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    before=st.sampled_from([0, 9]),
    rounds=st.lists(
        st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.none() | st.integers(0, n))), max_size=6
    ),
)
@example(before=0, rounds=[(7, 7)])  # a first forward taken back leaves nothing
@example(before=9, rounds=[(7, 7), (7, 3), (2, 0)])
def test_any_rounds_leave_what_a_cache_has_that_never_saw_what_was_taken_back(linear, before, rounds):
    ids, cache, never, length = prompt(60), fresh(linear), fresh(linear), before
    with record_calls(linear):
        for each in (cache, never) if before else ():
            feed(linear, each, ids[:, :before])
        if before:
            assert_refused(cache, 0)  # the prompt came before recording
        cache.activate_past_recording()
        for fed, cropped in rounds:
            removed = cropped or 0
            block = ids[:, length : length + fed].clone()
            block[:, fed - removed :] = 63 - block[:, fed - removed :]  # other tokens than the text's
            feed(linear, cache, block)
            assert_refused(cache, fed)
            if cropped is not None:
                cache.crop(-cropped)
                assert not any(layer.undoable_tokens for layer in linear_layers(cache))  # a crop ends a round
                if fed > removed:
                    assert_refused(cache, 0)
            if fed > removed:
                feed(linear, never, ids[:, length : length + fed - removed])
            length += fed - removed
            assert cache.get_seq_length() == length
    if length:
        assert_same(cache, never)
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([1, 0, 1]))
    more = ids[:, length : length + 9]
    logits = feed(linear, cache, more.expand(3 if length else 1, -1))
    torch.testing.assert_close(logits, feed(linear, never, more).expand_as(logits), atol=1e-4, rtol=1e-4)
    cache.batch_select_indices(torch.tensor([0]))
    assert_same(cache, never)


def test_a_reset_layer_starts_anew(linear):
    ids, cache = prompt(12), fresh(linear)
    with record_calls(linear):
        feed(linear, cache, ids)
        cache.activate_past_recording()
        feed(linear, cache, ids[:, :3])
        cache.reset()
    feed(linear, cache, ids[:, :2])  # nobody told the layers how they were called
    for layer in linear_layers(cache):
        assert layer.undoable_tokens == 0
        layer.reset()
        assert not any(layer.has_previous_state.values())
    assert not any(state.any() for state in states(cache))


@pytest.mark.parametrize("length", [2, 9])
@pytest.mark.parametrize("recording", [False, True])
def test_other_layers_stay_and_stock_state_is_taken_over(linear, recording, length):
    stock, never, ids = DynamicCache(config=linear.config), fresh(linear), prompt(20)
    if recording:
        stock.activate_past_recording()
    for each in (stock, never):
        feed(linear, each, ids[:, :length])
    kinds = [type(layer) for layer in stock.layers]
    cache = make_linear_rewindable(stock)
    assert make_linear_rewindable(cache) is cache and cache.is_croppable
    assert all(isinstance(layer, kind) for layer, kind in zip(cache.layers, kinds, strict=True))
    assert_same(cache, never)
    more = [feed(linear, each, ids[:, length:]) for each in (cache, never)]
    torch.testing.assert_close(*more, atol=1e-4, rtol=1e-4)
