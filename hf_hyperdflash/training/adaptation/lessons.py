"""What generations leave to learn from: their text and the residual that the target computed for it anyway."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import torch

from ..losses.objective import Batch, collate


class Lesson:
    """One generation's tokens as the drafter took them in, the last ones if they are too many.

    Args:
        layer_ids: Whose residual paths are wanted.
        most_bytes: Of residual.
        is_drawn: Whether the text is drawn at random; else it is greedy.
    """

    def __init__(self, layer_ids: Sequence[int], most_bytes: int, is_drawn: bool = False) -> None:
        self.layer_ids, self.most_bytes, self.is_drawn = list(layer_ids), most_bytes, is_drawn
        self._parts: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]] = deque()

    def add(self, residual: torch.Tensor, positions: torch.Tensor, following: torch.Tensor, is_written: bool) -> None:
        """Take tokens in.

        Args:
            residual: `[1, new, paths, config.hidden_size]` of `layer_ids`.
            positions: True ones, `[1, new]`.
            following: The token after each, `[1, new]`.
            is_written: Whether the target wrote them; else they are of the prompt.
        """
        kept = max(1, self.most_bytes // max(1, residual[0, 0].nbytes))  # of a long prompt
        part = residual[0, -kept:], positions[0, -kept:], following[0, -kept:]
        self._parts.append((*part, is_written))
        left = sum(len(positions) for _, positions, *_ in self._parts)
        while left - len(self._parts[0][1]) >= kept:
            left -= len(self._parts.popleft()[1])

    def row(self) -> Batch | None:
        """As [`~objective.collate`] takes it, and `is_drawn`; `None` if the target wrote too little to learn from."""
        if sum(len(positions) for _, positions, _, is_written in self._parts if is_written) < 2:
            return None
        # Copies: what a round computed in inference mode could not be learned from.
        residual, positions, following = (torch.cat(parts) for parts in list(zip(*self._parts))[:3])
        written = [torch.full_like(part[1], part[3], dtype=torch.bool) for part in self._parts]
        row = {"residual": residual, "position_ids": positions.to(residual.device)}
        # The first token follows none that is known here: it is read as some other, and never an anchor or a label.
        row["input_ids"] = torch.cat([following[:1], following[:-1]]).to(residual.device)
        row["loss_mask"] = torch.cat(written).to(residual.device)
        row["loss_mask"][0] = False
        row["is_drawn"] = torch.tensor(self.is_drawn)
        return row


class Memory:
    """The last generations' rows, of not more than so many bytes.

    Args:
        most_bytes: Of all rows.
        seed: Of which earlier ones are taken again.
    """

    def __init__(self, most_bytes: int, seed: int = 0) -> None:
        self.most_bytes, self._random = most_bytes, random.Random(seed)
        self._rows: deque[Batch] = deque()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, row: Batch) -> None:
        """Keep a row, and leave those that there is no room for any more."""
        self._rows.append(row)
        self.nbytes += _size(row)
        while self.nbytes > self.most_bytes and len(self._rows) > 1:
            self.nbytes -= _size(self._rows.popleft())

    def newest(self, count: int) -> list[Batch]:
        """The last rows."""
        return list(self._rows)[-count:]

    def earlier(self, count: int, new: int, held_out: int) -> Batch:
        """A batch of rows before the last `held_out`: some of the `new` ones before them, which were not learned from
        yet, and as many of those that were."""
        rows = list(self._rows)[: len(self._rows) - held_out]
        fresh, old = rows[max(0, len(rows) - new) :], rows[: max(0, len(rows) - new)]
        of_fresh = max(count - len(old), (count + 1) // 2)
        drawn = self._random.sample(fresh, min(of_fresh, len(fresh)))
        return collate(drawn + self._random.sample(old, min(count - len(drawn), len(old))))


def _size(row: Batch) -> int:
    return sum(values.nbytes for values in row.values())
