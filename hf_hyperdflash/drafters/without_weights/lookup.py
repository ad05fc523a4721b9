"""Finds where the last tokens of a text occurred before, in the text itself, in documents and in earlier requests."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

import torch

SIZES = 12, 5, 2, 1  # of the runs of tokens that are looked up, the longest first
LONGEST = 32  # a longer match is as good as one of this length
NEAR = 32  # tokens behind the end of a copy, in which it may go on
MEMORY = 1_000_000  # tokens of earlier requests, about; each takes some 350 bytes
_END = -1  # between two texts


class Match(NamedTuple):
    """An earlier occurrence of a text's last tokens.

    Attributes:
        tokens: The text that it is in, which may grow.
        place: Of the token that followed there.
        length: How many tokens are the same, [`LONGEST`] at most.
        is_resumed: Whether a copy goes on there behind a difference.
    """

    tokens: list[int]
    place: int
    length: int
    is_resumed: bool = False

    @property
    def following(self) -> int:
        """The token that followed."""
        return self.tokens[self.place]

    def moved_on(self) -> Match | None:
        """Return the match of one token more, once that is written; `None` where the text that it is in ends."""
        moved = self._replace(place=self.place + 1, length=self.length + 1)
        return None if moved.following == _END else moved

    def resumed(self, last: Sequence[int]) -> Match | None:
        """Return where this copy, which ended here, goes on behind a difference, as in an edited text: near its
        end, behind the longest run of tokens that are now the last; `None` if none of them is."""
        tokens, best = self.tokens, None
        for place in range(self.place + 1, min(self.place + NEAR, len(tokens) - 1) + 1):
            length = 0
            while length < min(LONGEST, len(last), place) and tokens[place - 1 - length] == last[-1 - length]:
                length += 1
            if tokens[place - 1] == _END:
                break
            if length > (best.length if best else 0) and tokens[place] != _END:
                best = Match(tokens, place, length, True)
        return best

    def copy(self, count: int) -> list[int]:
        """Return at most `count` tokens that followed. What follows the end of the text itself is the copy again."""
        copied = self.tokens[self.place : self.place + count]
        if _END in copied:
            return copied[: copied.index(_END)]
        if self.place + len(copied) == len(self.tokens):
            while copied and len(copied) < count:
                copied += copied[: count - len(copied)]
        return copied


class TextIndex:
    """Token ids, and where each run of [`SIZES`] tokens was followed by another token last.

    A run is known by its hash; what is found by it is compared. To add a token, and to find a match, takes the same
    time however long the text is. One thread may add while others find.

    Attributes:
        tokens: All of them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._places: list[dict[int, int]] = [{} for _ in SIZES]
        self.extend(tokens)

    def append(self, token: int) -> None:
        """Add a token."""
        tokens, place = self.tokens, len(self.tokens)
        for size, places in zip(SIZES, self._places):
            if place >= size:
                places[hash(tuple(tokens[-size:]))] = place
        tokens.append(token)

    def extend(self, new: Iterable[int]) -> None:
        """Add many tokens at once, which takes less time."""
        start = len(self.tokens)
        self.tokens += new  # first: a place must be there before it can be found
        for size, places in zip(SIZES, self._places):
            first = max(0, start - size)
            runs = zip(*(islice(self.tokens, first + at, None) for at in range(size)))
            places.update(zip(map(hash, runs), range(first + size, len(self.tokens))))

    def find(self, last: Sequence[int]) -> Match | None:
        """Return the latest earlier occurrence of the longest run that ends with the tokens `last`; `None` if there is
        none."""
        tokens = self.tokens
        for size, places in zip(SIZES, self._places):
            run = last[-size:]
            place = places.get(hash(tuple(run)))
            if place is None or tokens[place - size : place] != run or tokens[place] == _END:
                continue
            most = min(LONGEST, len(last), place)
            while size < most and last[-1 - size] == tokens[place - 1 - size]:
                size += 1
            return Match(tokens, place, size)
        return None


class Lookup:
    """Texts that `generate(..., lookup=)` copies from beside the text that it writes: documents, and the requests that
    were made with it before.

    What followed the last tokens where they occurred is drafted, where that is likely to be right. Several threads may
    generate with one. Of requests it forgets the oldest, once it has a million tokens of them.

    Args:
        documents: Token ids of each, as the target's tokenizer makes them.

    Raises:
        ValueError: If a document is no list of token ids.
    """

    def __init__(self, documents: Iterable[Sequence[int] | torch.Tensor] = ()) -> None:
        self._lock = threading.Lock()
        self._documents, self._requests = TextIndex(), [TextIndex(), TextIndex()]  # the older ones, and the newer ones
        self._largest = -1
        if isinstance(documents, (str, bytes)) or not isinstance(documents, Iterable):
            raise ValueError(
                f"`documents` is {shortened(documents)}, expected a list with the token ids of each: pass "
                "`[tokenizer(text).input_ids for text in texts]`."
            )
        for number, document in enumerate(documents):
            self._add(document, f"`documents[{number}]`")

    def __deepcopy__(self, memo: dict[int, object]) -> Lookup:
        return self  # of a generation configuration, which transformers copies for each call

    def add(self, document: Sequence[int] | torch.Tensor) -> None:
        """Add a document, its token ids.

        Raises:
            ValueError: If it is no list of token ids.
        """
        self._add(document, "`document`")

    def _add(self, document: Sequence[int] | torch.Tensor, name: str) -> None:
        ids: object = document
        if isinstance(document, torch.Tensor) and not document.is_meta:
            ids = (document[0] if document.ndim == 2 and len(document) == 1 else document).tolist()
        if not isinstance(ids, (list, tuple)) or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(
                f"{name} is {shortened(document)}, expected a list of token ids: pass `tokenizer(text).input_ids`."
            )
        with self._lock:
            self._largest = max(self._largest, max(ids, default=-1))
            self._documents.extend([*ids, _END])

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise a `ValueError` if it has tokens that a target does not have."""
        if self._largest >= vocab_size:
            raise ValueError(
                f"`lookup` has a text with the token {self._largest}, expected token ids from 0 to {vocab_size - 1}: "
                "use one `Lookup` for each tokenizer, and make documents with the target's own."
            )

    def remember(self, text: Sequence[int]) -> None:
        """Add the text of a request, but for its beginning if that is known, as of an earlier turn."""
        with self._lock:
            start, newer = self._known(text), self._requests[1]
            if len(newer.tokens) >= MEMORY // 2:
                self._requests = [newer, TextIndex()]
            self._largest = max(self._largest, max(text))
            self._requests[1].extend([*text[start:], _END])

    def _known(self, text: Sequence[int]) -> int:
        """Return where a text begins to be new, less a run by which it is found that it goes on there."""
        end = size = SIZES[0]
        while (match := self._requests[1].find(text[end - size : end])) and match.length == size:
            pairs = zip(islice(text, end, None), islice(match.tokens, match.place, None))
            same = next((at for at, (own, other) in enumerate(pairs) if own != other), len(text) - end)
            if not same:
                break
            end += same
        return end - size

    def find(self, last: Sequence[int]) -> Match | None:
        """Return the longest match of the last tokens of a text; of equally long ones the latest."""
        indexes = *self._requests[::-1], self._documents
        matches = [found for index in indexes if index.tokens and (found := index.find(last))]
        return max(matches, key=lambda match: match.length, default=None)


def shortened(value: object) -> str:
    """Return a value as the start of one line."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
