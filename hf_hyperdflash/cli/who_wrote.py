"""Text in the colours of who wrote it, token by token: the target, or a draft that it accepted."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

from ..display.text import Pieces, name_of

# Of draft positions 1, 2, ..; the last one of all that are further.
COLOURS = ("green3", "spring_green2", "cyan3", "deep_sky_blue1", "dodger_blue1", "slate_blue1", "medium_purple1")
TARGET = "bold yellow"


class WhoWrote(BaseStreamer):
    """Prints tokens as they are accepted.

    Args:
        tokenizer: The target's.
        drafter: Whose `last_stats` say who wrote a token.
        console: Where to.
    """

    def __init__(self, tokenizer: Any, drafter: Any, console: Console) -> None:
        self.tokenizer, self.drafter, self.console = tokenizer, drafter, console
        self._pieces: Pieces | None = None  # after the prompt

    def put(self, value: Any) -> None:
        """Take a token, or the prompt, which is not shown."""
        if self._pieces is None:
            self._pieces = Pieces(self.tokenizer)
            return
        piece = self._pieces.add(int(value), self.drafter.last_stats.written[-1])
        if piece is not None:
            self.console.print(Text(piece.text, style_of(piece.position)), end="", soft_wrap=True)

    def end(self) -> None:
        """End the text, and say which colour is whose."""
        self._pieces = None
        most = max(self.drafter.last_stats.written, default=0)
        legend = Text("\n\n").append(name_of(0), TARGET)
        for position in range(1, most + 1):
            legend.append(f"  {name_of(position)}", style_of(position))
        self.console.print(legend, soft_wrap=True)


def style_of(position: int) -> str:
    """The colour of a draft position; 0 is the target's."""
    return COLOURS[min(position, len(COLOURS)) - 1] if position else TARGET
