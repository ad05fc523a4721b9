"""Of a target all of whose layers slide, a drafter's graphs fit texts of any length that fits in the cache."""

import torch._dynamo
from transformers import MistralConfig, MistralForCausalLM

from hf_hyperdflash import HyperDFlashDrafter, bind

from ..conftest import prompt
from ..decoding.test_static_caches import compiling
from ..helpers.families import COMMON


def test_another_length_compiles_nothing(monkeypatch):
    monkeypatch.setattr("hf_hyperdflash.drafters.saved.SavedDrafter._is_launch_bound", True)  # as on an accelerator
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    small = dict(intermediate_size=48, num_hidden_layers=1, num_key_value_heads=2, sliding_window=8)
    target, graphs = bind(MistralForCausalLM(MistralConfig(**COMMON, **small)).eval()), []
    drafter = HyperDFlashDrafter.from_target(target, num_draft_tokens=4, mask_token_id=63, num_hidden_layers=1).eval()
    options = dict(do_sample=False, cache_implementation="static", max_cache_len=100, compile_config=compiling())
    for length, new in ((9, 10), (9, 14), (14, 8)):
        target.generate(prompt(length), assistant_model=drafter, max_new_tokens=new, **options)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1] == 2  # the target's rounds and the drafter's passes
