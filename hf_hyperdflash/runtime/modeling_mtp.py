"""DeepSeek-V4's native drafter: the multi-token-prediction block that its checkpoints carry as `mtp.0.*`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HyperHead,
    DeepseekV4PreTrainedModel,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

from .configuration_mtp import DeepseekV4MTPConfig
from .drafter import SavedDrafter
from .mtp_checkpoint import PREFIX, MTPCheckpoint
from .sampling import DraftSampler
from .targets import family_of
from .tree import DraftTree
from .weights import check_finite, check_source, named_dtype

# Our names and DeepSeek's, by prefix, the first that matches; experts, one tensor each there, are handled apart.
_DEEPSEEK_NAMES = [
    ("block.self_attn.q_a_proj", "attn.wq_a"),
    ("block.self_attn.q_b_proj", "attn.wq_b"),
    ("block.self_attn.q_a_norm", "attn.q_norm"),
    ("block.self_attn.kv_proj", "attn.wkv"),
    ("block.self_attn.kv_norm", "attn.kv_norm"),
    ("block.self_attn.o_a_proj", "attn.wo_a"),
    ("block.self_attn.o_b_proj", "attn.wo_b"),
    ("block.self_attn.sinks", "attn.attn_sink"),
    ("block.input_layernorm", "attn_norm"),
    ("block.post_attention_layernorm", "ffn_norm"),
    ("block.attn_hc.", "hc_attn_"),
    ("block.ffn_hc.", "hc_ffn_"),
    ("block.mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("block.mlp.gate", "ffn.gate"),
    ("block.mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("block.mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
    ("block.mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
    ("hc_head.hc_", "hc_head_"),
]
Rotary = tuple[torch.Tensor, torch.Tensor]


class MTPContext:
    """What the block keeps of one sequence: the keys of its last accepted entries, and its streams after the last.

    Stands in for a transformers cache in the block's attention. Tensors are replaced, never written to: a shallow copy
    can run ahead, and the original is as it was.

    Args:
        sliding_window: `config.sliding_window`; a query sees itself and `sliding_window - 1` keys before it.
    """

    def __init__(self, sliding_window: int) -> None:
        self.sliding_window = sliding_window
        self.end = 0  # position after the last token seen, in tokens of the sequence
        self.keys: torch.Tensor | None = None  # [1, 1, at most sliding_window - 1, config.head_dim]
        self.streams: torch.Tensor | None = None  # [1, 1, config.hc_mult, config.hidden_size]

    def __len__(self) -> int:
        """Keys of the past that the next entry can see."""
        return 0 if self.keys is None else self.keys.shape[2]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append keys `[1, 1, new, config.head_dim]`, which are V4's values too; return them all, old ones first."""
        full = key_states if self.keys is None else torch.cat([self.keys, key_states], dim=2)
        self.keys = full[:, :, max(full.shape[2] - (self.sliding_window - 1), 0) :]
        return full, full


class DeepseekV4MTPDrafter(SavedDrafter, DeepseekV4PreTrainedModel):
    """Drafts one token at a time from the target's pre-collapse residual with the block that V4 was trained with.

    The block's entry `t` is made of the residual after token `t` and the embedding of token `t + 1`; the LM head reads
    token `t + 2` from what comes out. To draft further, the streams that come out stand in for the next residual. The
    target's embedding and LM head are shared: they belong to the target, and are neither copied nor saved.

    Use [`from_target`], `drafter.bind(target)` once, then `target.generate(**inputs, assistant_model=drafter)`.

    Args:
        config: A DeepSeek-V4's configuration, of which this model makes one block: sliding-window attention and a
            mixture of experts with learned routing. It is copied, not changed.
    """

    config: DeepseekV4MTPConfig
    config_class = DeepseekV4MTPConfig
    base_model_prefix = "mtp"
    target_layer_ids = [-1]  # reads the residual after the last layer, before it is collapsed
    _is_stateful = False  # one sliding window: nothing in it that could not be rewound
    _keep_in_fp32_modules_strict = [*DeepseekV4PreTrainedModel._keep_in_fp32_modules_strict, "enorm", "hnorm"]
    _keys_to_ignore_on_load_unexpected: list[str] = []

    def __init__(self, config: DeepseekV4Config) -> None:
        is_block = isinstance(config, DeepseekV4MTPConfig)
        super().__init__(config if is_block else DeepseekV4MTPConfig.of_target(config))
        hidden, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.e_proj, self.h_proj = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.enorm, self.hnorm, self.norm = (DeepseekV4RMSNorm(hidden, eps) for _ in range(3))
        self.block = DeepseekV4DecoderLayer(self.config, layer_idx=0)
        self.hc_head = DeepseekV4HyperHead(self.config)
        self.rotary_emb = DeepseekV4RotaryEmbedding(self.config)
        self.num_draft_tokens = 3
        self.post_init()

    @classmethod
    def from_target(
        cls,
        target: PreTrainedModel | str | Path,
        *,
        num_draft_tokens: int = 3,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        **hub_kwargs: Any,
    ) -> DeepseekV4MTPDrafter:
        """Load the drafter from the `mtp.0.*` tensors of a target's checkpoint; FP8 and FP4 weights are dequantized.

        Args:
            target: A checkpoint's path or Hub id, or a loaded target: then its `config._name_or_path`. Only the files
                with `mtp.0.*` tensors in them are downloaded.
            num_draft_tokens: Drafted tokens per round.
            dtype: Of the weights, or its name, except those that V4 keeps in float32; by default the loaded target's
                LM head's, or the checkpoint's.
            device: By default the loaded target's LM head's, or the CPU.
            revision: Of the Hub repository.
            **hub_kwargs: For the Hub: `token`, `cache_dir`, `local_files_only`, ...

        Raises:
            ValueError: If it is no DeepSeek-V4, or the checkpoint's `mtp.0.*` tensors are not the MTP block's.
        """
        hub_kwargs["revision"], dtype = revision, named_dtype(dtype)
        if isinstance(target, PreTrainedModel):
            family_of(target)  # says what a target is, if it is none
            head = target.get_output_embeddings().weight
            config = target.config.get_text_config(decoder=True)
            name, dtype = config._name_or_path, dtype or head.dtype
            hub_kwargs["revision"] = revision or getattr(config, "_commit_hash", None)
            device = device or (None if head.is_meta else head.device)
        else:
            check_source(target, "target")
            name = str(target)
            fields, _ = PreTrainedConfig.get_config_dict(name, **hub_kwargs)
            if any(made.endswith("Drafter") for made in fields.get("architectures") or ()):
                raise ValueError(f"{name} is a drafter, expected a target: pass the DeepSeek-V4 that it drafts for.")
            config = AutoConfig.from_pretrained(name, **hub_kwargs)
            dtype = dtype or config.dtype or torch.bfloat16
        _check_model_type(config, name)
        drafter = cls._empty(cast(DeepseekV4Config, config), cast(torch.dtype, dtype), device or "cpu")
        drafter._load(MTPCheckpoint(name, config, hub_kwargs))
        drafter.num_draft_tokens = num_draft_tokens
        return drafter.eval()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a drafter that `save_pretrained` wrote, whole and in safetensors ([`~weights.load_complete`]).

        Raises:
            ValueError: If it is a target or another model, or its tensors are not the block's.
            OSError: If it cannot be found or its weights are damaged.
        """
        if kwargs.get("state_dict") is None:  # else there is nothing to read
            check_source(pretrained_model_name_or_path)
            fields, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
            made = fields.get("architectures") or ["model of unknown architecture"]
            if cls.__name__ not in made:
                raise ValueError(
                    f"{pretrained_model_name_or_path} is no drafter but a target, a {made[0]}. Its own MTP block is "
                    "loaded by `DeepseekV4MTPDrafter.from_target(...)`, or by `--mtp` of `hf-hyperdflash benchmark`."
                )
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in the source of this file

    @classmethod
    def _empty(cls, config: DeepseekV4Config, dtype: torch.dtype, device: torch.device | str) -> DeepseekV4MTPDrafter:
        """A drafter with uninitialized weights: V4-Flash's would take minutes and 25 GB to initialize in float32."""
        with torch.device("meta"):
            drafter = cls(config)
        for name, tensor in drafter.state_dict(keep_vars=True).items():
            if not set(name.split(".")) & set(cls._keep_in_fp32_modules_strict):
                tensor.data = tensor.data.to(dtype)
        drafter.to_empty(device=device)
        drafter.rotary_emb = DeepseekV4RotaryEmbedding(drafter.config).to(device)  # in no checkpoint
        drafter.config.dtype = dtype
        return drafter

    def _load(self, checkpoint: MTPCheckpoint) -> None:
        own = self.deepseek_state_dict()
        checkpoint.check_names(own.keys())
        for name, tensor in checkpoint.tensors(self.device):
            if tensor.shape != own[name].shape:
                raise ValueError(
                    f"`{name}` in {checkpoint.name} has shape {list(tensor.shape)}, expected {list(own[name].shape)} "
                    "by the checkpoint's own config. Use the config that belongs to the checkpoint."
                )
            check_finite({name: tensor}, checkpoint.name)
            own[name].copy_(tensor)

    def deepseek_state_dict(self) -> dict[str, torch.Tensor]:
        """The parameters under DeepSeek's names, `mtp.0.*`, as views: what is written to them is in the drafter."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.state_dict().items():
            if name == "block.mlp.experts.gate_up_proj":
                for i, expert in enumerate(tensor):
                    gate, up = expert.chunk(2)
                    tensors[f"{PREFIX}ffn.experts.{i}.w1.weight"] = gate
                    tensors[f"{PREFIX}ffn.experts.{i}.w3.weight"] = up
            elif name == "block.mlp.experts.down_proj":
                for i, down in enumerate(tensor):
                    tensors[f"{PREFIX}ffn.experts.{i}.w2.weight"] = down
            else:
                tensors[PREFIX + _deepseek_name(name)] = tensor
        return tensors

    # The block

    def forward(
        self,
        residual: torch.Tensor,
        next_embeds: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        past_key_values: MTPContext | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Run the block: the one path that training and generation share.

        Args:
            residual: `[batch, seq, config.hc_mult, config.hidden_size]`, the target's pre-collapse residual, or what
                this returned for the entry before.
            next_embeds: `[batch, seq, config.hidden_size]`, the target's embeddings of the tokens after.
            position_ids: `[batch, seq]`, true positions of `residual`'s tokens; counted from 0 if left out.
            past_key_values: The sequence so far. It takes in the new entries' keys.
            attention_mask: Added to the attention's logits, `[batch, 1, seq, past + seq]`; a causal sliding window if
                left out.
            rotary: Cosines and sines of `position_ids`, where they are known already.

        Returns:
            The block's streams, `[batch, seq, config.hc_mult, config.hidden_size]`, for [`collapse`] and for the next
            step.
        """
        dtype = self.e_proj.weight.dtype
        residual, next_embeds = residual.to(dtype), next_embeds.to(dtype)
        if rotary is None:
            if position_ids is None:
                position_ids = torch.arange(residual.shape[1], device=residual.device)[None]
            rotary = self._rotary(next_embeds, position_ids)
        if attention_mask is None:
            past = 0 if past_key_values is None else len(past_key_values)
            attention_mask = sliding_mask(residual.shape[1], past, self.config.sliding_window, next_embeds)
        # The norms may return float32, their weights' dtype.
        token = self.e_proj(self.enorm(next_embeds).to(dtype))
        streams = token.unsqueeze(2) + self.h_proj(self.hnorm(residual).to(dtype))
        return self.block(
            streams,
            position_embeddings={"main": rotary},
            position_ids=position_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
        )

    def collapse(self, streams: torch.Tensor) -> torch.Tensor:
        """Streams `[batch, seq, config.hc_mult, config.hidden_size]` to the states that the target's LM head reads,
        `[batch, seq, config.hidden_size]`."""
        return self.norm(self.hc_head(streams))

    def _rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        return self.rotary_emb(like, position_ids=position_ids, layer_type="main")

    # Drafting

    def new_context(self) -> MTPContext:
        """An empty context for one sequence."""
        return MTPContext(self.config.sliding_window)

    @torch.no_grad()
    def extend(
        self,
        target: PreTrainedModel,
        context: MTPContext,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Take accepted tokens into the context.

        Args:
            target: The target, for its embedding.
            context: Of the sequence; changed.
            residual: `[1, seq, config.hc_mult, config.hidden_size]`, the target's pre-collapse residual. `seq` may be
                0.
            position_ids: `[1, seq]`, true positions.
            next_ids: `[1, seq]`, the tokens that follow each.
        """
        if residual.shape[1] == 0:
            return
        # One layer: nothing before the last entry's window reaches what is drafted from here on.
        window = self.config.sliding_window
        residual, position_ids, next_ids = residual[:, -window:], position_ids[:, -window:], next_ids[:, -window:]
        streams = self(residual.to(self.device), self._embed(target, next_ids), position_ids.to(self.device), context)
        context.streams = streams[:, -1:].clone()  # not a view that keeps the rest alive

    @torch.no_grad()
    def propose(
        self,
        target: PreTrainedModel,
        context: MTPContext,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        count: int,
        sampler: DraftSampler,
    ) -> DraftTree:
        """Draft the tokens after `ids` one by one, nothing from an empty context."""
        if context.streams is None:
            return DraftTree.chain(ids.new_empty(0))
        ahead, streams = copy.copy(context), context.streams
        steps = torch.arange(count - 1, device=self.device)
        cos, sin = self._rotary(streams, position_ids[:, -1:].to(self.device) + steps)

        def logits_after(k: int, token: torch.Tensor) -> torch.Tensor:
            nonlocal streams
            if k:
                rotary = cos[:, k - 1 : k], sin[:, k - 1 : k]
                streams = self(streams, self._embed(target, token[:, None]), past_key_values=ahead, rotary=rotary)
            return self._logits(target, streams)[:, 0]

        return sampler.path(ids, count, logits_after)

    def _embed(self, target: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
        return family_of(target).embed(ids).to(self.device)

    def _logits(self, target: PreTrainedModel, streams: torch.Tensor) -> torch.Tensor:
        return family_of(target).logits(self.collapse(streams)).float()

    _about_drafts = ": 1 to 6, as the block was trained for one step, and each further one is accepted less often"

    # Use with a target

    def check_target(self, target: PreTrainedModel) -> None:
        """Check that the drafter fits `target`.

        Raises:
            ValueError: Naming both values, if they cannot work together.
        """
        family = family_of(target)
        targets_sizes = (family.config.vocab_size, family.config.hidden_size, family.paths)
        for what, targets in zip(("vocab_size", "hidden_size", "hc_mult"), targets_sizes):
            drafters = getattr(self.config, what)
            if drafters != targets:
                raise ValueError(
                    f"The MTP drafter is of a model with `{what}` {drafters}, but this target's is {targets}. Load "
                    "the target's own with `DeepseekV4MTPDrafter.from_target(target)`."
                )


def sliding_mask(queries: int, past: int, window: int, like: torch.Tensor) -> torch.Tensor | None:
    """The mask that V4's own model builds: causal, `window` keys wide, added to the attention's logits.

    Args:
        queries: New entries.
        past: Keys before them, at most `window - 1`.
        window: `config.sliding_window`.
        like: Gives dtype and device.

    Returns:
        `[1, 1, queries, past + queries]`, or `None` for a single query, which sees all there is.
    """
    if queries == 1:
        return None
    keys = torch.arange(past + queries, device=like.device)
    distance = keys[past:, None] - keys
    mask = torch.zeros(distance.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_((distance < 0) | (distance >= window), torch.finfo(like.dtype).min)[None, None]


# Configuration


def _check_model_type(config: Any, name: str) -> None:
    if config.model_type != DeepseekV4Config.model_type:
        raise ValueError(
            f"{name or 'The target'} is a {config.model_type} model, expected {DeepseekV4Config.model_type}: only "
            "DeepSeek-V4 has this MTP block. Train a `HyperDFlashDrafter` for other targets."
        )


def _deepseek_name(name: str) -> str:
    for ours, theirs in _DEEPSEEK_NAMES:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name
