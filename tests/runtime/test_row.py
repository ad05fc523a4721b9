"""A row against lists: whatever comes after what, and nothing that was handed out changes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.runtime.row import Row
from hf_hyperdflash.runtime.tree import DraftTree

from ..conftest import prompt


class NaiveRow:
    """Lists, made anew for every question.

    Attributes:
        axes: The positions of the prompt without padding, one list per axis; the caller's and, before them, those of a
            text without gaps.
    """

    def __init__(self, ids: list[int], padding: int, mask: list[int] | None, given: list[list[int]] | None) -> None:
        self.ids, self.padding, self.seen = list(ids), padding, mask
        prompt_length = len(ids) - padding
        seen = mask or [1] * prompt_length
        axes = given or [[sum(seen[:at]) for at in range(prompt_length)]]
        earlier = prompt_length - len(axes[0])
        self.axes = [[*(axis[0] - back for back in range(earlier, 0, -1)), *axis] for axis in axes]
        self.prompt_length = prompt_length

    def text(self) -> list[int]:
        return self.ids[self.padding :]

    def mask(self, end: int) -> list[int] | None:
        return None if self.seen is None else [*self.seen, *[1] * end][:end]

    def positions(self, start: int, end: int) -> list[list[int]]:
        """What transformers gives new tokens: one more than the last one's, on every axis."""
        after = range(1, end - self.prompt_length + 1)
        return [[*axis, *(axis[-1] + more for more in after)][start:end] for axis in self.axes]


@st.composite
def prompts(draw) -> tuple[Row, NaiveRow]:
    padding, length = draw(st.integers(0, 4)), draw(st.integers(1, 9))
    ids = prompt(padding + length, draw(st.integers(0, 99)))
    mask, axes = None, None
    if draw(st.booleans()):  # padding that stays, as a cache has seen it; the last token is none
        mask = [*draw(st.lists(st.integers(0, 1), min_size=length - 1, max_size=length - 1)), 1]
    if draw(st.booleans()):
        count = draw(st.integers(1, length))
        axis = st.lists(st.integers(0, 50), min_size=count, max_size=count)
        axes = draw(st.lists(axis, min_size=1, max_size=4))
    given = None if axes is None else torch.tensor(axes)[:, None]
    if given is not None and len(axes) == 1 and draw(st.booleans()):
        given = given[0]
    row = Row(ids, padding, None if mask is None else torch.tensor([mask]), given)
    return row, NaiveRow(ids[0].tolist(), padding, mask, axes)


def listed(tensor: torch.Tensor) -> list[list[int]]:
    """Rows of a `[1, n]` or `[axes, 1, n]` tensor."""
    assert tensor.shape[-2] == 1
    return tensor.flatten(0, -2).tolist()


@settings(deadline=None, max_examples=80)
@given(
    prompts(), st.lists(st.tuples(st.integers(0, 3), st.integers(2, 60), st.integers(0, 12)), max_size=30), st.data()
)
def test_a_row_is_its_lists_whatever_is_done_to_it(rows, operations, data):
    row, naive = rows
    assert row.prompt_length == naive.prompt_length and row.context is None and not row.finished
    handed_out = []
    for kind, token, count in operations:
        drafts = []
        if kind < 2:
            row.append(token)
            naive.ids.append(token)
        elif kind == 2:
            drafts = [(token + more) % 64 for more in range(count)]
            before = row.text
            after = row.with_drafts(DraftTree.chain(torch.tensor(drafts, dtype=torch.long)))
            assert after.tolist() == [naive.text() + drafts]
            handed_out += [(before, before.tolist()), (after[:, : len(naive.text())], [naive.text()])]
        else:  # drafts that branch lie one after the other, too
            tree = DraftTree(torch.tensor([token, 3, 4]), (-1, -1, 0))
            drafts = tree.tokens.tolist()
            assert row.with_drafts(tree).tolist() == [naive.text() + drafts]
        assert row.length == len(naive.ids) and row.ids.tolist() == [naive.ids] and row.text.tolist() == [naive.text()]
        end = len(naive.text()) + data.draw(st.integers(0, len(drafts)))
        start = data.draw(st.integers(0, end))
        mask = row.mask(end)
        assert (mask if mask is None else mask.tolist()) == (naive.seen and [naive.mask(end)])
        positions, expected = row.positions(start, end), naive.positions(start, end)
        seen = [at for at in range(start, end) if naive.seen is None or naive.mask(end)[at]]
        for got, wanted in zip(listed(positions), expected, strict=True):
            assert [got[at - start] for at in seen] == [wanted[at - start] for at in seen]
        assert len(listed(positions)[0]) == end - start
        assert row.text_positions(start, end).tolist() == listed(positions)[:1]
        handed_out += [(given, given.tolist()) for given in (row.ids, row.text, positions)]
        if mask is not None:
            handed_out.append((mask, mask.tolist()))
    for view, then in handed_out:
        assert view.tolist() == then
