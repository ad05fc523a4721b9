"""The rewindable cache layers against stock layers that never saw the cropped tokens; under a model: in
tests/decoding/test_rounds.py."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4Config
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    STATIC_LAYER_TYPE_MAPPING,
    Cache,
    DynamicSlidingWindowLayer,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from hf_hyperdflash.targets.caches.deepseek_v4 import (
    RewindableCSACacheLayer,
    RewindableHCACacheLayer,
    RewindableSlidingCacheLayer,
    make_rewindable,
)

from ..conftest import CSA, HCA, SLIDING, tiny_config

STOCK = {SLIDING: DynamicSlidingWindowLayer, CSA: DeepseekV4CSACache, HCA: DeepseekV4HCACache}
REWINDABLE = {SLIDING: RewindableSlidingCacheLayer, CSA: RewindableCSACacheLayer, HCA: RewindableHCACacheLayer}
FEATURES = {"compressor": 4, "indexer": 2}
PROPERTY = settings(deadline=None, max_examples=100, database=None)


# Builders


def layer_config(kind: str, window: int, rate: int) -> DeepseekV4Config:
    other = rate + 3
    return tiny_config(sliding_window=window, compress_rates={CSA: other, HCA: other, kind: rate})


def stock_layer(kind: str, window: int = 5, rate: int = 3):
    return STOCK[kind](window if kind == SLIDING else layer_config(kind, window, rate))


def rewindable_layer(kind: str, window: int = 5, rate: int = 3, max_rewind: int = 8, recording: bool = True):
    config = window if kind == SLIDING else layer_config(kind, window, rate)
    layer = REWINDABLE[kind](config, max_rewind=max_rewind)
    if recording:
        layer.activate_past_recording()
    return layer


@dataclass
class Tokens:
    """What a model would give the layer for each token: small integers, so that float sums are exact in any order."""

    keys: torch.Tensor  # [batch, seq, 3]
    projections: dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> kv and gate, [batch, seq, features]

    @classmethod
    def random(cls, batch: int, length: int, seed: int = 0) -> Tokens:
        generator = torch.Generator().manual_seed(seed)

        def draw(features: int) -> torch.Tensor:
            return torch.randint(-9, 10, (batch, length, features), generator=generator).float()

        return cls(draw(3), {name: (draw(2 * size), draw(2 * size)) for name, size in FEATURES.items()})

    def map(self, change) -> Tokens:
        projections = {name: (change(kv), change(gate)) for name, (kv, gate) in self.projections.items()}
        return Tokens(change(self.keys), projections)

    def __getitem__(self, positions: slice) -> Tokens:
        return self.map(lambda tensor: tensor[:, positions].clone())

    def __len__(self) -> int:
        return self.keys.shape[1]

    def __add__(self, other: Tokens) -> Tokens:
        pairs = zip(self.projections.items(), other.projections.values())
        projections = {
            name: (torch.cat([kv, more_kv], 1), torch.cat([gate, more_gate], 1))
            for (name, (kv, gate)), (more_kv, more_gate) in pairs
        }
        return Tokens(torch.cat([self.keys, other.keys], 1), projections)


def feed(layer, tokens: Tokens) -> torch.Tensor:
    """One forward: the calls that V4's attention, compressor and indexer make. Returns the keys seen by attention."""
    keys = tokens.keys.unsqueeze(1)
    seen, values = layer.update(keys, keys)
    assert seen is values or type(layer) is DynamicSlidingWindowLayer
    for name in getattr(layer, "entry_count", ()):
        compress(layer, name, *tokens.projections[name])
    return seen


def compress(layer, name: str, kv: torch.Tensor, gate: torch.Tensor) -> None:
    batch, features, rate = kv.shape[0], kv.shape[-1], layer.compress_rate
    chunk_kv, chunk_gate, first_position = layer.store_compression_weights(name, kv, gate)
    assert first_position == layer.entry_count[name] * rate
    windows = chunk_kv.shape[1] // rate
    chunk_kv = chunk_kv.view(batch, windows, rate, features)
    position_bias = 100.0 * torch.arange(1, rate + 1)[:, None] + torch.arange(features)
    chunk_gate = chunk_gate.view(batch, windows, rate, features) + position_bias
    entries = (chunk_kv * chunk_gate).sum(2)
    if hasattr(layer, "overlap_kv"):
        half = features // 2
        entries = entries[..., half:].clone()
        if windows:
            prior_kv, prior_gate = layer.update_overlap_state(name, chunk_kv, chunk_gate, half)
            entries[:, 1:] += (chunk_kv * chunk_gate)[:, :-1, :, :half].sum(2)
            if prior_kv is not None:
                entries[:, 0] += (prior_kv * prior_gate).sum(1)
    layer.update_compressor_states(name, entries)


def feed_in_chunks(layer, tokens: Tokens, chunk: int):
    for start in range(0, len(tokens), chunk):
        feed(layer, tokens[start : start + chunk])
    return layer


# Comparing


STATES = ("buffer_kv", "buffer_gate", "compressed_kv", "overlap_kv", "overlap_gate")


def assert_bit_equal(actual: torch.Tensor | None, expected: torch.Tensor | None, what: str) -> None:
    if actual is None or expected is None:
        assert actual is expected, what
        return
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, msg=what)


def assert_same_state(layer, expected) -> None:
    """Every public tensor and counter of the layer equals the stock layer's."""
    for counter in ("cumulative_length", "is_initialized", "entry_count"):
        assert getattr(layer, counter, None) == getattr(expected, counter, None), counter
    assert layer.get_seq_length() == expected.get_seq_length()
    assert layer.get_mask_sizes(3) == expected.get_mask_sizes(3)
    assert layer.keys is layer.values
    assert_bit_equal(layer.keys, expected.keys, "keys")
    for state in STATES:
        for name, tensor in getattr(expected, state, {}).items():
            assert_bit_equal(getattr(layer, state)[name], tensor, f"{state}[{name}]")


def storages_of(thing) -> dict[int, int]:
    """Address and bytes of every storage reachable from an object."""
    if isinstance(thing, torch.Tensor):
        return {thing.untyped_storage().data_ptr(): thing.untyped_storage().nbytes()}
    if isinstance(thing, dict):
        thing = list(thing.values())
    elif hasattr(thing, "__dict__"):
        thing = list(vars(thing).values())
    if not isinstance(thing, (list, tuple)):
        return {}
    return {address: size for item in thing for address, size in storages_of(item).items()}


def held_bytes(layer) -> int:
    return sum(storages_of({k: v for k, v in vars(layer).items() if k != "_sliding_window_tensor"}).values())


def stock_bytes(kind: str, layer, stock) -> int:
    """What a layer that records nothing may hold: keys and values in one, and where windows overlap the projections of
    the last closed one, of which those of a draft tree would be made."""
    if kind != CSA or not layer.entry_count["compressor"]:
        return held_bytes(stock) // (2 if kind == SLIDING else 1)
    window = layer.compress_rate * 2 * sum(2 * size for size in FEATURES.values())
    return held_bytes(stock) + 4 * layer.keys.shape[0] * window


# Any acts


kinds = pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
shapes = st.fixed_dictionaries(
    {"window": st.integers(2, 9), "rate": st.integers(1, 6), "max_rewind": st.integers(1, 14)}
)
ACTS = ["feed", "feed", "crop", "crop", "crop too far", "copy", "rows", "record", "record no more", "reset", "widen"]


def through_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@kinds
@PROPERTY
@given(data=st.data(), shape=shapes, before=st.integers(0, 40), chunk=st.integers(1, 41))
def test_after_any_acts_a_layer_is_a_stock_one_that_saw_what_is_left(kind, data, shape, before, chunk):
    """Acts on a layer that goes on from a stock one's state, beside a list of the tokens that are left."""
    window, rate, max_rewind = shape["window"], shape["rate"], shape["max_rewind"]
    unknown = before // rate  # windows that closed in the stock layer
    filled, history, undoable = stock_layer(kind, window, rate), Tokens.random(2, before), 0
    if before:
        feed_in_chunks(filled, history, chunk)
    is_recording = data.draw(st.booleans(), label="records already")
    if is_recording:
        filled.activate_past_recording()
    (layer,) = make_rewindable(Cache(layers=[filled]), max_rewind).layers

    for seed, act in enumerate(data.draw(st.lists(st.sampled_from(ACTS), max_size=12), label="acts"), start=1):
        batch, length = history.keys.shape[0], len(history)
        if act == "feed":
            new = Tokens.random(batch, data.draw(st.integers(1, 12), label="fed"), seed)
            seen, history = feed(layer, new), history + new
            visible = min(length, window - 1) + len(new)
            assert_bit_equal(seen, history.keys[:, -visible:].unsqueeze(1), "keys seen by the new tokens")
            undoable = min(undoable + len(new), max_rewind) if is_recording else 0
        elif act == "crop":
            removed = data.draw(st.integers(0, undoable), label="cropped")
            layer.crop(-removed)
            history, undoable = history[: length - removed], undoable - removed
        elif act == "crop too far":
            wrong = data.draw(st.sampled_from([-1, length + 1]) | st.integers(undoable + 1, max(length, undoable + 1)))
            with pytest.raises(RuntimeError if 0 < wrong <= length else ValueError):
                layer.crop(-wrong)
        elif act == "copy":
            copied = data.draw(st.sampled_from([copy.deepcopy, through_torch_save]))
            other, layer = layer, copied(layer)
            other.crop(-undoable)
            feed(other, Tokens.random(batch, 5, seed))
        elif act == "rows":
            rows = data.draw(st.lists(st.integers(0, 2 * batch - 1), min_size=1, max_size=3), label="rows")
            layer.batch_repeat_interleave(2)
            layer.reorder_cache(torch.arange(2 * batch).flip(0))
            layer.batch_select_indices(torch.tensor(rows))
            history = history.map(lambda state: state.repeat_interleave(2, dim=0).flip(0)[rows])  # noqa: B023
        elif act == "record":
            layer.activate_past_recording()
            is_recording = True
        elif act == "record no more":  # as transformers' deferred stop check before it returns the cache
            layer.record_past = is_recording = False
        elif act == "reset":
            layer.reset()
            history, undoable, unknown = history[:0], 0, 0
        else:
            wider = data.draw(st.integers(1, 20), label="reach")
            assert make_rewindable(Cache(layers=[layer]), wider).layers == [layer]
            max_rewind = max(max_rewind, wider)
            assert layer.max_rewind == max_rewind

        stock = stock_layer(kind, window, rate)
        assert_same_state(layer, feed_in_chunks(stock, history, chunk))
        assert (layer.undoable_tokens, layer.record_past) == (undoable, is_recording)
        closed = len(history) // rate  # where windows overlap, a tree's first one reads the last of these
        assert layer.can_verify_trees == (kind != CSA or closed == 0 or closed > unknown)


@PROPERTY
@given(
    data=st.data(),
    shape=shapes,
    hca_rate=st.integers(1, 6),
    mix=st.lists(st.sampled_from([SLIDING, CSA, HCA]), min_size=1, max_size=4),
    unrecorded=st.integers(0, 20),
    swapped_first=st.booleans(),
)
def test_refused_cache_crop_leaves_every_layer_as_it_was(data, shape, hca_rate, mix, unrecorded, swapped_first):
    rates = {SLIDING: 1, CSA: shape["rate"], HCA: hca_rate}
    cache = Cache(layers=[stock_layer(kind, shape["window"], rates[kind]) for kind in mix])
    if swapped_first:
        make_rewindable(cache, shape["max_rewind"])
    history = Tokens.random(1, unrecorded)
    for layer in cache.layers if unrecorded else ():
        feed(layer, history)
    make_rewindable(cache, shape["max_rewind"]).activate_past_recording()
    for seed, step in enumerate(data.draw(st.lists(st.integers(-9, 9), max_size=6), label="forwards and crops")):
        length, undoable = len(history), cache.layers[0].undoable_tokens
        assert {layer.undoable_tokens for layer in cache.layers} == {undoable}
        if step > 0:
            history = history + Tokens.random(1, step, seed)
            for layer in cache.layers:
                feed(layer, history[length:])
        elif -step <= undoable:
            cache.crop(step)
            history = history[: length + step]
        else:
            before = copy.deepcopy(cache)
            with pytest.raises(RuntimeError if -step <= length else ValueError):
                cache.crop(step)
            for layer, old in zip(cache.layers, before.layers):
                assert_same_state(layer, old)
        if len(history):
            for kind, layer in zip(mix, cache.layers):
                stock = stock_layer(kind, shape["window"], rates[kind])
                assert_same_state(layer, feed_in_chunks(stock, history, len(history)))


# Memory


def bound_in_bytes(kind: str, window: int, rate: int, max_rewind: int, batch: int) -> int:
    """What keys, open windows and records may hold, whatever the sequence length; compressed entries not included."""
    floats_per_token = 0 if kind == SLIDING else 4 * FEATURES["compressor"]
    if kind == CSA:  # the indexer on top, and the overlap slices: half of kv and gate once more
        floats_per_token = (floats_per_token + 4 * FEATURES["indexer"]) * 3 // 2
    keys, tokens = 2 * (window - 1 + max_rewind), 4 * (max_rewind + rate) + 2 * rate
    return 4 * batch * (3 * keys + tokens * floats_per_token)


@kinds
@pytest.mark.parametrize("late", [False, True], ids=["recorded prompt", "recording after the prompt"])
@pytest.mark.parametrize("crop_each_step", [False, True])
def test_a_long_prompt_is_not_kept_alive(kind, late, crop_each_step):
    window, rate, max_rewind, prompt, steps = 6, 4, 10, 8_001, 150
    layer = rewindable_layer(kind, window, rate, max_rewind, recording=not late)
    history = Tokens.random(2, prompt + steps)
    feed(layer, history[:prompt])
    layer.activate_past_recording()
    for length in range(prompt, prompt + steps):
        entries = sum(storages_of(getattr(layer, "compressed_kv", {})).values())
        assert held_bytes(layer) - entries <= bound_in_bytes(kind, window, rate, max_rewind, batch=2)
        feed(layer, history[length : length + 1])
        if crop_each_step:
            layer.crop(0)
        assert layer.keys.shape[-2] == window - 1


@kinds
def test_without_recording_memory_is_the_stock_layers_with_keys_and_values_in_one(kind):
    layer, stock = rewindable_layer(kind, recording=False), stock_layer(kind)
    history = Tokens.random(2, 400)
    for start, stop in [(0, 300), *((step, step + 1) for step in range(300, 330)), (330, 400)]:
        seen, stock_seen = feed(layer, history[start:stop]), feed(stock, history[start:stop])
        assert_bit_equal(seen, stock_seen, "keys seen by the new tokens")
        assert_same_state(layer, stock)
        assert held_bytes(layer) <= stock_bytes(kind, layer, stock)


def test_transformers_keeps_its_own_layer_types():
    """A subclass that names one would replace the stock class in every cache of the process."""
    for kinds_of_layers in (DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING):
        assert not [kind for kind in kinds_of_layers.values() if kind.__module__.startswith("hf_hyperdflash")]
    assert {DeepseekV4CSACache, DeepseekV4HCACache} <= set(DYNAMIC_LAYER_TYPE_MAPPING.values())
