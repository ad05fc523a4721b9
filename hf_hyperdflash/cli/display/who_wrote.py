"""Streams text to a terminal in the colours of who wrote each token: the target, or an accepted draft. Tokens that a
sequential head chose are underlined."""

from __future__ import annotations

import time
from typing import cast

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from ...decoding.stats import SpeculationStats
from ...drafters.base import Drafter
from .live_line import LiveLine
from .text import BY_HEAD, Piece, Pieces, writer_name

# Colours of draft positions 1, 2, ..; the last one is for all later ones.
COLOURS = (
    "green3", "spring_green2", "cyan3", "deep_sky_blue1", "dodger_blue1", "slate_blue1", "medium_purple1", "orchid",
)  # fmt: skip
# For terminals with 16 colours, where several of those would be equal.
FEW_COLOURS = (
    "green", "cyan", "blue", "magenta", "bright_green", "bright_cyan", "bright_blue", "bright_magenta",
)  # fmt: skip
TARGET = "bold yellow"


class WhoWrote(BaseStreamer):
    """Prints tokens as they are accepted and, in a terminal, speed and tokens a round in a line below.

    Use it in a `with`, so that this line is erased however the text ends. The drafter's `last_stats` say who wrote a
    token; choices of a head are known inside [`~decoding.stats.keep_trees`]."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, drafter: Drafter, console: Console) -> None:
        self.tokenizer, self.drafter, self.console = tokenizer, drafter, console
        self.line = LiveLine(console)
        self._pieces: Pieces | None = None  # after the prompt
        self._speed = Speed()

    def __enter__(self) -> WhoWrote:
        return self

    def __exit__(self, *_: object) -> None:
        self.line.clear()

    def put(self, value: torch.Tensor) -> None:
        """Print a token. The prompt, which comes first, is not printed."""
        if self._pieces is None:
            self._pieces = Pieces(self.tokenizer)
            return
        stats = cast(SpeculationStats, self.drafter.last_stats)
        self._speed.token(stats.tokens)
        self._print(self._pieces.add(int(value), stats.written[-1], stats.by_head[-1]))

    def end(self) -> None:
        """End the text, even within a character, and print the legend of colours."""
        stats = cast(SpeculationStats, self.drafter.last_stats)
        written, by_head = stats.written, stats.by_head
        self._print(self._pieces.last_piece(written[-1], by_head[-1]) if self._pieces and written else None)
        self.line.clear()
        self._pieces, self._speed = None, Speed()
        if not self.console.is_terminal or not self.console.color_system:  # no colours
            self.console.print()
            return
        most = max(written, default=0)
        legend = Text("\n\n").append(writer_name(0), TARGET)
        for position in range(1, most + 1):
            legend.append(f"  {writer_name(position)}", self._style(position))
        if any(by_head):
            legend.append(f"  {BY_HEAD}", "not bold default")
        self.console.print(legend, soft_wrap=True)

    def _print(self, piece: Piece | None) -> None:
        if piece is None:
            return
        stats = cast(SpeculationStats, self.drafter.last_stats)
        so_far = f"{len(stats.written)} tokens"
        if stats.rounds:
            so_far += f", {self._speed.rate:.1f} tokens/s, tau {stats.tau:.2f}"
        self.line.write(piece.text, self._style(piece.position) + " underline" * piece.by_head, so_far)

    def _style(self, position: int) -> str:
        return position_style(position, self.console.color_system)


class Speed:
    """Measures the speed of a text by whole verification rounds, because the tokens of a round come at once: tokens a
    second after the first token, 0 before the end of a round."""

    def __init__(self) -> None:
        self.rate = self._began = self._came = 0.0
        self._counted = 0

    def token(self, counted: int) -> None:
        """Record that a token has arrived; `counted` is the number of tokens of all earlier rounds."""
        now = time.perf_counter()
        self._began = self._began or now
        if counted != self._counted:  # they had all arrived with the token before
            self.rate = (counted - 1) / max(self._came - self._began, 1e-9)
        self._counted, self._came = counted, now


def position_style(position: int, color_system: str | None = None) -> str:
    """Return the style of a draft position; 0 is the target. `color_system` is the console's."""
    colours = FEW_COLOURS if color_system in ("standard", "windows") else COLOURS
    return colours[min(position, len(colours)) - 1] if position else TARGET
