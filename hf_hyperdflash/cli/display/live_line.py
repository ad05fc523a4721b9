"""A line beneath text that streams to a terminal, told anew with each piece of it."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments

# The row beneath is found from where the text ends, so that the text breaks and scrolls as the terminal has it, and a
# window may change its size. rich's own live displays rewrite whole rows, and text that streams ends within one.
# Down and up again first: where the text ends in the last row, as after a window has shrunk, the screen scrolls.
_BENEATH, _BACK = "\x1bD\x1bM\x1b7\x1b[B\r\x1b[K", "\x1b8"


class LiveLine:
    """Where the console is no terminal, or one that cannot move its cursor, there is the text alone.

    Args:
        console: Where to.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_live = console.is_terminal and not console.is_dumb_terminal and not console.legacy_windows
        self._column = 0
        self._is_told = False

    def write(self, text: str, style: str, told: str) -> None:
        """Go on with the text, and say something beneath it, as far as the row is wide."""
        shown, width = self._erased() + self._rendered(text, style), self.console.width
        self._column = column_after(text, self._column, width)
        # A full row ends only with the next character, which some terminals forget when the cursor moves.
        self._is_told = self.is_live and self._column < width
        if self._is_told:
            shown += f"{_BENEATH}{self._rendered(told[: width - 1], 'dim')}{_BACK}"
        self.console.file.write(shown)
        self.console.file.flush()

    def clear(self) -> None:
        """Leave the text alone."""
        self.console.file.write(self._erased())
        self.console.file.flush()
        self._is_told = False

    def _erased(self) -> str:
        return f"{_BENEATH}{_BACK}" if self._is_told else ""

    def _rendered(self, text: str, style: str) -> str:
        with self.console.capture() as captured:
            self.console.print(Segments([Segment(text, self.console.get_style(style))]), end="", soft_wrap=True)
        return captured.get()


def column_after(text: str, column: int, width: int) -> int:
    """Where a terminal's cursor stands after a text that begins at `column`; `width` where the row is full."""
    for character in text:
        cells = cell_len(character)
        if character in "\n\r":
            column = 0
        elif character == "\t":  # never beyond the last cell
            column = min(column + 8 - column % 8, width - 1)
        else:
            column = cells if column + cells > width else column + cells
    return column
