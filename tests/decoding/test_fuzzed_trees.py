"""Some hundreds of the cases that `python -m tests.fuzz_trees` runs by the thousand."""

import pytest

from ..fuzz_trees import SHARE_GRAPHS, run_case, run_compiled_case


@pytest.mark.parametrize("first", range(0, 240, 20))
def test_no_case_differs(first):
    assert not [found for found in map(run_case, range(first, first + 20)) if found[1]]


def test_no_compiled_case_differs():
    """Of the graphs alone: what a backend makes of them takes long to compile."""
    assert not [
        found for found in (run_compiled_case(seed, "eager") for seed in range(0, 40, SHARE_GRAPHS)) if found[1]
    ]
