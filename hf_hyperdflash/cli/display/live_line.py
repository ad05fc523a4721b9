"""A status line beneath text that streams to a terminal, rewritten with each piece of text."""

from __future__ import annotations

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments

# The status row is found relative to the end of the text. So the terminal breaks and scrolls the text itself, and its
# window may change size. rich's live displays rewrite whole rows, but streamed text ends within a row. First the
# cursor moves down and up, which scrolls the screen if the text ends in the last row, as in a window that got smaller.
_BENEATH, _BACK = "\x1bD\x1bM\x1b7\x1b[B\r\x1b[K", "\x1b8"


class LiveLine:
    """Writes text with a status line beneath it; only the text, if the console cannot move a cursor."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.is_live = console.is_terminal and not console.is_dumb_terminal and not console.legacy_windows
        self._column = 0
        self._has_status = False

    def write(self, text: str, style: str, status: str) -> None:
        """Append text, and write a status beneath it, cut to the width of a row."""
        output, width = self._erased() + self._rendered(text, style), self.console.width
        self._column = column_after(text, self._column, width)
        # A full row breaks only before the next character. Some terminals forget the break when the cursor moves.
        self._has_status = self.is_live and self._column < width
        if self._has_status:
            output += f"{_BENEATH}{self._rendered(status[: width - 1], 'dim')}{_BACK}"
        self.console.file.write(output)
        self.console.file.flush()

    def clear(self) -> None:
        """Erase the status line."""
        self.console.file.write(self._erased())
        self.console.file.flush()
        self._has_status = False

    def _erased(self) -> str:
        return f"{_BENEATH}{_BACK}" if self._has_status else ""

    def _rendered(self, text: str, style: str) -> str:
        with self.console.capture() as captured:
            self.console.print(Segments([Segment(text, self.console.get_style(style))]), end="", soft_wrap=True)
        return captured.get()


def column_after(text: str, column: int, width: int) -> int:
    """Return the column of a terminal's cursor after a text that begins at `column`; `width` if the row is full."""
    for character in text:
        cells = cell_len(character)
        if character in "\n\r":
            column = 0
        elif character == "\t":  # a tab never goes beyond the last cell
            column = min(column + 8 - column % 8, width - 1)
        else:
            column = cells if column + cells > width else column + cells
    return column
