"""What each thread wants of a target's hooks while it runs the target.

Hooks belong to a module, and every thread that runs the module runs them; torch does not expect them to come and go
meanwhile. So ours are put on once, when a target is bound, and look here what the thread that they run in wants.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class PerThread(dict[int, tuple[T, ...]]):
    """A stack of values for each thread that has any, the innermost last.

    As `threading.local`, but it can be copied and pickled with a target, and hooks read it as the dictionary it is.
    """

    def add(self, value: T) -> Callable[[], None]:
        """Let this thread have one more value, until what is returned is called."""
        thread = threading.get_ident()
        self[thread] = (*self.get(thread, ()), value)

        def remove() -> None:
            rest = tuple(other for other in self.get(thread, ()) if other is not value)
            if rest:
                self[thread] = rest
            else:
                self.pop(thread, None)

        return remove
