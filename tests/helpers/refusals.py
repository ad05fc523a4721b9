"""What a user gets wrong ends in one line. Each room has a table of it in tests/refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest


class Refusal(NamedTuple):
    """A call that is refused, the words that its one line has in any order, and the error's type.

    The words are the value that was given, and what was expected: never a sentence, which may become better any day.
    """

    call: Callable[..., object]
    words: tuple[str, ...]
    error: type[Exception] | tuple[type[Exception], ...] = ValueError

    def check(self, *given: Any, **options: Any) -> None:
        """Make the call, with what it needs of the test's fixtures."""
        with pytest.raises(self.error) as refused:
            self.call(*given, **options)
        message = str(refused.value)
        assert [word for word in self.words if word not in message] == [], message
        assert message and "\n" not in message, message

    def __str__(self) -> str:
        return " ".join(self.words)
