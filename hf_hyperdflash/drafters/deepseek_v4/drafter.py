"""The base of DeepSeek-V4's own drafters: V4 blocks, read from the checkpoint of their target."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4PreTrainedModel, DeepseekV4RotaryEmbedding

from ...targets.registry import target_of
from ..saved import SavedDrafter
from ..weights import HubOptions, check_source, named_dtype, resolve_subfolder, uninitialized, warn_of_untrained
from .checkpoint import MTPCheckpoint

if TYPE_CHECKING:
    from typing_extensions import Unpack

# Our names within a block and DeepSeek's, by prefix, the first that matches; experts, one tensor each there, are
# handled apart.
_DEEPSEEK_NAMES = [
    ("self_attn.q_a_proj", "attn.wq_a"),
    ("self_attn.q_b_proj", "attn.wq_b"),
    ("self_attn.q_a_norm", "attn.q_norm"),
    ("self_attn.kv_proj", "attn.wkv"),
    ("self_attn.kv_norm", "attn.kv_norm"),
    ("self_attn.o_a_proj", "attn.wo_a"),
    ("self_attn.o_b_proj", "attn.wo_b"),
    ("self_attn.sinks", "attn.attn_sink"),
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("attn_hc.", "hc_attn_"),
    ("ffn_hc.", "hc_ffn_"),
    ("mlp.gate.e_score_correction_bias", "ffn.gate.bias"),
    ("mlp.gate", "ffn.gate"),
    ("mlp.shared_experts.gate_proj", "ffn.shared_experts.w1"),
    ("mlp.shared_experts.down_proj", "ffn.shared_experts.w2"),
    ("mlp.shared_experts.up_proj", "ffn.shared_experts.w3"),
    ("hc_head.hc_", "hc_head_"),
]
Rotary = tuple[torch.Tensor, torch.Tensor]  # cosines and sines
Own = TypeVar("Own", bound="DeepseekV4Drafter")


class DeepseekV4Drafter(SavedDrafter, DeepseekV4PreTrainedModel):
    """A drafter that DeepSeek-V4's checkpoints carry under `mtp.*`.

    The target's embedding and LM head are shared: they belong to the target, and are neither copied nor saved. A
    subclass has a `rotary_emb`, and its [`_place`] returns where its tensors are in a checkpoint.
    """

    rotary_emb: DeepseekV4RotaryEmbedding
    target_model_type = "deepseek_v4"
    _is_stateful = False  # sliding windows: nothing in them that could not be rewound
    _keys_to_ignore_on_load_unexpected: list[str] = []

    @classmethod
    def from_target(
        cls: type[Own],
        target: PreTrainedModel | str | Path,
        *,
        num_draft_tokens: int | None = None,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        revision: str | None = None,
        **hub_kwargs: Any,
    ) -> Own:
        """Load the drafter from the `mtp.*` tensors of a target's checkpoint; FP8 and FP4 weights are dequantized.

        Args:
            target: A checkpoint's path or Hub id, or a loaded target: then its `config._name_or_path`. Only the files
                with `mtp.*` tensors in them are downloaded.
            num_draft_tokens: Drafted tokens per round; this kind's usual number if left out.
            dtype: Of the weights, or its name, except those that V4 keeps in float32; by default the loaded target's
                LM head's, or the checkpoint's.
            device: By default the loaded target's LM head's, or the CPU.
            revision: Of the Hub repository.
            **hub_kwargs: For the Hub: `token`, `cache_dir`, `local_files_only`, ...

        Raises:
            ValueError: If `target` is no DeepSeek-V4, or its checkpoint's `mtp.*` tensors are another drafter's.
        """
        checkpoint = own_checkpoint(target, revision=revision, **hub_kwargs)
        checkpoint.check_drafter(cls.__name__)
        dtype = named_dtype(dtype)
        if isinstance(target, PreTrainedModel):
            head = cast(torch.Tensor, target.get_output_embeddings().weight)
            dtype, device = dtype or head.dtype, device or (None if head.is_meta else head.device)
        dtype = dtype or checkpoint.config.dtype or torch.bfloat16
        config = cast(Any, cls.config_class).from_target_config(checkpoint.config, checkpoint.blocks)
        drafter = cls._empty(config, cast(torch.dtype, dtype), device or "cpu")
        if num_draft_tokens is not None:
            drafter.num_draft_tokens = num_draft_tokens
        drafter._load(checkpoint)
        warn_of_untrained(drafter.state_dict(), checkpoint.name)
        return drafter.eval()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Load a drafter that `save_pretrained` wrote, whole and in safetensors ([`~drafters.weights.load_complete`]).

        Raises:
            ValueError: If it is a target or another model, or its tensors are not the drafter's.
            OSError: If it cannot be found or its weights are damaged.
        """
        pretrained_model_name_or_path, kwargs = resolve_subfolder(pretrained_model_name_or_path, kwargs)
        if kwargs.get("state_dict") is None:  # else there is nothing to read
            check_source(pretrained_model_name_or_path)
            fields, _ = PreTrainedConfig.get_config_dict(pretrained_model_name_or_path, **kwargs)
            made = fields.get("architectures") or ["model of unknown architecture"]
            if cls.__name__ not in made:
                raise ValueError(
                    f"{pretrained_model_name_or_path} is no drafter but a target, a {made[0]}. Its own drafter is "
                    f"loaded by `{cls.__name__}.from_target(...)`, or by `--mtp` of `hf-hyperdflash benchmark`."
                )
        return super().from_pretrained(pretrained_model_name_or_path, *args, **kwargs)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # transformers looks for the experts' decorator in the source of a drafter's own file

    @classmethod
    def _empty(cls: type[Own], config: PreTrainedConfig, dtype: torch.dtype, device: torch.device | str) -> Own:
        drafter = uninitialized(cls, config, dtype).to_empty(device=device)
        drafter.rotary_emb = DeepseekV4RotaryEmbedding(drafter.config).to(device)  # in no checkpoint
        drafter.config.dtype = dtype
        return drafter

    def _load(self, checkpoint: MTPCheckpoint) -> None:
        own = self.deepseek_state_dict()
        checkpoint.check_names(own)
        if self.device.type == "meta":  # sizes and counts without weights
            return
        checkpoint.copy(checkpoint.tensors(self.device), own)

    def deepseek_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the parameters under DeepSeek's names, `mtp.*`, as views: writing to them changes the drafter."""
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in self.state_dict().items():
            place, part = self._place(name)
            if part == "mlp.experts.gate_up_proj":
                for i, expert in enumerate(tensor):
                    tensors[f"{place}ffn.experts.{i}.w1.weight"], tensors[f"{place}ffn.experts.{i}.w3.weight"] = (
                        expert.chunk(2)
                    )
            elif part == "mlp.experts.down_proj":
                for i, down in enumerate(tensor):
                    tensors[f"{place}ffn.experts.{i}.w2.weight"] = down
            else:
                ours, theirs = next((pair for pair in _DEEPSEEK_NAMES if part.startswith(pair[0])), ("", ""))
                tensors[place + theirs + part[len(ours) :]] = tensor
        return tensors

    def _rotary(self, like: torch.Tensor, position_ids: torch.Tensor) -> Rotary:
        return self.rotary_emb(like, position_ids=position_ids, layer_type="main")

    def _place(self, name: str) -> tuple[str, str]:
        """Return the checkpoint's prefix for a tensor of ours, `"mtp.0."`, and its name within a block."""
        raise NotImplementedError


def own_checkpoint(target: PreTrainedModel | str | Path, **hub_kwargs: Unpack[HubOptions]) -> MTPCheckpoint:
    """Return the `mtp.*` tensors of a target's checkpoint, by the path or Hub id of it, or by the loaded target.

    Raises:
        ValueError: If `target` is no DeepSeek-V4, or there are no such tensors.
    """
    if isinstance(target, PreTrainedModel):
        target_of(target)  # says what a target is, if it is none
        config = target.config.get_text_config(decoder=True)
        name = config._name_or_path
        hub_kwargs["revision"] = hub_kwargs.get("revision") or getattr(config, "_commit_hash", None)
    else:
        check_source(target, "target")
        name = str(target)
        fields, _ = PreTrainedConfig.get_config_dict(name, **hub_kwargs)
        if any(made.endswith("Drafter") for made in fields.get("architectures") or ()):
            raise ValueError(f"{name} is a drafter, expected a target: pass the DeepSeek-V4 that it drafts for.")
        config = AutoConfig.from_pretrained(name, **hub_kwargs)
    if config.model_type != DeepseekV4Config.model_type:
        raise ValueError(
            f"{name or 'The target'} is a {config.model_type} model, expected {DeepseekV4Config.model_type}: only "
            "DeepSeek-V4 carries these drafters. Train a `HyperDFlashDrafter` for other targets."
        )
    return MTPCheckpoint(name, config, hub_kwargs)
