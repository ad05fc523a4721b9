"""The HyperDFlash drafter: a block of tokens in one pass from the target's pre-collapse residual."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from pathlib import PurePath
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from .block_path import BlockPath
from .configuration_hyperdflash import HyperDFlashConfig
from .drafter import SavedDrafter
from .heads import HEADS, ConfidenceHead, HeadOutput, SequentialHead, along_text
from .layers import (
    CausalConvolution,
    ContextCache,
    HyperDFlashLayer,
    HyperDFlashRotaryEmbedding,
    attention_mask_for,
    block_inputs,
)
from .mask_token import find_mask_token
from .reducers import REDUCERS, HCGateReducer, RMSNorm
from .sampling import DraftSampler
from .target_family import TargetFamily
from .targets import family_of
from .tree import DraftTree
from .weights import named_dtype

logger = logging.getLogger(__name__)


class HyperDFlashDrafter(SavedDrafter):
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

    def __init__(self, config: HyperDFlashConfig) -> None:
        super().__init__(config)
        self.reducer = REDUCERS[config.reducer]
        for name, module in self.reducer.modules(config).items():
            self.add_module(name, module)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.hidden_size != config.target_hidden_size:
            self.embed_proj = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)
            self.head_proj = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        self.layers = nn.ModuleList(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(config.target_hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # of the target's vocabulary
        memory = 0
        if config.sequential_head != "none":
            head = HEADS[config.sequential_head](config)
            self.add_module(head.key, head)
            memory = head.memory_size if config.confidence_reads_token else 0
        self.confidence_head = ConfidenceHead(config, memory) if config.confidence_head else None
        self.rotary_emb = HyperDFlashRotaryEmbedding(config)  # type: ignore[arg-type]
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HCGateReducer):
            # Half-open gates on every path: near the mean of the paths, where `hc_head` starts too.
            init.normal_(module.hc_fn, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.hc_base)
            init.ones_(module.hc_scale)
        elif isinstance(module, RMSNorm):
            init.zeros_(module.weight)
        elif isinstance(module, SequentialHead):
            module.reset(self.config.initializer_range)
        elif isinstance(module, (ConfidenceHead, CausalConvolution)):
            module.reset()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel,
        *,
        reducer: str | None = None,
        mask_token_id: int | None = None,
        tokenizer: Any = None,
        num_draft_tokens: int = 6,
        dtype: torch.dtype | str | None = None,
        **config_fields: Any,
    ) -> HyperDFlashDrafter:
        """Build an untrained drafter fitted to a target, its gate inherited from the target's `hc_head`.

        Args:
            target: The model to draft for. It is read, not changed. Of one on the meta device the drafter is there
                too: sizes and counts without weights.
            reducer: One of [`HyperDFlashConfig`]'s, or `None` for the gate where the paper's conditions hold (a gated
                collapse in the target, equal widths) and the `fc` fallback, with a logged reason, where not.
            mask_token_id: A token that no text has; found by [`~mask_token.find_mask_token`] if left out.
            tokenizer: The target's, for that; the one beside its weights if left out.
            num_draft_tokens: Drafted tokens per round, the block size less the anchor.
            dtype: Of the drafter's weights (the gate stays float32), or its name; the target's residual stream's by
                default.
            **config_fields: Any field of [`HyperDFlashConfig`], overriding what the target suggests.

        Raises:
            ValueError: If it is no target, no mask token is found, there is no such field or dtype, or the gate is
                asked for where it cannot be inherited.
        """
        if type(num_draft_tokens) is not int or num_draft_tokens < 1:
            raise ValueError(f"`num_draft_tokens` is {num_draft_tokens!r}, expected an integer of at least 1.")
        dtype = named_dtype(dtype)
        HyperDFlashConfig.check_fields(config_fields)
        family = family_of(target)
        own = family.config
        width = config_fields.get("hidden_size", own.hidden_size)
        obstacle = _gate_obstacle(family, width)
        if reducer is None:
            reducer = "fc" if obstacle else "hc_gate"
            if obstacle:
                logger.warning("HyperDFlash falls back to reducer='fc': %s.", obstacle)
        elif obstacle and reducer in REDUCERS and REDUCERS[reducer].has_gate:
            raise ValueError(f"`reducer={reducer!r}` cannot be used: {obstacle}. Pass `reducer='fc'` or leave it out.")
        head_dim = config_fields.get("head_dim", min(128, family.head_dim))
        heads = max(1, width // head_dim)
        fields: dict[str, Any] = {
            "vocab_size": own.vocab_size,
            "hidden_size": width,
            "head_dim": head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
            "intermediate_size": 3 * width,
            "rms_norm_eps": family.norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": family.rope_theta},
            "max_position_embeddings": own.max_position_embeddings,
            # Engines' layouts, which are for targets with one stream, have no words for a window that all slots share.
            "sliding_window": None if family.paths == 1 else min(2048, own.max_position_embeddings),
            "block_size": num_draft_tokens + (0 if config_fields.get("sample_from_anchor") else 1),
            "mask_token_id": find_mask_token(target, tokenizer) if mask_token_id is None else mask_token_id,
            "hc_eps": family.hc_eps,
            "target_hidden_size": own.hidden_size,
            "target_hc_mult": family.paths,
            "target_model_type": own.model_type,
            "target_name_or_path": target.config._name_or_path,
            "target_revision": getattr(target.config, "_commit_hash", None) or "",
        }
        config = HyperDFlashConfig(reducer=reducer, **{**fields, **config_fields})
        check_pair(config, target)
        head = target.get_output_embeddings()
        is_offloaded = hasattr(head, "_hf_hook")
        device = head.weight.device if not (head.weight.is_meta and is_offloaded) else torch.device("cpu")
        with torch.device("meta") if device.type == "meta" else nullcontext():
            drafter = cls(config)
        if config.has_gate:
            drafter.hc_gate.inherit(family.gate())
        for name, part in drafter.named_children():
            # Not all at once: the gate would be rounded on its way.
            part.to(device=device, dtype=torch.float32 if name == "hc_gate" else dtype or family.dtype)
        return drafter

    # Drafting

    def reduce(self, residual: torch.Tensor) -> torch.Tensor:
        """Collapse `[batch, seq, config.num_paths, config.target_hidden_size]` to the normed conditioning feature
        `[batch, seq, config.hidden_size]` in the drafter's dtype."""
        return self.hidden_norm(self.reducer.reduce(self, residual, self.dtype))

    def forward(
        self,
        block_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context: ContextCache | None = None,
        attention_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_position_ids: torch.Tensor | None = None,
        previous_ids: torch.Tensor | None = None,
        previous_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | HeadOutput:
        """Run blocks over their context: the one path that training and generation share.

        Args:
            block_embeds: `[batch, queries, config.target_hidden_size]`, the target's embeddings of anchors and mask
                tokens.
            position_ids: `[batch, queries]`, true positions.
            context: What is known of the tokens before; the residual's are added to it. `None` in training.
            attention_mask: Boolean `[batch, 1, queries, context + seq + queries]`, `True` where a query may look;
                `None` for one block that sees all of its context and itself.
            residual: The target's residual paths of `config.target_layer_ids` of tokens before the anchors,
                `[batch, seq, config.num_paths, config.target_hidden_size]`.
            residual_position_ids: `[batch, seq]`, true positions of `residual`.
            previous_ids: `[batch, blocks, config.max_draft_tokens]`, in training: the token before each draft.
            previous_embeds: The target's embeddings of them, `[..., config.target_hidden_size]`.

        Returns:
            States that the target's LM head reads, `[batch, queries, config.target_hidden_size]`; with `previous_ids`
            what the heads make of those of the draft positions, `[batch, blocks, config.max_draft_tokens, ...]`.

        Raises:
            ValueError: If neither `context` nor `residual` is given.
        """
        if context is None and residual is None:
            raise ValueError("Expected `context`, or `residual` with `residual_position_ids`, not neither.")
        hidden, feature, new = block_embeds.to(self.dtype), None, 0
        if attention_mask is not None:
            attention_mask = attention_mask_for(self.config._attn_implementation, attention_mask, hidden.dtype)
        if hasattr(self, "embed_proj"):
            hidden = self.embed_proj(hidden)
        if residual is not None:
            feature, new = self.reduce(residual), residual.shape[1]
            position_ids = torch.cat([cast(torch.Tensor, residual_position_ids), position_ids], dim=1)
        rotary = self.rotary_emb(hidden, position_ids)
        if context is not None:
            context.make_room(position_ids.shape[1], hidden, self.config)
        for index, layer in enumerate(self.layers):
            known = None if context is None else context.layer(index, new)
            hidden = layer(hidden, feature, rotary, known, attention_mask)
        if context is not None:
            context.advance(new)
        hidden = self.norm(hidden)
        hidden = self.head_proj(hidden) if hasattr(self, "head_proj") else hidden
        if previous_ids is None:
            return hidden
        drafts = hidden.unflatten(1, (-1, self.config.block_size))[:, :, self.config.first_slot :]
        return along_text(drafts, previous_ids, previous_embeds, self.head, self.confidence_head)

    # One sequence

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the layers; a gate is always float32."""
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the layers are."""
        return self.norm.weight.device

    @property
    def target_layer_ids(self) -> list[int]:  # type: ignore[override]
        """Whose residual paths the drafter reads."""
        return self.config.target_layer_ids or []

    @property
    def max_draft_tokens(self) -> int:  # type: ignore[override]
        """The draft positions of a block."""
        return self.config.max_draft_tokens

    @property
    def _about_drafts(self) -> str:  # type: ignore[override]
        return (
            f", the draft positions of its block of {self.config.block_size}. Train one with a larger "
            "`num_draft_tokens` for more"
        )

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise a `ValueError` that names both values if the drafter does not fit `target`."""
        check_pair(self.config, target)

    def new_context(self) -> ContextCache:
        """An empty context for one sequence."""
        return ContextCache(self.config.sliding_window)

    @torch.no_grad()
    def extend(
        self,
        target: PreTrainedModel,
        context: ContextCache,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the context: of many, those that its window keeps. Few of them go in with the next
        block, in one pass; the residual of many, a prompt's, is not kept for so long."""
        if context.pending is not None:
            self.take_in(context)
        kept, device = slice(-context.window if context.window else None, None), self.device
        context.pending = residual[:, kept].to(device), position_ids[:, kept].to(device)
        if residual.shape[1] > self.config.block_size:
            self.take_in(context)

    @torch.no_grad()
    def take_in(self, context: ContextCache) -> None:
        """Compute keys and values of what is pending, without a block."""
        if context.pending is None:
            return
        residual, position_ids = context.pending
        feature, new = self.reduce(residual), residual.shape[1]
        rotary = self.rotary_emb(feature, position_ids)
        context.make_room(new, feature, self.config)
        for index, layer in enumerate(self.layers):
            attention = cast(HyperDFlashLayer, layer).self_attn
            context.layer(index, new)(*attention.keys_values(feature, rotary))
        context.advance(new)
        context.pending = None

    @torch.no_grad()
    def propose(
        self,
        target: PreTrainedModel,
        context: ContextCache,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        count: int,
        sampler: DraftSampler,
    ) -> DraftTree:
        """Draft `count` tokens after the last of `ids` in one pass. The block always has its trained width."""
        config = self.config
        block, positions = block_inputs(ids[:, -1:], position_ids[:, -1:], config.block_size, config.mask_token_id)
        device = self.device
        embeds = family_of(target).embed(block).to(device)
        hidden = self(embeds, positions.to(device), context, None, *(context.pending or ()))
        context.pending = None
        states = hidden[:, config.first_slot : config.first_slot + count]
        if self.head is None and self.confidence_head is None:
            return sampler.chain(ids, self.of_vocabulary(self.logits(target, states)))
        path = BlockPath(self, target, states)
        tree = sampler.path(ids, count, path.logits_after)
        return replace(tree, confidence=torch.cat(path.confidence) if path.confidence else None)

    def logits(
        self, target: PreTrainedModel, hidden: torch.Tensor, vectors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits of the tokens that can be drafted, `[..., config.draft_vocab_size or config.vocab_size]`, from what
        [`forward`] returned: by the target's LM head, or an own one over fewer tokens, and by the head's table."""
        logits = self.lm_head(hidden) if self.config.draft_vocab_size else family_of(target).logits(hidden)
        if vectors is None or self.head_table is None:
            return logits
        return logits + nn.functional.linear(vectors, self.head_table).to(logits)

    def logits_of(self, target: PreTrainedModel, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The same of some of them, `[batch, tokens]`, from `[batch, config.target_hidden_size]`."""
        if not self.config.draft_vocab_size:
            return family_of(target).logits_of(hidden, ids)
        return torch.einsum("bd,bcd->bc", hidden, self.lm_head.weight[ids])

    def of_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """`[..., config.vocab_size]` from those of the tokens that can be drafted."""
        if not self.config.draft_vocab_size:
            return logits
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), -torch.inf)
        return full.index_copy_(-1, cast(torch.Tensor, self.draft_ids), logits)

    @property
    def head(self) -> SequentialHead | None:
        """What lets each draft know the one before it, if there is one."""
        kind = HEADS.get(self.config.sequential_head)
        return None if kind is None else getattr(self, kind.key)

    @property
    def head_table(self) -> torch.Tensor | None:
        """The head's `[config.draft_vocab_size or config.vocab_size, config.head_rank]`, if it has one."""
        return None if self.head is None else self.head.table

    # Use with a target

    def bind(self, target: PreTrainedModel) -> None:
        """As of any drafter; its configuration takes the target's special tokens, which transformers' pipelines
        compare."""
        super().bind(target)
        own = target.config.get_text_config(decoder=True)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self.config, name, getattr(own, name, None))


def _gate_obstacle(family: TargetFamily, width: int) -> str | None:
    """Why the gate cannot be inherited (the paper's conditions, section 2.2), or `None`."""
    if family.why_ungated:
        return family.why_ungated
    if width != family.config.hidden_size:
        return f"the drafter's hidden size {width} differs from the target's {family.config.hidden_size}"
    return None


def check_pair(config: HyperDFlashConfig, target: PreTrainedModel) -> None:
    """Check that a drafter's configuration fits a target; warn where only the target's name differs.

    Raises:
        ValueError: Naming both values, if they cannot work together.
    """
    family = family_of(target)
    own = family.config
    for what, drafters, targets in (
        ("vocab_size", config.vocab_size, own.vocab_size),
        ("hidden_size", config.target_hidden_size, own.hidden_size),
        ("hc_mult", config.target_hc_mult, family.paths),
    ):
        if drafters != targets:
            raise ValueError(
                f"The drafter was made for a target with `{what}` {drafters}, but this target's is {targets}. Load "
                "the drafter's own target, or make one with `HyperDFlashDrafter.from_target(target)`."
            )
    deepest = max(config.target_layer_ids or [-1])
    if own.num_hidden_layers and deepest >= own.num_hidden_layers:  # loaded without layers: for its head alone
        raise ValueError(
            f"The drafter reads layers {config.target_layer_ids}, but this target's are 0 to "
            f"{own.num_hidden_layers - 1} (-1 for the last)."
        )
    if config.mask_token_id >= own.vocab_size:
        raise ValueError(
            f"The drafter's mask token {config.mask_token_id} is outside the target's vocabulary of {own.vocab_size}."
        )
    made_for, given = PurePath(config.target_name_or_path).name, PurePath(target.config._name_or_path).name
    if made_for and given and made_for.lower() != given.lower():
        logger.warning(
            "The drafter was made for %r and is used with %r: the text stays the target's own, but fewer drafts may "
            "be accepted.",
            config.target_name_or_path,
            target.config._name_or_path,
        )


def register_auto_classes() -> None:
    """Let `AutoConfig` and `AutoModel` load drafters in this process. Nothing is registered until this is called."""
    from transformers import AutoConfig, AutoModel

    AutoConfig.register(HyperDFlashConfig.model_type, HyperDFlashConfig, exist_ok=True)
    AutoModel.register(HyperDFlashConfig, HyperDFlashDrafter, exist_ok=True)
