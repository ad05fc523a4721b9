"""Results in git are few, small, and of no machine's folders."""

import re

from ..helpers.scripts import ROOT


def test_results_in_git_stay_small():
    """What tables and pictures of the pages are made of; raw lines only where a card is made from them."""
    kept = [path for path in (ROOT / "experiments" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 5e6
    assert len([path for path in kept if path.suffix == ".jsonl"]) == 2


def test_what_is_kept_names_no_folder_of_a_machine():
    """Of any result that is committed."""
    kept = [
        path
        for path in (ROOT / "experiments" / "results").rglob("*")
        if path.suffix in (".json", ".jsonl", ".md", ".csv")
    ]
    found = [
        (path.name, place)
        for path in kept
        for place in re.findall(r"""["' =](/(?:\w[\w.-]*/)+)""", path.read_text(encoding="utf-8"))
    ]
    assert len(kept) > 20 and found == []
