"""A second reading of DSpark, DFlash 2 and Domino in z-lab's, speculators' and DeepSpec's layout, beside
`oracle_dflash.py`.

Tiny random checkpoints and what they draft, token by token, in plain float32 tensor maths; it shares nothing with the
package. Facts are from the public repositories named; the code is ours.

**DSpark** (deepseek-ai/DeepSpec deepspec/modeling/dspark/, deepspec/eval/dspark/draft_ops.py; vllm-project/speculators
src/speculators/models/dspark/)
- DFlash's block and layers. h_k is the state of the slot that drafts position k, x_{k-1} the token before (the anchor,
  for the first), e = W1[x_{k-1}], W1 `markov_head.markov_w1.weight [vocab, r]`.
- Logits of position k: LMHead(h_k) + W2 v_k, W2 `markov_head.markov_w2.weight [draft vocab, r]`.
  `vanilla`: v = e. `gated`: v = sigmoid(G [h; e] + b) * e, G `gate_proj [r, D + r]`. `rnn`: [g; c; o] = J [s; e; h]
  + b, J `joint_proj [3 r, 2 r + D]`, s = sigmoid(g) s + (1 - sigmoid(g)) tanh(c), v = tanh(o), s = 0 at first.
- Confidence: sigmoid(`confidence_head.proj` [h_k; e]), or of h_k alone (`confidence_head_with_markov`).
- At temperature T > 0 the token is drawn from softmax(logits / T), left to right.
- DeepSpec: a flat Qwen3 config, `architectures: ["Qwen3DSparkModel"]`, `target_layer_ids` (i is hidden_states[i + 1],
  -1 the embeddings), `mask_token_id`, `block_size` inputs that all draft, the anchor's too, `markov_rank` (0: no
  head), `markov_head_type`, `enable_confidence_head`, `confidence_head_with_markov`, `num_anchors`,
  `num_target_layers`. The file has copies of the target's embedding and head, `embed_tokens.weight` and
  `lm_head.weight`.
- SpecForge (sgl-project/SpecForge configs/qwen3-8b-dspark.json, specforge/modeling/draft/dspark.py,
  specforge/algorithms/common/dflash_family_model.py `_build_dspark_labels_and_mask`): as z-lab's, `architectures:
  ["DSparkDraftModel"]`, in `dflash_config` `projector_type: "dspark"` and the heads' fields, without
  `enable_confidence_head` there is a head if `confidence_head_alpha` is not 0. Slot k is trained for the token a+k+1,
  as DeepSpec's. Its `normalize_dflash_export.py` makes `architectures: ["Qwen3DSparkModel"]` and copies the heads'
  fields to the top level, not the others.
- speculators: as its DFlash, with the same four fields; `sample_from_anchor` is true where it is not said.

**DFlash 2** (PyPI dflash 0.1.0 dflash/model.py; speculators src/speculators/models/dflash2/)
- Convolutions around attention and MLP: see `oracle_dflash.py`.
- Candidates of position k: the 16 (`selector_top_k`) best by U = LMHead(h_k). Their scores: U_b + <A[x_{k-1}] *
  (P h_k), B[b]>, A and B `candidate_selector.{predecessor,successor}_codebook [vocab, r]`, P `hidden_projection.weight
  [r, D]`.
- At temperature T > 0 the token is drawn from softmax(score / T) of the candidates.
- z-lab: `architectures: ["DFlash2DraftModel"]`, the four sizes in `dflash_config` or at the top level. speculators: at
  the top level, 2, 16, 256 and 16 where they are not said; no truncated vocabulary.

**Domino** (sgl-project/SpecForge specforge/modeling/draft/domino.py, configs/qwen3-8b-domino.json;
NVIDIA-NeMo/Automodel components/speculative/dflash/{draft_qwen3,domino_core}.py; NVIDIA/Model-Optimizer
modelopt/torch/speculative/plugins/modeling_domino.py)
- z-lab's file with `projector_type: "domino"`, `emb_dim`, `gru_hidden_dim`, `pure_draft_prefix_len` (0 where it is not
  said) and `shift_label` in `dflash_config`. `architectures` is `["DominoDraftModel"]` (SpecForge, for which that is
  enough) or a DFlash one's. With `shift_label` slot k drafts the token a+k+1, without it the token a+k.
- A GRU of one layer without biases, `prefix_gru.weight_ih_l0 [3 S, D]` and `weight_hh_l0 [3 S, S]`, reads the target's
  embeddings of the anchor and of the drafts before, from a state of zeros. Logits of a draft: LMHead(h) + W2 silu(W1
  [h; state after the token before]), `embed_proj.0.weight [r, D + S]`, `embed_proj.2.weight [vocab, r]`. The first
  `pure_draft_prefix_len` drafts are LMHead(h) alone, but the GRU reads them.
- Early checkpoints have these tensors below `logit_head.`.
- SpecForge's own loop verifies block_size - 1 drafts of a shifted block; all block_size slots are trained, and
  vllm-ascend drafts with all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_hyperdflash.trees.draws import sample_index

from . import oracle_dflash as base
from .oracle_dflash import THETA, Drafter, Target, Weights

RANK, LAYERS, CAP = 8, 2, "final_logit_softcapping"


@dataclass(frozen=True)
class Drafts:
    """What is drafted after a text.

    Attributes:
        tokens: One per position.
        q: `[positions, vocab]`, what each was drawn from; `None` if each is the most probable.
        confidence: `[positions]`, or `None`.
    """

    tokens: list[int]
    q: Tensor | None
    confidence: Tensor | None


# --- Writing --------------------------------------------------------------------------------------------------------


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed + 7)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def dspark_tensors(target: Target, head: str | None, confidence: str | None, drafted: int, seed: int) -> Weights:
    """Random tensors of DSpark's heads: `head` vanilla, gated, rnn or `None`, `confidence` markov, state or `None`."""
    text = target.config.get_text_config()
    size, width = text.vocab_size, text.hidden_size
    shapes: dict[str, tuple[int, ...]] = {}
    if head:
        shapes |= {"markov_head.markov_w1.weight": (size, RANK), "markov_head.markov_w2.weight": (drafted, RANK)}
    if head == "gated":
        shapes |= {"markov_head.gate_proj.weight": (RANK, width + RANK), "markov_head.gate_proj.bias": (RANK,)}
    if head == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + width)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    if confidence:
        shapes["confidence_head.proj.weight"] = (1, width + (RANK if confidence == "markov" else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    weights = _random(shapes, seed)
    for name in weights.keys() & {"markov_head.gate_proj.weight", "markov_head.joint_proj.weight"}:
        weights[name] /= weights[name].shape[1] ** 0.5
    return weights


def _dspark_fields(head: str | None, confidence: str | None) -> dict[str, Any]:
    return {
        "markov_rank": RANK if head else 0,
        "markov_head_type": head or "vanilla",
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": confidence == "markov",
    }


def _dflash2_tensors(target: Target, taps: int, group: int, seed: int) -> Weights:
    text = target.config.get_text_config()
    size, width = text.vocab_size, text.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (size, RANK),
        "candidate_selector.successor_codebook": (size, RANK),
        "candidate_selector.hidden_projection.weight": (RANK, width),
    }
    for i in range(LAYERS):
        for which in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{which}.base_kernel"] = (2, taps, width)
            shapes[f"layers.{i}.{which}.kernel_projection.weight"] = (2 * taps * width // group, width)
    weights = _random(shapes, seed)
    for name, tensor in weights.items():
        tensor /= tensor.shape[-1] ** 0.5 if "projection" in name else 2.0
    return weights


def write_dspark(
    folder: str | Path,
    target: Target,
    *,
    layout: str,
    layer_ids: list[int],
    block_size: int,
    mask_token_id: int,
    head: str | None = "vanilla",
    confidence: str | None = None,
    normalized: bool = False,
    draft_vocab_size: int | None = None,
    sample_from_anchor: bool | None = None,
    sliding_window: int | None = None,
    seed: int = 0,
) -> None:
    """A random DSpark drafter in DeepSpec's layout, as SpecForge writes it, or `normalized` for SGLang (layer id i:
    its output), or in speculators' (hidden_states[i]). There a truncated vocabulary has a head of its own, else
    embedding and head are left out, as newer versions do. With a window all layers slide."""
    text = target.config.get_text_config()
    size = text.vocab_size
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    kept = order[: draft_vocab_size or size].sort().values
    heads = _dspark_fields(head, confidence)
    roles = {"mask_token_id": mask_token_id, "target_layer_ids": layer_ids}
    config = base.layer_config(target, LAYERS, sliding_window, all_slide=True)
    if layout == "deepspec":
        rope = {"rope_theta": THETA, "rope_type": "default"}
        config |= {
            "architectures": ["Qwen3DSparkModel"],
            "rope_parameters": rope,
            "num_anchors": 512,
            **heads,
            **roles,
        }
        config |= {"tie_word_embeddings": False, "dtype": "float32", "transformers_version": "5.10.2"}
    elif layout == "specforge":
        inner = {**heads, **roles, "attention_mode": "gqa", "projector_type": "dspark"}
        inner["confidence_head_alpha"] = float(confidence is not None)
        config |= {"auto_map": {"AutoModel": "dspark.DSparkDraftModel"}, "rope_scaling": None, "rope_theta": THETA}
        config |= {"architectures": ["DSparkDraftModel"], "dflash_config": inner}
        config |= {"architectures": ["Qwen3DSparkModel"], **heads} if normalized else {}
    else:
        config = base.speculators_config(target, config, block_size - (sample_from_anchor is False), "dspark")
        config |= {"architectures": ["DSparkDraftModel"], "draft_vocab_size": len(kept), **heads}
        config |= {"aux_hidden_state_layer_ids": layer_ids, "mask_token_id": mask_token_id}
        config |= {} if sample_from_anchor is None else {"sample_from_anchor": sample_from_anchor}
    config["block_size"] = block_size
    if layout != "speculators":
        config["num_target_layers"] = target.config.num_hidden_layers
    weights = base.random_body(text.hidden_size, len(layer_ids), LAYERS, seed)
    weights |= dspark_tensors(target, head, confidence, len(kept), seed)
    if layout != "specforge":
        copies = "copied" if layout == "deepspec" else "omitted"
        weights |= base.vocabulary(target, size, kept, copies, seed)
    base.save(folder, config, weights)


def write_dflash2(
    folder: str | Path,
    target: Target,
    *,
    layout: str,
    layer_ids: list[int],
    block_size: int,
    mask_token_id: int,
    nested: bool = True,
    top_k: int = 16,
    taps: int = 2,
    group: int = 16,
    sliding_window: int | None = None,
    seed: int = 0,
) -> None:
    """A random DFlash 2 drafter, in z-lab's layout (layer id i: its output) or in speculators' (hidden_states[i]).
    With a window all layers slide."""
    text = target.config.get_text_config()
    config = base.layer_config(target, LAYERS, sliding_window, all_slide=True)
    sizes = {"conv_kernel_size": taps, "conv_group_size": group, "selector_rank": RANK, "selector_top_k": top_k}
    roles = {"mask_token_id": mask_token_id, "block_size": block_size}
    if layout == "speculators":
        config = base.speculators_config(target, config, block_size - 1, "dflash2")
        config |= {"aux_hidden_state_layer_ids": layer_ids, "draft_vocab_size": text.vocab_size}
        config |= {**roles, **sizes}
    else:
        config |= {"is_causal": False, "rope_parameters": {"rope_theta": THETA, "rope_type": "default"}}
        config["num_target_layers"] = text.num_hidden_layers
        inner = {**roles, **sizes, "target_layer_ids": layer_ids}
        config |= {"dflash_config": inner} if nested else inner
    config["architectures"] = ["DFlash2DraftModel"]
    weights = base.random_body(text.hidden_size, len(layer_ids), LAYERS, seed)
    base.save(folder, config, weights | _dflash2_tensors(target, taps, group, seed))


def write_domino(
    folder: str | Path,
    target: Target,
    *,
    layer_ids: list[int],
    block_size: int,
    mask_token_id: int,
    shifted: bool = True,
    start: int | None = 1,
    architecture: str = "DominoDraftModel",
    below: str = "",
    seed: int = 0,
) -> None:
    """A random Domino drafter as SpecForge or NVIDIA write it, with its head's tensors `below` a module or not;
    `start` is `pure_draft_prefix_len`."""
    text, size = target.config.get_text_config(), 6
    inner = {"projector_type": "domino", "emb_dim": RANK, "gru_hidden_dim": size, "shift_label": shifted}
    inner |= {"mask_token_id": mask_token_id, "target_layer_ids": layer_ids}
    config = base.layer_config(target, LAYERS, None) | {"rope_scaling": None, "rope_theta": THETA, "emb_dim": RANK}
    config |= {"auto_map": {"AutoModel": "domino.DominoDraftModel"}, "num_target_layers": text.num_hidden_layers}
    config |= {"architectures": [architecture], "block_size": block_size}
    config["dflash_config"] = inner | ({} if start is None else {"pure_draft_prefix_len": start})
    shapes = {"prefix_gru.weight_ih_l0": (3 * size, text.hidden_size), "prefix_gru.weight_hh_l0": (3 * size, size)}
    shapes |= {"embed_proj.0.weight": (RANK, text.hidden_size + size), "embed_proj.2.weight": (text.vocab_size, RANK)}
    heads = {f"{below}{name}": tensor for name, tensor in _random(shapes, seed).items()}
    base.save(folder, config, base.random_body(text.hidden_size, len(layer_ids), LAYERS, seed) | heads)


# --- Reading --------------------------------------------------------------------------------------------------------


def _read_deepspec(folder: str | Path) -> Drafter:
    config, weights = base.read(folder)
    layers = config["num_hidden_layers"]
    return Drafter(
        config=config,
        weights=weights,
        features=[i + 1 for i in config["target_layer_ids"]],
        mask_token_id=config["mask_token_id"],
        block_size=config["block_size"],
        causal=[False] * layers,
        windows=[None] * layers,
        window_from_anchor=False,
        first=0,
    )


def read_any(folder: str | Path, config: dict[str, Any]) -> Drafter:
    if "speculators_model_type" in config:
        return base.read_speculators(folder)
    inner = config.get("dflash_config", {})
    if inner.get("projector_type") == "dspark" or inner.get("shift_label"):
        return replace(base.read_zlab(folder), first=0)
    return _read_deepspec(folder) if "Qwen3DSparkModel" in config["architectures"] else base.read_zlab(folder)


# --- Drafting -------------------------------------------------------------------------------------------------------


def _markov(weights: Weights, hidden: Tensor, before: int, state: Tensor) -> tuple[Tensor, Tensor]:
    """v_k and s_k."""
    embedded = weights["markov_head.markov_w1.weight"][before]
    if "markov_head.gate_proj.weight" in weights:
        gate, bias = weights["markov_head.gate_proj.weight"], weights["markov_head.gate_proj.bias"]
        return torch.sigmoid(gate @ torch.cat([hidden, embedded]) + bias) * embedded, state
    if "markov_head.joint_proj.weight" in weights:
        joint, bias = weights["markov_head.joint_proj.weight"], weights["markov_head.joint_proj.bias"]
        said = joint @ torch.cat([state, embedded, hidden]) + bias
        keep = torch.sigmoid(said[:RANK])
        return torch.tanh(said[2 * RANK :]), keep * state + (1 - keep) * torch.tanh(said[RANK : 2 * RANK])
    return embedded, state


def _selected(weights: Weights, hidden: Tensor, before: int, unary: Tensor, top_k: int) -> Tensor:
    """Scores of the candidates, minus infinity for every other token."""
    predecessor = weights["candidate_selector.predecessor_codebook"][before]
    projected = weights["candidate_selector.hidden_projection.weight"] @ hidden
    scores = torch.full_like(unary, -torch.inf)
    for token in sorted(range(len(unary)), key=lambda token: -float(unary[token]))[:top_k]:
        successor = weights["candidate_selector.successor_codebook"][token]
        scores[token] = unary[token] + sum(float(a * p * b) for a, p, b in zip(predecessor, projected, successor))
    return scores


def _domino(weights: Weights, hidden: Tensor, embedded: Tensor) -> Tensor:
    """What Domino adds to the logits of a state, after the embeddings of all tokens before, `[tokens, D]`."""
    names = ("weight_ih_l0", "weight_hh_l0")
    given = {name: weights[f"prefix_gru.{name}"] for name in names}
    with torch.random.fork_rng(devices=[]):  # its first weights are drawn
        gru = torch.nn.GRU(embedded.shape[1], given[names[1]].shape[1], bias=False)
    gru.load_state_dict(given)
    state = gru(embedded[:, None])[0][-1, 0]
    bottleneck = weights["embed_proj.0.weight"] @ torch.cat([hidden, state])
    return weights["embed_proj.2.weight"] @ (bottleneck * torch.sigmoid(bottleneck))


@torch.no_grad()
def draft(folder: str | Path, target: Target, ids: Tensor, count: int, temperature: float = 0.0) -> Drafts:
    """`count` drafts after the anchor ids[0, -1], which the target has not processed yet, in a block of full width.
    Above temperature 0 each is one draw of [`sample_index`] over the target's whole vocabulary."""
    outer = base.read(folder)[0]
    drafter = read_any(folder, outer)
    weights, config = drafter.weights, drafter.config
    size = config["vocab_size"]
    # Gemma scales what it embeds; drafters read what its first layer does.
    embedding = weights.get("embed_tokens.weight", target.get_input_embeddings()(torch.arange(size)).float())
    cap = outer.get("dflash_config", {}).get(CAP, {**config, **outer}.get(CAP))
    kept = torch.arange(config.get("draft_vocab_size") or size) + weights.get("d2t", torch.tensor(0))
    head = weights.get("lm_head.weight", target.get_output_embeddings().weight.float()[kept])
    hidden = base.states(drafter, target, embedding, ids, count, drafter.block_size)
    before, state, tokens, q, confidence = int(ids[0, -1]), torch.zeros(RANK), [], [], []
    weights = {name.removeprefix("logit_head."): tensor for name, tensor in weights.items()}
    for k in range(count):
        logits = head @ hidden[k]
        logits = torch.tanh(logits / cap) * cap if cap else logits
        logits = logits.masked_fill(kept == drafter.mask_token_id, -torch.inf)  # ours: never drafted
        judged = hidden[k]
        if "markov_head.markov_w1.weight" in weights:
            vector, state = _markov(weights, hidden[k], before, state)
            logits = logits + weights["markov_head.markov_w2.weight"] @ vector
            judged = torch.cat([hidden[k], weights["markov_head.markov_w1.weight"][before]])
        elif "candidate_selector.hidden_projection.weight" in weights:
            top_k = outer.get("dflash_config", outer)["selector_top_k"]
            logits = _selected(weights, hidden[k], before, logits, top_k)
        elif "prefix_gru.weight_ih_l0" in weights and k >= outer["dflash_config"].get("pure_draft_prefix_len", 0):
            logits = logits + _domino(weights, hidden[k], embedding[[int(ids[0, -1]), *tokens]].float())
        if "confidence_head.proj.weight" in weights:
            row = weights["confidence_head.proj.weight"][0]
            said = row @ judged[: len(row)] + weights["confidence_head.proj.bias"][0]
            confidence.append(1 / (1 + torch.exp(-said)))
        whole = torch.full((size,), -torch.inf).index_copy(0, kept, logits)
        if temperature:
            q.append((whole / temperature).softmax(-1))
            before = int(sample_index(q[-1]))
        else:
            before = int(whole.argmax())
        tokens.append(before)
    return Drafts(tokens, torch.stack(q) if q else None, torch.stack(confidence) if confidence else None)
