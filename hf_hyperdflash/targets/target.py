"""A target: a model as drafters and the loop see it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, cast

import torch
from torch import nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache

from ..trees.tree import TreeLayout
from .caches.linear import CallRecorder, make_linear_rewindable
from .hooks import EMBEDDINGS, PerThread, Round
from .shared_heads import SHARED_HEADS

# How a draft tree is verified. "mask": by one forward with a mask of ancestors, over layers that read nothing but keys
# that a mask shows them; so it also tells apart the texts of a batch, and the columns of a static cache. "cache": by
# such a forward over a cache that was told of the tree, and takes up one path of it later. "fork": with a sequence for
# each path. "chain": not at all, so that drafts are a chain.
TreeVerification = Literal["mask", "cache", "fork", "chain"]
# By the `model_type` of a model's text configuration: a family that no test covers may read more than a mask shows it.
VERIFICATION: dict[str, TreeVerification] = {
    "llama": "mask", "qwen2": "mask", "qwen3": "mask", "qwen3_moe": "mask", "mistral": "mask", "gemma2": "mask",
    "gemma3_text": "mask", "gemma4_text": "mask", "gemma4_unified_text": "mask", "gpt_oss": "mask",
    "deepseek_v3": "mask", "glm4_moe": "mask", "minimax_m2": "mask", "ernie4_5_moe": "mask", "longcat_flash": "mask",
    "muse_glimmer_text": "mask", "exaone4": "mask", "exaone_moe": "mask", "glm4_moe_lite": "mask",
    "glm_ocr_text": "mask", "hy_v3": "mask", "mellum": "mask", "sarvam_mla": "mask", "sarvam_moe": "mask",
    "step3p5": "mask",
    "qwen3_next": "fork", "qwen3_5_text": "fork", "qwen3_5_moe_text": "fork", "granitemoehybrid": "fork",
    "bamba": "fork", "falcon_h1": "fork", "nemotron_h": "fork", "hy_v4": "fork", "hy_v4_vl_text": "fork",
    "glm5_next_text": "fork", "qwen4_exp_text": "fork", "bailing_hybrid": "fork",
}  # fmt: skip
_PARTS = {
    "indexer_keys": 1,
    "indexer_position_ids": -1,
    "idx_keys": -2,
}  # the tensors of layers with an indexer, and their dimension of tokens
_MASKED_KINDS = frozenset({"full_attention", "sliding_attention", "of no declared kind"})
MASKED_IMPLEMENTATIONS = frozenset({"eager", "sdpa", SHARED_HEADS, "flex_attention"})
AttentionMask = torch.Tensor | BlockMask
Outputs = torch.Tensor | tuple[torch.Tensor, ...]  # of a module
Kernel = Callable[[Any, torch.Tensor], Outputs]  # does a module's forward
# They run a text from its start again, in a new cache, once it is longer than the length of the switch.
_RESTARTING = frozenset({"phi3", "phimoe", "phi4_multimodal"})


class TargetOutput(Protocol):
    """What the loop reads of a target's forward.

    Attributes:
        logits: `[batch, positions, config.vocab_size]`.
        hidden_states: Of each layer, where the caller asked for them and the model has some to show.
        attentions: Of each attention layer, likewise.
    """

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...] | None
    attentions: tuple[torch.Tensor, ...] | None


class RewindableLayer(Protocol):
    """A cache layer from which the last tokens can be removed."""

    keys: torch.Tensor | None
    values: torch.Tensor | None

    def get_seq_length(self) -> int: ...
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]: ...
    def crop(self, tokens_to_remove: int) -> None: ...


class RewindableCache(Protocol):
    """A cache from which the last tokens can be removed: `crop(-n)` removes n."""

    @property
    def layers(self) -> Sequence[RewindableLayer]: ...
    def get_seq_length(self) -> int: ...
    def activate_past_recording(self) -> None: ...
    def crop(self, tokens_to_remove: int) -> None: ...
    def batch_repeat_interleave(self, repeats: int) -> None: ...
    def batch_select_indices(self, indices: torch.Tensor) -> None: ...


class Trunk(Protocol):
    """The module that runs a model's decoder layers. Families have more in it, by other names."""

    layers: nn.ModuleList


class Target:
    """A model as drafters and the loop see it, made once by `bind` and by the trainer.

    This class is for a causal LM with one residual stream that ends in `model.norm` and an LM head. Other families are
    subclasses that override what differs.

    Attributes:
        model: The model itself.
        config: The model's text configuration.
        title: The family's name.
        streams: How many residual streams leave its decoder layers.
        why_ungated: The reason why a drafter cannot inherit a gate from it; empty if it can.
        rewindable_kinds: The `config.layer_types` whose cache layers can be rewound after [`make_rewindable`].
        skips_padding: Whether its text would depend on the amount of padding, so that it must not see any.
        rounds: For each thread, its forwards that verify drafts.
        rope_switch: The length of a text at which its rotary frequencies change; `None` where they never do. They
            depend on the highest position of a forward, drafts included, whether or not those are accepted. So a round
            over that length would apply new ones to tokens for which plain decoding uses the old.
        layers: The decoder layers; the last one's output is the pre-collapse residual.
        norm: The final norm, applied after the collapse; `None` where the collapse has its own.
    """

    title: ClassVar[str] = "causal LM with one residual stream (`model.layers` and `model.norm`)"
    rewindable_kinds: ClassVar[frozenset[str]] = frozenset({
        "full_attention", "sliding_attention", "chunked_attention", "linear_attention", "indexed_attention",
        "deepseek_sparse_attention",  # what earlier transformers call it
        "minimax_m3_sparse",
    })  # fmt: skip
    skips_padding: ClassVar[bool] = False

    hyperdflash_binding: Any = None  # while the model is bound

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        self.model, self.trunk = model, trunk
        self.config: PreTrainedConfig = model.config.get_text_config(decoder=True)
        self.layers: nn.ModuleList = trunk.layers
        self.norm: Any = getattr(trunk, "norm", None)
        self.rounds: PerThread[Round] = PerThread()
        self.rope_switch = rope_switch_of(self.config)

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        """Return whether `target`, whose decoder layers are in `trunk`, belongs to this family."""
        config = target.config.get_text_config(decoder=True)
        return hasattr(trunk, "norm") and not any(hasattr(config, name) for name in ("hc_mult", "hc_count"))

    # The end of the trunk

    @property
    def streams(self) -> int:
        return 1

    @property
    def why_ungated(self) -> str:
        return f"a {self.config.model_type} target has one residual stream, and no gate that collapses several"

    def gate(self) -> dict[str, torch.Tensor]:
        """Return a copy of the collapse's `hc_fn` `[streams, streams * config.hidden_size]`, `hc_base` `[streams]` and
        `hc_scale` `[1]`; nothing if it has another form."""
        return {}

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        """Collapse the residual `[batch, seq, streams, config.hidden_size]` to the states that the LM head reads,
        `[batch, seq, config.hidden_size]`."""
        return self.norm(residual.squeeze(2))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        """The modules of the collapse and the norm that have parameters."""
        return (self.norm,)

    # Embedding and head, which drafters share

    @property
    def input_embedding(self) -> nn.Embedding:
        """The model's input embedding."""
        return cast(nn.Embedding, self.model.get_input_embeddings())

    @property
    def output_head(self) -> nn.Linear:
        """The model's LM head."""
        return cast(nn.Linear, self.model.get_output_embeddings())

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the first layer's input for `ids` `[batch, seq]`, `[batch, seq, config.hidden_size]`, on their
        device."""
        embedding = self.input_embedding
        weight = embedding.weight
        return embedding(ids if weight.is_meta else ids.to(weight.device)).to(ids.device)

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Return the target's logits from `states` `[..., config.hidden_size]` of any dtype and device."""
        head = self.output_head
        return self.after_head(head(computable(states, head.weight)))

    def logits_of(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of some tokens only, from the LM head's rows for them.

        Args:
            states: `[batch, config.hidden_size]` of any dtype and device.
            ids: `[batch, tokens]`.

        Returns:
            `[batch, tokens]`, on the head's device.
        """
        head = self.output_head
        weight = head.weight
        is_plain = type(weight) in (torch.Tensor, nn.Parameter) and weight.is_floating_point() and not weight.is_meta
        if not is_plain or weight.itemsize == 1:  # offloaded, sharded or quantized: its rows cannot be read
            logits = self.logits(states)
            return logits.gather(-1, ids.to(logits.device))
        ids = ids.to(weight.device)
        logits = torch.einsum("bd,bcd->bc", computable(states, weight), weight[ids])
        return self.after_head(logits if head.bias is None else logits + head.bias[ids])

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the model's logits from its LM head's output."""
        return soft_capped(logits, self.soft_cap)

    @property
    def soft_cap(self) -> float | None:
        """What its logits are capped at; `None` for nothing."""
        return getattr(self.config, "final_logit_softcapping", None)

    # Sizes

    @property
    def layer_kinds(self) -> set[str]:
        """The kinds of its layers, by the configuration."""
        return set(getattr(self.config, "layer_types", None) or ["of no declared kind"])

    @property
    def norm_eps(self) -> float:
        values = (getattr(self.config, name, None) for name in ("rms_norm_eps", "norm_eps", "layer_norm_eps"))
        return next((eps for eps in values if eps is not None), 1e-6)

    @property
    def hc_eps(self) -> float:
        """The number that is added to each gate."""
        return getattr(self.config, "hc_eps", 1e-6)

    @property
    def head_dim(self) -> int:
        layers = getattr(self.config, "per_layer_config", None)  # where they differ, transformers has no common value
        config = layers[0] if layers else self.config
        return getattr(config, "head_dim", None) or self.config.hidden_size // self.config.num_attention_heads

    @property
    def rope_theta(self) -> float:
        rope = getattr(self.config, "rope_parameters", None) or {}
        by_kind = [rope[kind] for kind in ("main", "full_attention") if isinstance(rope.get(kind), dict)]
        return float((by_kind[0] if by_kind else rope).get("rope_theta", 10000.0))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self.input_embedding.weight.dtype

    def check_computes(self) -> None:
        """Raise a `ValueError` if the installed transformers cannot run the target in the dtype that it has."""

    def check_layers(self, layer_ids: Sequence[int] = (), reads_each_token: bool = True) -> None:
        """Raise a `ValueError` if a drafter cannot read these layers (-1 for the last) because there are none such or
        their output is not one state for each token of a prompt, of which it may need the last one alone, or if
        nothing can be drafted for the target at all."""
        own = self.config
        count = len(self.layers) or own.num_hidden_layers  # without layers it was loaded for its head alone
        if count and max(layer_ids, default=0) >= count:
            raise ValueError(
                f"The drafter reads layers {list(layer_ids)}, but this target's are 0 to {count - 1} (-1 for the "
                "last)."
            )
        loops = max(getattr(own, name, 1) for name in ("n_recurrent_loops", "loop_num_passes"))
        if loops > 1:
            raise ValueError(
                f"A {own.model_type} target runs layers {loops} times for each token, and a drafter can neither read "
                "them nor be taken back from what its cache keeps of each time: generate with it as it is."
            )
        streams, shared = getattr(own, "altup_num_inputs", 1), getattr(own, "num_kv_shared_layers", 0) or 0
        why, fix = "", "Use prompt lookup (`PromptLookupDrafter`), which reads no layer"
        if streams > 1:
            why = f"each hands on {streams} streams (AltUp)"
        elif (
            reads_each_token
            and shared
            and count
            and any(i != EMBEDDINGS and i % count >= count - shared for i in layer_ids)
        ):
            why = f"from {count - shared} on they use keys of earlier ones, and only a prompt's last token runs them"
            fix += f", or read some of 0 to {count - shared - 1} (`target_layer_ids`)"
        if why and layer_ids:
            raise ValueError(
                f"The drafter reads layers {list(layer_ids)} of a {own.model_type} target, but {why}. {fix}."
            )

    # Removing rejected drafts

    @property
    def why_not_rewindable(self) -> str:
        """The reason why rejected drafts could not be removed from the cache that `generate` makes for it; empty if
        they can."""
        makes_stock_cache = getattr(self.model, "_supports_default_dynamic_cache", None)
        if makes_stock_cache is not None and not makes_stock_cache():
            return "makes a cache of its own, which cannot be rewound"
        stuck = self.layer_kinds - self.rewindable_kinds
        if not getattr(self.model, "_is_stateful", False):  # remote code may call its kinds what it likes
            stuck &= DYNAMIC_LAYER_TYPE_MAPPING.keys()
        return f"has layers ({', '.join(sorted(stuck))}) with a running state that cannot be rewound" if stuck else ""

    @property
    def has_running_state(self) -> bool:
        """Whether a layer has one running state instead of a key per token: only the last forward can be undone."""
        return not self.layer_kinds.isdisjoint({"linear_attention", "hybrid"})

    def make_rewindable(self, cache: Cache, num_drafts: int) -> None:
        """Make a cache of the target able to remove that many drafts and the anchor. Remote code's caches stay as they
        are."""
        if isinstance(cache, Cache) and self.has_running_state:
            make_linear_rewindable(cache)

    def register_hooks(self) -> list[RemovableHandle]:
        """Register the hooks that a verification round needs; they do nothing in other forwards."""
        return CallRecorder(self.layers).handles if self.has_running_state else []

    def kernels(self) -> dict[nn.Module, Kernel]:
        """Return the modules that a kernel can do the work of, each with it ([`~targets.fused.Fusion`])."""
        return {}

    def cached_lengths(self, cache: Cache) -> set[int]:
        """Return how many tokens the parts of a cache have seen. It is one number, unless a forward was interrupted
        between two parts. Running states count no tokens."""
        lengths = set()
        for layer in getattr(cache, "layers", ()):
            if getattr(layer, "keys", None) is not None:
                lengths.add(int(layer.get_seq_length()))
            if not hasattr(layer, "max_cache_len"):  # a static layer has its full length from the start
                lengths |= {part.shape[dim] if part.ndim > 1 else 0 for dim, part in _parts_of(layer).values()}
        return lengths

    # Draft trees

    @property
    def tree_verification(self) -> TreeVerification:
        """How its draft trees are verified, see [`TreeVerification`]."""
        how = VERIFICATION.get(self.config.model_type, "chain")
        takes_masks = self.config._attn_implementation in MASKED_IMPLEMENTATIONS
        return "fork" if how == "mask" and not (takes_masks and self.layer_kinds <= _MASKED_KINDS) else how

    @property
    def can_join_sequences(self) -> bool:
        """Whether one forward serves all sequences of a batch, whose texts differ in length: not where rotary
        frequencies depend on the longest text. Otherwise the texts are written one after the other."""
        return self.tree_verification == "mask" and self.rope_switch is None

    @property
    def windows(self) -> list[int | None]:
        """How many tokens a position sees in each layer, itself included; `None` for all."""
        kinds = getattr(self.config, "layer_types", None) or []
        window = getattr(self.config, "sliding_window", None)
        if not kinds:
            return [window] * self.config.num_hidden_layers
        return [window if kind == "sliding_attention" else None for kind in kinds]

    def begin_tree(self, cache: RewindableCache, layout: TreeLayout) -> None:
        """Prepare a cache for a masked forward over a draft tree."""

    def keep(self, cache: RewindableCache, layout: TreeLayout, accepted: list[int]) -> None:
        """Keep the accepted path of a draft tree in the cache, and no other node.

        Args:
            cache: As a masked forward left it.
            layout: The tree's.
            accepted: The path's verification positions, from the anchor on.
        """
        for layer in cache.layers if accepted != list(range(len(accepted))) else ():
            for states in (layer.keys, layer.values):
                if states is not None:  # in place: what follows the path is cut off
                    last = states[:, :, -len(layout) :]
                    last[:, :, : len(accepted)] = last.index_select(2, layout.index(accepted, states.device))
        cache.crop(len(accepted) - len(layout))

    def abort_forward(self, cache: RewindableCache, start: int) -> None:
        """Leave the first `start` tokens in a cache after a round's forward was interrupted, which some parts of the
        cache saw and others did not."""
        for layer in cache.layers:
            # A layer's own crop takes as many of an indexer's tokens as of its own, and either may come first.
            parts = _parts_of(layer)
            abort = getattr(layer, "abort_forward", None)
            if abort is not None:  # a running state's
                abort(start)
            elif getattr(layer, "keys", None) is not None:  # an MLP has a layer without
                layer.crop(min(0, start - layer.get_seq_length()))
            for name, (dim, part) in parts.items():
                setattr(layer, name, part.narrow(dim, 0, min(start, part.shape[dim])))

    def attention_keys(self, layer: RewindableLayer, keys: int, count: int, visible: list[int]) -> torch.Tensor:
        """Return where, in a verification round's attention weights, a token finds its keys: of its window's tokens in
        the order of the text, then of what else there was for it.

        Args:
            layer: Of the cache, as the round left it.
            keys: How many keys the weights are over.
            count: Verification positions of the round.
            visible: Those that the token sees, its own last.
        """
        columns_of = getattr(layer, "columns_of", None)
        if columns_of is not None:  # of a cache of rounds
            return cast(torch.Tensor, columns_of(visible))
        past, window = keys - count, getattr(layer, "sliding_window", None) or keys
        return torch.cat([torch.arange(past), past + torch.tensor(visible)])[-window:]


def stop_recording(cache: object) -> None:
    """Let a cache be as one that no draft was taken back from: of a window it holds the keys that a forward reads, and
    nothing that would undo one. What is recorded between calls would grow with every forward."""
    for layer in getattr(cache, "layers", ()):
        if hasattr(layer, "stop_recording"):  # ours, by this code or a drafter's own copy of it
            layer.stop_recording()
        elif getattr(layer, "record_past", False):
            if layer.keys is not None if hasattr(layer, "keys") else any(layer.has_previous_state.values()):
                layer.crop(0)  # which trims it to what the next forward reads
            layer.record_past = False


def _parts_of(layer: object) -> dict[str, tuple[int, torch.Tensor]]:
    """Return the tensors of an indexer in a cache layer, by name, each with its dimension of tokens."""
    return {name: (dim, part) for name, dim in _PARTS.items() if (part := getattr(layer, name, None)) is not None}


def soft_capped(logits: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Return logits between `-cap` and `cap`, nearly the same where they are small; all the same without a cap."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


def computable(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return `values` on the device and in the dtype of `weight`. An offloaded module moves its inputs itself, and a
    quantized weight's dtype cannot be computed in."""
    dtype = weight.dtype if weight.dtype.is_floating_point and weight.dtype.itemsize > 1 else values.dtype
    return values.to(dtype=dtype, device=values.device if weight.is_meta else weight.device)


def attention_mask_for(implementation: str | None, mask: torch.Tensor, dtype: torch.dtype) -> AttentionMask:
    """Return a mask as an implementation of transformers' attention interface takes it.

    Args:
        implementation: `config._attn_implementation`.
        mask: Boolean `[batch, 1, queries, keys]`, `True` where a query sees a key.
        dtype: That of the attention's logits.

    Raises:
        ValueError: If the implementation takes no masks of this kind.
    """
    if implementation in ("sdpa", SHARED_HEADS):
        return mask
    if implementation == "flex_attention":
        batch, _, queries, keys = mask.shape
        visible = mask[:, 0]
        return create_block_mask(
            lambda b, h, q, k: visible[b, q, k],
            batch,
            None,
            queries,
            keys,
            device=str(mask.device),  # type: ignore[arg-type]
        )
    if implementation == "eager":
        return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)
    raise ValueError(
        f"`attn_implementation` is {implementation!r}, which cannot mask blocks of several anchors: train with "
        "'sdpa' or 'flex_attention', and draft so where layers are causal or windows count from each slot."
    )


class RopeSwitch(NamedTuple):
    """A length of the text at which rotary frequencies change."""

    length: int
    is_at_every_token: bool  # whether they change with every token from there on, or only once

    def max_drafts(self, seen: int) -> float:
        """Return how deep the drafts of a round may go after `seen` tokens, the anchor included."""
        if seen <= self.length:
            return self.length - seen
        return 0 if self.is_at_every_token else math.inf


def rope_switch_of(config: PreTrainedConfig) -> RopeSwitch | None:
    """Return the switch of a target by its text configuration; `None` if its frequencies never change."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [each for each in (rope, *rope.values()) if isinstance(each, Mapping) and each.get("rope_type")]
    if any("dynamic" in each["rope_type"] for each in kinds):
        return RopeSwitch(config.max_position_embeddings, is_at_every_token=True)
    lengths = [each["original_max_position_embeddings"] for each in kinds if each["rope_type"] == "longrope"]
    return RopeSwitch(min(lengths), is_at_every_token=False) if lengths else None


def check_restart(config: PreTrainedConfig, length: int, max_length: int, padding: int) -> None:
    """Raise a `ValueError` if a target starts its cache anew while a text grows from `length` to `max_length`
    tokens, of which it does not see the first `padding`."""
    at = getattr(config, "original_max_position_embeddings", None)
    if config.model_type in _RESTARTING and at is not None and length - padding <= at < max_length - padding:
        raise ValueError(
            f"A {config.model_type} target starts its cache anew at {at + 1} tokens, where no draft can be taken "
            f"back: expected a text that ends before, and one of {length - padding} may have {max_length - padding}. "
            f"Set `max_length={at + padding}`, or leave `assistant_model` out."
        )
