"""Cache layers for linear attention and Mamba that can be cropped after the target has verified a draft.

Linear attention has one running state instead of a key per token, so there is nothing to cut off: stock transformers
calls such a cache not croppable and refuses assisted generation. The layers here keep the state from before the last
forward and the inputs of the attention module. A crop restores that state and runs the module, not the rest of the
decoder layer, once more over the tokens that stay: at most a block of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch.utils.hooks import RemovableHandle
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from .growing import GrowingLayer

Call = tuple[tuple[object, ...], dict[str, object]]  # of a module: arguments by place, and by name


class _Snapshot(NamedTuple):
    """Copies of a layer's states, by their index in the layer; `fed` says which have seen a token."""

    conv: dict[int, torch.Tensor | None]
    recurrent: dict[int, torch.Tensor | None]
    fed: dict[int, bool]


class RewindableLinearLayer(LinearAttentionLayer):
    """Cache layer of a linear-attention block, with a `crop` that undoes tokens of the last forward.

    While recording is on (`activate_past_recording`) and the target runs under a [`CallRecorder`], the layer holds one
    copy of its states, which do not grow with the sequence, and the inputs of one forward. After `crop(-n)` the states
    are those after the tokens that stay, up to the rounding that another length of the same forward brings.
    """

    is_croppable = True  # type: ignore[assignment]

    @classmethod
    def from_stock(cls, layer: Any) -> RewindableLinearLayer:
        """Build a layer that continues from `layer`'s state, which it shares: `layer` must not be used afterwards."""
        rewindable = cls.__new__(cls)
        vars(rewindable).update(vars(layer))
        # Stock recording keeps the convolution's inputs, which some models then update in place: ours keeps states.
        rewindable.record_past = False
        for index, state in rewindable.conv_states.items() if layer.record_past else ():
            if state is not None:  # which `pad` makes shorter, too
                rewindable.conv_states[index] = pad(state, (layer.conv_kernel_size[index] - state.shape[-1], 0))
        rewindable.recording = layer.record_past
        rewindable._forget_call()
        return rewindable

    def activate_past_recording(self) -> None:
        """Record from now on what is needed to undo the last forward."""
        self.recording = True

    def stop_recording(self) -> None:
        """Stop recording, and forget the recorded inputs and states."""
        self.recording = False
        self._forget_call()

    def _forget_call(self) -> None:
        self._calls: dict[nn.Module, Call] = {}
        self._before: _Snapshot | None = None
        self._replaying = False

    def entering(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Record the call of a module that is about to update this layer, and the states before it."""
        if self._replaying or not self.recording:
            return
        if not self._calls or module in self._calls:  # the first module of a new forward
            self._calls = {}
            conv, recurrent = (
                {place: None if state is None else state.clone() for place, state in states.items()}
                for states in (self.conv_states, self.recurrent_states)
            )
            self._before = _Snapshot(conv, recurrent, dict(self.has_previous_state))
        self._calls[module] = (args, kwargs)

    @property
    def undoable_tokens(self) -> int:
        """The number of the last tokens that `crop` can undo now: those of the last forward."""
        return max((_length(args, kwargs) for args, kwargs in self._calls.values()), default=0)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens. A refused crop leaves the layer as it was.

        Args:
            tokens_to_remove: Minus the number of tokens; 0 only forgets what is recorded of the last forward.

        Raises:
            ValueError: If `tokens_to_remove` is positive.
            RuntimeError: If the tokens are more than the last forward's, or it was not recorded.
        """
        count, length = -int(tokens_to_remove), self.undoable_tokens
        if count < 0:
            raise ValueError(
                f"`crop` was called with a positive value ({-count}), expected 0 or a negative one. Pass minus the "
                "number of tokens to remove."
            )
        if count > length and any(self.has_previous_state.values()):  # an MLP has such a layer in earlier transformers
            raise RuntimeError(
                f"`crop` was asked to remove {count} tokens, but linear attention keeps a running state and only the "
                f"last forward, of {length} recorded tokens, can be undone. Crop after every forward, under a "
                "`CallRecorder`."
            )
        calls, before = self._calls, self._before
        if count and before is not None:
            self._restore(before)
        self._forget_call()
        if 0 < count < length:
            self._replay(calls, length, length - count)

    def abort_forward(self, start: int) -> None:
        """Undo a forward that was interrupted, the first one since the last crop.

        Args:
            start: Tokens before the forward.
        """
        if self._before is not None:
            self._restore(self._before)
        self._forget_call()

    def _restore(self, before: _Snapshot) -> None:
        self.has_previous_state = dict(before.fed)
        for states, earlier in ((self.conv_states, before.conv), (self.recurrent_states, before.recurrent)):
            for index, state in earlier.items():
                if state is not None:  # in place: compiled graphs know the address
                    states[index].copy_(state)  # type: ignore[union-attr]

    def _replay(self, calls: dict[nn.Module, Call], length: int, kept: int) -> None:
        self._replaying = True
        try:
            for module, (args, kwargs) in calls.items():
                module(
                    *(_prefix(value, length, kept) for value in args),
                    **{name: _prefix(value, length, kept) for name, value in kwargs.items()},
                )
        finally:
            self._replaying = False

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence of the batch `repeats` times. What is recorded of the last forward is forgotten."""
        self._change_batch(lambda state: state.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the sequences `indices` of the batch. What is recorded of the last forward is forgotten."""
        self._change_batch(lambda state: state[indices, ...])

    def _change_batch(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        kinds: Any = self.conv_states, self.recurrent_states
        for states in kinds:
            for index, state in states.items():
                states[index] = None if state is None else change(state)
        self._forget_call()

    def reset(self) -> None:
        """Forget all tokens; recording stays on if it was."""
        super().reset()
        self._forget_call()


class RewindableHybridLayer(RewindableLinearLayer, LinearAttentionAndFullAttentionLayer, GrowingLayer):
    """As [`RewindableLinearLayer`], for a layer that has linear attention and full attention side by side."""

    dtype: Any
    device: Any

    def stop_recording(self) -> None:
        super().stop_recording()
        GrowingLayer.stop_recording(self)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys and values as the stock layer does. A crop cuts them off, so their module, the last one that was
        entered, is not run again."""
        if self._calls:
            self._calls.popitem()
        return GrowingLayer.update(self, key_states, value_states, *args, **kwargs)

    def batch_repeat_interleave(self, repeats: int) -> None:
        super().batch_repeat_interleave(repeats)
        GrowingLayer.batch_repeat_interleave(self, repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        super().batch_select_indices(indices)
        GrowingLayer.batch_select_indices(self, indices)

    def abort_forward(self, start: int) -> None:
        super().abort_forward(start)
        if (count := self.get_seq_length() - start) > 0:
            DynamicLayer.crop(self, -count)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens from both kinds of attention. A refused crop leaves the keys as they were."""
        super().crop(tokens_to_remove)
        DynamicLayer.crop(self, tokens_to_remove)


def _length(args: tuple[object, ...], kwargs: dict[str, object]) -> int:
    """Return the number of tokens of a call: its first tensor of three dimensions is the hidden states, `[batch, seq,
    features]`."""
    values = (*args, *kwargs.values())
    return next(value.shape[1] for value in values if isinstance(value, torch.Tensor) and value.ndim == 3)


def _prefix(value: object, length: int, kept: int) -> object:
    if isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[1] == length:
        return value[:, :kept]
    return value


class CallRecorder:
    """Hooks that record, in the [`RewindableLinearLayer`]s of a cache, the calls of the modules that update them.

    Args:
        layers: The target's decoder layers, in the order of the cache's.
    """

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.handles: list[RemovableHandle] = [
            part.register_forward_pre_hook(partial(_entering, index), with_kwargs=True)
            for index, layer in enumerate(layers)
            for part in layer.children()
        ]


def _entering(
    index: int, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object] | None = None
) -> None:
    # torch marks a hook as one with keyword arguments after it is there: a thread between the two passes none.
    for value in (*args, *(kwargs or {}).values()):
        cached: Any = value.layers[index] if isinstance(value, Cache) else None
        if hasattr(cached, "entering"):  # of this class, or of a drafter's own copy of it
            cached.entering(module, args, kwargs or {})


_REWINDABLE: dict[type, type[RewindableLinearLayer]] = {
    LinearAttentionLayer: RewindableLinearLayer,
    LinearAttentionAndFullAttentionLayer: RewindableHybridLayer,
}


def make_linear_rewindable(cache: Cache) -> Cache:
    """Swap, in place, the stock linear-attention layers of a cache for rewindable ones; others stay as they are."""
    cache.layers[:] = [
        _REWINDABLE[type(layer)].from_stock(layer) if type(layer) in _REWINDABLE else layer for layer in cache.layers
    ]
    return cache
