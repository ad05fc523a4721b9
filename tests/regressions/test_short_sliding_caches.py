"""In static caches with fewer columns than window and text another text was written than transformers does, which
writes on in the shorter window; and each length of text compiled a drafter's graphs again."""

import copy

import pytest
import torch
import torch._dynamo
from transformers import StaticCache
from transformers.cache_utils import Cache, StaticSlidingWindowLayer

from hf_hyperdflash import HyperDFlashDrafter, bind
from hf_hyperdflash.targets.caches.name import CACHE
from hf_hyperdflash.targets.caches.round_cache import RoundCache

from ..conftest import prompt
from ..decoding.test_static_caches import compiling
from ..helpers import families
from ..helpers.families import made
from ..helpers.tree_drafters import RandomChains, RandomTrees

ONE_LAYER = dict(intermediate_size=48, num_hidden_layers=1, num_key_value_heads=2, sliding_window=8)
GREEDILY = dict(do_sample=False, pad_token_id=0, max_new_tokens=30)


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
@pytest.mark.parametrize(("columns", "length"), [(5, 3), (5, 13), (1, 4), (7, 7)])  # of a window of 8
def test_turns_are_those_of_plain_decoding(columns, length, kind, chunk):
    own, text = families.mistral().eval(), prompt(length)
    target = bind(copy.deepcopy(own))
    stock, ours = (StaticCache(config=own.config, max_cache_len=columns) for _ in range(2))
    for turn in range(2 if chunk is None else 1):  # before 5.20 transformers runs chunks of a turn wrongly
        expected = own.generate(text, prefill_chunk_size=chunk, **GREEDILY, **{CACHE: stock})
        assert turn or not torch.equal(expected, own.generate(text, **GREEDILY))
        drafter = kind(target, [expected[0]], seed=turn, most=7)
        asked = dict(assistant_model=drafter, tree_budget=7, prefill_chunk_size=chunk)
        assert torch.equal(target.generate(text, **asked, **GREEDILY, **{CACHE: ours}), expected)
        assert drafter.last_stats.tau > 1 and ours.get_seq_length() == stock.get_seq_length()
        text = torch.cat([expected, prompt(4, seed=turn)], dim=1)


def test_compiled_rounds_write_on_in_it_too():
    torch._dynamo.reset()
    own = made("mistral", **ONE_LAYER).eval()
    target = bind(copy.deepcopy(own))
    stock, ours = (StaticCache(config=own.config, max_cache_len=5) for _ in range(2))
    expected = own.generate(prompt(9), **GREEDILY, **{CACHE: stock})
    asked = dict(assistant_model=RandomChains(target, [expected[0]], most=3, depth=3), compile_config=compiling())
    assert torch.equal(target.generate(prompt(9), **asked, **GREEDILY, **{CACHE: ours}), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_graphs_of_two_windows_are_told_apart():
    """Also where both have as many columns: a graph has its window in it."""
    shapes = set()
    for window, width in ((5, 6), (6, 5)):
        layer = StaticSlidingWindowLayer(9, sliding_window=window)
        layer.update(torch.zeros(1, 1, 3, 1), torch.zeros(1, 1, 3, 1))
        shapes.add(RoundCache(Cache(layers=[layer]), [window], [3], width).shape)
    assert len(shapes) == 2


def test_another_length_compiles_nothing(monkeypatch):
    monkeypatch.setattr("hf_hyperdflash.drafters.saved.SavedDrafter._on_accelerator", True)  # as on an accelerator
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    target, graphs = bind(made("mistral", **ONE_LAYER).eval()), []
    drafter = HyperDFlashDrafter.from_target(target, num_draft_tokens=4, mask_token_id=63, num_hidden_layers=1).eval()
    options = dict(do_sample=False, cache_implementation="static", max_cache_len=100, compile_config=compiling())
    for length, new in ((9, 10), (9, 14), (14, 8)):
        target.generate(prompt(length), assistant_model=drafter, max_new_tokens=new, **options)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] == 2  # the target's rounds and the drafter's passes
