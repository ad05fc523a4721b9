"""What "auto" refuses."""

from __future__ import annotations

from functools import partial

import pytest

from ..conftest import prompt, tiny_drafter
from ..helpers.refusals import Refusal

# Where the advice differs, it is the row's.
DRAFTS = [
    ("Auto", ""),
    ("", ""),
    ("6", ""),
    (0, "`assistant_model`"),
    (7, "`num_draft_tokens`"),
    (2.0, ""),
    (True, ""),
]


@pytest.mark.parametrize(("wrong", "advice"), [*DRAFTS, (True, "")])
def test_what_is_neither_a_number_nor_auto_is_refused(target, wrong, advice):
    drafter = tiny_drafter(target)
    drafter.bind(target)
    words = (repr(wrong), "from 1 to 6", "'auto'")
    Refusal(partial(setattr, drafter, "num_draft_tokens", wrong), (*words, advice)).check()
    asked = {"assistant_model": drafter, "num_assistant_tokens": wrong, "max_new_tokens": 5}
    Refusal(partial(target.generate, prompt(12), **asked), words).check()
