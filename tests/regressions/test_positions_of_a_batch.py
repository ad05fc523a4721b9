"""Positions of several axes, `[axes, rows, tokens]`, are told apart by row."""

import copy

import pytest
import torch

from hf_hyperdflash import PromptLookupDrafter, bind

from ..conftest import prompt
from ..helpers import families


@pytest.mark.parametrize("rows", [2, 3])  # also as many as there are axes
def test_each_row_gets_its_own_positions(rows):
    own = families.qwen3_5().eval()
    target = bind(copy.deepcopy(own))
    ids, mask = torch.cat([prompt(8, seed=seed) for seed in range(rows)]), torch.ones(rows, 8, dtype=torch.long)
    mask[0, :3] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0).repeat(3, 1, 1)
    options = dict(attention_mask=mask, position_ids=positions, do_sample=False, max_new_tokens=8, pad_token_id=0)
    written = target.generate(ids, assistant_model=PromptLookupDrafter(target), **options)
    assert torch.equal(written, own.generate(ids, **options))
