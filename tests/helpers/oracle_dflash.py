"""A second reading of two public DFlash checkpoint formats: z-lab's own and that of vllm-project/speculators.

Tiny random checkpoints and what they draft, in plain float32 tensor maths. It shares nothing with the package: what
the package imports or exports can be held against it. Facts are from the public repositories named; the code is ours.

**Both formats.**
- Tensors: `fc.weight [D, L*D]`, `hidden_norm.weight`, `norm.weight`, `layers.i.{input_layernorm,
  post_attention_layernorm}.weight`, `layers.i.self_attn.{q,k,v,o}_proj.weight`, `layers.i.self_attn.{q,k}_norm.weight
  [head_dim]`, `layers.i.mlp.{gate,up,down}_proj.weight`; biases of q, k, v and o if `attention_bias`. No `model.`
  prefix. (z-lab/dflash dflash/model.py and tests/fixtures/dflash2-safetensors-header.json; vllm-project/speculators
  src/speculators/models/dflash/core.py and model_definitions.py)
- Context: the chosen target states concatenated in the order the config lists them, then `fc`, then `hidden_norm`,
  once for all layers. Each layer applies its own `k_proj`, `v_proj` and `k_norm` to that; not its `input_layernorm`.
  Queries come from the block alone. (same files)
- Block: the anchor's embedding and then mask tokens, at positions a, a+1, ..; the context is at 0 .. a-1. A full
  attention layer sees the whole context and the whole block, in both directions. Slot k predicts the token at a+k;
  slot 0 predicts nothing. (z-lab model.py `dflash_generate`: positions from `start`, the last B-1 outputs;
  speculators core.py: targets are the verifier's logits at index - 1, slot 0 is masked out of the loss; vLLM
  vllm/v1/spec_decode/dflash.py: 1 + num_speculative_tokens queries, the mask slots are sampled)
- The drafter's own `norm` and then a head without bias. The target's final norm is not applied.
- RoPE is Qwen3's half-split one, on the normed queries and keys; scores are scaled by head_dim**-0.5. With a
  `partial_rotary_factor` the first channels of a head turn, and the others pass (vLLM's `get_rope`, GLM and Qwen3.5 in
  transformers). With "linear" scaling positions are divided by `factor`.
- A target with several residual streams (hyper-connections): its feature is their mean, as engines hand it out
  (vLLM's and SGLang's glm5_next, deepseek_v4). speculators' pull request 524 reads DeepSeek-V4's side by side instead
  and writes `hc_mult` into `transformer_layer_config`.
- `block_size` counts the anchor: at most block_size - 1 drafts. vLLM's block is 1 + num_speculative_tokens, the
  current z-lab code cuts the block to the tokens left, its first version always ran block_size slots. Attention
  being bidirectional, that changes the drafts: here the block is as long as the count asks, or `slots`.

**z-lab** (github.com/z-lab/dflash; also sgl-project/sglang python/sglang/srt/models/dflash.py and
speculative/dflash_utils.py, vllm-project/vllm vllm/model_executor/models/qwen3_dflash.py)
- Layer id i is hidden_states[i + 1], the output of layer i (`extract_context_feature`, offset 1; vLLM's
  eagle3_utils.py adds 1, since it takes the input of a layer; SGLang's `set_dflash_layers_to_capture` likewise).
- Embedding and head are the target's; the file has neither. Optional, in `dflash_config` or else at the top level:
  `input_embedding_scale` (on the raw embedding weights), `output_multiplier`, `final_logit_softcapping`.
- Flat config: `block_size`, `rope_theta`, `rope_scaling: null`, `auto_map` (vllm-project/speculators
  tests/unit/convert/test_dflash_converter.py; configs of SpecForge and of Hub copies). Newer: `block_size` within
  `dflash_config`, a top-level `rope_parameters {rope_theta, rope_type}`, `is_causal` (z-lab/dflash
  tests/fixtures/dflash2-config.json; speculators' converter.py says block_size moved with Qwen3.5).
- `layer_types` may mix full and sliding attention. A sliding layer sees keys less than `sliding_window` positions
  away and is causal within the block, unless `is_causal` says otherwise, which then holds for all layers (model.py at
  10129599; vLLM's `_dflash_layer_causal`, which also heeds `dflash_config.causal`). The first version (model/dflash.py
  at a3516f8c) was never causal.
- JetSpec (hao-ai-lab/JetSpec jetspec/models/draft_head.py `_build_dflash_causal_attention_mask`,
  jetspec/draft_head_adapter.py): DFlash's file with `dflash_config.causal_head`: a slot of any layer sees the context
  and the slots up to its own. Anchor and mask tokens are its input, slots 1.. draft, and all nodes of a depth of its
  tree have that slot's logits, whatever their path (jetspec/tree/baselines/accum_logp.py). NVIDIA-NeMo/Automodel
  (recipes/llm/train_jetspec.py) writes `dflash_config.causal`, which vLLM reads.

**speculators** (github.com/vllm-project/speculators; vllm-project/vllm vllm/transformers_utils/configs/speculators)
- Layer id i is hidden_states[i] (converter.py and test_dflash_converter.py: z-lab's ids + 1; vLLM's algos.py passes
  the ids on as they are and gives `dflash_config` the ids - 1, see vllm pull request 40727). The last layer's id is
  dropped in training and conversion (models/utils.py `resolve_target_layer_ids`, converter.py): that state serves the
  loss alone, so no post-norm state is ever a feature.
- `sample_from_anchor` (false for DFlash, true for DSpark; absent in older files): if true, slot k predicts a+k+1 and
  slot 0 counts (docs/user_guide/algorithms/dflash.md, core.py).
- `embed_tokens.weight [vocab, D]` and `lm_head.weight [draft_vocab, D]` are the frozen verifier's (model.py
  `DraftVocabMixin`), used if present. Newer versions leave out the embedding always and the head unless the vocabulary
  is truncated (core.py; tests/unit/models/test_checkpoint_key_ownership.py); `verifier_norm` and `verifier_lm_head`
  are never saved. vLLM takes what is missing from the target.
- Truncated: `t2d` bool [vocab], true for a kept id; `d2t` int64 [draft_vocab], an offset: target id = draft id +
  d2t[draft id], ascending (train/vocab_mapping.py; vLLM's qwen3_dflash.py `compute_logits` adds an arange). Neither
  is there when draft_vocab_size is the target's size.
- Sliding layers see the context from a - sliding_window on, whatever the slot, and their block causally unless
  `sliding_window_non_causal`; full layers are bidirectional regardless (models/dflash/attention.py). vLLM turns
  `sliding_window_non_causal: false` into a causal mask for *all* layers and takes an absent key for true (algos.py;
  pull request 56692 is to mend that), and counts its window from each query.
- `transformer_layer_config` is a transformers config's diff, with `rope_parameters` or, from transformers 4,
  `rope_theta`. `speculative_tokens` is block_size - 1.

**Not verified.** No weights and no Hub file were opened, only stored copies. A z-lab file for plain DFlash with
`rope_parameters` was not seen, only DFlash2's. For the target's *last* layer z-lab's code reads transformers'
hidden_states[-1], which is post-norm, while vLLM and SGLang take the residual stream; no released drafter was seen to
use it. A still newer speculators config ("Open Spec Config": flat, `open_spec_config_version`, `speculative_config`
with `target_layer_ids` and `target_layer_start_idx`, id + 1 - start being the one above) is not written here. Neither
are separate mask embeddings and attention sinks. DFlash 2's convolutions are here, where the layers are; the heads of
DFlash 2, DSpark and Domino, and DeepSpec's layout, are in `oracle_layouts.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

Weights = dict[str, Tensor]
Target = Any  # a transformers causal LM with a text-only config

HEADS, KV_HEADS, HEAD_DIM, THETA, EPS = 4, 2, 8, 10000.0, 1e-6


@dataclass(frozen=True)
class Drafter:
    """A checkpoint in terms common to both formats."""

    config: dict[str, Any]  # the Qwen3-like one
    weights: Weights
    features: list[int]  # indices of hidden_states
    mask_token_id: int
    block_size: int
    causal: list[bool]
    windows: list[int | None]
    window_from_anchor: bool
    first: int = 1  # the first slot that predicts
    side_by_side: bool = False  # a target's streams, not their mean


# --- Writing --------------------------------------------------------------------------------------------------------


def _layer_shapes(hidden: int, intermediate: int) -> dict[str, tuple[int, ...]]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def random_body(hidden: int, features: int, layers: int, seed: int) -> Weights:
    """Random tensors under z-lab's names. Norms differ from one, so that a skipped or misplaced one shows."""
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, features * hidden), "hidden_norm": (hidden,)}
    for i in range(layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _layer_shapes(hidden, 2 * hidden).items()}
    shapes["norm"] = (hidden,)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        weights[f"{name}.weight"] = 1 + 0.3 * noise if len(shape) == 1 else noise / shape[1] ** 0.5
    return weights


def layer_config(target: Target, layers: int, sliding_window: int | None, all_slide: bool = False) -> dict[str, Any]:
    """The Qwen3-like fields both formats share, rope aside. With a window, every layer but the last slides, or all."""
    config = target.config.get_text_config()
    sliding = 0 if sliding_window is None else layers - (not all_slide)
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": 2 * config.hidden_size,
        "layer_types": ["sliding_attention"] * sliding + ["full_attention"] * (layers - sliding),
        "max_position_embeddings": config.max_position_embeddings,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "sliding_window": sliding_window,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
        "use_cache": True,
        "use_sliding_window": sliding_window is not None,
        "vocab_size": config.vocab_size,
    }


def save(folder: str | Path, config: dict[str, Any], weights: Weights) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
    save_file(tensors, str(Path(folder) / "model.safetensors"), metadata={"format": "pt"})


def write_zlab(
    folder: str | Path,
    target: Target,
    *,
    nested: bool,
    layer_ids: list[int],
    block_size: int,
    mask_token_id: int,
    layers: int = 2,
    seed: int = 0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    inner: dict[str, Any] | None = None,
    outer: dict[str, Any] | None = None,
) -> None:
    """A random drafter in z-lab's layout: the flat config or, `nested`, the newer one, with more fields in
    `dflash_config` and at the top level (`None` takes one out). Layer id i: its output."""
    config = layer_config(target, layers, sliding_window)
    config |= {
        "architectures": ["DFlashDraftModel"],
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": layer_ids},
        "dtype": "float32",
        "num_target_layers": target.config.num_hidden_layers,
    }
    if nested:
        config["dflash_config"]["block_size"] = block_size
        config |= {"rope_parameters": {"rope_theta": THETA, "rope_type": "default"}, "transformers_version": "5.15.0"}
    else:
        config |= {"block_size": block_size, "rope_theta": THETA, "rope_scaling": None}
        config |= {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "4.57.1"}
    if is_causal is not None:
        config["is_causal"] = is_causal
    config["dflash_config"] |= inner or {}
    config = {field: value for field, value in {**config, **(outer or {})}.items() if value is not None}
    save(folder, config, random_body(target.config.hidden_size, len(layer_ids), layers, seed))


def speculators_config(
    target: Target, of_layers: dict[str, Any], drafts: int, algorithm: str = "dflash"
) -> dict[str, Any]:
    """All but what a drafter reads, how long its block is and which tokens it drafts."""
    proposal = {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "dtype": "float32",
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "architectures": [type(target).__name__],
                "name_or_path": str(target.config.name_or_path) or None,
            },
        },
        "speculators_model_type": algorithm,
        "speculators_version": "0.6.0",
        "target_hidden_size": None,
        "transformer_layer_config": {
            **of_layers,
            "rope_parameters": {"rope_theta": THETA, "rope_type": "default"},
        },
        "transformers_version": "5.15.0",
    }


def vocabulary(target: Target, size: int, kept: Tensor, verifier_weights: str, seed: int) -> Weights:
    """Embedding, head and, if ids were dropped, their maps. `kept`: the target ids of the draft ids, ascending."""
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight[kept]
    if verifier_weights == "own":
        generator = torch.Generator().manual_seed(seed + 1)
        embedding, head = (torch.randn(tensor.shape, generator=generator) for tensor in (embedding, head))
    truncated = len(kept) != size
    weights: Weights = {}
    if verifier_weights != "omitted":
        weights["embed_tokens.weight"] = embedding.float()
    if verifier_weights != "omitted" or truncated:
        weights["lm_head.weight"] = head.float()
    if truncated:
        weights["t2d"] = torch.zeros(size, dtype=torch.bool).index_fill(0, kept, True)
        weights["d2t"] = kept - torch.arange(len(kept))
    return weights


def write_speculators(
    folder: str | Path,
    target: Target,
    *,
    layer_ids: list[int],
    block_size: int,
    mask_token_id: int,
    draft_vocab_size: int | None = None,
    layers: int = 2,
    seed: int = 0,
    sliding_window: int | None = None,
    sliding_window_non_causal: bool = False,
    sample_from_anchor: bool = False,
    verifier_weights: Literal["copied", "omitted", "own"] = "copied",
    all_slide: bool = False,
    streams: int = 1,
) -> None:
    """A random drafter in speculators' layout. Layer id i: hidden_states[i]. Embedding and head: a copy of the
    target's, as trained; omitted, as newer versions save; or random "own" ones, to see which a loader uses. With
    `streams` the target's are read side by side, and the file has the buffers of its `hc_head`, of the loss."""
    text = target.config.get_text_config()
    size, width = text.vocab_size, text.hidden_size
    drafts = block_size if sample_from_anchor else block_size - 1
    of_layers = layer_config(target, layers, sliding_window, all_slide)
    config = speculators_config(target, of_layers | ({"hc_mult": streams} if streams > 1 else {}), drafts)
    if streams > 1:
        config["target_hidden_size"] = streams * width
    config |= {
        "aux_hidden_state_layer_ids": layer_ids,
        "block_size": block_size,
        "draft_vocab_size": draft_vocab_size or size,
        "mask_token_id": mask_token_id,
        "sample_from_anchor": sample_from_anchor,
        "sliding_window_non_causal": sliding_window_non_causal,
    }
    weights = random_body(width, len(layer_ids) * streams, layers, seed)
    if streams > 1:
        weights["hc_head_fn"] = torch.zeros(streams, streams * width)
        weights |= {"hc_head_base": torch.zeros(streams), "hc_head_scale": torch.ones(1)}
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    kept = order[: draft_vocab_size or size].sort().values
    save(folder, config, weights | vocabulary(target, size, kept, verifier_weights, seed))


# --- Reading --------------------------------------------------------------------------------------------------------


def read(folder: str | Path) -> tuple[dict[str, Any], Weights]:
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    weights = load_file(str(Path(folder) / "model.safetensors"))
    return config, {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _sliding(config: dict[str, Any]) -> list[bool]:
    """Which layers slide. Where `layer_types` are not said, those from `max_window_layers` on, if a window is in use
    (transformers' Qwen3Config); with `use_swa` and none that slides, all (vLLM's `_resolve_layer_attention`)."""
    layers = config["num_hidden_layers"]
    types, is_used = config.get("layer_types"), config.get("use_sliding_window") and config.get("sliding_window")
    sliding = [kind == "sliding_attention" for kind in types] if types else [False] * layers
    if types is None and is_used:
        sliding = [i >= config.get("max_window_layers", 28) for i in range(layers)]
    if config.get("dflash_config", {}).get("use_swa") and not any(sliding):
        return [True] * layers
    return sliding


def _zlab_value(config: dict[str, Any], name: str, default: Any = None) -> Any:
    return config.get("dflash_config", {}).get(name, config.get(name, default))


def read_zlab(folder: str | Path) -> Drafter:
    config, weights = read(folder)
    sliding = _sliding(config)
    explicit = config.get("is_causal")
    if explicit is None:
        explicit = config.get("dflash_config", {}).get("causal", config.get("dflash_config", {}).get("causal_head"))
    window = _zlab_value(config, "swa_window_size", config.get("sliding_window"))
    is_said = bool(config.get("layer_types")) and "sliding_attention" in config["layer_types"]
    return Drafter(
        config=config,
        weights=weights,
        features=[i + 1 for i in _zlab_value(config, "target_layer_ids")],
        mask_token_id=_zlab_value(config, "mask_token_id"),
        block_size=_zlab_value(config, "block_size"),
        causal=[each and is_said if explicit is None else bool(explicit) for each in sliding],
        windows=[window if each else None for each in sliding],
        window_from_anchor=False,
        first=1 if not _zlab_value(config, "sample_from_anchor") else 0,
    )


def read_speculators(folder: str | Path) -> Drafter:
    outer, weights = read(folder)
    config = outer["transformer_layer_config"]
    sliding = _sliding(config)
    return Drafter(
        config=config | {"draft_vocab_size": outer["draft_vocab_size"]},
        weights=weights,
        features=outer["aux_hidden_state_layer_ids"],
        mask_token_id=outer["mask_token_id"],
        block_size=outer["block_size"],
        causal=[each and not outer.get("sliding_window_non_causal", False) for each in sliding],
        windows=[config["sliding_window"] if each else None for each in sliding],
        window_from_anchor=True,
        side_by_side=config.get("hc_mult", 1) > 1,
        first=0 if outer.get("sample_from_anchor", outer["speculators_model_type"] == "dspark") else 1,
    )


# --- The drafter ----------------------------------------------------------------------------------------------------


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def _norm(weights: Weights, name: str, x: Tensor, eps: float) -> Tensor:
    return weights[f"{name}.weight"] * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _rope(config: dict[str, Any]) -> tuple[float, float, float]:
    """The base, what positions are divided by, and the part of a head that turns."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope", "linear"):  # the first two are the same for text
        raise ValueError(f"the oracle knows only plain RoPE, not {rope}")
    theta = float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])
    part = rope.get("partial_rotary_factor", _zlab_value(config, "partial_rotary_factor"))
    return theta, rope["factor"] if kind == "linear" else 1.0, 1.0 if part is None else part


def _rotate(x: Tensor, start: int, rope: tuple[float, float, float]) -> Tensor:
    """Half-split rotary embedding of x [length, heads, head_dim], whose first row is at position `start`."""
    theta, divisor, part = rope
    half = int(x.shape[-1] * part) // 2
    frequencies = theta ** -(torch.arange(half) / half)
    angles = (start + torch.arange(len(x)))[:, None, None] / divisor * frequencies
    left, right, passed = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = (left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin(), passed)
    return torch.cat(turned, dim=-1)


def _visible(drafter: Drafter, layer: int, context: int, slots: int) -> Tensor:
    """[slots, context + slots]: what each slot sees."""
    query, key = torch.arange(context, context + slots)[:, None], torch.arange(context + slots)[None]
    seen = torch.ones(slots, context + slots, dtype=torch.bool)
    if drafter.causal[layer]:
        seen &= key <= query
    window = drafter.windows[layer]
    if window is not None and drafter.window_from_anchor:
        seen &= key >= context - window
    elif window is not None:
        seen &= (query - key).abs() < window
    return seen


def _attention(drafter: Drafter, layer: int, context: Tensor, block: Tensor) -> Tensor:
    """`block` [slots, D] after the input norm, `context` [length, D] after `hidden_norm`."""
    weights, eps, rope = drafter.weights, drafter.config["rms_norm_eps"], _rope(drafter.config)
    prefix, length = f"layers.{layer}.self_attn.", len(context)
    heads, groups = drafter.config["num_attention_heads"], drafter.config["num_key_value_heads"]
    source = torch.cat([context, block])
    queries = _linear(weights, prefix + "q_proj", block).unflatten(-1, (heads, -1))
    keys = _linear(weights, prefix + "k_proj", source).unflatten(-1, (groups, -1))
    values = _linear(weights, prefix + "v_proj", source).unflatten(-1, (groups, -1))
    queries = _rotate(_norm(weights, prefix + "q_norm", queries, eps), length, rope)
    keys = _rotate(_norm(weights, prefix + "k_norm", keys, eps), 0, rope)
    keys, values = (each.repeat_interleave(heads // groups, dim=1) for each in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries, keys) / queries.shape[-1] ** 0.5
    scores = scores.masked_fill(~_visible(drafter, layer, length, len(block)), -torch.inf)
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return _linear(weights, prefix + "o_proj", mixed.flatten(1))


def _around(weights: Weights, prefix: str, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
    """A sublayer between DFlash 2's two convolutions, if there are any: of slot t out_t = sum over taps j of
    (base_j + dynamic_{t,j}) x_{t-j}, where the dynamic part is one number per group of channels."""
    if f"{prefix}.base_kernel" not in weights:
        return sublayer(x)
    base = weights[f"{prefix}.base_kernel"]  # [before or after, taps, channels]
    taps, channels = base.shape[1:]
    said = _linear(weights, f"{prefix}.kernel_projection", x).reshape(len(x), 2, taps, -1)
    group_of = torch.arange(channels) // (channels // said.shape[-1])
    for side in range(2):
        out = torch.zeros_like(x)
        for t in range(len(x)):
            for j in range(min(taps, t + 1)):
                out[t] += (base[side, j] + said[t, side, j][group_of]) * x[t - j]
        x = sublayer(out) if side == 0 else out
    return x


def _mlp(weights: Weights, prefix: str, x: Tensor) -> Tensor:
    gated = F.silu(_linear(weights, prefix + "gate_proj", x)) * _linear(weights, prefix + "up_proj", x)
    return _linear(weights, prefix + "down_proj", gated)


def body(drafter: Drafter, block: Tensor, context: Tensor) -> Tensor:
    """Final states [slots, D] of the block's embeddings, over the already projected and normed context."""
    weights, eps = drafter.weights, drafter.config["rms_norm_eps"]
    for layer in range(drafter.config["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        normed = _norm(weights, prefix + "input_layernorm", block, eps)
        attention = partial(_attention, drafter, layer, context)
        block = block + _around(weights, prefix + "attention_conv", normed, attention)
        normed = _norm(weights, prefix + "post_attention_layernorm", block, eps)
        block = block + _around(weights, prefix + "mlp_conv", normed, partial(_mlp, weights, prefix + "mlp."))
    return _norm(weights, "norm", block, eps)


@torch.no_grad()
def states(drafter: Drafter, target: Target, embedding: Tensor, ids: Tensor, count: int, slots: int | None) -> Tensor:
    """[count, D]: the final states of the slots that predict."""
    slots = count + drafter.first if slots is None else slots
    if ids.shape[0] != 1 or ids.shape[1] < 2 or not 1 <= count <= slots - drafter.first or slots > drafter.block_size:
        raise ValueError(
            f"cannot draft {count} in a block of {slots} (at most {drafter.block_size}) after {ids.shape}"
        )
    states = target(ids[:, :-1], output_hidden_states=True).hidden_states
    chosen = [states[i][0].float() for i in drafter.features]  # [length, (streams,) D]
    if chosen[0].dim() == 3:
        chosen = [each.flatten(1) if drafter.side_by_side else each.mean(1) for each in chosen]
    features = torch.cat(chosen, dim=-1)
    context = _linear(drafter.weights, "fc", features)
    context = _norm(drafter.weights, "hidden_norm", context, drafter.config["rms_norm_eps"])
    block = torch.tensor([int(ids[0, -1])] + [drafter.mask_token_id] * (slots - 1))
    return body(drafter, embedding[block], context)[drafter.first :][:count]


# --- Drafting -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def zlab_logits(folder: str | Path, target: Target, ids: Tensor, count: int, slots: int | None = None) -> Tensor:
    """Logits [count, vocab] of the tokens after the anchor ids[0, -1], which the target has not processed yet."""
    drafter = read_zlab(folder)
    embedding = target.get_input_embeddings().weight.float() * _zlab_value(drafter.config, "input_embedding_scale", 1)
    hidden = states(drafter, target, embedding, ids, count, slots)
    logits = F.linear(hidden, target.get_output_embeddings().weight.float())
    logits = logits * _zlab_value(drafter.config, "output_multiplier", 1.0)
    cap = _zlab_value(drafter.config, "final_logit_softcapping")
    return torch.tanh(logits / cap) * cap if cap else logits


@torch.no_grad()
def speculators_logits(
    folder: str | Path, target: Target, ids: Tensor, count: int, slots: int | None = None
) -> tuple[Tensor, Tensor]:
    """Logits [count, draft_vocab] of the tokens after the anchor ids[0, -1], and each draft id's target id."""
    drafter = read_speculators(folder)
    weights, size = drafter.weights, drafter.config["draft_vocab_size"]
    kept = torch.arange(size) + weights.get("d2t", torch.zeros(size, dtype=torch.long))
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings().weight.float())
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight.float()[kept])
    return F.linear(states(drafter, target, embedding, ids, count, slots), head), kept
