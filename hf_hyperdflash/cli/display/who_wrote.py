"""Streams text to a terminal in the colours of who wrote each token: the target, or an accepted draft. Tokens that a
sequential head chose are underlined."""

from __future__ import annotations

import time
from typing import cast

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from ...decoding.stats import SpeculationStats
from ...drafters.base import Drafter
from .text import BY_HEAD, Piece, PieceStreamer, writer_name

# Colours of draft positions 1, 2, ..; the last one is for all later ones.
COLOURS = (
    "green3", "spring_green2", "cyan3", "deep_sky_blue1", "dodger_blue1", "slate_blue1", "medium_purple1", "orchid",
)  # fmt: skip
# For terminals with 16 colours, where several of those would be equal.
FEW_COLOURS = (
    "green", "cyan", "blue", "magenta", "bright_green", "bright_cyan", "bright_blue", "bright_magenta",
)  # fmt: skip
TARGET = "bold yellow"
# The status row is found relative to the end of the text. So the terminal breaks and scrolls the text itself, and its
# window may change size. rich's live displays rewrite whole rows, but streamed text ends within a row. First the
# cursor moves down and up, which scrolls the screen if the text ends in the last row, as in a window that got smaller.
_BENEATH, _BACK = "\x1bD\x1bM\x1b7\x1b[B\r\x1b[K", "\x1b8"


class WhoWrote(PieceStreamer):
    """Prints tokens as they are accepted and, in a terminal, speed and tokens a round in a line below.

    Use it in a `with`, so that this line is erased however the text ends."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, console: Console) -> None:
        super().__init__(tokenizer, drafter)
        self.console, self.line = console, LiveLine(console)
        self._rate = self._began = self._came = 0.0
        self._counted = 0

    def __enter__(self) -> WhoWrote:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.clear()

    def show(self, piece: Piece | None) -> None:
        stats, now = cast(SpeculationStats, self.stats), time.perf_counter()
        # The tokens of a round come at once: the speed is that of whole rounds after the first token, `stats.tokens`
        # the number of tokens of all earlier ones, which had all arrived with the token before.
        self._began = self._began or now
        if stats.tokens != self._counted:
            self._rate = (stats.tokens - 1) / max(self._came - self._began, 1e-9)
        self._counted, self._came = stats.tokens, now
        if piece is None:
            return
        so_far = f"{len(stats.written)} tokens"
        if stats.rounds:
            so_far += f", {self._rate:.1f} tokens/s, tau {stats.tau:.2f}"
        style = position_style(piece.position, self.console.color_system)
        self.line.write(piece.text, style + " underline" * piece.by_head, so_far)

    def end(self) -> None:
        """End the text, even within a character, and print the legend of colours."""
        super().end()
        self.line.clear()
        if not self.console.is_terminal or not self.console.color_system:  # no colours
            self.console.print()
            return
        stats = cast(SpeculationStats, self.stats)
        shown = Text("\n\n").append_text(legend(stats.written, self.console.color_system))
        if any(stats.by_head):
            shown.append(f"  {BY_HEAD}", "not bold default")
        self.console.print(shown, soft_wrap=True)


def legend(written: list[int], color_system: str | None) -> Text:
    """Return who wrote in which colour, by the draft positions of the tokens of a text."""
    positions = range(max(written, default=0) + 1)
    return Text("  ").join(Text(writer_name(at), position_style(at, color_system)) for at in positions)


def position_style(position: int, color_system: str | None = None) -> str:
    """Return the style of a draft position; 0 is the target. `color_system` is the console's."""
    colours = FEW_COLOURS if color_system in ("standard", "windows") else COLOURS
    return colours[min(position, len(colours)) - 1] if position else TARGET


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
