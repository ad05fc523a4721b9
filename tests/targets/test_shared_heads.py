"""Attention over keys that query heads share: transformers' "sdpa" without its copies."""

from types import SimpleNamespace

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_hyperdflash import PromptLookupDrafter, bind
from hf_hyperdflash.targets.shared_heads import SHARED_HEADS, attend, attention_of_rounds

from ..conftest import prompt
from ..helpers.families import made
from ..helpers.live_memory import LiveMemory

GROUPS, HEADS, KEYS = 2, 3, 3000


def states(count, batch=2):
    torch.manual_seed(0)
    query = torch.randn(batch, HEADS * GROUPS, count, 32)
    key, value = (torch.randn(batch, HEADS, KEYS, 32) for _ in range(2))
    visible = torch.rand(batch, 1, count, KEYS) < 0.5
    return SimpleNamespace(num_key_value_groups=GROUPS), query, key, value, visible


@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("is_masked", [True, False])
@pytest.mark.parametrize("is_causal", [True, False, None])
def test_it_computes_what_sdpa_does(count, is_masked, is_causal):
    module, query, key, value, mask = states(count)
    inputs, options = (module, query, key, value, mask if is_masked else None), dict(scaling=0.2, is_causal=is_causal)
    own, weights = attend(*inputs, **options)
    assert weights is None and own.shape == (2, count, HEADS * GROUPS, 32) and own.is_contiguous()
    torch.testing.assert_close(own, sdpa_attention_forward(*inputs, **options)[0])


def test_other_arguments_of_scores_are_left_to_sdpa():
    module, query, key, value, mask = states(5)
    bias = torch.randn(1, HEADS * GROUPS, 5, KEYS)
    inputs = module, query, key, value, mask
    own = attend(*inputs, scaling=0.2, position_bias=bias)[0]
    torch.testing.assert_close(own, sdpa_attention_forward(*inputs, scaling=0.2, position_bias=bias)[0])


@pytest.mark.parametrize("is_masked", [True, False])
def test_no_key_is_copied(is_masked):
    *inputs, mask = states(2)
    given = dict(attention_mask=mask if is_masked else None, scaling=0.2, is_causal=False)
    with LiveMemory() as memory:
        attend(*inputs, **given)
    assert memory.peak < inputs[2].nbytes
    if is_masked:
        with LiveMemory() as memory:
            sdpa_attention_forward(*inputs, **given)
        assert memory.peak > 2 * GROUPS * inputs[2].nbytes


class Stopped(Exception):
    pass


def test_a_target_attends_so_in_its_rounds_alone():
    target = bind(made("qwen3", intermediate_size=48, num_hidden_layers=2, num_key_value_heads=2).eval())
    drafter, seen = PromptLookupDrafter(target), []

    def note(module, args, kwargs):
        seen.append((kwargs["hidden_states"].shape[1] > 20, target.config._attn_implementation))
        if len(seen) == 9:
            raise Stopped

    target.model.layers[0].self_attn.register_forward_pre_hook(note, with_kwargs=True)
    with pytest.raises(Stopped):
        target.generate(prompt(30), assistant_model=drafter, max_new_tokens=30, pad_token_id=0)
    assert seen[0] == (True, "sdpa") and set(seen[1:]) == {(False, SHARED_HEADS)}
    assert target.config._attn_implementation == "sdpa"
    target.config._attn_implementation = "eager"
    with attention_of_rounds(target.config):
        assert target.config._attn_implementation == "eager"
