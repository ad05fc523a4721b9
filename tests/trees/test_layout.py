"""The verification positions of a forward over a tree, against each one's path written out."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.trees.tree import DraftTree, TreeLayout

from ..helpers.draft_trees import lists_of_parents, path_to


def layout_of(parents):
    return TreeLayout(DraftTree(torch.zeros(len(parents), dtype=torch.long), tuple(parents)))


# With long paths, too: each node after the one before, but for some.
DEEP = st.lists(st.booleans(), max_size=12).map(
    lambda goes_on: [node - 1 if on else max(node - 3, -1) for node, on in enumerate(goes_on)]
)
TREES = st.one_of(lists_of_parents(), DEEP)


@settings(deadline=None, max_examples=150)
@given(TREES, st.integers(0, 9), st.one_of(st.none(), st.integers(1, 7)))
def test_a_position_sees_its_own_path_and_what_its_window_still_holds(parents, past, window):
    layout = layout_of(parents)
    paths = [[0, *(node + 1 for node in path_to(node, parents))] for node in range(-1, len(parents))]
    assert len(layout) == len(paths) and layout.paths == paths
    assert layout.depths.tolist() == [len(path) - 1 for path in paths]
    expected = []
    for path in paths:
        text = [*range(past), *(past + position for position in path)]  # keys in the order of the text
        seen = text if window is None else text[-window:]
        expected.append([key in seen for key in range(past + len(paths))])
    assert layout.mask(past, window).tolist() == expected
    assert layout.mask(past, window, device="meta").shape == (len(paths), past + len(paths))  # made there, not copied


@settings(deadline=None, max_examples=150)
@given(TREES, st.integers(2, 5), st.data())
def test_windows_close_where_a_paths_tokens_fill_them(parents, rate, data):
    open_tokens = data.draw(st.integers(0, rate - 1))
    layout, expected = layout_of(parents), []
    for position, path in enumerate(layout.paths):
        # Indices: the window that closed before the forward, the open one, the positions.
        text = [*range(rate + open_tokens), *(rate + open_tokens + above for above in path)]
        windows = [text[i : i + rate] for i in range(0, len(text) - rate + 1, rate)]
        if len(text) % rate == 0 and len(windows) > 1:
            expected.append((position, len(windows) - 1, windows[-1], windows[-2]))
    assert [tuple(window) for window in layout.windows(rate, open_tokens)] == expected
