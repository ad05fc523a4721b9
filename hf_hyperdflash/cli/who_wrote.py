"""Text in the colours of who wrote it, token by token: the target, or a draft that it accepted."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text
from transformers.generation.streamers import BaseStreamer

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
        self._ids: list[int] | None = None  # of this line, after the prompt
        self._printed = 0

    def put(self, value: Any) -> None:
        """Take a token, or the prompt, which is not shown."""
        if self._ids is None:
            self._ids = []
            return
        self._ids += value.tolist()
        text = self.tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return  # a character of several tokens
        position = self.drafter.last_stats.written[-1]
        self.console.print(Text(text[self._printed :], style_of(position)), end="", soft_wrap=True)
        self._printed = len(text)
        if text.endswith("\n"):  # so that a long text does not get slower
            self._ids, self._printed = [], 0

    def end(self) -> None:
        """End the line, and say which colour is whose."""
        self._ids, self._printed = None, 0
        most = max(self.drafter.last_stats.written, default=0)
        legend = Text("\n\ntarget", TARGET)
        for position in range(1, most + 1):
            legend.append(f"  draft {position}", style_of(position))
        self.console.print(legend, soft_wrap=True)


def style_of(position: int) -> str:
    """The colour of a draft position; 0 is the target's."""
    return COLOURS[min(position, len(COLOURS)) - 1] if position else TARGET
