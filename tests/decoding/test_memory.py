"""How much memory rounds hold."""

import pytest
import torch

from hf_hyperdflash import PromptLookupDrafter, bind
from hf_hyperdflash.targets.caches import round_cache

from ..conftest import prompt
from ..helpers.families import made
from ..helpers.live_memory import LiveMemory


@pytest.mark.parametrize("rows", [1, 3])
@torch.no_grad()
def test_a_cache_that_grows_holds_no_text_twice(rows, monkeypatch):
    target = bind(made("qwen3", intermediate_size=48, num_hidden_layers=16, num_key_value_heads=2).eval())
    drafter, config = PromptLookupDrafter(target), target.config
    monkeypatch.setattr(round_cache, "_GROWTH", 4)
    ids = torch.cat([prompt(700, seed=row) for row in range(rows)])
    with LiveMemory() as memory:
        target.generate(ids, assistant_model=drafter, max_new_tokens=30, pad_token_id=0, prefill_chunk_size=50)
    of_keys = 16 * 2 * 4 * rows * 730 * config.num_key_value_heads * config.head_dim
    assert of_keys < memory.peak < 1.6 * of_keys
