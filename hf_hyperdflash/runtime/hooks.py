"""Everything that hangs on a bound target's modules, from `bind` to `unbind`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from .cache_linear import CallRecorder
from .indexer import OneTokenChoice
from .residual import ResidualTap


class TargetHooks:
    """The hooks of one bound target. Plain forwards run as if they were not there.

    Args:
        target: The target.
        layers: Its decoder layers.
        paths: How many residual paths it has.
        has_linear_attention: Whether some of its layers keep a running state.
    """

    def __init__(self, target: nn.Module, layers: nn.ModuleList, paths: int, has_linear_attention: bool) -> None:
        self.residual = ResidualTap(layers, paths)
        self.choice = OneTokenChoice(target)
        self.calls = CallRecorder(layers if has_linear_attention else ())

    @contextmanager
    def own_forward(
        self, target_layer_ids: Sequence[int], verified_position_ids: torch.Tensor | None = None
    ) -> Iterator[list[torch.Tensor]]:
        """Run one forward of ours inside: what others run on the target, logits processors for example, is not seen.

        Args:
            target_layer_ids: Whose residual paths to read, as in [`~runtime.targets.capture_residual`].
            verified_position_ids: `[1, seq]` of a verification round; `None` for a prompt.

        Yields:
            A list to which the forward adds its residual paths.
        """
        with ExitStack() as stack:
            if verified_position_ids is not None:
                stack.enter_context(self.choice.applied(verified_position_ids))
            yield stack.enter_context(self.residual.reading(target_layer_ids))

    def remove(self) -> None:
        """Take them all off."""
        for handle in (*self.residual.handles, *self.choice.handles, *self.calls.handles):
            handle.remove()
