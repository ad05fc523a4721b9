"""Text in pieces, each with who wrote it: the target, or a draft that it accepted. As HTML, in a colour for each, and
underlined where a sequential head chose it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

TARGET = "#ffc46b"
# Of draft positions 1, 2, ..; the last one of all that are further. Black is legible on each, in a page of any theme.
DRAFTS = ("#a6e3b4", "#90e0d5", "#93d7ef", "#a3c4f7", "#b9b4f5", "#d2aef0", "#ecabe0", "#f5b5c4")
BY_HEAD = "underlined: chosen by the head, the block alone holds another token more probable"


class Piece(NamedTuple):
    """A piece of a text: of one token, or of the several that one character is made of.

    Attributes:
        text: Never empty.
        position: The draft position that wrote it, from 1; 0 where the target did.
        token: Which of the new tokens, from 0; the last one of several.
        by_head: Whether a sequential head chose it, and not the block.
    """

    text: str
    position: int
    token: int
    by_head: bool = False


class Pieces:
    """Makes pieces of tokens that come one by one.

    Args:
        tokenizer: The target's.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._line: list[int] = []  # its tokens, so that a long text does not get slower
        self._told = 0  # characters of it
        self._tokens = 0

    def add(self, token: int, position: int, by_head: bool = False) -> Piece | None:
        """The text that has become known with one more token; none of a special token, or of half a character."""
        self._line.append(token)
        self._tokens += 1
        text = self.tokenizer.decode(self._line, skip_special_tokens=True)
        return None if text.endswith("\N{REPLACEMENT CHARACTER}") else self._piece(text, position, by_head)

    def rest(self, position: int, by_head: bool = False) -> Piece | None:
        """What is left where a text ends in the midst of a character."""
        return self._piece(self.tokenizer.decode(self._line, skip_special_tokens=True), position, by_head)

    def _piece(self, text: str, position: int, by_head: bool) -> Piece | None:
        new, self._told = text[self._told :], len(text)
        if text.endswith("\n"):
            self._line, self._told = [], 0
        return Piece(new, position, self._tokens - 1, by_head) if new else None


def pieces_of(
    tokenizer: Any, ids: Iterable[int], written: Sequence[int], by_head: Sequence[bool] | None = None
) -> list[Piece]:
    """The pieces of a text that is there.

    Args:
        tokenizer: The target's.
        ids: The new tokens.
        written: Of each the draft position that wrote it, as `last_stats.written` has it.
        by_head: Of each whether a sequential head chose it, as `last_stats.by_head` has it; `None` for nowhere.

    Raises:
        ValueError: If there are not as many of one as of the other.
    """
    ids, pieces = [int(token) for token in ids], Pieces(tokenizer)
    if len(ids) != len(written):
        raise ValueError(
            f"The text has {len(ids)} tokens and `written` {len(written)}: expected the new tokens alone, without the "
            "prompt, and the `last_stats.written` of the same generation."
        )
    heads = [False] * len(ids) if by_head is None else by_head
    made = [pieces.add(*each) for each in zip(ids, written, heads)]
    made += [pieces.rest(written[-1], heads[-1])] if ids else []
    return [piece for piece in made if piece is not None]


def colour_of(position: int) -> str:
    """The colour of a draft position; 0 is the target's."""
    return DRAFTS[min(position, len(DRAFTS)) - 1] if position else TARGET


def name_of(position: int, by_head: bool = False) -> str:
    """Who wrote a piece, in words."""
    return f"draft {position}{', by the head' * by_head}" if position else "target"


def text_html(pieces: Iterable[Piece]) -> str:
    """A text in the colours of who wrote it, what a sequential head chose underlined, and below what is whose.
    `data-token` says which token a piece is."""
    pieces = list(pieces)
    most = max((piece.position for piece in pieces), default=0)
    text = "".join(
        _coloured(
            escape(piece.text), piece.position, piece.by_head,
            f' data-token="{piece.token}" title="{name_of(piece.position, piece.by_head)}"',
        )
        for piece in pieces
    )  # fmt: skip
    legend = " ".join(_coloured(name_of(position), position) for position in range(most + 1)) if pieces else ""
    legend += f" {BY_HEAD}" if any(piece.by_head for piece in pieces) else ""
    return (
        f'<div style="white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.6">{text}</div>'
        f'<div style="margin-top: 0.8em; font-size: 0.85em">{legend}</div>'
    )


def _coloured(html: str, position: int, by_head: bool = False, more: str = "") -> str:
    style = f"background: {colour_of(position)}; color: #111; border-radius: 3px; padding: 1px 0"
    style += "; text-decoration: underline" * by_head
    return f'<span style="{style}"{more}>{html}</span>'
