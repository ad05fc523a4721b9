"""What a node of a tree over DeepSeek-V4's compressed entries chooses, against one token that sees those entries."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.targets.caches.tree_state import best_visible


@settings(deadline=None, max_examples=200)
@given(
    st.integers(0, 40) | st.integers(600, 800),  # of many, torch looks for few in another way
    st.integers(0, 6),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 10**6),
)
def test_a_row_chooses_among_what_it_sees_as_if_there_were_no_more(before, own, rows, top_k, seed):
    torch.manual_seed(seed)
    scores = torch.randint(0, 9, (1, rows, before + own)).relu().float()  # many alike, as an indexer's zeros are
    seen = torch.rand(rows, own) < 0.5
    top_k = min(top_k, before + own)
    found = best_visible(scores, seen, top_k)
    assert found.shape == (1, rows, top_k)
    for row in range(rows):
        there = [*range(before), *(before + i for i in range(own) if seen[row, i])]
        count = min(top_k, len(there))
        chosen = scores[0, row, there].topk(count).indices.tolist()
        assert found[0, row].tolist() == [there[i] for i in chosen] + [-1] * (top_k - count)


def test_rows_that_see_as_many_entries_choose_at_once(monkeypatch):
    """A tree has nearly as many sets of windows as leaves, each of which would go through the whole text's entries."""
    scores, calls, topk = torch.rand(1, 9, 308), [], torch.Tensor.topk
    seen = torch.cat([torch.zeros(1, 8, dtype=torch.bool), torch.eye(8, dtype=torch.bool)])
    monkeypatch.setattr(
        torch.Tensor, "topk", lambda own, *args, **kw: calls.append(own.shape) or topk(own, *args, **kw)
    )
    best_visible(scores, seen, 5)
    assert calls == [(1, 300), (8, 301)]
