"""EAGLE-3, P-EAGLE and SpecBlock here give the trees and logits of the programs that they are of, on random weights.

    .ci/compat                       # makes an environment with these programs and runs the comparisons
    pytest -m compat tests/compat    # where they are there

The programs are SafeAILab's EAGLE, the SpecBlock of its authors, and speculators. Each writes a checkpoint in its own
layout, and `load_drafter` reads it.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, Qwen3Config

from hf_hyperdflash import load_drafter
from hf_hyperdflash.drafters.parts.context import rows_of
from hf_hyperdflash.drafters.parts.heads import rank_features
from hf_hyperdflash.drafters.sampling import DraftRequest, DraftSampler
from hf_hyperdflash.drafters.unrolled.unrolling import Unrolling
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.targets.target import Target

from ..helpers.released_layouts import Followed
from .programs import require_checkout, require_package

pytestmark = [
    pytest.mark.compat,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # what other programs call by its old name
]

WIDTH, VOCABULARY, DRAFTED, LENGTH, THETA = 64, 64, 40, 10, 5000.0
SHAPE = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512, "rms_norm_eps": 1e-6, "pad_token_id": 0,
}  # fmt: skip
CLOSE = {"atol": 1e-4, "rtol": 0}  # float32, logits between -10 and 10


@torch.no_grad()
def randomize(model: Any) -> Any:
    """Draw all weights anew, and a draft vocabulary that is not the first tokens."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.2)
        else:
            parameter.copy_(1 + torch.randn_like(parameter) / 10)
    ids = torch.randperm(VOCABULARY)[:DRAFTED].sort().values
    model.d2t.copy_(ids - torch.arange(DRAFTED))
    model.t2d.copy_(torch.zeros(VOCABULARY, dtype=torch.bool).index_fill_(0, ids, True))
    return model.eval()


def ours(folder: Path, model: nn.Module, fields: dict[str, Any], without: str = "rotary") -> Any:
    """Return what `load_drafter` makes of the checkpoint that a program would save."""
    tensors = {name: value.contiguous().clone() for name, value in model.state_dict().items() if without not in name}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(fields, default=str))
    return load_drafter(folder, dtype=torch.float32)


def flat_fields(config: LlamaConfig, **more: Any) -> dict[str, Any]:
    """Return a configuration as before transformers 5, with its RoPE at the top."""
    fields = {name: value for name, value in config.to_dict().items() if name != "rope_parameters"}
    return {**fields, "rope_theta": THETA, **more}


def llama_config(layers: int, **fields: Any) -> LlamaConfig:
    """Return a configuration with fields that only the other program knows."""
    config = LlamaConfig(**SHAPE, num_hidden_layers=layers)
    for name, value in {"rope_theta": THETA, "rope_scaling": None, **fields}.items():
        setattr(config, name, value)
    return config


def target_with(embedding: nn.Embedding) -> Target:
    """Return a target that embeds tokens as a drafter's program does."""
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, num_hidden_layers=8)).eval()
    model.set_input_embeddings(embedding)
    return target_of(model)


def contexts(drafter: Any, target: Target, features: Tensor, tokens: Tensor) -> Iterator[tuple[int, Any]]:
    """Yield each entry with the context that ends in it."""
    context = drafter.new_context()
    for entry in range(features.shape[1]):
        part = features[:, entry : entry + 1].unflatten(2, (3, WIDTH))
        drafter.extend(target, context, part, torch.tensor([[entry]]), tokens[:, entry : entry + 1])
        drafter.flush_pending(target, [context])
        yield entry, context


def unrolling_of(drafter: Any, target: Target, context: Any, entry: int) -> Unrolling:
    """Return the later blocks of a context that ends in `entry`."""
    keys_values, length = rows_of(drafter, [context], 64), context.length
    return Unrolling(drafter, target, keys_values, context.states, torch.tensor([entry + 1]), length, length)


def logits_of(drafter: Any, target: Target, states: Tensor) -> Tensor:
    return drafter.drafted_logits(target, drafter.norm(states))


def random_inputs(tokens: int) -> tuple[Tensor, Tensor]:
    return torch.randn(1, LENGTH, 3 * WIDTH), torch.randint(0, VOCABULARY, (1, tokens))


def empty_module(name: str, **attributes: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(attributes)
    return module


@torch.no_grad()
def test_eagle3_grows_the_tree_of_safeailab(tmp_path, monkeypatch):
    """Its own dynamic tree and ours, without sharpening."""
    monkeypatch.syspath_prepend(require_checkout("EAGLE") / "eagle" / "model")
    monkeypatch.setitem(sys.modules, "utils", empty_module("utils", prepare_logits_processor=None))
    monkeypatch.setitem(sys.modules, "configs", empty_module("configs", EConfig=None))
    cnets = importlib.import_module("cnets")
    config = llama_config(1, draft_vocab_size=DRAFTED, pretraining_tp=1)
    model = randomize(cnets.Model(config, total_tokens=14, depth=3, top_k=4))
    model.init_tree()
    features, tokens = random_inputs(LENGTH + 1)
    drafted, paths, _, _ = model.topK_genrate(features, tokens, None, None)
    theirs = {
        tuple(drafted[0, [place for place in path if place > 0][: k + 1]].tolist())
        for path in paths.tolist()
        for k in range(sum(place > 0 for place in path))
    }
    monkeypatch.setattr("hf_hyperdflash.trees.growth.SHARPENED", 1.0)
    drafter = ours(tmp_path, model, flat_fields(config, architectures=["LlamaForCausalLMEagle3"]))
    drafter.config.tree_width = 4
    target = target_with(model.embed_tokens)
    *_, (_, context) = contexts(drafter, target, features, tokens[:, 1:])
    sampler = DraftSampler(LogitsProcessorList(), False, 13)
    (tree,) = drafter.draft(target, [DraftRequest(context, tokens, torch.arange(LENGTH + 1)[None], 4, sampler)])
    found = {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}
    assert len(theirs) == 13 and found == theirs


@torch.no_grad()
def test_specblock_gives_the_blocks_of_its_authors(tmp_path, monkeypatch):
    """Their training forward and our blocks. There a second block also sees second blocks of earlier positions, which
    drafting does not have: so it is compared at the first position."""
    checkout = require_checkout("SPECBLOCK")
    monkeypatch.syspath_prepend(checkout)
    for name in ("specforge", "specforge.modeling", "specforge.modeling.draft"):  # not what these import
        package = empty_module(name, __path__=[str(checkout.joinpath(*name.split(".")))])
        monkeypatch.setitem(sys.modules, name, package)
    base = importlib.import_module("specforge.modeling.draft._llama3_specblock_base")
    base.get_compiled_flex_attention = lambda length: base.flex_attention
    theirs = importlib.import_module("specforge.modeling.draft.llama3_specblock").LlamaForCausalLMSpecBlock
    own = {"draft_vocab_size": DRAFTED, "diffspec_draft_token_num": 4, "rank_classes": 4, "rope_theta": THETA}
    config, slot = llama_config(2, **own), 1
    model = randomize(theirs(config))
    features, tokens = random_inputs(LENGTH)
    later = torch.randint(0, VOCABULARY, (1, LENGTH))
    logits, ranks, hidden, cross, kept = model.forward_parallel(features, tokens, None)
    second, *_ = model.forward_parallel(
        hidden[:, :, slot], later, None, use_draft_condition=True, prev_kv_cache=kept, cross_kv_cache=cross,
        ttt_valid_counts=torch.full((1, LENGTH), slot + 1),
    )  # fmt: skip
    fields = flat_fields(config, architectures=["LlamaForCausalLMSpecBlock"], **own)
    drafter, target = ours(tmp_path, model, fields, "embed_tokens"), target_with(model.embed_tokens)
    for entry, context in contexts(drafter, target, features, tokens):
        found = logits_of(drafter, target, context.states[0])
        torch.testing.assert_close(found, logits[0, entry], **CLOSE)
        head = drafter.rank_head(drafter.norm(context.states[0]), rank_features(found))
        torch.testing.assert_close(head, ranks[0, entry], **CLOSE)
        if entry == 0:
            unrolling = unrolling_of(drafter, target, context, entry)
            states = unrolling.branch(torch.tensor([0]), torch.tensor([slot]), later[0, :1])
            torch.testing.assert_close(logits_of(drafter, target, states[0]), second[0, 0], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer_type", "flags"),
    [
        (LlamaConfig, {}),
        (Qwen3Config, {"norm_before_residual": True}),
        (LlamaConfig, {"fc_norm": True}),
        (LlamaConfig, {"norm_before_fc": True, "norm_output": True}),
    ],
    ids=lambda value: getattr(value, "model_type", None) or "-".join(value) or "plain",
)
def test_eagle3_gives_the_logits_of_speculators(layer_type, flags, tmp_path):
    """Its training-time test, three steps, and our entries."""
    require_package("speculators")
    core = importlib.import_module("speculators.models.eagle3.core")
    kinds, greedy = importlib.import_module("speculators"), importlib.import_module("speculators.proposals.greedy")
    layer = layer_type(**SHAPE, num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    layer._attn_implementation = "eager"
    method = kinds.SpeculatorsConfig(
        algorithm="eagle3", proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=3)],
        default_proposal_method="greedy",
        verifier=kinds.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
    )  # fmt: skip
    config = core.Eagle3SpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFTED, eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=method, **flags,
    )  # fmt: skip
    model, steps = randomize(core.Eagle3DraftModel(config)), []
    model.lm_head.register_forward_hook(lambda module, args, output: steps.append(output[0]))
    features, tokens = random_inputs(LENGTH)
    model(features, tokens, torch.zeros(1, LENGTH, dtype=torch.long), ttt_steps=3)
    assert len(steps) == 3
    drafter, target = ours(tmp_path, model, config.to_dict()), target_with(model.embed_tokens)
    for entry, context in contexts(drafter, target, features, tokens):
        unrolling, states = unrolling_of(drafter, target, context, entry), context.states
        for step in range(min(3, LENGTH - entry)):
            if step:
                last = torch.tensor([step - 1]), torch.tensor([0])
                states = unrolling.branch(*last, tokens[0, entry + step, None])
            torch.testing.assert_close(logits_of(drafter, target, states[0, 0]), steps[step][entry], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize(
    ("layer_type", "flags"),
    [(LlamaConfig, {}), (Qwen3Config, {"norm_before_residual": True}), (LlamaConfig, {"norm_before_fc": True})],
    ids=("plain", "Qwen3's", "normed"),
)
def test_peagle_gives_the_logits_of_speculators(layer_type, flags, tmp_path, monkeypatch):
    """Its training forward over four depths of every position, and our drafts after each entry."""
    require_package("speculators")
    core = importlib.import_module("speculators.models.peagle.core")
    kinds, greedy = importlib.import_module("speculators"), importlib.import_module("speculators.proposals.greedy")
    layer = layer_type(**SHAPE, num_hidden_layers=2, rope_parameters={"rope_type": "default", "rope_theta": THETA})
    layer._attn_implementation, depths = "eager", 4
    method = kinds.SpeculatorsConfig(
        algorithm="peagle", proposal_methods=[greedy.GreedyTokenProposalConfig(speculative_tokens=depths)],
        default_proposal_method="greedy",
        verifier=kinds.VerifierConfig(name_or_path=None, architectures=["Qwen3ForCausalLM"]),
    )  # fmt: skip
    config = core.PEagleSpeculatorConfig(
        transformer_layer_config=layer, draft_vocab_size=DRAFTED, eagle_aux_hidden_state_layer_ids=[2, 4, 5],
        speculators_config=method, mask_token_id=7, **flags,
    )  # fmt: skip
    model, logits = randomize(core.PEagleDraftModel(config)), []
    model.lm_head.register_forward_hook(lambda module, args, output: logits.append(output[0]))
    places = [(anchor, depth) for depth in range(depths) for anchor in range(LENGTH - depth)]
    anchors, at_depth = torch.tensor(places).T
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, at_depth))
    features, tokens = random_inputs(LENGTH)
    with suppress(RuntimeError):  # its loss needs a GPU
        document, last = torch.zeros(1, LENGTH, dtype=torch.long), torch.randn(1, LENGTH, WIDTH)
        model(features, tokens, document, verifier_last_hidden_states=last, num_depths=depths)
    expected = dict(zip(places, logits[0], strict=True))
    drafter, target = ours(tmp_path, model, config.to_dict()), target_with(model.embed_tokens)
    assert drafter.max_draft_tokens == depths
    for entry, context in contexts(drafter, target, features, tokens):
        ids, sampler = tokens[:, : entry + 2], Followed([0] * depths)
        drafter.draft(target, [DraftRequest(context, ids, torch.arange(entry + 2)[None], depths, sampler)])
        for depth in range(min(depths, LENGTH - entry)):
            found = sampler.seen[depth][drafter.draft_ids]
            torch.testing.assert_close(found, expected[entry, depth], **CLOSE)
