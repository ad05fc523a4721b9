"""A head over a batch of blocks, against our own drafting of each block by itself."""

import pytest
import torch

from hf_hyperdflash.drafters.blocks.drafter import BlockPath
from hf_hyperdflash.drafters.parts.heads import HEADS
from hf_hyperdflash.serving.ordered_drafts import ordered_logits
from hf_hyperdflash.targets.registry import target_of

from ..conftest import tiny_target
from ..helpers import families
from ..helpers.headed_drafters import headed


def by_itself(drafter, target, states, anchor):
    """The logits of one block's drafts as our own loop has them, greedily, and the drafts."""
    path, token, rows, drafts = BlockPath(drafter, target_of(target), states[None]), anchor[None], [], []
    for k in range(len(states)):
        rows.append(path(k, token, torch.tensor([0])).whole().logits[0])
        token = rows[-1].argmax(-1, keepdim=True)
        drafts.append(token)
    return torch.stack(rows), torch.cat(drafts)


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("family", [tiny_target, families.gemma2, families.granite_hybrid])
@pytest.mark.parametrize("fields", [{}, {"head_candidates": 9}, {"draft_vocab_size": 30, "head_candidates": 0}])
@torch.no_grad()
def test_a_batch_of_blocks_drafts_what_each_does_by_itself(kind, family, fields):
    target = family()
    drafter = headed(target, kind, **fields)
    seen_by = target_of(target)
    states, anchors = torch.randn(3, 6, target.config.hidden_size), torch.tensor([5, 40, 11])

    def logits(of):
        return drafter.logits(target_of(target), of)

    def embed(ids):
        return seen_by.embed(ids[:, None])[:, 0]

    def token_of(index):
        return drafter.draft_ids[index] if drafter.config.draft_vocab_size else index

    count = drafter.config.head_candidates
    found = ordered_logits(drafter.head, states, anchors, logits, embed, token_of, count)
    alike, masks = set(), int(drafter.config.mask_token_id in token_of(torch.arange(found.shape[-1])))
    for row, block, anchor in zip(found, states, anchors):
        expected, drafts = by_itself(drafter, target, block, anchor)
        of_all = torch.full_like(expected, -torch.inf)
        of_all[:, token_of(torch.arange(row.shape[-1]))] = row
        assert torch.equal(of_all.argmax(-1), drafts)
        kept = of_all > -torch.inf
        assert kept.sum(-1).tolist() == [count or row.shape[-1] - masks] * 6
        torch.testing.assert_close(of_all[kept], expected[kept], atol=1e-3, rtol=1e-3)  # six steps multiply rounding
        alike.add(tuple(drafts.tolist()))
    assert len(alike) == 3
