"""The HyperDFlash drafter: reducers, context injection, block layers."""

from __future__ import annotations

import logging
import os
import shutil
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import torch
import torch.nn.functional as F
from huggingface_hub import CommitInfo, HfApi
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from ..hub.cards import TEMPLATE, drafter_card
from ..hub.publish import PAPERS, RECIPE_FILE, code_files, drafter_files, reaching_hub
from ..training.blocks import block_inputs
from .configuration_hyperdflash import HyperDFlashConfig
from .custom_generate import RECIPE
from .decoding import Choice, SpeculationStats
from .mask_token import find_mask_token
from .targets import bind, check_fit, check_pair, describe, embed, logits_of, path_gates, unbind
from .version import __version__
from .weights import load_complete, named_dtype

logger = logging.getLogger(__name__)

_AUTO_MAP = {
    "AutoConfig": "configuration_hyperdflash.HyperDFlashConfig",
    "AutoModel": "modeling_hyperdflash.HyperDFlashDrafter",
}
# What `save_pretrained(push_to_hub=True)` may be given besides.
_PUSHING = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")

LayerKV = tuple[torch.Tensor, torch.Tensor]


class HCGateReducer(nn.Module):
    """Collapse the target's residual paths with an input-dependent sigmoid gate per path (Eq. 1).

    The gate has the form and, after [`HyperDFlashDrafter.from_target`], the values of the target's `hc_head`; its
    parameters are float32 as the target's are. With `config.path_norm` each path is normalized, without a weight,
    before the sum; without it an untrained reducer computes exactly what the target's `hc_head` does.

    Args:
        config: The drafter's.
        layers: How many of the target's layers are read. Each has gates of its own; all layers' paths are summed.
    """

    def __init__(self, config: HyperDFlashConfig, layers: int = 1) -> None:
        super().__init__()
        paths, width = config.target_hc_mult, config.hidden_size
        self.layers, self.eps, self.norm_eps, self.path_norm = (
            layers, config.hc_eps, config.rms_norm_eps, config.path_norm,
        )  # fmt: skip
        self.hc_fn = nn.Parameter(torch.empty(layers * paths, paths * width, dtype=torch.float32))
        self.hc_base = nn.Parameter(torch.empty(layers * paths, dtype=torch.float32))
        self.hc_scale = nn.Parameter(torch.empty(layers, dtype=torch.float32))

    @torch.no_grad()
    def inherit(self, gate: dict[str, torch.Tensor]) -> None:
        """Copy the target's `hc_fn`, `hc_base` and `hc_scale`, for every layer read."""
        for name, value in gate.items():
            getattr(self, name).copy_(value.repeat(self.layers, *[1] * (value.ndim - 1)))

    def forward(self, residual: torch.Tensor) -> torch.Tensor:
        """Residual `[batch, seq, layers * config.target_hc_mult, config.hidden_size]` to
        `[batch, seq, config.hidden_size]`."""
        parts = zip(
            residual.chunk(self.layers, dim=2),
            self.hc_fn.chunk(self.layers),
            self.hc_base.chunk(self.layers),
            self.hc_scale.chunk(self.layers),
        )
        # Mixed-precision training keeps the gate float32 too.
        with torch.autocast(residual.device.type, enabled=False):
            gates = torch.cat([path_gates(*part, self.norm_eps, self.eps) for part in parts], dim=-1)
            paths = _unit_rms(residual.float(), self.norm_eps) if self.path_norm else residual
            return (gates.unsqueeze(-1) * paths).sum(dim=2).to(residual.dtype)


def _unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps).to(x.dtype)


def _rotate(x: torch.Tensor, rotary: LayerKV) -> torch.Tensor:
    cos, sin = rotary[0].unsqueeze(1), rotary[1].unsqueeze(1)
    return x * cos + rotate_half(x) * sin


class HyperDFlashAttention(nn.Module):
    """Attention of a block over the injected context and, in both directions, over itself."""

    def __init__(self, config: HyperDFlashConfig) -> None:
        super().__init__()
        width, heads, kv_heads, dim = (
            config.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim,
        )  # fmt: skip
        self.head_dim = dim
        self.q_proj = nn.Linear(width, heads * dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_heads * dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * dim, width, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(dim, eps=config.rms_norm_eps)

    def keys_values(self, hidden: torch.Tensor, rotary: LayerKV) -> LayerKV:
        """Keys and values `[batch, config.num_key_value_heads, seq, config.head_dim]` of context or block states."""
        keys = self.k_norm(self._heads(self.k_proj(hidden))).transpose(1, 2)
        values = self._heads(self.v_proj(hidden)).transpose(1, 2)
        return _rotate(keys, rotary), values

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: LayerKV,
        context: LayerKV,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        if feature is not None:
            context = self.keys_values(feature, context)
        queries = _rotate(self.q_norm(self._heads(self.q_proj(hidden))).transpose(1, 2), rotary)
        block = self.keys_values(hidden, rotary)
        keys, values = (torch.cat(pair, dim=2) for pair in zip(context, block))
        grouped = keys.shape[1] != queries.shape[1]
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=attention_mask, enable_gqa=grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class HyperDFlashRotaryEmbedding(Qwen3RotaryEmbedding):
    """RoPE whose frequencies stay float32 in a drafter of another dtype: rounded to bfloat16, they turn the queries and keys
    of position 1,000 by up to a radian too far."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return super()._apply(lambda tensor: fn(tensor) if tensor.is_meta else tensor.to(fn(tensor).device), recurse)


class HyperDFlashLayer(GradientCheckpointingLayer):
    """A Qwen3-style block: attention with QK-norm, gated MLP, pre-norm residuals.

    The context comes as keys and values (`feature` is `None`) or as the conditioning feature with its RoPE. The second
    is for training: wrappers that shard or checkpoint a layer see everything the layer computes.
    """

    def __init__(self, config: HyperDFlashConfig) -> None:
        super().__init__()
        self.self_attn = HyperDFlashAttention(config)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        hidden: torch.Tensor,
        feature: torch.Tensor | None,
        rotary: LayerKV,
        context: LayerKV,
        attention_mask: torch.Tensor | None,
    ) -> torch.Tensor:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), feature, rotary, context, attention_mask)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class ContextCache:
    """Keys and values of the accepted tokens, computed once per token and layer.

    Only accepted tokens enter, so nothing is ever taken back. Buffers grow by doubling: adding a token does not copy
    the context.

    Args:
        window: Keep only the last `window` positions visible; `None` for all.
    """

    def __init__(self, window: int | None = None) -> None:
        self.window = window
        self.end = 0  # position after the last token seen, in tokens of the sequence
        self._layers: list[LayerKV] = []
        self._start = self._stop = 0  # the filled part of the buffers

    def append(self, layers: list[LayerKV]) -> None:
        """Add keys and values, `[batch, kv_heads, new, head_dim]` each, of every layer."""
        new = layers[0][0].shape[2]
        if not self._layers or self._stop + new > self._layers[0][0].shape[2]:
            self._grow(layers, new)
        for buffers, states in zip(self._layers, layers):
            for buffer, state in zip(buffers, states):
                buffer[:, :, self._stop : self._stop + new] = state
        self._stop += new
        if self.window is not None:
            self._start = max(self._start, self._stop - self.window)

    def _grow(self, layers: list[LayerKV], new: int) -> None:
        kept = self._stop - self._start
        capacity = 2 * (kept + new) + 64

        def moved(index: int, like: torch.Tensor, part: int) -> torch.Tensor:
            buffer = like.new_empty(*like.shape[:2], capacity, like.shape[3])
            if kept:
                buffer[:, :, :kept] = self._layers[index][part][:, :, self._start : self._stop]
            return buffer

        self._layers = [(moved(i, k, 0), moved(i, v, 1)) for i, (k, v) in enumerate(layers)]
        self._start, self._stop = 0, kept

    @property
    def layers(self) -> list[LayerKV]:
        """Visible keys and values of every layer, views of `[batch, kv_heads, visible, head_dim]`."""
        span = slice(self._start, self._stop)
        return [(keys[:, :, span], values[:, :, span]) for keys, values in self._layers]

    def __len__(self) -> int:
        return self._stop - self._start


class HyperDFlashDrafter(PreTrainedModel):
    """Drafts a block of tokens in one pass from the target's pre-collapse residual (paper, Figure 2).

    The target's embedding and LM head are shared: they belong to the target, are passed in where needed, and are
    neither copied nor saved. Use [`from_target`] to make a drafter for a target, `drafter.bind(target)` to prepare the
    target, then `target.generate(**inputs, assistant_model=drafter)`.
    """

    config: HyperDFlashConfig
    config_class = HyperDFlashConfig
    base_model_prefix = "drafter"
    supports_gradient_checkpointing = True
    _no_split_modules = ["HyperDFlashLayer"]
    _supports_sdpa = True
    _keep_in_fp32_modules_strict = ["hc_gate"]

    def __init__(self, config: HyperDFlashConfig) -> None:
        super().__init__(config)
        self.__dict__.pop("generation_config", None)  # None here; see `__getattr__`
        layers = len(config.target_layer_ids or ())
        if config.has_gate:
            self.hc_gate = HCGateReducer(config, layers if config.reducer == "hc_gate" else 1)
        if config.reducer != "hc_gate":
            # What it reads: all paths (section 2.2; z-lab's checkpoints call it `fc` too), those of all layers but the
            # one with the gate, or one mean per layer.
            read = {
                "fc": config.num_paths,
                "hybrid": max(layers - 1, 1) * config.target_hc_mult,
                "stream_mean": layers,
            }[config.reducer]
            self.fc = nn.Linear(read * config.target_hidden_size, config.hidden_size, bias=False)
        if config.reducer == "hybrid":
            # Its weight is zero at first. Without a norm the projection, whose every output has thousands of inputs,
            # outgrows the gate within a few steps.
            self.fc_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.hidden_size != config.target_hidden_size:
            self.embed_proj = nn.Linear(config.target_hidden_size, config.hidden_size, bias=False)
            self.head_proj = nn.Linear(config.hidden_size, config.target_hidden_size, bias=False)
        self.layers = nn.ModuleList(HyperDFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.draft_vocab_size:
            self.lm_head = nn.Linear(config.target_hidden_size, config.draft_vocab_size, bias=False)
            self.register_buffer("draft_ids", torch.arange(config.draft_vocab_size))  # of the target's vocabulary
        self.rotary_emb = HyperDFlashRotaryEmbedding(config)  # type: ignore[arg-type]
        self._num_draft_tokens = config.max_draft_tokens
        self.last_stats: SpeculationStats | None = None
        self.synchronize_timing = False
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, HCGateReducer):
            # Half-open gates on every path: near the mean of the paths, where `hc_head` starts too.
            init.normal_(module.hc_fn, mean=0.0, std=self.config.initializer_range)
            init.zeros_(module.hc_base)
            init.ones_(module.hc_scale)
        elif self.config.reducer == "hybrid" and module is self.fc_norm:
            init.zeros_(module.weight)

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
            target: The model to draft for. It is read, not changed. Of one on the meta device the drafter is there too:
                sizes and counts without weights.
            reducer: One of [`HyperDFlashConfig`]'s, or `None` for the gate where the paper's conditions hold (a gated
                collapse in the target, equal widths) and the `fc` fallback, with a logged reason, where not.
            mask_token_id: A token that no text has; found by [`~runtime.mask_token.find_mask_token`] if left out.
            tokenizer: The target's, for that; the one beside its weights if left out.
            num_draft_tokens: Drafted tokens per round, the block size less the anchor.
            dtype: Of the drafter's weights (the gate stays float32), or its name; the target's residual stream's by
                default.
            **config_fields: Any field of [`HyperDFlashConfig`], overriding what the target suggests.

        Raises:
            ValueError: If it is no target, no mask token is found, there is no such field or dtype, or the gate is asked
                for where it cannot be inherited.
        """
        if type(num_draft_tokens) is not int or num_draft_tokens < 1:
            raise ValueError(f"`num_draft_tokens` is {num_draft_tokens!r}, expected an integer of at least 1.")
        dtype = named_dtype(dtype)
        HyperDFlashConfig.check_fields(config_fields)
        facts = describe(target)
        width = config_fields.get("hidden_size", facts.hidden_size)
        obstacle = facts.gate_obstacle(width)
        if reducer is None:
            reducer = "fc" if obstacle else "hc_gate"
            if obstacle:
                logger.warning("HyperDFlash falls back to reducer='fc': %s.", obstacle)
        elif reducer in ("hc_gate", "hybrid") and obstacle:
            raise ValueError(f"`reducer={reducer!r}` cannot be used: {obstacle}. Pass `reducer='fc'` or leave it out.")
        head_dim = config_fields.get("head_dim", min(128, facts.head_dim))
        heads = max(1, width // head_dim)
        fields: dict[str, Any] = {
            "vocab_size": facts.vocab_size,
            "hidden_size": width,
            "head_dim": head_dim,
            "num_attention_heads": heads,
            "num_key_value_heads": heads // 4 if heads % 4 == 0 else heads,
            "intermediate_size": 3 * width,
            "rms_norm_eps": facts.rms_norm_eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": facts.rope_theta},
            "max_position_embeddings": facts.max_position_embeddings,
            # Engines' layouts, which are for targets with one stream, have no words for a window that all slots share.
            "sliding_window": None if facts.hc_mult == 1 else min(2048, facts.max_position_embeddings),
            "block_size": num_draft_tokens + 1,
            "mask_token_id": find_mask_token(target, tokenizer) if mask_token_id is None else mask_token_id,
            "hc_eps": facts.hc_eps,
            "target_hidden_size": facts.hidden_size,
            "target_hc_mult": facts.hc_mult,
            "target_model_type": facts.model_type,
            "target_name_or_path": facts.name_or_path,
            "target_revision": facts.revision,
        }
        config = HyperDFlashConfig(reducer=reducer, **{**fields, **config_fields})
        check_pair(config, target)
        head = target.get_output_embeddings()
        is_offloaded = hasattr(head, "_hf_hook")
        device = head.weight.device if not (head.weight.is_meta and is_offloaded) else torch.device("cpu")
        with torch.device("meta") if device.type == "meta" else nullcontext():
            drafter = cls(config)
        if config.has_gate:
            drafter.hc_gate.inherit(facts.gate)
        for name, part in drafter.named_children():
            # Not all at once: the gate would be rounded on its way.
            part.to(device=device, dtype=torch.float32 if name == "hc_gate" else dtype or facts.dtype)
        return drafter

    # The Hub

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """As of any model, but only a whole one in safetensors ([`~runtime.weights.load_complete`]).

        Raises:
            ValueError: If it is no HyperDFlash drafter, or its tensors are not those of its configuration.
            OSError: If it cannot be found or its weights are damaged.
        """
        return load_complete(super().from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(  # type: ignore[override]
        self, save_directory: str | os.PathLike, is_main_process: bool = True, push_to_hub: bool = False, **kwargs: Any
    ) -> None:
        """As of any model. The folder also gets the code with which plain transformers drafts without this package.

        Raises:
            OSError: If it is a file.
        """
        if Path(save_directory).is_file():  # where transformers logs an error and saves nothing
            raise OSError(f"{save_directory} is a file, expected a folder for the drafter: choose another name.")
        of_push = {name: kwargs.pop(name) for name in _PUSHING if name in kwargs}
        self.config.auto_map, self.config.hyperdflash_version = dict(_AUTO_MAP), __version__
        super().save_pretrained(save_directory, is_main_process=is_main_process, token=of_push.get("token"), **kwargs)
        if not is_main_process:
            return
        # Not transformers' own way, which goes by the class: FSDP2 makes the drafter's a subclass of its own.
        for path in code_files():
            shutil.copyfile(path, Path(save_directory) / path.name)
        recipe = Path(save_directory) / RECIPE_FILE
        recipe.parent.mkdir(exist_ok=True)
        shutil.copyfile(RECIPE, recipe)
        if push_to_hub:
            self.push_to_hub(of_push.pop("repo_id", Path(save_directory).name), **of_push)

    def push_to_hub(  # type: ignore[override]
        self,
        repo_id: str,
        *,
        commit_message: str | None = None,
        commit_description: str | None = None,
        private: bool | None = None,
        token: bool | str | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        max_shard_size: int | str = "50GB",
        tags: list[str] | None = None,
    ) -> CommitInfo:
        """Upload drafter, code and model card in one commit. The target's embedding and head are no part of it.

        Args:
            repo_id: The repository, `"org/name"`, made if needed.
            commit_message: What is committed.
            commit_description: More about it.
            private: Whether a new repository is private.
            token: Of the Hub; the stored one by default.
            revision: The branch, made if needed.
            create_pr: Propose the commit instead.
            max_shard_size: Of one weights file.
            tags: For the card, beside its own.

        The card is the `README.md` of the folder that the drafter was loaded from; else the one that the repository has
        already; else a new one from what is known (`hf-hyperdflash card` makes one with a benchmark's figures).
        """
        with TemporaryDirectory() as folder, reaching_hub(repo_id):
            api = HfApi(token=token)
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            self.save_pretrained(folder, max_shard_size=max_shard_size)
            self._add_papers(Path(folder))
            is_new = not api.file_exists(repo_id, "README.md", revision=revision)
            if is_new and TEMPLATE.exists() and not (Path(folder) / "README.md").exists():
                drafter_card(folder, repo_id=repo_id, tags=tags).save(Path(folder) / "README.md")
            return api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=drafter_files(folder),
                commit_message=commit_message or "Upload HyperDFlash drafter",
                commit_description=commit_description,
                revision=revision,
                create_pr=create_pr,
            )

    def _add_papers(self, folder: Path) -> None:
        """Card, picture and training record from the local folder that the drafter was loaded from."""
        source = Path(self.name_or_path or "")
        if self.name_or_path and source.is_dir():
            for name in set(PAPERS) & set(drafter_files(source)):
                shutil.copyfile(source / name, folder / name)

    # Drafting

    def reduce(self, residual: torch.Tensor) -> torch.Tensor:
        """Collapse `[batch, seq, config.num_paths, config.target_hidden_size]` to the normed conditioning feature
        `[batch, seq, config.hidden_size]` in the drafter's dtype."""
        return self.hidden_norm(self._collapse(residual, self.norm.weight.dtype))

    def _collapse(self, residual: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        reducer, hc_mult = self.config.reducer, self.config.target_hc_mult
        if reducer == "hc_gate":
            return self.hc_gate(residual).to(dtype)
        if reducer == "stream_mean":
            return self.fc(residual.to(dtype).unflatten(2, (-1, hc_mult)).mean(3).flatten(2))
        if reducer == "fc":
            return self.fc(residual.flatten(2).to(dtype))
        gated, others = residual[:, :, -hc_mult:], residual[:, :, :-hc_mult]
        dense = self.fc((others if others.shape[2] else gated).flatten(2).to(dtype))
        return self.hc_gate(gated).to(dtype) + self.fc_norm(dense)

    def encode_context(self, residual: torch.Tensor, position_ids: torch.Tensor) -> list[LayerKV]:
        """Keys and values that the residual of accepted tokens injects into each layer.

        Args:
            residual: `[batch, seq, config.num_paths, config.target_hidden_size]`, the target's residual paths of
                `config.target_layer_ids`: by default its pre-collapse residual.
            position_ids: `[batch, seq]`, the tokens' true positions.

        Returns:
            One pair of `[batch, config.num_key_value_heads, seq, config.head_dim]` per layer.
        """
        feature = self.reduce(residual)
        rotary = self.rotary_emb(feature, position_ids)
        return [cast(HyperDFlashLayer, layer).self_attn.keys_values(feature, rotary) for layer in self.layers]

    def forward(
        self,
        block_embeds: torch.Tensor,
        position_ids: torch.Tensor,
        context: list[LayerKV] | None = None,
        attention_mask: torch.Tensor | None = None,
        residual: torch.Tensor | None = None,
        residual_position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run blocks over their context: the one path that training and generation share.

        Args:
            block_embeds: `[batch, queries, config.target_hidden_size]`, the target's embeddings of anchors and mask
                tokens.
            position_ids: `[batch, queries]`, true positions.
            context: What [`encode_context`] returned for the tokens before the anchors; `None` to compute it here, in
                training, from the next two.
            attention_mask: Boolean `[batch, 1, queries, context + queries]`, `True` where a query may look; `None`
                for one block that sees all of its context and itself.
            residual: `[batch, seq, config.num_paths, config.target_hidden_size]`, if `context` is `None`.
            residual_position_ids: `[batch, seq]`, true positions of `residual`.

        Returns:
            States that the target's LM head reads, `[batch, queries, config.target_hidden_size]`.

        Raises:
            ValueError: If neither or both of `context` and `residual` are given.
        """
        if (context is None) == (residual is None):
            raise ValueError(
                "Expected either `context`, or `residual` with `residual_position_ids`, not both or neither."
            )
        hidden = block_embeds.to(self.norm.weight.dtype)
        if hasattr(self, "embed_proj"):
            hidden = self.embed_proj(hidden)
        rotary = self.rotary_emb(hidden, position_ids)
        feature = None
        if residual is not None:
            feature = self.reduce(residual)
            context = [self.rotary_emb(feature, residual_position_ids)] * len(self.layers)
        for layer, layer_context in zip(self.layers, cast("list[LayerKV]", context)):
            hidden = layer(hidden, feature, rotary, layer_context, attention_mask)
        hidden = self.norm(hidden)
        return self.head_proj(hidden) if hasattr(self, "head_proj") else hidden

    # One sequence (`generation.Drafter`)

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the layers; a gate is always float32."""
        return self.norm.weight.dtype

    @property
    def target_layer_ids(self) -> list[int]:
        """Whose residual paths the drafter reads."""
        return cast("list[int]", self.config.target_layer_ids)

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise a `ValueError` if the drafter does not fit `target`."""
        check_pair(self.config, target)

    def new_context(self) -> ContextCache:
        """An empty context for one sequence."""
        return ContextCache(self.config.sliding_window)

    def extend(
        self,
        target: PreTrainedModel,
        context: ContextCache,
        residual: torch.Tensor,
        position_ids: torch.Tensor,
        next_ids: torch.Tensor,
    ) -> None:
        """Add accepted tokens to the context: of many, those that its window keeps."""
        kept = slice(-self.config.sliding_window if self.config.sliding_window else None, None)
        residual, position_ids = residual[:, kept].to(self.device), position_ids[:, kept].to(self.device)
        context.append(self.encode_context(residual, position_ids))

    def draft(
        self,
        target: PreTrainedModel,
        context: ContextCache,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        count: int,
        choose: Choice,
    ) -> None:
        """Draft `count` tokens after the last of `ids` in one pass. The block always has its trained width."""
        config = self.config
        block, positions = block_inputs(ids[:, -1:], position_ids[:, -1:], config.block_size, config.mask_token_id)
        hidden = self(embed(target, block).to(self.device), positions.to(self.device), context.layers)
        choose(self.logits(target, hidden[:, config.first_slot : config.first_slot + count]))

    def logits(self, target: PreTrainedModel, hidden: torch.Tensor) -> torch.Tensor:
        """`[batch, queries, config.vocab_size]` from what [`forward`] returned: the target's LM head, or an own one over
        fewer tokens."""
        if not self.config.draft_vocab_size:
            return logits_of(target, hidden)
        own = self.lm_head(hidden)
        logits = own.new_full((*own.shape[:2], self.config.vocab_size), -torch.inf)
        return logits.index_copy_(2, cast(torch.Tensor, self.draft_ids), own)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens drafted per round at inference, at most `config.max_draft_tokens`."""
        return self._num_draft_tokens

    @num_draft_tokens.setter
    def num_draft_tokens(self, value: int) -> None:
        self._num_draft_tokens = self.check_num_draft_tokens(value)

    def check_num_draft_tokens(self, value: int) -> int:
        """Return `value` if this drafter can draft that many tokens per round.

        Raises:
            ValueError: If not.
        """
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= self.config.max_draft_tokens:
            raise ValueError(
                f"This drafter cannot draft {value!r} tokens a round: expected 1 to {self.config.max_draft_tokens}, the "
                f"draft positions of its block of {self.config.block_size}. Train one with a larger `num_draft_tokens` "
                "for more."
            )
        return value

    # Use with a target

    def bind(self, target: PreTrainedModel) -> None:
        """Check that the drafter fits `target` and prepare that one instance for assisted generation.

        Afterwards `target.generate(**inputs, assistant_model=drafter)` drafts with this drafter. Only that instance
        changes: its class, to a subclass, and hooks on its layers that are silent outside our forwards; [`unbind`] restores it.

        Raises:
            ValueError: If drafter and target do not fit, naming both values.
        """
        check_fit(target, self)
        bind(target)
        own = target.config.get_text_config(decoder=True)
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):  # transformers' pipelines compare them
            setattr(self.config, name, getattr(own, name, None))

    def unbind(self, target: PreTrainedModel) -> None:
        """Give `target` its own class back."""
        unbind(target)

    def generate(self, *args: Any, **kwargs: Any) -> None:
        """A drafter does not generate: it assists its target.

        Raises:
            ValueError: Always, saying what to call.
        """
        raise NotBoundError(_NOT_BOUND)

    def __getattr__(self, name: str) -> Any:
        # Stock assisted decoding asks its assistant for this first; reached only through a target that is not bound.
        if name == "generation_config":
            raise NotBoundError(_NOT_BOUND)
        return super().__getattr__(name)


class NotBoundError(ValueError, AttributeError):
    """The drafter was used without binding its target. Also an `AttributeError`: `hasattr` must stay usable."""


_NOT_BOUND = (
    "A HyperDFlash drafter works only through a target that is bound to it. Call `drafter.bind(target)` once, then "
    "`target.generate(**inputs, assistant_model=drafter)`."
)


def register_auto_classes() -> None:
    """Let `AutoConfig` and `AutoModel` load drafters in this process. Nothing is registered until this is called."""
    from transformers import AutoConfig, AutoModel

    AutoConfig.register(HyperDFlashConfig.model_type, HyperDFlashConfig, exist_ok=True)
    AutoModel.register(HyperDFlashConfig, HyperDFlashDrafter, exist_ok=True)
