"""What "auto" and its linear model refuse."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from hf_hyperdflash.auto.aslm import AugmentedSpaceLinearModel

from ..conftest import prompt, tiny_drafter
from ..helpers.refusals import Refusal

NAN, INF = float("nan"), float("inf")


def fitted() -> AugmentedSpaceLinearModel:
    return AugmentedSpaceLinearModel().fit([[1.0, 2.0], [3.0, 4.0]], [1.0, 2.0])


def fit(**parameters: Any) -> AugmentedSpaceLinearModel:
    return AugmentedSpaceLinearModel(**parameters).fit([[1.0]], [1.0])


def singular() -> None:
    """It stays without rows."""
    model = AugmentedSpaceLinearModel()
    with pytest.raises(ValueError, match="alpha"):
        model.fit([[1e9, 1e9], [2e9, 2e9]], [1.0, 2.0])
    model.predict([[1e9, 1e9]])


PARAMETERS = [
    ("alpha", 0, "above 0"), ("alpha", NAN, "above 0"), ("alpha", INF, "above 0"), ("alpha", "1", "above 0"),
    ("n_neighbors", 0, "at least 1"), ("n_neighbors", 2.0, "whole number"), ("n_neighbors", True, "whole number"),
    ("quantization", -0.5, "at least 0"), ("quantization", NAN, "at least 0"), ("shrinkage", -1, "at least 0"),
    ("memory", 0, "None"), ("max_centers", 0, "None"),
]  # fmt: skip
ROWS = [
    ([[1.0, NAN]], [1.0], ("`X`", "nan", "finite")),
    ([[1.0, -INF]], [1.0], ("`X`", "-inf", "finite")),
    ([[1.0, 1e200]], [1.0], ("`X`", "1e+200", "1e150")),
    ([1.0, 2.0], [1.0, 2.0], ("`X`", "(2,)", "[rows, features]")),
    ([[]], [1.0], ("`X`", "(1, 0)", "[rows, features]")),
    ([[1.0]], [1.0], ("`X`", "1 features", "the 2 of `fit`")),
    ([[1.0, 2.0]], [INF], ("`y`", "inf", "finite")),
    ([[1.0, 2.0]], [[1.0]], ("`y`", "(1, 1)", "[rows]")),
    ([[1.0, 2.0]], [1.0, 2.0], ("`y`", "2 targets", "1 rows")),
]
REFUSED = [
    *(Refusal(partial(fit, **{name: value}), (f"`{name}`", repr(value), words)) for name, value, words in PARAMETERS),
    *(Refusal(partial(fitted().partial_fit, X, y), words) for X, y, words in ROWS),
    *(Refusal(partial(fitted().predict, X), words) for X, _, words in ROWS if words[0] == "`X`"),
    Refusal(lambda: fitted().set_params(n_neighbors=0).predict([[1.0, 2.0]]), ("`n_neighbors`", "0", "at least 1")),
    Refusal(lambda: fitted().set_params(neighbors=3), ("`neighbors`", "n_neighbors")),
    Refusal(lambda: AugmentedSpaceLinearModel().predict([[1.0]]), ("0 rows", "`fit`")),
    Refusal(singular, ("0 rows", "`fit`")),
    Refusal(lambda: AugmentedSpaceLinearModel().fit([[1e9] * 2, [2e9] * 2], [1.0, 2.0]), ("`alpha`", "0.1", "2")),
]


@pytest.mark.parametrize("refusal", REFUSED, ids=str)
def test_it_is_refused_in_one_line(refusal: Refusal):
    refusal.check()


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
