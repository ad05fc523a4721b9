"""The HyperDFlash drafter: a block of tokens in one pass from the target's pre-collapse residual."""

from __future__ import annotations

import logging
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...targets.registry import target_of
from ...targets.target import Target
from ...targets.vocabulary import find_mask_token
from ..parts.heads import CONFIDENCE_HEADS, HEADS, ConfidenceHead
from ..parts.layers import (
    CausalConvolution,
    DrafterRMSNorm,
    HyperDFlashLayer,
    HyperDFlashRotaryEmbedding,
    block_inputs,
    reset_reducer,
)
from ..parts.reducers import REDUCERS, HCGateReducer
from .configuration_hyperdflash import HyperDFlashConfig
from .drafter import BlockDrafter

logger = logging.getLogger(__name__)

# From how many anchors a fresh drafter's logits are checked.
_ANCHORS = 8

# The fields of heads that a drafter can get later, and the head that each belongs to.
_HEAD_OF = {
    "sequential_head": "sequential_head", "head_rank": "sequential_head", "head_candidates": "sequential_head",
    "head_state_size": "sequential_head", "head_start": "sequential_head",
    "confidence_head": "confidence_head", "confidence_reads_token": "confidence_head",
}  # fmt: skip


class HyperDFlashNetwork(nn.Module):
    """The layers of HyperDFlash, before a base of drafters: the package's, or that of `portable/`."""

    config: Any
    confidence_head: ConfidenceHead | None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.reducer = REDUCERS[config.reducer]
        for name, module in self.reducer.modules(config).items():
            self.add_module(name, module)
        self.hidden_norm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.mask_token_id is None:
            self.mask_embedding = nn.Embedding(1, config.hidden_size)
        self.embed_proj = self.head_proj = None  # where the target is as wide
        if config.hidden_size != config.target_hidden_size:
            self.embed_proj = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)
            self.head_proj = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        self.layers = nn.ModuleList(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = DrafterRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(config.target_hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # of the target's vocabulary
        memory = 0
        if config.sequential_head != "none":
            head = HEADS[config.sequential_head](config)
            self.add_module(head.key, head)
            memory = head.memory_size if config.confidence_reads_token else 0
        self.confidence_head = None
        for kind in CONFIDENCE_HEADS.values() if config.confidence_head else ():
            self.confidence_head = kind(config, memory)
        self.rotary_emb = HyperDFlashRotaryEmbedding(config)
        cast(Any, self).post_init()

    def reduce(self, residual: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.reducer.reduce(self, residual, cast(Any, self).dtype))

    def _begin(self, embeds: torch.Tensor) -> torch.Tensor:
        hidden = embeds if self.embed_proj is None else self.embed_proj(embeds)
        if self.config.mask_token_id is not None:
            return hidden
        slots = torch.arange(hidden.shape[1], device=hidden.device) % self.config.block_size
        mask = self.mask_embedding(torch.zeros_like(slots))
        return torch.where((slots == 0).unsqueeze(-1), hidden, mask)

    def _end(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(hidden)
        return hidden if self.head_proj is None else self.head_proj(hidden)


class HyperDFlashDrafter(HyperDFlashNetwork, BlockDrafter):
    """Drafts a block of tokens in one pass from the target's pre-collapse residual (paper, Figure 2).

    The target's embedding and LM head are shared: they belong to the target, are passed in where needed, and are
    neither copied nor saved. Use [`from_target`] to make a drafter for a target, `drafter.bind(target)` to prepare the
    target, then `target.generate(**inputs, assistant_model=drafter)`.
    """

    config: HyperDFlashConfig
    hc_gate: HCGateReducer
    config_class = HyperDFlashConfig
    base_model_prefix = "drafter"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HyperDFlashLayer"]
    _supports_sdpa = _supports_flash_attn = _supports_flex_attn = _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ["hc_gate"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        reset_reducer(module, self.config.initializer_range)
        if isinstance(module, CausalConvolution):
            module.reset()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        reducer: str | None = None,
        mask_token_id: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_draft_tokens: int = 6,
        dtype: torch.dtype | str | None = None,
        **config_fields: Any,
    ) -> HyperDFlashDrafter:
        """Build an untrained drafter that fits a target, with a gate inherited from the target's `hc_head`.

        Of a target with one residual stream it reads as many layers as it has itself, spread as published DFlash
        drafters do, and says which; of one with several the pre-collapse residual.

        Args:
            target: The model to draft for. It is read, not changed. Of one on the meta device the drafter is there
                too: sizes and counts without weights.
            reducer: One of [`HyperDFlashConfig`]'s, or `None` for the gate where the paper's conditions hold (a gated
                collapse in the target, equal widths) and the `fc` fallback, with a logged reason, where not.
            mask_token_id: A token that no text has; found by [`~targets.vocabulary.find_mask_token`] if left out, and
                where there is none the drafter has a mask vector of its own.
            tokenizer: The target's, for that; the one beside its weights if left out.
            num_draft_tokens: Drafted tokens per round, the block size less the anchor.
            dtype: Of the drafter's weights (the gate stays float32), or its name; the target's residual stream's by
                default.
            **config_fields: Any field of [`HyperDFlashConfig`], overriding what the target suggests. With a
                `draft_vocab_size` the drafter has so many of the rows of the target's LM head, the first ones
                ([`draft_only`] takes others).

        Raises:
            ValueError: If `target` is no target, there is no such field or dtype, or the gate is requested and
                cannot be inherited.
        """
        if type(num_draft_tokens) is not int or num_draft_tokens < 1:
            raise ValueError(f"`num_draft_tokens` is {num_draft_tokens!r}, expected an integer of at least 1.")
        HyperDFlashConfig.check_fields(config_fields)
        seen = target_of(target)
        own = seen.config
        # The paper's conditions for the gate (section 2.2).
        obstacle = seen.why_ungated
        if not obstacle and (width := config_fields.get("hidden_size", own.hidden_size)) != own.hidden_size:
            obstacle = f"the drafter's hidden size {width} differs from the target's {own.hidden_size}"
        if reducer is None:
            reducer = "fc" if obstacle else "hc_gate"
            if obstacle:
                logger.warning("HyperDFlash falls back to reducer='fc': %s.", obstacle)
        elif obstacle and reducer in REDUCERS and REDUCERS[reducer].has_gate:
            raise ValueError(f"`reducer={reducer!r}` cannot be used: {obstacle}. Pass `reducer='fc'` or leave it out.")
        fields: dict[str, Any] = {
            "reducer": reducer,
            # Engines' layouts, which are for targets with one stream, have no field for a window that all slots share.
            "sliding_window": None if seen.streams == 1 else min(2048, own.max_position_embeddings),
            "block_size": num_draft_tokens + (0 if config_fields.get("sample_from_anchor") else 1),
            "mask_token_id": find_mask_token(seen, tokenizer) if mask_token_id is None else mask_token_id,
            **config_fields,
        }
        if seen.streams == 1 and fields.get("target_layer_ids") is None:
            fields["target_layer_ids"] = _spread_layers(own, fields.get("num_hidden_layers"))
            logger.warning(
                "The drafter reads layers %s of the target's %d; `target_layer_ids` chooses others.",
                ", ".join(map(str, fields["target_layer_ids"])),
                own.num_hidden_layers,
            )
        return super().from_target(target, dtype=dtype, **fields)

    @torch.no_grad()
    def _flatten_first_logits(self, target: Target) -> None:
        """Make a fresh drafter's logits nearly flat, by its last norm. An LM head that is the target's embedding would
        give a high logit to the token that a slot reads, and training would begin with unlearning that. So every other
        weight of the norm changes its sign, which makes states unlike any embedding, and then the norm is scaled
        down."""
        self.norm.weight[1::2].neg_()
        config = self.config
        count = _ANCHORS if config.sample_from_anchor else 1
        anchors = torch.linspace(0, config.vocab_size - 1, count, device=self.device).long()[:, None]
        block, _ = block_inputs(anchors, torch.zeros_like(anchors), config.block_size, config.mask_token_id)
        read = self._begin(target.embed(block).to(self.device, self.dtype))[:, config.first_slot : 2]
        self._flatten_logits(lambda: self.logits(target, self._end(read)))

    def with_heads(self, **fields: Any) -> HyperDFlashDrafter:
        """Return this drafter with heads that it lacks, for further training. At first they change nothing, and it
        drafts as before.

        Args:
            **fields: Of [`HyperDFlashConfig`]: `sequential_head`, `confidence_head`, and their fields.

        Returns:
            A new drafter in this one's dtype and on its device; this one stays as it is.

        Raises:
            ValueError: If a field belongs to no head, the head is there already, or a value does not fit.
        """
        for name, value in fields.items():
            head = _HEAD_OF.get(name)
            if head is None:
                raise ValueError(f"`{name}` is not of a head: expected some of {', '.join(_HEAD_OF)}.")
            if head not in fields:
                raise ValueError(f"`{name}` is {value!r}, but of no new head: add `{head}`, or leave it out.")
            if (own := getattr(self.config, head)) not in ("none", False):
                raise ValueError(
                    f"`{head}` is {fields[head]!r}, but the drafter has one already ({own!r}): leave it out to train "
                    "that one."
                )
        if self.config.confidence_head:  # which has no weights for a token that it did not read
            fields["confidence_reads_token"] = self.head is not None and self.config.confidence_reads_token
        config = HyperDFlashConfig.from_dict({**self.config.to_dict(), **fields})
        config._attn_implementation = self.config._attn_implementation
        grown = type(self)(config)
        grown.load_state_dict(self.state_dict(), strict=False)
        for name, part in grown.named_children():
            part.to(device=self.device, dtype=torch.float32 if name == "hc_gate" else self.dtype)
        return grown


def _spread_layers(target: PreTrainedConfig, drafter_layers: int | None) -> list[int]:
    """Return the layers of a target with one stream that a drafter reads by default, as published DFlash drafters do:
    as many as it has layers itself, evenly from the second one to the fourth from the end; one alone in the middle.

    Layers that use keys of earlier ones are left out: of a prompt they run the last token alone. A target of less than
    four has only its last.
    """
    layers = target.num_hidden_layers - (getattr(target, "num_kv_shared_layers", 0) or 0)
    count = HyperDFlashConfig.num_hidden_layers if drafter_layers is None else drafter_layers
    if layers < 4:
        return [-1]
    if count == 1:
        return [layers // 2]
    return sorted({round(1 + i * (layers - 4) / (count - 1)) for i in range(count)})
