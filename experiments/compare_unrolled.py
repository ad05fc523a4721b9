"""Hold EAGLE-3 and SpecBlock against the programs that they come from, on random weights: equal trees, equal logits.

    git clone https://github.com/SafeAILab/EAGLE; git clone https://github.com/shiweijiezero/SpecBlock
    python experiments/compare_unrolled.py --eagle EAGLE --specblock SpecBlock

Each of the two is optional; speculators is compared where it can be imported. A checkpoint in each program's layout is
written by that program and read by `load_drafter`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from measured import circumstances
from safetensors.torch import save_file
from torch import nn
from transformers import LlamaConfig, LogitsProcessorList, Qwen3Config

from hf_hyperdflash import load_drafter
from hf_hyperdflash.drafters.sampling import DraftSampler
from hf_hyperdflash.drafters.unrolled.drafter import Unrolling
from hf_hyperdflash.drafters.unrolled.rank_head import rank_features

WIDTH, VOCABULARY, DRAFTED, LENGTH, THETA = 64, 64, 40, 10, 5000.0
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip


@torch.no_grad()
def shaken(model: Any) -> Any:
    """Random weights, and a draft vocabulary that is not the first tokens."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            parameter.copy_(1 + torch.randn_like(parameter) / 10)
    ids = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    model.d2t.copy_(ids - torch.arange(DRAFTED))
    model.t2d.copy_(torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True))
    return model.eval()


def ours(folder: str, model: Any, fields: dict[str, Any], without: str = "rotary") -> Any:
    """What `load_drafter` makes of the checkpoint that a program would save."""
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items() if without not in name}
    save_file(tensors, Path(folder) / "model.safetensors")
    Path(folder, "config.json").write_text(json.dumps(fields, default=str))
    return load_drafter(folder, dtype=torch.float32)


def flat(config: Any, **more: Any) -> dict[str, Any]:
    fields = {name: value for name, value in config.to_dict().items() if name != "rope_parameters"}
    return {**fields, "rope_theta": THETA, **more}


def taken_in(drafter: Any, features: torch.Tensor, tokens: torch.Tensor) -> Iterator[tuple[int, Any]]:
    """The context after each entry."""
    context = drafter.new_context()
    for entry in range(features.shape[1]):
        part = features[:, entry : entry + 1].unflatten(2, (3, WIDTH))
        drafter.extend(None, context, part, torch.tensor([[entry]]), tokens[:, entry : entry + 1])
        yield entry, context


def after(drafter: Any, states: torch.Tensor) -> torch.Tensor:
    return drafter.drafted_logits(None, drafter.norm(states))


@torch.no_grad()
def compare_eagle(checkout: str) -> str:
    """SafeAILab's own dynamic tree and ours, without sharpening."""
    sys.path.insert(0, str(Path(checkout) / "eagle" / "model"))
    stands_in = ModuleType("utils")
    stands_in.prepare_logits_processor = None  # type: ignore[attr-defined]
    with patch.dict(sys.modules, {"utils": stands_in, "configs": _empty("configs", "EConfig")}):
        cnets = importlib.import_module("cnets")
    config = LlamaConfig(**SHAPE, num_hidden_layers=1)
    for name, value in {"draft_vocab_size": DRAFTED, "rope_theta": THETA, "rope_scaling": None}.items():
        setattr(config, name, value)
    config.pretraining_tp = 1
    model = shaken(cnets.Model(config, total_tokens=14, depth=3, top_k=4))
    model.init_tree()
    features, tokens = torch.randn(1, LENGTH, 3 * WIDTH), torch.randint(0, VOCABULARY, (1, LENGTH + 1))
    drafted, paths, _, _ = model.topK_genrate(features, tokens, None, None)
    theirs = {
        tuple(drafted[0, [place for place in path if place > 0][: k + 1]].tolist())
        for path in paths.tolist()
        for k in range(sum(place > 0 for place in path))
    }
    with TemporaryDirectory() as folder, patch("hf_hyperdflash.trees.growth.SHARPENED", 1.0):
        drafter = ours(folder, model, flat(config, architectures=["LlamaForCausalLMEagle3"]))
        drafter.config.tree_width = 4
        *_, (_, context) = taken_in(drafter, features, tokens[:, 1:])
        sampler = DraftSampler(LogitsProcessorList(), False, 13)
        tree = drafter.propose(None, context, tokens, torch.arange(LENGTH + 1)[None], 4, sampler)
    found = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
    return f"EAGLE-3, SafeAILab: {len(theirs)} nodes, {len(theirs ^ found)} differ"


@torch.no_grad()
def compare_specblock(checkout: str) -> str:
    """Its authors' training forward and our blocks. Of theirs a second block sees second blocks of earlier positions,
    too, which drafting does not have: so it is compared at the first position."""
    sys.path.insert(0, str(Path(checkout)))
    for name in ("specforge", "specforge.modeling", "specforge.modeling.draft"):  # not what these import
        sys.modules[name] = _empty(name)
        sys.modules[name].__path__ = [str(Path(checkout, *name.split(".")))]
    base = importlib.import_module("specforge.modeling.draft._llama3_specblock_base")
    base.get_compiled_flex_attention = lambda length: base.flex_attention
    theirs = importlib.import_module("specforge.modeling.draft.llama3_specblock").LlamaForCausalLMSpecBlock
    config = LlamaConfig(**SHAPE, num_hidden_layers=2)
    own = {"draft_vocab_size": DRAFTED, "diffspec_draft_token_num": 4, "rank_classes": 4, "rope_theta": THETA}
    for name, value in {**own, "rope_scaling": None}.items():
        setattr(config, name, value)
    model, slot = shaken(theirs(config)), 1
    features, tokens, later = torch.randn(1, LENGTH, 3 * WIDTH), *torch.randint(0, VOCABULARY, (2, 1, LENGTH))
    logits, ranks, hidden, cross, kept = model.forward_parallel(features, tokens, None)
    second, *_ = model.forward_parallel(
        hidden[:, :, slot], later, None, use_draft_condition=True, prev_kv_cache=kept, cross_kv_cache=cross,
        ttt_valid_counts=torch.full((1, LENGTH), slot + 1),
    )  # fmt: skip
    worst = {"first blocks": 0.0, "ranks": 0.0, "second block": 0.0}
    with TemporaryDirectory() as folder:
        drafter = ours(folder, model, flat(config, architectures=["LlamaForCausalLMSpecBlock"], **own), "embed_tokens")
    drafter.embed = lambda target, ids: model.embed_tokens(ids)
    for entry, context in taken_in(drafter, features, tokens):
        found = after(drafter, context.states[0])
        head = drafter.rank_head(drafter.norm(context.states[0]), rank_features(found))
        worst["first blocks"] = max(worst["first blocks"], float((found - logits[0, entry]).abs().max()))
        worst["ranks"] = max(worst["ranks"], float((head - ranks[0, entry]).abs().max()))
        if entry == 0:
            unrolling = Unrolling(drafter, None, context)
            states = unrolling.further(torch.tensor([0]), torch.tensor([slot]), later[0, :1])
            worst["second block"] = float((after(drafter, states[0]) - second[0, 0]).abs().max())
            unrolling.forget()
    return f"SpecBlock, its authors: logits differ by at most {_told(worst)}"


SPECULATORS: list[tuple[type, dict[str, bool]]] = [
    (LlamaConfig, {}), (Qwen3Config, {"norm_before_residual": True}), (LlamaConfig, {"fc_norm": True}),
    (LlamaConfig, {"norm_before_fc": True, "norm_output": True}),
]  # fmt: skip


@torch.no_grad()
def compare_speculators() -> Iterator[str]:
    """speculators' training-time test, three steps, and our entries."""
    core = importlib.import_module("speculators.models.eagle3.core")
    kinds, greedy = importlib.import_module("speculators"), importlib.import_module("speculators.proposals.greedy")
    proposal = greedy.GreedyTokenProposalConfig(speculative_tokens=3)
    for kind, flags in SPECULATORS:
        layer = kind(**SHAPE, num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": THETA})
        layer._attn_implementation = "eager"
        method = kinds.SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy",
            verifier=kinds.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
        )  # fmt: skip
        config = core.Eagle3SpeculatorConfig(
            transformer_layer_config=layer, draft_vocab_size=DRAFTED, eagle_aux_hidden_state_layer_ids=[2, 4, 5],
            speculators_config=method, **flags,
        )  # fmt: skip
        model, seen = shaken(core.Eagle3DraftModel(config)), []
        model.lm_head.register_forward_hook(lambda module, args, output, seen=seen: seen.append(output[0]))
        features, tokens = torch.randn(1, LENGTH, 3 * WIDTH), torch.randint(0, VOCABULARY, (1, LENGTH))
        model(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=3)
        with TemporaryDirectory() as folder:
            drafter = ours(folder, model, config.to_dict())
        worst = dict.fromkeys(("first", "second", "third"), 0.0)
        for entry, context in taken_in(drafter, features, tokens):
            unrolling, states = Unrolling(drafter, None, context), context.states
            for step, name in enumerate(worst):
                if step and entry + step < LENGTH:
                    states = unrolling.further(
                        torch.tensor([step - 1]), torch.tensor([0]), tokens[0, entry + step, None]
                    )
                if entry + step < LENGTH:
                    differs = float((after(drafter, states[0, 0]) - seen[step][entry]).abs().max())
                    worst[name] = max(worst[name], differs)
            unrolling.forget()
        yield f"EAGLE-3, speculators, {', '.join([layer.model_type, *flags])}: logits differ by at most {_told(worst)}"


def _empty(name: str, *attributes: str) -> ModuleType:
    module = ModuleType(name)
    for attribute in attributes:
        setattr(module, attribute, None)
    return module


def _told(worst: dict[str, float]) -> str:
    return ", ".join(f"{value:.1e} ({name})" for name, value in worst.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--eagle", help="a checkout of SafeAILab/EAGLE")
    parser.add_argument("--specblock", help="a checkout of shiweijiezero/SpecBlock")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    checkouts = {"SafeAILab/EAGLE": arguments.eagle, "shiweijiezero/SpecBlock": arguments.specblock}
    print(circumstances(("torch", "transformers", "speculators"), checkouts) + "\n")
    if arguments.eagle:
        print(f"- {compare_eagle(arguments.eagle)}")
    if arguments.specblock:
        print(f"- {compare_specblock(arguments.specblock)}")
    try:
        for line in compare_speculators():
            print(f"- {line}")
    except ImportError as error:
        print(f"- speculators is not compared: {error}.")


if __name__ == "__main__":
    main()
