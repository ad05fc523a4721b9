"""One sequence on its way: its tokens, their positions and mask, and the drafter's context of it. When it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList


class Row:
    """A row of a `generate` call.

    Tokens, positions and mask lie in buffers that grow by doubling, drafts under verification after the text: a round
    copies no text and counts no positions.

    Args:
        ids: `[1, seq]`, the prompt, tokens that are already in the cache included.
        padding: Columns on the left that the target is not to see; the caller's ids keep them.
        mask: `[1, seq]` without those columns, if some of it is padding.
        position_ids: The caller's, of the last tokens of the prompt, `[1, tokens]` or `[axes, 1, tokens]`.

    Attributes:
        length: Tokens of the text, padding included.
        prompt_length: Tokens of the prompt, padding left out.
        context: The drafter's.
        residuals: Residual streams of what is in the target's cache and not yet in the context.
        finished: Whether the text has ended.
    """

    def __init__(
        self, ids: torch.Tensor, padding: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> None:
        self.padding, self.length = padding, ids.shape[1]
        self.prompt_length = self.length - padding
        self.context: Any = None
        self.residuals: list[torch.Tensor] = []
        self.finished = False
        self._buffer, self._mask = ids, mask
        self._positions = self._prompt_positions(mask, position_ids)

    def _prompt_positions(self, mask: torch.Tensor | None, given: torch.Tensor | None) -> torch.Tensor:
        if given is not None:
            before = given[..., :1] + torch.arange(given.shape[-1] - self.prompt_length, 0, device=given.device)
            return torch.cat([before, given], dim=-1)
        if mask is not None:
            return (mask.cumsum(-1) - 1).clamp(min=0)
        return torch.arange(self.prompt_length, device=self._buffer.device)[None]

    def _grow(self, more: int) -> None:
        needed = self.length + more
        if needed > self._buffer.shape[1]:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, needed))
            self._mask = None if self._mask is None else torch.nn.functional.pad(self._mask, (0, needed), value=1)
            after = torch.arange(1, needed + 1, device=self._positions.device)
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + after], dim=-1)

    def with_drafts(self, tokens: torch.Tensor) -> torch.Tensor:
        """`text` and drafts `[drafts]` after it, `[1, seq + drafts]`."""
        end = self.length + len(tokens)
        self._grow(len(tokens) + 1)
        self._buffer[0, self.length : end] = tokens
        return self._buffer[:, self.padding : end]

    def append(self, token: int) -> None:
        """One more token."""
        self._grow(1)
        self._buffer[0, self.length] = token
        self.length += 1

    @property
    def ids(self) -> torch.Tensor:
        """The text, `[1, seq]`."""
        return self._buffer[:, : self.length]

    @property
    def text(self) -> torch.Tensor:
        """The text as the target sees it, without padding, `[1, seq]`."""
        return self._buffer[:, self.padding : self.length]

    @property
    def end(self) -> int:
        """Tokens of `text`."""
        return self.length - self.padding

    def mask(self, end: int) -> torch.Tensor | None:
        """Which of the first `end` tokens of `text` are none of padding, `[1, end]`; `None` if all are."""
        return None if self._mask is None else self._mask[:, :end]

    def inputs(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """What a target is told of the tokens from `start` to `end` beside their ids."""
        told = {"position_ids": self.positions(start, end)}
        return told if self._mask is None else {**told, "attention_mask": self._mask[:, :end]}

    def positions(self, start: int, end: int) -> torch.Tensor:
        """True positions of the tokens of `text` and of drafts after it, `[1, end - start]`. Multimodal targets have
        them for several axes, `[axes, 1, end - start]`."""
        return self._positions[..., start:end]

    def text_positions(self, start: int, end: int) -> torch.Tensor:
        """As [`positions`], `[1, end - start]`: text has the same on every axis."""
        positions = self.positions(start, end)
        return positions[0] if positions.ndim == 3 else positions


class Stopping:
    """A request's stopping criteria, asked after every token.

    Args:
        criteria: The request's.
        is_row: Whether the text is one of a batch.
    """

    def __init__(self, criteria: StoppingCriteriaList, is_row: bool = False) -> None:
        self._is_row = is_row
        self._ends: set[int] = set()
        self._most = float("inf")
        self._others = StoppingCriteriaList()
        for criterion in criteria:
            if not self._is_known(criterion):
                self._others.append(criterion)

    def _is_known(self, criterion: StoppingCriteria) -> bool:
        if type(criterion) is EosTokenCriteria:
            self._ends |= set(criterion.eos_token_id.flatten().tolist())
            return True
        if type(criterion) is MaxLengthCriteria:
            self._most = min(self._most, criterion.max_length)
            # Else it has something to say about texts that are longer than the target was made for.
            longest = criterion.max_position_embeddings
            return longest is None or criterion.max_length <= longest
        return False

    def __call__(self, token: int, ids: torch.Tensor, scores: Sequence[torch.Tensor]) -> bool:
        """Whether the text `ids` `[1, seq]`, which ends in `token`, is finished.

        Raises:
            ValueError: If a criterion looks for other rows of a batch.
        """
        try:
            is_over = bool(self._others(ids, tuple(scores) or None).all()) if self._others else False
        except IndexError as error:
            if not self._is_row:
                raise
            given = ", ".join(sorted({type(criterion).__name__ for criterion in self._others}))
            raise ValueError(
                f"A stopping criterion ({given}) looks at rows that are not there: with a drafter each row of a batch "
                f"is asked about alone, `[1, {ids.shape[1]}]`. Pass one prompt, or `stop_strings` with `tokenizer`."
            ) from error
        return is_over or token in self._ends or ids.shape[1] >= self._most
