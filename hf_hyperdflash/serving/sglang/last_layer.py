"""The last layer's output, before the norm, from a target of SGLang.

SGLang hands drafters what enters a layer. Some of its models (Qwen3 and Llama among them) so have nothing to hand out
after the last, and leave it out without a word. The norm that follows has it.
"""

from __future__ import annotations

from typing import Any

import torch


def hand_out_last_layer(target: Any, layers: int) -> None:
    """Let one target add its last layer's output to what it hands out, where it does not by itself.

    Args:
        target: SGLang's model.
        layers: How many layers' states the drafter reads, the last one's included.

    Raises:
        ValueError: If it has no norm after its layers where SGLang's models have it.
    """
    trunk = getattr(target, "model", None)
    norm = getattr(trunk, "norm", None)
    if trunk is None or norm is None:
        raise ValueError(
            f"SGLang's {type(target).__name__} has no `model.norm`, before which the drafter reads the last layer: "
            "expected one, or a drafter whose `target_layer_ids` have no -1."
        )
    kept: list[torch.Tensor] = []

    def keep(_: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
        kept[:] = [(output[1] if isinstance(output, tuple) else inputs[0]).clone()]

    def add(_: Any, inputs: Any, output: Any) -> Any:
        hidden, states = output if isinstance(output, tuple) else (output, [])
        if isinstance(states, list) and len(states) == layers - 1:
            states.append(kept.pop() if kept else hidden)  # the norm is left out where there are no tokens
        kept.clear()
        return hidden, states

    norm.register_forward_hook(keep)
    trunk.register_forward_hook(add)
