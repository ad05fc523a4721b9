"""A caller's `DynamicCache()`, made without the configuration, keeps all tokens in every layer: nodes of a draft tree
saw past the window there, and another text was written."""

import copy

import pytest
import torch
from transformers import DynamicCache

from hf_hyperdflash import bind
from hf_hyperdflash.targets.caches.name import CACHE

from ..conftest import prompt
from ..helpers import families
from ..helpers.tree_drafters import RandomChains, RandomTrees

GREEDILY = dict(do_sample=False, max_new_tokens=20)


@pytest.mark.parametrize("kind", [RandomTrees, RandomChains])
@pytest.mark.parametrize("family", [families.mistral, families.gemma3])
def test_no_position_sees_past_its_window(family, kind):
    own = family().eval()
    expected = own.generate(prompt(13), **GREEDILY)
    target, cache = bind(copy.deepcopy(own)), DynamicCache()
    drafter = kind(target, [expected[0]], seed=1, most=7)
    asked = dict(assistant_model=drafter, tree_budget=7)
    assert torch.equal(target.generate(prompt(13), **asked, **GREEDILY, **{CACHE: cache}), expected)
    assert {layer.keys.shape[2] for layer in cache.layers} == {32}
