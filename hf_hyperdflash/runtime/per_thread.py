"""What each thread wants of a target's hooks while it runs the target.

Hooks belong to a module, and every thread that runs the module runs them; torch does not expect them to come and go
meanwhile. So ours are put on once, when a target is bound, and ask here what the thread that they run in wants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class PerThread(Generic[T]):
    """A stack of values for each thread. As `threading.local`, but it can be copied and pickled with a target."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[T, ...]] = {}

    def __bool__(self) -> bool:
        """Whether any thread has a value."""
        return bool(self._values)

    @property
    def here(self) -> tuple[T, ...]:
        """This thread's values, the innermost last."""
        return self._values.get(threading.get_ident(), ())

    def add(self, value: T) -> Callable[[], None]:
        """Let this thread have one more value, until what is returned is called."""
        thread = threading.get_ident()
        self._values[thread] = (*self.here, value)

        def remove() -> None:
            rest = tuple(other for other in self._values.get(thread, ()) if other is not value)
            if rest:
                self._values[thread] = rest
            else:
                self._values.pop(thread, None)

        return remove

    @contextmanager
    def holding(self, value: T) -> Iterator[T]:
        """Let this thread have one more value inside the context."""
        remove = self.add(value)
        try:
            yield value
        finally:
            remove()
