"""Splits a text that is being written into pieces by who wrote them, the target or an accepted draft."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

if TYPE_CHECKING:
    import torch

    from ...decoding.stats import SpeculationStats
    from ...drafters.base import Drafter

BY_HEAD = "underlined: chosen by the head, the block alone holds another token more probable"


class Piece(NamedTuple):
    """A piece of a text: one token, or several tokens that form one character.

    Attributes:
        text: The text, never empty.
        position: The draft position that wrote it, from 1; 0 for the target.
        token: The index of its token among the new ones, from 0; of several, the last.
        by_head: Whether a sequential head chose it, instead of the block.
    """

    text: str
    position: int
    token: int
    by_head: bool = False


class Pieces:
    """Makes pieces from tokens that arrive one by one.

    Args:
        tokenizer: The target's tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self._line: list[int] = []  # tokens of the present line: decoding only them keeps long texts fast
        self._known_characters = 0  # characters of the line that are in pieces
        self._tokens = 0

    def add(self, token: int, position: int, by_head: bool = False) -> Piece | None:
        """Add a token, and return the piece that it completes; `None` for a special token or half a character."""
        self._line.append(token)
        self._tokens += 1
        text = self._decoded()
        return None if text.endswith("\N{REPLACEMENT CHARACTER}") else self._piece(text, position, by_head)

    def last_piece(self, position: int, by_head: bool = False) -> Piece | None:
        """Return the last piece of a text that ends within a character."""
        return self._piece(self._decoded(), position, by_head)

    def _decoded(self) -> str:
        return cast(str, self.tokenizer.decode(self._line, skip_special_tokens=True))

    def _piece(self, text: str, position: int, by_head: bool) -> Piece | None:
        new, self._known_characters = text[self._known_characters :], len(text)
        if text.endswith("\n"):
            self._line, self._known_characters = [], 0
        return Piece(new, position, self._tokens - 1, by_head) if new else None


class PieceStreamer(BaseStreamer):
    """Takes the tokens of a text, without its prompt, and hands on its pieces. `drafter` is `None` where the target
    writes alone; else its `last_stats` say who wrote a token, and which ones a head chose inside
    [`~decoding.stats.keep_trees`]."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, drafter: Drafter | None) -> None:
        self.drafter, self.tokens = drafter, list[int]()
        self._pieces, self._has_prompt = Pieces(tokenizer), False

    def put(self, value: torch.Tensor) -> None:
        if self._has_prompt:
            self.tokens.append(int(value))
            self.show(self._pieces.add(self.tokens[-1], *self._writer()))
        self._has_prompt = True

    def end(self) -> None:
        """Hand on what is left of a text that ends within a character."""
        piece = self._pieces.last_piece(*self._writer()) if self.tokens else None
        if piece is not None:
            self.show(piece)

    def show(self, piece: Piece | None) -> None:
        """Show the piece that a token completed, if it completed one."""
        raise NotImplementedError

    @property
    def stats(self) -> SpeculationStats | None:
        return None if self.drafter is None else self.drafter.last_stats

    def _writer(self) -> tuple[int, bool]:
        return (0, False) if self.stats is None else (self.stats.written[-1], self.stats.by_head[-1])


def writer_name(position: int, by_head: bool = False) -> str:
    """Return the name of a piece's writer."""
    return f"draft {position}{', by the head' * by_head}" if position else "target"
