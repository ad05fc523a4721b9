"""The rewindable cache layers against stock layers that never saw the cropped tokens."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import dataclass
from functools import cache as memoize

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4CSACache, DeepseekV4HCACache

from hf_hyperdflash.targets.caches.deepseek_v4 import (
    RewindableCSACacheLayer,
    RewindableHCACacheLayer,
    RewindableSlidingCacheLayer,
    make_rewindable,
)
from hf_hyperdflash.targets.caches.name import CACHE

from ..helpers.processes import python

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
STOCK = {SLIDING: DynamicSlidingWindowLayer, CSA: DeepseekV4CSACache, HCA: DeepseekV4HCACache}
REWINDABLE = {SLIDING: RewindableSlidingCacheLayer, CSA: RewindableCSACacheLayer, HCA: RewindableHCACacheLayer}
FEATURES = {"compressor": 4, "indexer": 2}
PROPERTY = settings(deadline=None, max_examples=75, database=None)


# Builders


def v4_config(
    layer_types=(SLIDING, CSA, HCA, CSA), sliding_window: int = 7, csa_rate: int = 3, hca_rate: int = 5
) -> DeepseekV4Config:
    """A tiny V4 without score ties in the indexer: all entries selected, enough index heads."""
    return DeepseekV4Config(
        vocab_size=61,
        hidden_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=len(layer_types),
        num_attention_heads=4,
        head_dim=16,
        partial_rotary_factor=0.5,
        q_lora_rank=16,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=list(layer_types),
        mlp_layer_types=["hash_moe"] + ["moe"] * (len(layer_types) - 1),
        compress_rates={CSA: csa_rate, HCA: hca_rate},
        sliding_window=sliding_window,
        o_groups=2,
        o_lora_rank=8,
        index_n_heads=4,
        index_head_dim=8,
        index_topk=64,
        hc_mult=2,
        eos_token_id=None,
        pad_token_id=0,
    )


@memoize
def v4_model(layer_types=(SLIDING, CSA, HCA, CSA), **config) -> DeepseekV4ForCausalLM:
    """A tiny V4 with every parameter random, position biases and sinks included."""

    class CroppableV4(DeepseekV4ForCausalLM):
        # transformers refuses assisted decoding for stateful models; with this cache V4 is none.
        _is_stateful = False

    generator = torch.Generator().manual_seed(0)
    model = CroppableV4(v4_config(layer_types, **config)).eval()
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise
    for name, buffer in model.named_buffers():
        if name.endswith("tid2eid"):
            buffer.copy_(torch.randint(0, 4, buffer.shape, generator=generator))
    return model


def layer_config(kind: str, window: int, rate: int) -> DeepseekV4Config:
    other = rate + 3
    rates = {"csa_rate": rate, "hca_rate": other} if kind == CSA else {"csa_rate": other, "hca_rate": rate}
    return v4_config(sliding_window=window, **rates)


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
        assert actual is expected, f"{what}: {actual} is not {expected}"
        return
    assert actual.dtype == expected.dtype and actual.device == expected.device, what
    assert actual.shape == expected.shape, f"{what}: {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert torch.equal(actual, expected), what


def assert_same_state(layer, expected) -> None:
    """Every public tensor and counter of the layer equals the stock layer's."""
    assert layer.cumulative_length == expected.cumulative_length
    assert layer.get_seq_length() == expected.get_seq_length()
    assert layer.get_mask_sizes(3) == expected.get_mask_sizes(3)
    assert layer.is_initialized == expected.is_initialized
    assert getattr(layer, "entry_count", None) == getattr(expected, "entry_count", None)
    assert layer.keys is layer.values
    assert_bit_equal(layer.keys, expected.keys, "keys")
    for state in STATES:
        if hasattr(expected, state):
            assert getattr(layer, state).keys() == getattr(expected, state).keys()
            for name, tensor in getattr(expected, state).items():
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


# Properties of crop


kinds = pytest.mark.parametrize("kind", [SLIDING, CSA, HCA])
compressed_kinds = pytest.mark.parametrize("kind", [CSA, HCA])
shapes = st.fixed_dictionaries(
    {"window": st.integers(2, 9), "rate": st.integers(1, 6), "max_rewind": st.integers(1, 14)}
)


@kinds
@PROPERTY
@given(data=st.data(), shape=shapes, batch=st.integers(1, 3), prompt=st.integers(1, 40), chunk=st.integers(1, 41))
def test_crop_equals_never_having_seen_the_tokens(kind, data, shape, batch, prompt, chunk):
    layer = rewindable_layer(kind, **shape)
    history = Tokens.random(batch, prompt)
    feed(layer, history)
    undone_to = max(prompt - shape["max_rewind"], 0)
    for seed in range(1, data.draw(st.integers(2, 9), label="actions")):
        if data.draw(st.booleans(), label="forward"):
            new = Tokens.random(batch, data.draw(st.integers(1, 12), label="forwarded"), seed)
            seen = feed(layer, new)
            history = history + new
            visible = min(len(history) - len(new), shape["window"] - 1) + len(new)
            assert_bit_equal(seen, history.keys[:, -visible:].unsqueeze(1), "keys seen by the new tokens")
            undone_to = max(undone_to, len(history) - shape["max_rewind"])
        else:
            assert layer.undoable_tokens == len(history) - undone_to
            removed = data.draw(st.integers(0, len(history) - undone_to), label="cropped")
            layer.crop(-removed)
            history = history[: len(history) - removed]
            if len(history) == 0:
                break
        stock = stock_layer(kind, shape["window"], shape["rate"])
        assert_same_state(layer, feed_in_chunks(stock, history, chunk))
    assert_same_state(layer, feed_in_chunks(stock_layer(kind, shape["window"], shape["rate"]), history, chunk))


@kinds
@PROPERTY
@given(data=st.data(), shape=shapes, unrecorded=st.integers(1, 30), recorded=st.lists(st.integers(1, 7), max_size=6))
def test_what_came_before_recording_stays_and_what_came_after_can_go(kind, data, shape, unrecorded, recorded):
    shape["max_rewind"] = max(sum(recorded), 1)
    history = Tokens.random(2, unrecorded + sum(recorded))
    filled = stock_layer(kind, shape["window"], shape["rate"])
    feed(filled, history[:unrecorded])
    layer = make_rewindable(Cache(layers=[filled]), shape["max_rewind"]).layers[0]
    layer.activate_past_recording()
    if data.draw(st.booleans(), label="crop first"):
        layer.crop(0)
    length = unrecorded
    for count in recorded:
        feed(layer, history[length : length + count])
        length += count
    assert layer.undoable_tokens == sum(recorded)
    removed = data.draw(st.integers(0, sum(recorded)), label="cropped")
    layer.crop(-removed)
    stock = stock_layer(kind, shape["window"], shape["rate"])
    assert_same_state(layer, feed_in_chunks(stock, history[: length - removed], 3))


@kinds
@PROPERTY
@given(data=st.data(), shape=shapes, length=st.integers(1, 30), chunk=st.integers(1, 30))
def test_unrecorded_tokens_cannot_be_cropped(kind, data, shape, length, chunk):
    layer = rewindable_layer(kind, **shape, recording=False)
    history = Tokens.random(1, length)
    feed_in_chunks(layer, history, chunk)
    with pytest.raises(RuntimeError, match=r"only the last 0 of the .*past recording is off"):
        layer.crop(-data.draw(st.integers(1, length), label="cropped"))
    layer.crop(0)
    assert_same_state(layer, feed_in_chunks(stock_layer(kind, shape["window"], shape["rate"]), history, chunk))


@kinds
@PROPERTY
@given(shape=shapes, chunks=st.lists(st.integers(1, 12), min_size=1, max_size=6))
def test_refused_crop_says_how_far_back_it_can_go_and_changes_nothing(kind, shape, chunks):
    layer = rewindable_layer(kind, **shape)
    for seed, count in enumerate(chunks):
        feed(layer, Tokens.random(1, count, seed))
    before, undoable, length = copy.deepcopy(layer), layer.undoable_tokens, sum(chunks)
    assert undoable == min(length, shape["max_rewind"])
    refusals = [(1, ValueError, r"positive value \(1\)"), (-length - 1, ValueError, f"layer holds {length}")]
    if undoable < length:
        limits = f"remove {undoable + 1} tokens, but only the last {undoable} of the {length}.*max_rewind"
        refusals.append((-undoable - 1, RuntimeError, limits))
    for count, error, message in refusals:
        with pytest.raises(error, match=message):
            layer.crop(count)
        assert_same_state(layer, before)
    layer.crop(-undoable)
    before.crop(-undoable)
    assert_same_state(layer, before)


@kinds
@PROPERTY
@given(data=st.data(), shape=shapes, chunks=st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_batch_operations_carry_compressor_and_records(kind, data, shape, chunks):
    layer, history = rewindable_layer(kind, **shape), Tokens.random(3, sum(chunks) + 2 * shape["rate"])
    length = 0
    for count in chunks:
        feed(layer, history[length : length + count])
        length += count
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=4), label="rows"))
    layer.reorder_cache(torch.tensor([2, 0, 1]))
    layer.batch_select_indices(rows)
    layer.batch_repeat_interleave(2)
    history = history.map(lambda tensor: tensor[[2, 0, 1]][rows].repeat_interleave(2, dim=0))
    removed = data.draw(st.integers(0, min(length, shape["max_rewind"])), label="cropped")
    layer.crop(-removed)
    stock = feed_in_chunks(stock_layer(kind, shape["window"], shape["rate"]), history[: length - removed], 4)
    assert_same_state(layer, stock)
    feed(layer, history[length - removed :])
    feed(stock, history[length - removed :])
    assert_same_state(layer, stock)


@compressed_kinds
@pytest.mark.parametrize("rate", [1, 4, 128])
def test_every_crop_around_every_window_edge(kind, rate):
    window, max_rewind = 8, 2 * min(rate, 6) + 9
    edges = {edge + step for edge in (window, rate, 2 * rate, rate + window) for step in (-2, -1, 0, 1, 2)}
    for prompt in sorted(edge for edge in edges if edge > 0):
        history = Tokens.random(1, prompt + max_rewind)
        for removed in range(max_rewind + 1):
            layer = rewindable_layer(kind, window, rate, max_rewind)
            for chunk in (history[:prompt], history[prompt:-2], history[-2:]):
                feed(layer, chunk)
            layer.crop(-removed)
            stock = stock_layer(kind, window, rate)
            feed(stock, history[: len(history) - removed])
            assert_same_state(layer, stock)


@kinds
def test_several_crops_in_a_row_reach_back_max_rewind_tokens_in_all(kind):
    history = Tokens.random(2, 60)
    layer = rewindable_layer(kind, window=5, rate=3, max_rewind=12)
    feed(layer, history)
    for length in (60, 59, 55, 55, 49, 48):
        layer.crop(length - layer.get_seq_length())
        assert_same_state(layer, feed_in_chunks(stock_layer(kind, 5, 3), history[:length], 60))
    with pytest.raises(RuntimeError, match="only the last 0 of the 48"):
        layer.crop(-1)


@kinds
def test_crop_to_nothing_equals_a_new_layer(kind):
    layer = rewindable_layer(kind, max_rewind=30)
    layer.crop(0)
    assert_same_state(layer, stock_layer(kind))
    with pytest.raises(ValueError, match="layer holds 0"):
        layer.crop(-1)
    feed_in_chunks(layer, Tokens.random(1, 20), 6)
    layer.crop(-20)
    assert_same_state(layer, stock_layer(kind))
    assert layer.record_past
    history = Tokens.random(3, 11, seed=5)
    assert_same_state(feed_in_chunks(layer, history, 4), feed_in_chunks(stock_layer(kind), history, 11))


@kinds
def test_recording_switched_off_forgets_at_the_next_forward(kind):
    # As transformers' deferred stop check does before it returns the cache.
    history = Tokens.random(1, 40)
    layer = rewindable_layer(kind, max_rewind=10)
    feed_in_chunks(layer, history[:33], 11)
    layer.record_past = False
    layer.crop(-2)
    layer.crop(-3)
    stock = feed_in_chunks(stock_layer(kind), history[:28], 28)
    assert_same_state(layer, stock)
    for one in (layer, stock):
        feed_in_chunks(one, history[28:], 1)
    assert_same_state(layer, stock)
    assert held_bytes(layer) <= stock_bytes(kind, layer, stock)
    with pytest.raises(RuntimeError, match="past recording is off"):
        layer.crop(-5)


# Memory


def bound_in_bytes(kind: str, window: int, rate: int, max_rewind: int, batch: int) -> int:
    """What keys, open windows and records may hold, whatever the sequence length; compressed entries not included."""
    floats_per_key, floats_per_token = 3, 0 if kind == SLIDING else 2 * (2 * FEATURES["compressor"])
    if kind == CSA:
        # The indexer on top, and the overlap slices: half of kv and gate once more.
        floats_per_token = (floats_per_token + 2 * (2 * FEATURES["indexer"])) * 3 // 2
    keys, tokens = 2 * (window - 1 + max_rewind), 4 * (max_rewind + rate) + 2 * rate
    return 4 * batch * (keys * floats_per_key + tokens * floats_per_token)


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


@kinds
@pytest.mark.parametrize("recording", [True, False])
def test_keys_and_values_stay_one_tensor(kind, recording):
    layer = rewindable_layer(kind, recording=recording)
    feed(layer, Tokens.random(2, 30))
    steps = [
        lambda: layer.crop(-3 if recording else 0),
        lambda: layer.reorder_cache(torch.tensor([1, 0])),
        lambda: layer.batch_repeat_interleave(2),
        lambda: layer.batch_select_indices(torch.tensor([0, 3])),
        lambda: layer.offload(),
        lambda: layer.prefetch(),
        lambda: feed(layer, Tokens.random(2, 2)),
    ]
    for step in steps:
        step()
        assert layer.keys is layer.values


# The rest of the cache interface


@kinds
@pytest.mark.parametrize("recording", [True, False])
def test_reset_makes_the_layer_as_new(kind, recording):
    layer = rewindable_layer(kind, recording=recording)
    feed_in_chunks(layer, Tokens.random(2, 23), 6)
    layer.reset()
    assert_same_state(layer, stock_layer(kind))
    assert layer.record_past == recording and layer.undoable_tokens == 0
    history = Tokens.random(1, 13, seed=3)
    assert_same_state(feed_in_chunks(layer, history, 5), feed_in_chunks(stock_layer(kind), history, 13))


@kinds
@pytest.mark.parametrize("recording", [True, False])
def test_offload_moves_the_keys_once_and_leaves_the_compressor(kind, recording):
    layer, stock, history = rewindable_layer(kind, recording=recording), stock_layer(kind), Tokens.random(2, 30)
    layer.offload(), layer.prefetch()
    for start in range(0, 30, 6):
        for one in (layer, stock):
            one.prefetch()
            feed(one, history[start : start + 6])
            one.offload()
    assert_same_state(layer, stock)
    # There is no second device to move to here: "meta" shows what would move.
    layer.device = torch.device("meta")
    layer.prefetch()
    assert layer.keys is layer.values and layer.keys.device.type == "meta"
    assert kind == SLIDING or layer.buffer_kv["compressor"].device.type == "cpu"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="cache offloading needs a GPU")
def test_offloading_cache_on_gpu():
    model = copy.deepcopy(v4_model()).to("cuda")
    ids = ids_of(2, 40).to("cuda")
    cache = make_rewindable(DynamicCache(config=model.config, offloading=True), 8)
    cache.activate_past_recording()
    with torch.no_grad():
        for start in range(0, 30, 5):
            model(ids[:, start : start + 5], **{CACHE: cache})
            cache.crop(0)
        model(ids[:, 35:], **{CACHE: cache})
        cache.crop(-5)
        logits = model(ids[:, 30:], **{CACHE: cache}).logits
        expected = model(ids).logits[:, 30:]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def through_torch_save(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@kinds
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer)), through_torch_save]
)
def test_copies_rewind_on_their_own(kind, copied):
    history = Tokens.random(1, 30)
    layer = rewindable_layer(kind)
    feed_in_chunks(layer, history, 7)
    twin = copied(layer)
    layer.crop(-8)
    feed(layer, history[:5])
    twin.crop(-5)
    twin.crop(-2)
    assert_same_state(twin, feed_in_chunks(stock_layer(kind), history[:23], 23))


@kinds
def test_early_initialized_layer_can_be_cropped_by_nothing(kind):
    layer = rewindable_layer(kind)
    empty = torch.zeros(1, 1, 0, 3)
    layer.lazy_initialization(empty, empty)
    layer.crop(0)
    assert layer.undoable_tokens == 0
    history = Tokens.random(1, 9)
    feed(layer, history)
    assert_same_state(layer, feed_in_chunks(stock_layer(kind), history, 9))


@pytest.mark.parametrize("max_rewind", [0, -1, 1.5, True, None])
def test_max_rewind_must_be_a_positive_integer(max_rewind):
    with pytest.raises(ValueError, match="max_rewind"):
        RewindableHCACacheLayer(v4_config(), max_rewind=max_rewind)
    with pytest.raises(ValueError, match="max_rewind"):
        make_rewindable(DynamicCache(config=v4_config()), max_rewind)


# make_rewindable


def test_make_rewindable_swaps_every_layer_in_place():
    cache = DynamicCache(config=v4_config((SLIDING, CSA, HCA, SLIDING)))
    assert make_rewindable(cache, 5) is cache
    assert [type(layer) for layer in cache.layers] == [REWINDABLE[kind] for kind in (SLIDING, CSA, HCA, SLIDING)]
    assert isinstance(cache.layers[1], DeepseekV4CSACache) and isinstance(cache.layers[2], DeepseekV4HCACache)
    assert not isinstance(cache.layers[2], DeepseekV4CSACache)
    assert cache.is_croppable
    assert [layer.max_rewind for layer in cache.layers] == [5] * 4


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


def test_values_must_be_the_keys():
    layer, keys = rewindable_layer(SLIDING), torch.zeros(1, 1, 2, 3)
    with pytest.raises(ValueError, match="the same tensor twice"):
        layer.update(keys, keys.clone())
    assert layer.get_seq_length() == 0 and not layer.is_initialized


def test_make_rewindable_refuses_a_sliding_layer_that_lost_keys():
    layer, keys = stock_layer(SLIDING, window=5), torch.zeros(1, 1, 12, 3)
    layer.activate_past_recording()
    layer.update(keys, keys)
    make_rewindable(Cache(layers=[copy.deepcopy(layer)]))
    for _ in range(2):
        layer.crop(-2)
    with pytest.raises(ValueError, match="seen 8 tokens, but holds keys of the last 2 only, expected 4"):
        make_rewindable(Cache(layers=[layer]))


def test_make_rewindable_twice_changes_nothing_but_can_widen_the_reach():
    cache = make_rewindable(DynamicCache(config=v4_config()), 5)
    before = list(cache.layers)
    for max_rewind, expected in ((3, 5), (5, 5), (9, 9)):
        make_rewindable(cache, max_rewind)
        assert all(layer is old for layer, old in zip(cache.layers, before))
        assert {layer.max_rewind for layer in cache.layers} == {expected}


@kinds
def test_widened_reach_applies_to_what_comes_next(kind):
    history = Tokens.random(1, 60)
    layer = rewindable_layer(kind, max_rewind=4)
    feed(layer, history[:40])
    make_rewindable(Cache(layers=[layer]), 20)
    feed_in_chunks(layer, history[40:], 1)
    layer.crop(-20)
    assert_same_state(layer, feed_in_chunks(stock_layer(kind), history[:40], 40))


@kinds
@pytest.mark.parametrize("recording", [True, False])
def test_make_rewindable_carries_state_and_recording_over(kind, recording):
    filled, twin = stock_layer(kind), stock_layer(kind)
    for layer in (filled, twin):
        feed_in_chunks(layer, Tokens.random(2, 17), 5)
    if recording:
        filled.activate_past_recording()
    layer = make_rewindable(Cache(layers=[filled])).layers[0]
    assert layer.record_past == recording
    assert_same_state(layer, twin)
    with pytest.raises(RuntimeError, match="max_rewind" if recording else "activate_past_recording"):
        layer.crop(-3)
    assert_same_state(layer, twin)
    feed(layer, Tokens.random(2, 9, seed=1))
    feed(twin, Tokens.random(2, 9, seed=1))
    assert_same_state(layer, twin)


@kinds
def test_make_rewindable_refuses_what_it_cannot_make_right(kind):
    class Foreign(STOCK[kind]):
        _layer_type = None

    stock = stock_layer(CSA)
    cache = Cache(layers=[stock, Foreign(5 if kind == SLIDING else v4_config())])
    with pytest.raises(TypeError, match="Foreign"):
        make_rewindable(cache)
    assert cache.layers[0] is stock
    with pytest.raises(TypeError, match=r"tuple.*DynamicCache"):
        make_rewindable(())

    feed(stock, Tokens.random(1, 4))
    stock.crop(-2)
    with pytest.raises(ValueError, match="keys of 2 tokens, but its compressor has seen 4"):
        make_rewindable(Cache(layers=[stock]))


def test_importing_the_module_registers_no_layer_type():
    # In a process of its own: here, both modules are imported already.
    code = """
import transformers.models.deepseek_v4.modeling_deepseek_v4 as stock
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING as dynamic, STATIC_LAYER_TYPE_MAPPING as static
before = dict(dynamic), dict(static)
import hf_hyperdflash.targets.caches.deepseek_v4
assert (dynamic, static) == before
assert stock.DeepseekV4CSACache in dynamic.values() and stock.DeepseekV4HCACache in dynamic.values()
"""
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


# With a model


def ids_of(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    # Never the padding id: `generate` would mask it, and V4 itself is not chunking-invariant then.
    return torch.randint(1, 61, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_close_state(layer, expected) -> None:
    """As `assert_same_state`, but for a model's matrix products, whose last bits depend on the chunking."""
    assert layer.cumulative_length == expected.cumulative_length
    assert getattr(layer, "entry_count", None) == getattr(expected, "entry_count", None)
    torch.testing.assert_close(layer.keys, expected.keys, atol=1e-5, rtol=1e-4)
    for state in STATES:
        torch.testing.assert_close(getattr(layer, state, {}), getattr(expected, state, {}), atol=1e-5, rtol=1e-4)


def assert_same_cache(model, cache, ids) -> None:
    """Cache and next logits equal those of a model that only ever saw `ids`."""
    expected = DynamicCache(config=model.config)
    model(ids, **{CACHE: expected})
    for layer, stock in zip(cache.layers, expected.layers):
        assert_close_state(layer, stock)
    more = ids_of(ids.shape[0], 6, seed=9)
    logits = model(more, **{CACHE: copy.deepcopy(cache)}).logits
    torch.testing.assert_close(logits, model(more, **{CACHE: expected}).logits, atol=1e-4, rtol=1e-4)


mixes = pytest.mark.parametrize(
    "config",
    [
        {"layer_types": (SLIDING, CSA, HCA, CSA)},
        {"layer_types": (SLIDING, SLIDING, CSA, HCA), "sliding_window": 4, "csa_rate": 4, "hca_rate": 8},
        {"layer_types": (HCA, HCA, CSA), "sliding_window": 12, "csa_rate": 2, "hca_rate": 4},
        {"layer_types": (SLIDING, SLIDING), "sliding_window": 5},
    ],
    ids=["mixed", "flash-like", "pro-like", "sliding only"],
)


@mixes
@pytest.mark.parametrize("prompt", [1, 3, 8, 23])
@torch.no_grad()
def test_model_after_verification_rounds_equals_one_that_never_saw_the_drafts(config, prompt):
    model, ids = v4_model(**config), ids_of(2, prompt + 40)
    cache = make_rewindable(DynamicCache(config=model.config), 8)
    cache.activate_past_recording()
    model(ids[:, :prompt], **{CACHE: cache})
    cache.crop(0)
    length = prompt
    for draft, rejected in ((3, 3), (7, 2), (1, 0), (8, 8), (5, 4), (6, 0), (2, 1)):
        kept = draft - rejected
        block = torch.cat([ids[:, length : length + kept], ids_of(2, rejected, seed=length)], dim=1)
        model(block, **{CACHE: cache})
        cache.crop(-rejected)
        length += kept
        assert_same_cache(model, cache, ids[:, :length])


@mixes
@torch.no_grad()
def test_model_rewinds_several_forwards_and_crops(config):
    model, ids = v4_model(**config), ids_of(2, 60)
    cache = make_rewindable(DynamicCache(config=model.config), 16)
    cache.activate_past_recording()
    for start, stop in ((0, 9), (9, 30), (30, 31), (31, 32), (32, 33), (33, 40)):
        model(ids[:, start:stop], **{CACHE: cache})
    for length in (38, 31, 31, 25):
        cache.crop(length - cache.get_seq_length())
        assert_same_cache(model, cache, ids[:, :length])


@mixes
@torch.no_grad()
def test_chunked_prefill_and_continuing_from_a_users_own_cache(config):
    model, ids = v4_model(**config), ids_of(2, 40)
    cache = DynamicCache(config=model.config)
    for start in range(0, 30, 7):
        model(ids[:, start : min(start + 7, 30)], **{CACHE: cache})
    make_rewindable(cache, 8).activate_past_recording()
    assert_same_cache(model, cache, ids[:, :30])
    model(ids[:, 30:], **{CACHE: cache})
    cache.crop(-8)
    assert_same_cache(model, cache, ids[:, :32])


@mixes
@torch.no_grad()
def test_prompt_lookup_generates_what_greedy_decoding_generates(config):
    model = v4_model(**config)
    for length in (3, 12, 25):
        prompt = ids_of(1, length).repeat(1, 2)
        greedy = model.generate(prompt, max_new_tokens=24, do_sample=False)
        cache = make_rewindable(DynamicCache(config=model.config), 8)
        drafted = model.generate(
            prompt, max_new_tokens=24, do_sample=False, prompt_lookup_num_tokens=4, **{CACHE: cache}
        )
        assert torch.equal(drafted, greedy)


@torch.no_grad()
def test_beam_search_generates_what_the_stock_cache_generates():
    model, prompt = v4_model(layer_types=(HCA, CSA)), ids_of(2, 11)
    cache = make_rewindable(DynamicCache(config=model.config))
    beams = model.generate(prompt, max_new_tokens=8, num_beams=3, do_sample=False, **{CACHE: cache})
    rescored = model.generate(prompt, max_new_tokens=8, num_beams=3, do_sample=False, use_cache=False)
    assert torch.equal(beams, rescored)
