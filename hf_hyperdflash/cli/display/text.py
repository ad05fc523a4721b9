"""Splits text into pieces by who wrote it, the target or an accepted draft, and renders them as HTML: a colour for
each writer, underlined where a sequential head chose the token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple, cast

from transformers import PreTrainedTokenizerBase

TARGET = "#ffc46b"
# Colours of draft positions 1, 2, ..; the last one is for all later ones. Black text is legible on each.
DRAFTS = ("#a6e3b4", "#90e0d5", "#93d7ef", "#a3c4f7", "#b9b4f5", "#d2aef0", "#ecabe0", "#f5b5c4")
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


def pieces_of(
    tokenizer: PreTrainedTokenizerBase,
    ids: Iterable[int],
    written: Sequence[int],
    by_head: Sequence[bool] | None = None,
) -> list[Piece]:
    """Split a complete text into pieces.

    Args:
        tokenizer: The target's tokenizer.
        ids: The new tokens.
        written: The draft position that wrote each token, as in `last_stats.written`.
        by_head: Whether a sequential head chose each token, as in `last_stats.by_head`; `None` for none.

    Raises:
        ValueError: If `ids` and `written` have different lengths.
    """
    ids, pieces = [int(token) for token in ids], Pieces(tokenizer)
    if len(ids) != len(written):
        raise ValueError(
            f"The text has {len(ids)} tokens and `written` {len(written)}: expected the new tokens alone, without the "
            "prompt, and the `last_stats.written` of the same generation."
        )
    heads = [False] * len(ids) if by_head is None else by_head
    made = [pieces.add(*parts) for parts in zip(ids, written, heads)]
    made += [pieces.last_piece(written[-1], heads[-1])] if ids else []
    return [piece for piece in made if piece is not None]


def position_colour(position: int) -> str:
    """Return the colour of a draft position; 0 is the target."""
    return DRAFTS[min(position, len(DRAFTS)) - 1] if position else TARGET


def writer_name(position: int, by_head: bool = False) -> str:
    """Return the name of a piece's writer."""
    return f"draft {position}{', by the head' * by_head}" if position else "target"


def text_html(pieces: Iterable[Piece]) -> str:
    """Render a text in the colours of its writers, with tokens of a sequential head underlined, and a legend below.

    The attribute `data-token` is the index of a piece's token.
    """
    pieces = list(pieces)
    most = max((piece.position for piece in pieces), default=0)
    text = "".join(
        _coloured(
            escape(piece.text), piece.position, piece.by_head,
            f' data-token="{piece.token}" title="{writer_name(piece.position, piece.by_head)}"',
        )
        for piece in pieces
    )  # fmt: skip
    legend = " ".join(_coloured(writer_name(position), position) for position in range(most + 1)) if pieces else ""
    legend += f" {BY_HEAD}" if any(piece.by_head for piece in pieces) else ""
    return (
        f'<div style="white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6">{text}</div>'
        f'<div style="margin-top: 0.8em; font-size: 0.85em">{legend}</div>'
    )


def _coloured(html: str, position: int, by_head: bool = False, more: str = "") -> str:
    style = f"background: {position_colour(position)}; color: #111; border-radius: 3px; padding: 1px 0"
    style += "; text-decoration: underline" * by_head
    return f'<span style="{style}"{more}>{html}</span>'
