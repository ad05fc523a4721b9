"""Where drafts of a sequence come from beside the drafter: sources that know the text, and say how it may go on."""

from __future__ import annotations

from collections.abc import Container
from typing import Protocol

from ..auto.copies import CopyChances, KnownPath
from ..drafters.without_weights.lookup import SIZES, Lookup, Match, TextIndex
from ..grammars.processor import TextGrammar

_SURE = 4  # tokens of a match that is hardly chance


class DraftSource(Protocol):
    """Knows of one sequence how it may go on. What it says depends on the text alone."""

    def append(self, token: int) -> None:
        """Hear of a token that was written."""

    def path(self, count: int) -> KnownPath | None:
        """Return at most `count` tokens that may follow the text, at least one; `None` if nothing is known."""

    def end(self) -> None:
        """Hear that the text has ended."""


class CopySource:
    """Copies what followed the last tokens where they occurred before.

    It follows a match for as long as the text does, and learns from each token whether the copy was right. Behind a
    difference, an edit for example, it looks first where that copy ended.

    Args:
        prompt: Token ids, without padding.
        chances: How probable copies are.
        lookup: What to copy from beside the text itself.
    """

    def __init__(self, prompt: list[int], chances: CopyChances, lookup: Lookup | None) -> None:
        self.text, self.chances, self.lookup = TextIndex(prompt), chances, lookup
        self._match: Match | None = None
        self._ended: Match | None = None  # the last copy of some length
        self._find()

    def append(self, token: int) -> None:
        self.text.append(token)
        match = self._match
        if match is not None:
            is_right = match.following == token
            self.chances.observe(match.length, is_right, match.is_resumed)
            self._match = match.moved_on() if is_right else None
            if not is_right and match.length >= _SURE:
                self._ended = match
        if self._match is None or self._match.length < SIZES[0]:
            self._find()

    def _find(self) -> None:
        """Take a match that is longer than the present one."""
        last, match = self.text.tokens, self._match
        for found in (self.text.find(last), self.lookup and self.lookup.find(last)):
            if found and (match is None or found.length > match.length):
                match = found
        if self._ended is not None and (match is None or match.length < _SURE):
            resumed = self._ended.resumed(last)
            if resumed is not None and (match is None or self._chance(resumed) > self._chance(match)):
                match = resumed
        self._match = match

    def _chance(self, match: Match) -> float:
        return self.chances(match.length, match.is_resumed)

    def path(self, count: int) -> KnownPath | None:
        if (match := self._match) is None or not (tokens := match.copy(count)):
            return None
        return KnownPath(tokens, [self.chances(match.length + k, match.is_resumed) for k in range(len(tokens))])

    def end(self) -> None:
        if self.lookup is not None:
            self.lookup.remember(self.text.tokens)


class GrammarSource:
    """What a text's grammar leaves no choice in.

    Args:
        grammar: The text's, which hears of every token here.
        ends: The tokens that end it.
    """

    def __init__(self, grammar: TextGrammar, ends: Container[int]) -> None:
        self.grammar, self.ends = grammar, ends

    def append(self, token: int) -> None:
        self.grammar.accept(token)

    def path(self, count: int) -> KnownPath | None:
        found = self.grammar.likely_tokens(count, self.ends)
        return KnownPath(*zip(*found)) if found else None

    def end(self) -> None:
        """Do nothing: the processor remembers where the text is in its grammar."""
