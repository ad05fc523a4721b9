"""Adds the last layer's output, before the norm, to the states that a target of SGLang returns.

SGLang gives drafters the input of a layer. So some of its models (Qwen3 and Llama among them) have nothing to return
for the last layer's output, and silently omit it. The norm after that layer gets it as its input.
"""

from __future__ import annotations

import torch
from torch import nn

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]  # of the norm, with the residual that it has added
States = torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]  # of the trunk, with what the layers got


def hand_out_last_layer(target: nn.Module, layers: int) -> None:
    """Make a target of SGLang add its last layer's output to the states that it returns, if it omits it: the drafter
    reads that many layers, the last one included."""
    trunk = getattr(target, "model", None)
    norm = getattr(trunk, "norm", None)
    if trunk is None or norm is None:
        raise ValueError(
            f"SGLang's {type(target).__name__} has no `model.norm`, before which the drafter reads the last layer: "
            "expected one, or a drafter whose `target_layer_ids` leave it out."
        )
    last_output: list[torch.Tensor] = []

    def record(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: Output) -> None:
        last_output[:] = [(output[1] if isinstance(output, tuple) else inputs[0]).clone()]

    def append_last(_: nn.Module, inputs: tuple[torch.Tensor, ...], output: States) -> States:
        hidden, states = output if isinstance(output, tuple) else (output, [])
        if isinstance(states, list) and len(states) == layers - 1:
            states.append(last_output.pop() if last_output else hidden)  # without tokens the norm is not called
        last_output.clear()
        return hidden, states

    norm.register_forward_hook(record)
    trunk.register_forward_hook(append_last)
