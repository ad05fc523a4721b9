"""When a text ends: transformers' stopping criteria, the usual two of them without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList


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
