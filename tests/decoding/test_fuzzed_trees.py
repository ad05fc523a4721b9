"""A few of the cases that `python -m tests.fuzz_trees` and `tests.fuzz_kinds` run by the thousand, and `.ci/nightly`
each night."""

import pytest

from ..conftest import mostly_nightly
from ..fuzz_kinds import ALL, pair_of
from ..fuzz_kinds import run_case as run_case_of
from ..fuzz_trees import SHARE_GRAPHS, run_case, run_compiled_case


# Takes seconds: each is twenty cases of many rounds.
@pytest.mark.parametrize("first", mostly_nightly(range(0, 240, 20), kept=2))
def test_no_case_differs(first):
    """Each case binds another target, writes a text plainly and assisted, and often goes on with it."""
    assert not [found for found in map(run_case, range(first, first + 20)) if found[1]]


# Takes seconds: each is ten cases of many rounds.
@pytest.mark.parametrize("kind", mostly_nightly(["dflash", *sorted(ALL.keys() - {"dflash"})]))
def test_no_case_of_a_kind_of_drafter_differs(kind):
    pair = pair_of(kind)
    told = [run_case_of(*pair, seed) for seed in range(10)]
    assert not [differs for _, differs in told if differs] and sum(accepted for accepted, _ in told) > 0


# Takes seconds, as above.
@pytest.mark.parametrize("first", mostly_nightly(range(0, 100, 20)))
def test_no_case_whose_drafts_are_joined_by_copies_differs(first):
    assert not [found for seed in range(first, first + 20) if (found := run_case(seed, lookup=True))[1]]


# Takes seconds: a case's rounds are traced.
@pytest.mark.parametrize("seed", mostly_nightly(range(0, 4 * SHARE_GRAPHS, SHARE_GRAPHS)))
def test_no_compiled_case_differs(seed):
    """Of the graphs alone: what a backend makes of them takes long to compile."""
    assert not run_compiled_case(seed, "eager")[1]
