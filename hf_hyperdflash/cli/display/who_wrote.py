"""Text in the colours of who wrote it, token by token: the target, or a draft that it accepted, underlined where a
sequential head chose it."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from .live_line import LiveLine
from .text import BY_HEAD, Piece, Pieces, name_of

# Of draft positions 1, 2, ..; the last one of all that are further.
COLOURS = (
    "green3", "spring_green2", "cyan3", "deep_sky_blue1", "dodger_blue1", "slate_blue1", "medium_purple1", "orchid",
)  # fmt: skip
# Where a terminal has 16 colours, several of those would be one.
FEW_COLOURS = (
    "green", "cyan", "blue", "magenta", "bright_green", "bright_cyan", "bright_blue", "bright_magenta",
)  # fmt: skip
TARGET = "bold yellow"


class WhoWrote(BaseStreamer):
    """Prints tokens as they are accepted and, in a terminal, how fast they come and how many a round. Used in a
    `with`, so that this line goes whatever ends the text; what a head chose is told under
    [`~decoding.stats.keep_trees`].

    Args:
        tokenizer: The target's.
        drafter: Whose `last_stats` say who wrote a token.
        console: Where to.
    """

    def __init__(self, tokenizer: Any, drafter: Any, console: Console) -> None:
        self.tokenizer, self.drafter, self.console = tokenizer, drafter, console
        self.line = LiveLine(console)
        self._pieces: Pieces | None = None  # after the prompt
        self._speed = Speed()

    def __enter__(self) -> WhoWrote:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.clear()

    def put(self, value: Any) -> None:
        """Take a token, or the prompt, which is not shown."""
        if self._pieces is None:
            self._pieces = Pieces(self.tokenizer)
            return
        stats = self.drafter.last_stats
        self._speed.token(stats.tokens)
        self._print(self._pieces.add(int(value), stats.written[-1], stats.by_head[-1]))

    def end(self) -> None:
        """End the text, in the midst of a character if need be, and say which colour is whose."""
        stats = self.drafter.last_stats
        written, by_head = stats.written, stats.by_head
        self._print(self._pieces.rest(written[-1], by_head[-1]) if self._pieces and written else None)
        self.line.clear()
        self._pieces, self._speed = None, Speed()
        if not self.console.is_terminal or not self.console.color_system:  # no colours
            self.console.print()
            return
        most = max(written, default=0)
        legend = Text("\n\n").append(name_of(0), TARGET)
        for position in range(1, most + 1):
            legend.append(f"  {name_of(position)}", self._style_of(position))
        if any(by_head):
            legend.append(f"  {BY_HEAD}", "not bold default")
        self.console.print(legend, soft_wrap=True)

    def _print(self, piece: Piece | None) -> None:
        if piece is not None:
            style = self._style_of(piece.position) + " underline" * piece.by_head
            self.line.write(piece.text, style, self._so_far())

    def _so_far(self) -> str:
        stats = self.drafter.last_stats
        told = f"{len(stats.written)} tokens"
        return f"{told}, {self._speed.rate:.1f} tokens/s, tau {stats.tau:.2f}" if stats.rounds else told

    def _style_of(self, position: int) -> str:
        return style_of(position, self.console.color_system)


class Speed:
    """How fast a text is written, by whole verification rounds: the tokens of one come at once.

    Attributes:
        rate: Tokens a second after the first token; 0 before a round is over.
    """

    def __init__(self) -> None:
        self.rate = self._began = self._came = 0.0
        self._counted = 0

    def token(self, counted: int) -> None:
        """Take in that a token has come; `counted` are those of the rounds before its own."""
        now = time.perf_counter()
        self._began = self._began or now
        if counted != self._counted:  # all of them were there when the token before came
            self.rate = (counted - 1) / max(self._came - self._began, 1e-9)
        self._counted, self._came = counted, now


def style_of(position: int, color_system: str | None = None) -> str:
    """The colour of a draft position; 0 is the target's. `color_system` is the console's."""
    colours = FEW_COLOURS if color_system in ("standard", "windows") else COLOURS
    return colours[min(position, len(colours)) - 1] if position else TARGET
