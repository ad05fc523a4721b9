"""A static cache for rows whose prompts are run in chunks: transformers prepares one for a text alone."""

import copy

import pytest
import torch

from hf_hyperdflash import bind

from ..conftest import prompt
from ..helpers import families
from ..helpers.tree_drafters import RandomTrees

GREEDILY = dict(do_sample=False, pad_token_id=0, max_new_tokens=20)


@pytest.mark.parametrize("family", [families.qwen3, families.gemma3])
def test_rows_are_their_texts_alone(family):
    own = family().eval()
    target = bind(copy.deepcopy(own))
    ids, mask = torch.cat([prompt(12, seed=seed) for seed in range(3)]), torch.ones(3, 12, dtype=torch.long)
    mask[0, :5] = 0
    texts = [own.generate(row[None, real.bool()], **GREEDILY)[0] for row, real in zip(ids, mask)]
    drafter = RandomTrees(target, texts, most=9)
    static = dict(cache_implementation="static", prefill_chunk_size=5, tree_budget=9)
    for rows in ([0, 1, 2], [1], [2, 0]):  # one after the other on the same target
        written = target.generate(ids[rows], attention_mask=mask[rows], assistant_model=drafter, **static, **GREEDILY)
        assert [row[12:].tolist() for row in written] == [texts[row][-20:].tolist() for row in rows]


def test_several_texts_of_one_prompt():
    target = bind(families.qwen3().eval())
    drafter, written = RandomTrees(target, []), []
    for cache in ("static", "dynamic"):  # draw in the same order, from the same logits
        torch.manual_seed(0)
        options = dict(do_sample=True, top_k=8, num_return_sequences=3, max_new_tokens=9, prefill_chunk_size=5)
        drafter.chance.seed(0)
        written.append(
            target.generate(prompt(12), assistant_model=drafter, cache_implementation=cache, pad_token_id=0, **options)
        )
    assert torch.equal(*written)
