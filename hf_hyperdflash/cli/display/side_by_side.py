"""Shows one answer twice, side by side: as the target writes it alone, and with its drafter, each token in the colour
of who wrote it. A table of both follows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .text import Piece, PieceStreamer
from .who_wrote import position_style

_REDRAWN = 0.1  # seconds between two drawings, so that they take no time of the text
_TWO_COLUMNS = 80  # characters of a row


class Side(PieceStreamer):
    """One of the two answers. Its time runs from when it is made to its last token."""

    def __init__(
        self,
        title: str,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Any,
        console: Console,
        redraw: Callable[[], None],
    ) -> None:
        super().__init__(tokenizer, drafter)
        self.title, self.console, self._redraw = title, console, redraw
        self.text, self.seconds, self._began = Text(), 0.0, time.perf_counter()

    def show(self, piece: Piece | None) -> None:
        if piece is not None:
            style = "" if self.drafter is None else position_style(piece.position, self.console.color_system)
            self.text.append(piece.text, style)
        self.seconds = time.perf_counter() - self._began
        self._redraw()

    def rendered(self) -> Table:
        """Return the answer below its title, and its speed so far."""
        column = Table.grid()
        speed = f"{len(self.tokens)} tokens, {self.rate:.1f} tokens/s" if self.tokens else ""
        column.add_row(Text.assemble((self.title, "bold"), "  ", (speed, "dim")))
        column.add_row(self.text)
        return column

    @property
    def rate(self) -> float:
        """Tokens a second, the prompt's forward included."""
        return len(self.tokens) / max(self.seconds, 1e-9)


class SideBySide:
    """Two answers beside each other while they are written; below each other in a narrow terminal, and printed at the
    end where there is no terminal."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, drafter: Any, console: Console) -> None:
        self.tokenizer, self.drafter, self.console = tokenizer, drafter, console
        self.sides: list[Side] = []
        self._live = Live(console=console, auto_refresh=False)
        self._drawn = 0.0

    def __enter__(self) -> SideBySide:
        if self.console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._draw()
            self._live.stop()
        else:
            self.console.print(self.rendered())

    def side(self, title: str, is_drafted: bool) -> Side:
        """Return the streamer of the next answer. Its time begins."""
        drafter = self.drafter if is_drafted else None
        self.sides.append(Side(title, self.tokenizer, drafter, self.console, self._redraw))
        return self.sides[-1]

    def rendered(self) -> Table:
        """Return both answers and the legend of colours."""
        shown = [side.rendered() for side in self.sides]
        grid = Table.grid(padding=(0, 2), expand=True)
        if self.console.is_terminal and self.console.width >= _TWO_COLUMNS:
            for _ in shown:
                grid.add_column(ratio=1)
            grid.add_row(*shown)
        else:
            for column in shown:
                grid.add_row(Padding(column, (0, 0, 1, 0)))
        return grid

    def table(self, note: str) -> Table:
        """Return the table of both answers, with a note below it."""
        table = Table(caption=note, caption_justify="left")
        table.add_column("", overflow="fold")  # rich's mark of what is cut off is no ASCII
        for heading in ("tokens", "seconds", "tokens/s", "tokens/round", "drafted", "speed"):
            table.add_column(heading, justify="right", overflow="fold")
        stats = self.drafter.last_stats
        for side in self.sides:
            tau, share = 1.0, 0.0
            if side.drafter is not None:
                tau, share = stats.tau, sum(position > 0 for position in stats.written) / max(len(stats.written), 1)
            cells = (f"{side.seconds:.1f}", f"{side.rate:.1f}", f"{tau:.2f}", f"{100 * share:.0f} %")
            table.add_row(side.title, str(len(side.tokens)), *cells, f"{side.rate / self.sides[0].rate:.2f}x")
        return table

    def _redraw(self) -> None:
        if self.console.is_terminal and time.perf_counter() - self._drawn > _REDRAWN:
            self._draw()

    def _draw(self) -> None:
        self._live.update(self.rendered(), refresh=True)
        self._drawn = time.perf_counter()
