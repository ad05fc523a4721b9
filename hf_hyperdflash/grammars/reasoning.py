"""What comes before a grammar: reasoning, which may be as long as it likes, or as a budget says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedTokenizerBase

from .states import check_beginning, state_of


class AfterReasoning:
    """A grammar that begins behind the end of the reasoning, at the very next token.

    ```python
    processor = GrammarProcessor(AfterReasoning(compiled_grammar, "</think>", tokenizer, budget=200))
    ```

    Args:
        grammar: Of what follows, as for a [`~grammars.processor.GrammarProcessor`]; `None` for any text.
        end: What ends the reasoning: a token's id, several that follow each other, or a text, which is found however
            the target spells it. It is looked for in what the target writes, not in the prompt: where the template
            has written it there, pass the grammar alone.
        tokenizer: The target's, if `end` is a text.
        budget: How many tokens of reasoning there may be: then those of `end` follow. `None` for any number.

    Raises:
        ValueError: If a text comes without a tokenizer, or `end` or `budget` says nothing.
    """

    def __init__(
        self,
        grammar: Any,
        end: int | str | Sequence[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        budget: int | None = None,
    ) -> None:
        if budget is not None and (type(budget) is not int or budget < 0):
            raise ValueError(f"`budget` is {budget!r}, expected a whole number of tokens, or None for any number.")
        self._decode: Callable[[list[int]], str] | None = None
        if isinstance(end, str):
            if not all(callable(getattr(tokenizer, method, None)) for method in ("encode", "decode")):
                given = "none" if tokenizer is None else f"a {type(tokenizer).__name__}"
                raise ValueError(
                    f"`end` is the text {end!r} and `tokenizer` {given}, expected the target's tokenizer with it, or "
                    "a token's id."
                )
            ids: Any = cast(Any, tokenizer).encode(end, add_special_tokens=False)
            self._decode = cast(Any, tokenizer).decode
            # A token is a byte of a text at least, and the last one may go on behind it.
            self._text, self._width = end, len(end.encode()) + 1
        else:
            ids = end.tolist() if isinstance(end, torch.Tensor) else end
            ids = list(ids) if isinstance(ids, (list, tuple)) else [ids]
            self._text, self._width = "", len(ids)
        if not ids or not all(type(token) is int and token >= 0 for token in ids):
            raise ValueError(
                f"`end` is {end!r}, expected a token's id, several, or a text that is not empty and that the "
                "tokenizer can write."
            )
        self._ids: list[int] = ids
        self._grammar, self._budget = None if grammar is None else state_of(grammar), budget
        self._count, self._last, self._is_over = 0, list[int](), False

    def allowed(self, vocab_size: int) -> torch.Tensor | None:
        if self._is_over:
            return None if self._grammar is None else self._grammar.allowed(vocab_size)
        if not self._count:  # what is wrong with the grammar is said before any work
            if max(self._ids) >= vocab_size:
                raise ValueError(f"`end` is the token {max(self._ids)}, expected one of the target's {vocab_size}.")
            if self._grammar is not None:
                check_beginning(self._grammar, vocab_size)
        if self._budget is None or self._count < self._budget:
            return None
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        mask[self._ids[self._count - self._budget]] = True
        return mask

    def advance(self, token: int) -> None:
        if self._is_over:
            if self._grammar is not None:
                self._grammar.advance(token)
            return
        self._count += 1
        self._last = [*self._last, token][-self._width :]
        is_end = self._last == self._ids if self._decode is None else self._text in self._decode(self._last)
        self._is_over = is_end or (self._budget is not None and self._count >= self._budget + len(self._ids))

    def likely(self) -> list[int]:
        """Return the tokens of what must come next, where the grammar knows some."""
        likely = getattr(self._grammar, "likely", None)
        return likely() if self._is_over and likely is not None else []

    def fork(self) -> AfterReasoning:
        own = copy.copy(self)
        own._grammar = None if self._grammar is None else self._grammar.fork()
        return own
