"""The base of the drafters in a saved drafter's folder: loading, checks, and binding to a target."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.configuration_utils import GenerationConfig

from .loop import BoundGenerate, Stats
from .target import INSTALL, Target

_BINDING = threading.Lock()


class PortableDrafter(PreTrainedModel):
    """Drafts for a target: `drafter.bind(target)` once, then `target.generate(**inputs, assistant_model=drafter)`.

    A subclass has three methods. `new_context()` returns what it keeps of a new text. `extend(target, context,
    residual, position_ids, next_ids)` adds accepted tokens: the target's residual `[1, new, streams read,
    config.hidden_size]`, their positions and the token that follows each, `[1, new]`. `draft(target, context, anchor,
    position, count, drafts)` drafts up to `count` tokens after the text's last one, the anchor `[1, 1]`, by
    `drafts.choose`.

    Attributes:
        target_layer_ids: The layers whose residual streams it reads.
        max_draft_tokens: The most drafts of a round; `None` for any number.
        usual_drafts: How many it drafts where nobody says a number, and there is no most.
        last_stats: What the last generation with it did.
    """

    config: Any
    target_layer_ids: Sequence[int] = ()
    max_draft_tokens: int | None = None
    usual_drafts = 3
    last_stats: Stats | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.generation_config = GenerationConfig()  # which transformers reads of an assistant

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """Load the drafter as any model. transformers would fill in missing tensors at random: they are refused."""
        name = pretrained_model_name_or_path
        loaded: Any = super().from_pretrained(name, *args, output_loading_info=True, **kwargs)
        drafter, info = loaded
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        wrong = {kind: sorted(map(str, info[kind]))[:4] for kind in kinds}
        if any(wrong.values()):
            raise ValueError(f"{name} has other tensors than its configuration says, expected the same: {wrong}.")
        return (drafter, info) if output_loading_info else drafter

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """Return nothing: the embeddings are the target's."""

    def layers_read(self, target: Target) -> Sequence[int]:
        """Return the layers of a target whose residual streams it reads."""
        return self.target_layer_ids

    def attention_mask(self, mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """Return a boolean mask, `True` where a query sees a key, as the drafter's attention takes it."""
        if mask is None or self.config._attn_implementation == "sdpa":
            return mask
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)

    def full_logits(self, target: Target, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits of all of the target's tokens from those of the tokens `ids`, or of the first ones. Others,
        which cannot be drafted, get minus infinity."""
        size = target.config.vocab_size
        if ids is None:
            return torch.nn.functional.pad(logits, (0, size - logits.shape[-1]), value=-torch.inf)
        return logits.new_full((*logits.shape[:-1], size), -torch.inf).index_copy(-1, ids.to(logits.device), logits)

    # Use with a target

    def check_target(self, target: Target) -> None:
        """Raise a `ValueError` that names both values if the drafter was made for another kind of target."""
        own, config, last = target.config, self.config, max(self.layers_read(target), default=0)
        any_streams = getattr(config, "any_streams", False) or not hasattr(config, "target_hc_mult")
        facts = [
            ("hidden_size", getattr(config, "target_hidden_size", config.hidden_size), own.hidden_size),
            ("hc_mult", target.streams if any_streams else config.target_hc_mult, target.streams),
            ("num_hidden_layers", max(last + 1, len(target.layers)), len(target.layers)),
        ]
        if config.vocab_size != own.vocab_size:  # a fine-tuned one may have more
            facts.append(("vocab_size", max(config.vocab_size, own.vocab_size), own.vocab_size))
            facts.append(("model_type", getattr(config, "target_model_type", "") or own.model_type, own.model_type))
        for name, drafters, targets in facts:
            if drafters != targets:
                raise ValueError(
                    f"The drafter was made for a target with `{name}` {drafters}, but this target's is {targets}: "
                    f"load {getattr(config, 'target_name_or_path', '') or 'its own target'}."
                )

    def bind(self, target: PreTrainedModel, as_default: bool = False) -> bool:
        """Prepare one target for `target.generate(..., assistant_model=drafter)`.

        That instance gets a `generate` of its own, and its layers get hooks that do nothing in other calls.

        Args:
            target: The target.
            as_default: Whether `target.generate` drafts with this drafter where no `assistant_model` is passed.

        Returns:
            Whether it was not bound to this target before.
        """
        with _BINDING:
            bound: Any = vars(target).get("generate")
            if not hasattr(bound, "drafters"):
                bound = BoundGenerate(target)
            try:
                self.check_target(bound.target)
                vars(target)["generate"] = bound
                is_new = self not in bound.drafters
                bound.drafters.add(self)
                bound.default = self if as_default else bound.default
                return is_new
            finally:
                bound.release_if_unused()

    def unbind(self, target: PreTrainedModel) -> None:
        """Undo [`bind`]. The target gets its own `generate` back when no drafter is bound to it any more."""
        with _BINDING:
            bound: Any = vars(target).get("generate")
            if hasattr(bound, "drafters"):
                bound.drafters.discard(self)
                bound.default = None if bound.default is self else bound.default
                bound.release_if_unused()

    def checked_count(self, count: Any, configured: Any) -> int:
        """Return how many tokens to draft a round.

        Args:
            count: `num_assistant_tokens` of a call.
            configured: That of a generation configuration, in which transformers' default may stand.
        """
        maximum = self.max_draft_tokens
        if "auto" in (count, configured):
            raise ValueError(f"`num_assistant_tokens` is 'auto': for as many drafts as save time {INSTALL}.")
        if count is None:
            return min(configured or maximum or self.usual_drafts, maximum or 2**16)
        if type(count) is not int or not 1 <= count <= (maximum or count):
            numbers = f"from 1 to {maximum}" if maximum else "of at least 1"
            raise ValueError(f"This drafter cannot draft {count!r} tokens a round: expected a whole number {numbers}.")
        return count

    def _supports_logits_to_keep(self) -> bool:
        """Raise an error: a target that is not bound asks this of an assistant."""
        raise ValueError("A drafter works only through a bound target: call `drafter.bind(target)` once.")

    def adapt(self, *args: Any, **kwargs: Any) -> Any:
        """Raise an error: learning while serving is not in this file."""
        raise ValueError(f"For learning while serving {INSTALL}.")
