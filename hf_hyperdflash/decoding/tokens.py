"""The tokens of one sequence, with their positions and mask, and room for drafts behind them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class TokenBuffer:
    """What is written of one sequence.

    Tokens, positions and mask lie in buffers that grow by doubling, drafts under verification after the text: a round
    copies no text and counts no positions. New tokens go there together, when somebody reads them: one by one, each
    would be a launch.

    Args:
        ids: `[1, seq]`, the prompt, tokens that are already in the cache included.
        padding: Columns on the left that the target is not to see; the caller's ids keep them.
        mask: `[1, seq]` without those columns, if some of it is padding.
        position_ids: The caller's, of the last tokens of the prompt, `[1, tokens]` or `[axes, 1, tokens]`.

    Attributes:
        prompt_length: Tokens of the prompt, padding left out.
    """

    def __init__(
        self, ids: torch.Tensor, padding: int, mask: torch.Tensor | None, position_ids: torch.Tensor | None
    ) -> None:
        self.padding, self.prompt_length = padding, ids.shape[1] - padding
        self._written = ids.shape[1]
        self._new: list[int] = []  # that are not in the buffer yet
        self._buffer, self._mask = ids, mask
        if position_ids is not None:
            before = torch.arange(position_ids.shape[-1] - self.prompt_length, 0, device=position_ids.device)
            self._positions = torch.cat([position_ids[..., :1] + before, position_ids], dim=-1)
        elif mask is not None:
            self._positions = (mask.cumsum(-1) - 1).clamp(min=0)
        else:
            self._positions = torch.arange(self.prompt_length, device=ids.device)[None]

    def _grow(self, more: int) -> None:
        needed = self.length + more
        if needed > self._buffer.shape[1]:
            self._buffer = torch.nn.functional.pad(self._buffer, (0, needed))
            self._mask = None if self._mask is None else torch.nn.functional.pad(self._mask, (0, needed), value=1)
            after = torch.arange(1, needed + 1, device=self._positions.device)
            self._positions = torch.cat([self._positions, self._positions[..., -1:] + after], dim=-1)

    def with_drafts(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return `unpadded` with drafts `[drafts]` behind it, `[1, seq + drafts]`."""
        end = self.ids.shape[1] + len(tokens)
        self._grow(len(tokens) + 1)
        self._buffer[0, self.length : end] = tokens
        return self._buffer[:, self.padding : end]

    def append(self, token: int) -> None:
        """Add a token."""
        self._grow(1)
        self._new.append(token)

    @property
    def length(self) -> int:
        """Tokens of the text, padding included."""
        return self._written + len(self._new)

    @property
    def ids(self) -> torch.Tensor:
        """The text, `[1, seq]`."""
        if self._new:
            self._buffer[0, self._written : self.length] = torch.tensor(self._new)
            self._written, self._new = self.length, []
        return self._buffer[:, : self._written]

    @property
    def unpadded(self) -> torch.Tensor:
        """The text as the target sees it, without padding, `[1, seq]`."""
        return self.ids[:, self.padding :]

    @property
    def end(self) -> int:
        """Tokens of `unpadded`."""
        return self.length - self.padding

    def mask(self, end: int) -> torch.Tensor | None:
        """Return which of the first `end` tokens of `unpadded` are no padding, `[1, end]`; `None` if all are."""
        return None if self._mask is None else self._mask[:, :end]

    def inputs(self, start: int, end: int) -> dict[str, torch.Tensor]:
        """Return what a target needs of the tokens from `start` to `end` beside their ids."""
        inputs = {"position_ids": self.positions(start, end)}
        return inputs if self._mask is None else {**inputs, "attention_mask": self._mask[:, :end]}

    def positions(self, start: int, end: int) -> torch.Tensor:
        """Return true positions of the tokens of `unpadded` and of drafts behind it, `[1, end - start]`. Multimodal
        targets have them for several axes, `[axes, 1, end - start]`."""
        return self._positions[..., start:end]

    def text_positions(self, start: int, end: int) -> torch.Tensor:
        """Return [`positions`] as `[1, end - start]`: text has the same on every axis."""
        positions = self.positions(start, end)
        return positions[0] if positions.ndim == 3 else positions


def padded(prompts: Sequence[TokenBuffer]) -> TokenBuffer:
    """Return the prompts of several sequences as one, `[batch, seq]`, padded on the left as transformers pads them."""
    if len(prompts) == 1:
        return prompts[0]
    lengths = [prompt.prompt_length for prompt in prompts]
    ids, mask, positions = prompts[0].ids.new_zeros(3, len(lengths), max(lengths))
    for index, (prompt, length) in enumerate(zip(prompts, lengths)):
        real = prompt.mask(length)
        ids[index, -length:] = prompt.unpadded[0]
        mask[index, -length:] = 1 if real is None else real[0]
        positions[index, -length:] = prompt.text_positions(0, length)[0]
    return TokenBuffer(ids, 0, mask, positions)
