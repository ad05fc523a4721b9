"""A token buffer against lists: whatever comes after what, and nothing that was handed out changes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.decoding.tokens import TokenBuffer
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import prompt


class NaiveTokens:
    """Lists, made anew for every question.

    Attributes:
        axes: The positions of the prompt without padding, one list per axis; the caller's and, before them, those of a
            text without gaps.
    """

    def __init__(self, ids: list[int], padding: int, mask: list[int] | None, given: list[list[int]] | None) -> None:
        self.ids, self.padding, self.seen = list(ids), padding, mask
        prompt_length = len(ids) - padding
        seen = mask or [1] * prompt_length
        # Also what is hidden has one that a table has.
        axes = given or [[max(0, sum(seen[: at + 1]) - 1) for at in range(prompt_length)]]
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
def prompts(draw) -> tuple[TokenBuffer, NaiveTokens]:
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
    tokens = TokenBuffer(ids, padding, None if mask is None else torch.tensor([mask]), given)
    return tokens, NaiveTokens(ids[0].tolist(), padding, mask, axes)


def listed(tensor: torch.Tensor) -> list[list[int]]:
    """Rows of a `[1, n]` or `[axes, 1, n]` tensor."""
    assert tensor.shape[-2] == 1
    return tensor.flatten(0, -2).tolist()


APPEND, DRAFT, BRANCH = "append", "draft", "branch"
OPERATIONS = st.lists(
    st.tuples(st.sampled_from([APPEND, DRAFT, BRANCH]), st.integers(2, 60), st.integers(0, 12)), max_size=20
)


@settings(deadline=None, max_examples=80)
@given(prompts(), OPERATIONS, st.data())
def test_it_is_its_lists_whatever_is_done_to_it(pair, operations, data):
    tokens, naive = pair
    assert tokens.prompt_length == naive.prompt_length
    handed_out = []

    def compare(drafts: int) -> None:
        assert (
            tokens.length == len(naive.ids)
            and tokens.ids.tolist() == [naive.ids]
            and tokens.unpadded.tolist() == [naive.text()]
        )
        end = len(naive.text()) + data.draw(st.integers(0, drafts))
        start = data.draw(st.integers(0, end))
        mask = tokens.mask(end)
        assert (mask if mask is None else mask.tolist()) == (naive.seen and [naive.mask(end)])
        for since in (0, start):
            positions, expected = tokens.positions(since, end), naive.positions(since, end)
            assert listed(positions) == expected
            assert tokens.text_positions(since, end).tolist() == listed(positions)[:1]
        given = [tokens.ids, tokens.unpadded, positions, *([] if mask is None else [mask])]
        handed_out.extend((view, view.tolist()) for view in given)

    compare(0)
    for kind, token, count in operations:
        if kind == APPEND:
            for more in range(count):
                tokens.append(token + more)
                naive.ids.append(token + more)
            compare(0)
            continue
        drafts = [token + more for more in range(count)]
        tree = DraftTree.chain(torch.tensor(drafts, dtype=torch.long))
        if kind == BRANCH:  # nodes lie one after the other, whatever follows what
            tree = DraftTree(tree.tokens, tuple(-1 if node < 2 else node - 2 for node in range(count)))
        text = naive.text()
        drafted = tokens.with_drafts(tree.tokens)
        assert drafted.tolist() == [text + drafts]
        handed_out.append((drafted[:, : len(text)], [text]))
        compare(count)
    for view, then in handed_out:
        assert view.tolist() == then


def test_the_callers_tensors_stay_theirs():
    ids, mask, positions = torch.tensor([[7, 8, 9]]), torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 1]])
    tokens = TokenBuffer(ids, 0, mask, positions)
    tokens.with_drafts(torch.tensor([3, 4]))
    tokens.append(5)
    assert ids.tolist() == [[7, 8, 9]] and mask.tolist() == [[0, 1, 1]] and positions.tolist() == [[0, 0, 1]]
    assert tokens.ids.tolist() == [[7, 8, 9, 5]] and tokens.mask(4).tolist() == [[0, 1, 1, 1]]
