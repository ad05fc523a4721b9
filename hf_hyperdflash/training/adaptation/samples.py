"""Training samples of generations: their text and the residual that the target has computed for it anyway."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import torch

from ..losses.objective import Batch, collate

_MOST_HELD_OUT = 4


class Sample:
    """The tokens of one generation, sampled or greedy, with their residual of some layers; the last ones if they are
    too many for `most_bytes`."""

    def __init__(self, layer_ids: Sequence[int], most_bytes: int, is_sampled: bool = False) -> None:
        self.layer_ids, self.most_bytes, self.is_sampled = list(layer_ids), most_bytes, is_sampled
        self._parts: deque[tuple[torch.Tensor, torch.Tensor, torch.Tensor, bool]] = deque()

    def add(self, residual: torch.Tensor, positions: torch.Tensor, following: torch.Tensor, is_written: bool) -> None:
        """Append tokens: residual `[1, new, streams, config.hidden_size]` of `layer_ids`, position ids without
        padding, the token after each, and whether the target wrote them; else they belong to the prompt."""
        room = max(1, self.most_bytes // max(1, residual[0, 0].nbytes))  # of a long prompt
        part = residual[0, -room:], positions[0, -room:], following[0, -room:]
        self._parts.append((*part, is_written))
        left = sum(len(positions) for _, positions, *_ in self._parts)
        while left - len(self._parts[0][1]) >= room:
            left -= len(self._parts.popleft()[1])

    def row(self) -> Batch | None:
        """Return the columns that [`~objective.collate`] reads, and `is_sampled`; `None` if the target wrote too
        little to learn from."""
        if sum(len(positions) for _, positions, _, is_written in self._parts if is_written) < 2:
            return None
        # Copies: tensors that were computed in inference mode cannot be trained on.
        residual, positions, following = (torch.cat(parts) for parts in list(zip(*self._parts))[:3])
        written = [torch.full_like(part[1], part[3], dtype=torch.bool) for part in self._parts]
        row = {"residual": residual, "position_ids": positions.to(residual.device)}
        # The first token is not known here. Another one stands for it, which is never an anchor or a label.
        row["input_ids"] = torch.cat([following[:1], following[:-1]]).to(residual.device)
        row["loss_mask"] = torch.cat(written).to(residual.device)
        row["loss_mask"][0] = False
        row["is_sampled"] = torch.tensor(self.is_sampled)
        return row


class ReplayBuffer:
    """The rows of the last generations, within a limit of memory, to learn from again; a few from all the time are
    held out and never learned from."""

    def __init__(self, most_bytes: int, seed: int = 0) -> None:
        self.most_bytes, self._random = most_bytes, random.Random(seed)
        self._rows: deque[Batch] = deque()
        self.held_out: list[Batch] = []
        self._times_held_out = 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for row in self._rows for values in row.values())

    def add(self, row: Batch) -> None:
        """Append a row, and drop the oldest rows if there are too many bytes."""
        self._rows.append(row)
        while self.nbytes > self.most_bytes and len(self._rows) > 1:
            self._rows.popleft()

    def newest(self, count: int) -> list[Batch]:
        """Return the last rows."""
        return list(self._rows)[-count:]

    def hold_one_out(self, new: int) -> int:
        """Set one of the `new` last rows aside, and return how many are left of them. The few that are kept are a fair
        draw from all that ever were. Of few rows none can be spared."""
        if new < _MOST_HELD_OUT or new > len(self._rows):
            return new
        self._times_held_out += 1
        place = len(self.held_out)
        if place == _MOST_HELD_OUT:
            place = self._random.randrange(self._times_held_out)
        if place >= _MOST_HELD_OUT:
            return new
        at = len(self._rows) - 1 - self._random.randrange(new)
        row = self._rows[at]
        del self._rows[at]
        self.held_out[place : place + 1] = [row]
        return new - 1

    def draw_batch(self, count: int, new: int) -> Batch:
        """Draw a batch: about half from the `new` last rows, which were not learned from yet, the rest from earlier
        ones."""
        rows = list(self._rows)
        new_rows, old_rows = rows[max(0, len(rows) - new) :], rows[: max(0, len(rows) - new)]
        new_count = max(count - len(old_rows), (count + 1) // 2)
        drawn = self._random.sample(new_rows, min(new_count, len(new_rows)))
        return collate(drawn + self._random.sample(old_rows, min(count - len(drawn), len(old_rows))))
