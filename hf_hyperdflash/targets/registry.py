"""The families of targets, which of them a model belongs to, and the capture of its residual streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate.utils import align_module_device
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, Cache, DynamicLayer
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4HCACache,
    DeepseekV4RMSNorm,
    DeepseekV4UnweightedRMSNorm,
)

from ..trees.tree import TreeLayout
from .caches.deepseek_v4 import (
    DEFAULT_MAX_REWIND,
    RewindableCSACacheLayer,
    RewindableHCACacheLayer,
    RewindableSlidingCacheLayer,
    make_rewindable,
)
from .deepseek_v4 import check_computes, hooks_of_rounds
from .fused import hyper_connection, rms_norm
from .gate import stream_gates
from .hooks import ResidualTap
from .target import Kernel, RewindableCache, RewindableLayer, Target, TreeVerification, Trunk

_COMPRESSED = frozenset({"compressed_sparse_attention", "heavily_compressed_attention"})  # kinds of V4's layers


class HyperConnected(Target):
    """A target whose `hc_head` has one gate per residual stream."""

    trunk: Any  # has `hc_head`, which collapses the streams, and `norm`

    title = "Hunyuan V4 (Hy4)"

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return isinstance(getattr(trunk, "hc_head", None), nn.Module)

    @property
    def streams(self) -> int:
        return self.config.hc_mult

    @property
    def why_ungated(self) -> str:
        return ""

    def gate(self) -> dict[str, torch.Tensor]:
        return read_gate(self.trunk.hc_head, "hc_")

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        return self.trunk.norm(self.trunk.hc_head(residual))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        return self.trunk.hc_head, self.trunk.norm

    def kernels(self) -> dict[nn.Module, Kernel]:
        connections = (module for module in self.model.modules() if hasattr(module, "hc_sinkhorn_iters"))
        return dict.fromkeys(connections, hyper_connection)


def read_gate(owner: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    """Return a copy of a gate's parameters; the values of an offloaded one are loaded here."""
    with align_module_device(owner):
        return {f"hc_{part}": getattr(owner, prefix + part).detach().clone() for part in ("fn", "base", "scale")}


class DeepseekV4(HyperConnected):
    """A DeepSeek-V4, from transformers or from remote code."""

    title = "DeepSeek-V4"
    rewindable_kinds = HyperConnected.rewindable_kinds | _COMPRESSED
    skips_padding = True  # its compressors pool padding with text

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__(model, trunk)
        # In DeepSeek's own layout, as remote code has it, the gate's parameters belong to no module.
        is_bare = not isinstance(getattr(trunk, "hc_head", None), nn.Module)
        self._bare: Any = (trunk if hasattr(trunk, "hc_head_fn") else model) if is_bare else None

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        config = target.config.get_text_config(decoder=True)
        is_named = config.model_type == "deepseek_v4" or bool(
            _COMPRESSED & set(getattr(config, "layer_types", None) or ())
        )
        is_bare = hasattr(trunk, "hc_head_fn") or hasattr(target, "hc_head_fn")
        return is_bare or (is_named and super().fits(target, trunk))

    @property
    def streams(self) -> int:
        return self.config.hc_mult if self._bare is None else self._bare.hc_head_fn.shape[0]

    def gate(self) -> dict[str, torch.Tensor]:
        return super().gate() if self._bare is None else read_gate(self._bare, "hc_head_")

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        if self._bare is None:
            return super().collapse(residual)
        gates = stream_gates(residual, **self.gate(), norm_eps=self.norm_eps, hc_eps=self.hc_eps)
        return self.trunk.norm((gates.unsqueeze(-1) * residual).sum(dim=2).to(residual.dtype))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        return super().collapse_modules if self._bare is None else (self.trunk.norm,)

    def check_computes(self) -> None:
        if isinstance(self.norm, DeepseekV4RMSNorm) and self.norm.weight.dtype == torch.float32:
            check_computes(self.dtype)

    def kernels(self) -> dict[nn.Module, Kernel]:
        connections, norms = super().kernels(), (DeepseekV4RMSNorm, DeepseekV4UnweightedRMSNorm)
        inside = {part for module in connections for part in module.modules()}
        alone = (module for module in self.model.modules() if type(module) in norms and module not in inside)
        return {**connections, **dict.fromkeys(alone, rms_norm)}

    # Caches

    def make_rewindable(self, cache: Cache, num_drafts: int) -> None:
        """Make a cache able to remove that many drafts and the anchor, from its compressors, too."""
        super().make_rewindable(cache, num_drafts)
        layers = getattr(cache, "layers", ())
        if self.config.model_type == "deepseek_v4" or any(isinstance(layer, DeepseekV4HCACache) for layer in layers):
            make_rewindable(cache, max(DEFAULT_MAX_REWIND, num_drafts + 1))
            for layer, cached in zip(self.layers, layers) if self.tree_verification == "cache" else ():
                if isinstance(cached, RewindableCSACacheLayer) and not cached.can_verify_trees:
                    compressor: Any = layer.get_submodule("self_attn.compressor")
                    for name, module in (("compressor", compressor), ("indexer", compressor.indexer)):
                        with align_module_device(module):  # the values of an offloaded one are loaded here
                            cached.read_overlap(name, module.position_bias)

    def cached_lengths(self, cache: Cache) -> set[int]:
        """Count the tokens of each compressor, too; a layer without keys has seen none."""
        lengths = super().cached_lengths(cache)
        for layer in getattr(cache, "layers", ()):
            lengths.add(layer.get_seq_length())
            for name, entries in getattr(layer, "entry_count", {}).items():
                buffered = layer.buffer_kv[name]
                lengths.add(entries * layer.compress_rate + (0 if buffered is None else buffered.shape[1]))
        return lengths

    def attention_keys(self, layer: RewindableLayer, keys: int, count: int, visible: list[int]) -> torch.Tensor:
        """Return where a token finds its keys, as the base does: compressed entries, one per closed window, come
        last."""
        if not hasattr(layer, "entry_count"):
            return super().attention_keys(layer, keys, count, visible)
        compressed = cast(RewindableHCACacheLayer, layer)
        keys -= compressed.entries_in_round("compressor")
        entries = keys + compressed.entries_seen("compressor", visible[-1], count)
        return torch.cat([super().attention_keys(layer, keys, count, visible), entries])

    # Draft trees

    @property
    def tree_verification(self) -> TreeVerification:
        is_stock = self.config.model_type == "deepseek_v4" and self.config._attn_implementation == "eager"
        return "cache" if is_stock else "fork"

    def begin_tree(self, cache: RewindableCache, layout: TreeLayout) -> None:
        for layer in cast("list[RewindableSlidingCacheLayer]", cache.layers):
            layer.begin_tree(layout)

    def keep(self, cache: RewindableCache, layout: TreeLayout, accepted: list[int]) -> None:
        for layer in cast("list[RewindableSlidingCacheLayer]", cache.layers):
            layer.keep(accepted)

    def abort_forward(self, cache: RewindableCache, start: int) -> None:
        for layer in cache.layers:
            if hasattr(layer, "keep"):  # remote code's own layers verify no trees
                layer.keep([])
        super().abort_forward(cache, start)

    # The indexer

    def register_hooks(self) -> list[RemovableHandle]:
        return [*super().register_hooks(), *hooks_of_rounds(self.model, self.rounds)]


class Glm5Next(HyperConnected):
    """A target whose `hc_head` has no parameters."""

    title = "GLM-5 Next (GLM-5.3-Flash)"

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return super().fits(target, trunk) and not hasattr(getattr(trunk, "hc_head", None), "hc_fn")

    def gate(self) -> dict[str, torch.Tensor]:
        """Return the gate whose collapse is the mean of the streams, whatever they hold."""
        return {
            "hc_fn": torch.zeros(self.streams, self.streams * self.config.hidden_size),
            "hc_base": torch.tensor(1 / self.streams - self.config.hc_eps).logit().repeat(self.streams),
            "hc_scale": torch.ones(1),
        }


class Qwen4Exp(Target):
    """A target whose mixer weighs every channel of a stream by itself, and norms."""

    trunk: Any  # has `hyper_connection_mixer`, which collapses the streams

    title = "Qwen4-Exp (Qwen3.8-Flash-Next)"
    # Its indexer reads the positions of all tokens. Before transformers 5.21 they are beside the cache's layers, where
    # nothing rewinds them.
    _KEEPS_POSITIONS = hasattr(
        DYNAMIC_LAYER_TYPE_MAPPING.get("indexed_attention", DynamicLayer)(), "indexer_position_ids"
    )
    rewindable_kinds = Target.rewindable_kinds - (set() if _KEEPS_POSITIONS else {"indexed_attention"})

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__(model, trunk)
        self.norm = None

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return hasattr(trunk, "hyper_connection_mixer")

    @property
    def streams(self) -> int:
        return self.config.hc_count

    @property
    def why_ungated(self) -> str:
        return "its collapse weighs every channel of a stream by itself, which one gate per stream cannot express"

    def collapse(self, residual: torch.Tensor) -> torch.Tensor:
        return self.trunk.hyper_connection_mixer(residual.flatten(2))

    @property
    def collapse_modules(self) -> tuple[nn.Module, ...]:
        return (self.trunk.hyper_connection_mixer,)


# One residual stream


class Granite(Target):
    """A target that scales its embeddings and its logits."""

    title = "Granite"

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        # Not the text part of a multimodal class, whose head is of its own and scales nothing.
        return target.config.model_type.startswith("granite") and hasattr(target.config, "logits_scaling")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * self.config.embedding_multiplier

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) / self.config.logits_scaling


class MuseGlimmer(Target):
    """A target whose input embedding norms the rows of its table, and which scales its logits before it caps them."""

    title = "Muse-Glimmer"

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return hasattr(target.get_input_embeddings(), "embed_norm")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of the table as they are: the family's own drafters read them so, without the norm with
        which they enter the first layer."""
        with align_module_device(self.input_embedding):
            weight = self.input_embedding.weight
            return nn.functional.embedding(ids.to(weight.device), weight).to(ids.device)

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits * self.config.output_multiplier)


class Exaone45(Target):
    """A target that counts positions by its cache, where draft trees and a batch's padding have others: a path and a
    text at a time."""

    title = "EXAONE 4.5"

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return target.config.model_type == "exaone4_5"

    @property
    def tree_verification(self) -> TreeVerification:
        return "fork"


class MambaHybrid(Target):
    """A target with Mamba-2 layers beside attention, or both in a layer. Its last norm has another name. Falcon-H1
    scales embeddings and logits.

    Stock Nemotron-H applies its least time step (`config.time_step_min`) in forwards of several tokens only. So its
    logits depend a little on how a text is divided into forwards, and drafted text may differ where two tokens are
    almost equally probable. Jamba does not belong here: its Mamba-1 layers start from an empty state in every forward
    of several tokens.
    """

    title = "Bamba, Falcon-H1, Nemotron-H"
    rewindable_kinds = Target.rewindable_kinds | {"hybrid", "mlp", "moe"}

    def __init__(self, model: PreTrainedModel, trunk: Trunk) -> None:
        super().__init__(model, trunk)
        self.norm = getattr(trunk, "norm_f" if hasattr(trunk, "norm_f") else "final_layernorm")

    @classmethod
    def fits(cls, target: PreTrainedModel, trunk: Trunk) -> bool:
        return target.config.model_type in ("bamba", "falcon_h1", "nemotron_h")

    @property
    def norm_eps(self) -> float:
        return getattr(self.config, "layer_norm_epsilon", super().norm_eps)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return super().embed(ids) * getattr(self.config, "embedding_multiplier", 1.0)

    def after_head(self, logits: torch.Tensor) -> torch.Tensor:
        return super().after_head(logits) * getattr(self.config, "lm_head_multiplier", 1.0)


# The first family that fits is chosen.
FAMILIES: tuple[type[Target], ...] = (
    DeepseekV4, Glm5Next, HyperConnected, Qwen4Exp, Granite, MuseGlimmer, Exaone45, MambaHybrid,
    Target,
)  # fmt: skip


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
