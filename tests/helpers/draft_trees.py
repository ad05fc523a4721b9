"""Random draft trees, as plain lists."""

from hypothesis import strategies as st

from hf_hyperdflash.runtime.tree import ANCHOR


@st.composite
def lists_of_parents(draw, most: int = 12) -> list[int]:
    return [draw(st.integers(ANCHOR, node - 1)) for node in range(draw(st.integers(0, most)))]


@st.composite
def parents_and_tokens(draw, vocab_size: int, most: int = 12) -> tuple[list[int], list[int]]:
    """A tree whose siblings differ, so that a text follows at most one path through it."""
    parents: list[int] = []
    tokens: list[int] = []
    for _ in range(draw(st.integers(0, most))):
        places = [
            (parent, token)
            for parent in range(ANCHOR, len(parents))
            for token in range(vocab_size)
            if (parent, token) not in zip(parents, tokens)
        ]
        parent, token = draw(st.sampled_from(places))
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


def path_to(node: int, parents: list[int]) -> list[int]:
    return [] if node == ANCHOR else [*path_to(parents[node], parents), node]
