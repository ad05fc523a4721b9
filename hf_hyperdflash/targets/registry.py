"""The families of targets, which of them a model belongs to, and the capture of its residual streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .deepseek_v4 import DeepseekV4
from .families import Glm5Next, Granite, HyperConnected, MambaHybrid, Qwen4Exp
from .hooks import ResidualTap
from .target import Target

# The first family that fits is chosen.
FAMILIES: tuple[type[Target], ...] = (DeepseekV4, Glm5Next, HyperConnected, Qwen4Exp, Granite, MambaHybrid, Target)


def target_of(model: PreTrainedModel | Target) -> Target:
    """Return a model as drafters and the loop see it; raise a `ValueError` if it belongs to no known family. For a
    bound model that is what `bind` made; a [`Target`] is returned as it is."""
    if isinstance(model, Target):
        return model
    binding = getattr(model, "__dict__", {}).get("hyperdflash_binding")
    if bound := getattr(binding, "target", None):
        return bound
    if is_drafter(model):
        raise ValueError(f"The target is a {type(model).__name__}, a drafter: pass the model that it drafts for.")
    check_without_virtual_tokens(model)
    if not isinstance(model, PreTrainedModel):
        given = repr(model) if isinstance(model, (str, type)) else f"a {type(model).__name__}"
        # PEFT, `torch.compile`, data parallelism and pipelines wrap a model.
        names = ("_orig_mod", "module", "model")
        inside = next((name for name in names if isinstance(getattr(model, name, None), PreTrainedModel)), "")
        if hasattr(model, "get_base_model") and not isinstance(model, type):
            inside = "get_base_model()"
        fix = f"pass what it wraps, its `{inside}`" if inside else "load it with `hf_hyperdflash.load_target` first"
        raise ValueError(f"The target is {given}, expected a model: {fix}.")
    # The module that runs the decoder layers.
    modules: tuple[Any, ...] = (model.get_decoder(), model.base_model, model)
    trunk: Any = next((part for part in modules if isinstance(getattr(part, "layers", None), nn.ModuleList)), None)
    family = next((family for family in FAMILIES if family.fits(model, trunk)), None) if trunk is not None else None
    if family is None:
        name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
        known = ", ".join(family.title for family in FAMILIES[:-1])
        raise ValueError(
            f"The target is a {name} model: expected one of {known}, or a {Target.title}. Load the target with "
            "`AutoModelForCausalLM.from_pretrained(...)`; docs/extending/family.md says how a family is added."
        )
    return family(model, trunk)


def check_without_virtual_tokens(target: object) -> None:
    """Raise a `ValueError` if a target is wrapped by PEFT for prompt or prefix tuning, or generates for such a
    wrapper, which is how PEFT's `generate` runs it."""
    preparing = getattr(target, "prepare_inputs_for_generation", None)
    for wrapper in (target, getattr(preparing, "__self__", None)):
        tuning: Any = getattr(wrapper, "active_peft_config", None) if hasattr(wrapper, "get_base_model") else None
        if getattr(tuning, "is_prompt_learning", False):
            raise ValueError(
                f"The target is tuned by PEFT's {tuning.peft_type.value}, whose virtual tokens are in its cache and "
                "in no text, so that drafts have no place after them: generate without a drafter, or train a LoRA "
                "adapter and merge it (`merge_and_unload()`)."
            )


def is_bound(model: object) -> bool:
    """Return whether `model` is a bound target."""
    return hasattr(type(model), "bound_by")


def is_drafter(model: object) -> bool:
    """Return whether `model` has the methods of a [`~drafters.base.Drafter`], as wrapped ones have, too."""
    return all(callable(getattr(model, name, None)) for name in ("check_target", "extend", "draft", "bind"))


@contextmanager
def capture_residual(target: PreTrainedModel, target_layer_ids: Sequence[int] = (-1,)) -> Iterator[list[torch.Tensor]]:
    """Collect the residual streams of every forward that this thread runs inside the context.

    Args:
        target: The target. One that is not bound gets hooks for the time, which torch does not expect to go while
            another thread runs it: bind it where several threads do.
        target_layer_ids: After which layers: -1 is the last, whose streams are the pre-collapse residual. Empty
            for nothing.

    Yields:
        A list that grows by one tensor per forward, `[batch, seq, paths, config.hidden_size]` with `config.hc_mult`
        streams per layer, in the order of `target_layer_ids`.
    """
    seen, bound = target_of(target), getattr(vars(target).get("hyperdflash_binding"), "residual", None)
    tap = ResidualTap(seen.layers, seen.streams) if bound is None else bound
    capture = tap.new_capture(target_layer_ids)
    end = tap.captures.add(capture) if target_layer_ids else None
    try:
        yield capture.captured
    finally:
        if end is not None:
            end()
        for handle in tap.handles if bound is None else ():
            handle.remove()
