"""What loading, exporting and describing refuse."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_hyperdflash import DeepseekV4MTPDrafter, load_drafter, load_target
from hf_hyperdflash.benchmark.report import measured
from hf_hyperdflash.hub.cards import drafter_card
from hf_hyperdflash.hub.formats import export_dflash
from hf_hyperdflash.hub.gguf import name_in_gguf
from hf_hyperdflash.hub.loading import check_target

from ..conftest import MODELS, tiny_config, tiny_drafter, tiny_target
from ..helpers.deepseek_checkpoints import mtp_shapes, random_tensors, write_shards
from ..helpers.families import llama, qwen3
from ..helpers.gguf_files import write_gguf
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import IDS, LAYER, LAYOUTS, WIDTH, eagle3_tensors, layer, saved

FULL, SLIDING = "full_attention", "sliding_attention"
ROLES = {"mask_token_id": 1, "block_size": 5}


def read_with(folder, name, fields=None, tensors=None):
    """Load a drafter of a layout of which something was changed; a field that is `None` is taken out."""
    torch.manual_seed(0)
    target = LAYOUTS[name].target().eval()
    LAYOUTS[name].write(folder, target)
    if fields:
        given = {**json.loads((folder / "config.json").read_text()), **fields}
        given = {field: value for field, value in given.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(given))
    if tensors:
        kept = load_file(folder / "model.safetensors")
        tensors(kept)
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / "model.safetensors")
    load_drafter(folder, target=target if tensors else None)


# By layout: what is changed in a config.json, and what the line names.
FIELDS = {
    "z-lab": [
        ({"dflash_config": None, "architectures": None}, ("EAGLE-1", "DFlash")),
        ({"dflash_config": None}, ("mask_token_id",)),
        ({"dflash_config": {**ROLES, "target_layer_ids": [0, 3]}}, ("[0, 3]", "4", "last layer")),
        ({"dflash_config": {**ROLES, "target_layer_ids": ["0"]}}, ("['0']", "layer numbers")),
        ({"dflash_config": {**ROLES, "target_layer_ids": [-2, 2]}}, ("[-2, 2]", "embeddings")),
        ({"dflash_config": ROLES}, ("target_layer_ids",)),
        ({"dflash_config": {**ROLES, "target_layer_ids": []}, IDS: [1, 3]}, ("target_layer_ids",)),
        ({"dflash_config": {**ROLES, "target_layer_ids": [0, 2]}, IDS: []}, ("target_layer_ids",)),
        ({"dflash_config": {"target_layer_ids": [0, 2], "block_size": 5}}, ("mask_token_id",)),
        ({"dflash_config": {**ROLES, "target_layer_ids": [0, 2], "block_size": "5"}}, ("block_size", "'5'")),
        ({"dflash_config": "yes"}, ("dflash_config", "'yes'", "dictionary")),
        ({"layer_types": [SLIDING, FULL]}, ("sliding_window", "None", "use")),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": False}, ("8", "False", "use")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "1024")),
        ({"num_hidden_layers": 1}, ("11 unexpected", "layers.1")),
        ({"intermediate_size": 47}, ("another shape", "layers.0.mlp")),
        ({"hidden_size": None}, ("hidden_size",)),
        ({"vocab_size": None, "head_dim": None}, ("vocab_size, head_dim",)),
        ({"rope_parameters": None, "rope_scaling": "yarn"}, ("rope_scaling", "'yarn'", "dictionary")),
        ({"num_target_layers": "4"}, ("target_num_layers", "'4'", "integer")),
    ],
    "speculators": [
        ({"transformer_layer_config": None}, ("transformer_layer_config", "None", "dictionary")),
        ({"speculators_config": 3}, ("speculators_config", "3", "dictionary")),
        ({"aux_hidden_state_layer_ids": None}, ("aux_hidden_state_layer_ids",)),
        ({"block_size": None}, ("block_size",)),
        ({"mask_token_id": None}, ("mask_token_id",)),
        ({"speculators_model_type": "ngram"}, ("'ngram'", "dflash, dflash2, dspark")),
        ({"speculators_model_type": "jetspec"}, ("'jetspec'", "dflash, dflash2, dspark")),
    ],
    "deepspec": [
        ({"architectures": ["Gemma4DSparkModel"]}, ("Gemma4DSparkModel", "Qwen3")),
        ({"markov_head_type": "fir"}, ("markov_head_type", "'fir'", "vanilla, gated, rnn")),
        ({"markov_rank": None}, ("2 unexpected", "markov_head")),
        ({"enable_confidence_head": False}, ("2 unexpected", "confidence_head")),
        ({"layer_types": [FULL, SLIDING]}, ("sliding_window", "None")),
        ({"dspark_bonus_anchor": True, "sample_from_anchor": True}, ("bonus_anchor", "sample_from_anchor", "True")),
        ({"dspark_bonus_anchor": False, "sample_from_anchor": False}, ("bonus_anchor", "False")),
        ({"sample_from_anchor": "no"}, ("sample_from_anchor", "'no'", "true, false or none")),
    ],
    "specforge": [
        ({"dflash_config": {"projector_type": "causal_v5"}}, ("projector_type", "'causal_v5'", "domino")),
        ({"architectures": ["DominoDraftModel"]}, ("emb_dim, gru_hidden_dim",)),
    ],
    "domino": [
        ({"causal_head": "yes"}, ("causal_head", "'yes'", "true, false or none")),
        ({"causal_head": True, "is_causal": False}, ("causal", "causal_head", "True", "False", "not the same")),
    ],
    "speculators dspark": [({"markov_head_type": "rnn"}, ("2 missing", "markov_head.joint_proj"))],
    "speculators rnn": [({"sample_from_anchor": False}, ("'rnn'", "sample_from_anchor"))],
    "z-lab dflash2": [
        ({"is_causal": "yes"}, ("is_causal", "'yes'", "true, false or none")),
        ({"final_logit_softcapping": "30"}, ("final_logit_softcapping", "'30'", "number")),
        ({"target_hidden_size": 128}, ("target_hidden_size", "128", "64")),
        ({IDS: [1, 2]}, (IDS, "[1, 2]", "[0, 2]", "one more")),
    ],
    "z-lab dflash2 flat": [
        ({"selector_top_k": 0}, ("selector_top_k",)),
        ({"selector_rank": None, "conv_kernel_size": None}, ("selector_rank, conv_kernel_size",)),
    ],
    "safeailab": [
        ({"eagle_config": {IDS: [4, 1]}}, ("[4, 1]", "ascending")),
        ({"hidden_size": None}, ("hidden_size",)),
        ({"eagle_config": [1, 2]}, ("eagle_config", "[1, 2]", "dictionary")),
        ({"target_layer_ids": [0, 2, 5]}, ("[0, 2, 5]", "[1, 3, 4]")),
        ({IDS: [1, 3, 4]}, ("[1, 3, 4]", "one more")),
        ({"eagle_config": {IDS: [-1, 2, 5]}}, ("[-1, 2, 5]", "from 0")),
        ({"eagle_config": None, IDS: [-1, 2, 4]}, ("[-2, 1, 3]", "from 0")),
        ({"num_aux_hidden_states": 5}, ("num_aux_hidden_states", "5", "3")),
        ({"final_logit_softcapping": -30.0}, ("final_logit_softcapping", "-30.0")),
        ({"layer_types": [SLIDING], "sliding_window": 8}, ("sliding attention",)),
        ({"use_sliding_window": True, "sliding_window": 8}, ("sliding attention",)),
        ({"architectures": ["Gemma4Eagle3Model"]}, ("Gemma4Eagle3Model", "Llama")),
        ({"architectures": ["Llama4Eagle3"]}, ("Llama4Eagle3", "Llama")),
        ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, ("Eagle3DeepseekV2ForCausalLM", "Llama")),
        # P-EAGLE without what makes it one.
        ({"architectures": ["PEagleDraftModel"]}, ("mask_token_id",)),
        ({"parallel_drafting": True}, ("mask_token_id",)),
        ({"ptd_token_id": 5}, ("1 missing", "mask_hidden")),
    ],
    "Amazon's P-EAGLE": [
        ({"ptd_token_id": 64}, ("mask_token_id", "64")),
        ({"ptd_token_id": "5"}, ("mask_token_id", "'5'", "integer")),
        ({"target_hidden_size": 48}, ("another shape", "mask_hidden")),
    ],
    "speculators peagle": [
        ({"mask_token_id": None}, ("mask_token_id",)),
        ({"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}}, ("max_blocks", "0", "1")),
        ({IDS: [2, 4]}, ("another shape", "fc.weight, input_norm.weight, mask_hidden")),
    ],
    "Muse-Glimmer's": [
        ({"sliding_window": "6"}, ("sliding_window", "'6'", "integer")),
        ({"layer_types": [SLIDING]}, ("layer_types", "2")),
        ({"block_size": 1}, ("block_size", "1", "2")),
        ({"mask_token_id": 202048}, ("mask_token_id", "202048")),
        ({"target_layer_ids": [2, 0]}, ("[2, 0]", "ascending")),
        ({"hidden_size": 48}, ("another shape", "fc.weight")),
        ({"num_hidden_layers": 3}, ("layer_types", "3")),
    ],
}  # fmt: skip


def set_to(name, change):
    return lambda tensors: tensors.update({name: change(tensors[name])})


TENSORS = [  # of a truncated vocabulary
    (set_to("t2d", lambda kept: kept.roll(1)), ("t2d", "d2t")),
    (set_to("t2d", lambda kept: kept[:-1]), ("t2d", "d2t")),
    (set_to("d2t", lambda offsets: offsets.float() + 0.5), ("20", "63")),
    (set_to("d2t", lambda offsets: offsets + 64), ("20", "63")),
    (set_to("d2t", lambda offsets: offsets - 64), ("20", "63")),
    (set_to("d2t", lambda offsets: -torch.arange(20)), ("20", "63")),
    (set_to("d2t", lambda offsets: offsets[:-1]), ("20", "63")),
    (lambda tensors: tensors.pop("d2t"), ("20 of 64", "d2t")),
    (set_to("embed_tokens.weight", lambda rows: rows.flip(0)), ("embed_tokens.weight", "copy")),
    (set_to("embed_tokens.weight", lambda rows: rows[:, :-1]), ("embed_tokens.weight", "copy")),
    (set_to("lm_head.weight", torch.zeros_like), ("lm_head.weight", "copy")),
]  # fmt: skip
READ = {
    **{f"{name} {change}": Refusal(partial(read_with, name=name, fields=change), words)
       for name, rows in FIELDS.items() for change, words in rows},
    **{f"tensors {i}": Refusal(partial(read_with, name="speculators truncated", tensors=change), words)
       for i, (change, words) in enumerate(TENSORS)},
}  # fmt: skip


@pytest.mark.parametrize("refusal", READ.values(), ids=READ)
def test_a_drafter_of_others_that_is_not_whole(refusal: Refusal, tmp_path: Path):
    refusal._replace(words=(*refusal.words, str(tmp_path))).check(tmp_path)


EAGLE1 = {
    "fc.weight": torch.zeros(WIDTH, 2 * WIDTH), "embed_tokens.weight": torch.zeros(64, WIDTH),
    **layer("layers.0", WIDTH, ("post_attention_layernorm",)),
}  # fmt: skip
OTHER_KINDS = [  # a config.json, the kind, and its tensors
    ({"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama"}, "EAGLE-1 or EAGLE-2", {}),
    ({"model_type": "eagle", "architectures": ["EAGLEModel"]}, "EAGLE-1 or EAGLE-2", {}),
    ({"speculators_model_type": "eagle", "transformer_layer_config": {}}, "EAGLE-1 or EAGLE-2", {}),
    ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "Medusa as a whole model or for vLLM", {}),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, "MLP speculator", {}),
    ({"architectures": ["HydraModel"]}, "Hydra", {}),
    # SafeAILab's first ones are a Llama of one layer to their config.json, and its EAGLE-3 without an architecture.
    ({**LAYER, "architectures": ["LlamaForCausalLM"]}, "EAGLE-1 or EAGLE-2", EAGLE1),
    ({**LAYER, "architectures": ["LlamaForCausalLM"]}, '"LlamaForCausalLMEagle3"', eagle3_tensors()),
]


@pytest.mark.parametrize("is_pickled", [False, True])
@pytest.mark.parametrize(("fields", "kind", "tensors"), OTHER_KINDS)
def test_drafters_that_are_not_read_are_no_targets_either(tmp_path, fields, kind, tensors, is_pickled):
    saved(tmp_path, fields, tensors or {"fc.weight": torch.zeros(2, 4)})
    if is_pickled:
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    for load in (load_drafter, check_target):
        Refusal(load, (str(tmp_path), kind)).check(tmp_path)


# What a drafter of ours has, the layout that it is to be written in, and what the line names: value here and there.
WINDOW_OFF = "from_pretrained(..., sliding_window=None)"
INEXPRESSIBLE = [
    ({"sliding_window": 8}, "z-lab", ("window_from", "'anchor'", "'slot'", WINDOW_OFF)),
    ({"sliding_window": 8, "window_from": "slot"}, "speculators", ("window_from", "'slot'", "'anchor'")),
    ({"sliding_window": 8, "sample_from_anchor": True}, "deepspec", ("sliding_window", "8", "None")),
    ({"causal_layers": "all"}, "speculators", ("causal_layers", "'all'", "'none'")),
    ({"sequential_head": "markov"}, "z-lab", ("sequential_head", "'markov'", "'none'")),
    ({"confidence_head": True}, "z-lab", ("confidence_head", "True", "False")),
    ({"sequential_head": "state"}, "speculators", ("sequential_head", "'state'", "'none'")),
    ({"sequential_head": "selector"}, "speculators", ("sequential_head", "'selector'", "'none'")),
    ({"conv_kernel_size": 2}, "z-lab", ("conv_kernel_size", "2", "0")),
    ({"conv_kernel_size": 2, "sequential_head": "selector", "confidence_head": True}, "speculators",
     ("confidence_head", "True", "False")),
    ({"conv_kernel_size": 2, "sequential_head": "selector", "draft_vocab_size": 20}, "speculators",
     ("draft_vocab_size", "20", "0")),
    ({"conv_kernel_size": 2, "sequential_head": "markov", "sample_from_anchor": True}, "deepspec",
     ("conv_kernel_size", "2", "0")),
    ({"sequential_head": "markov", "head_candidates": 16}, "speculators", ("head_candidates", "16", "64")),
    ({"sequential_head": "markov", "confidence_head": True, "confidence_temperatures": [1.5] * 6}, "speculators",
     ("confidence_temperatures", "None", "from_pretrained(..., confidence_temperatures=None)")),
    ({"sequential_head": "recurrent"}, "speculators", ("'rnn'", "sample_from_anchor")),
    ({"sequential_head": "markov"}, "deepspec", ("sample_from_anchor", "False", "True")),
    ({"draft_vocab_size": 20, "sample_from_anchor": True}, "deepspec", ("draft_vocab_size", "20", "0")),
    ({"target_layer_ids": [0, -1]}, "z-lab", ("last layer",)),
    ({}, "gguf", ("'gguf'", "z-lab")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "format", "words"), INEXPRESSIBLE)
def test_a_drafter_that_a_layout_has_no_words_for(tmp_path, fields, format, words):
    target = qwen3()
    drafter = tiny_drafter(target, **{"reducer": "fc", "target_layer_ids": [0], **fields})
    Refusal(export_dflash, (*words, format)).check(drafter, tmp_path / "out", format, target)
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target and a drafter, and folders with them."""
    folder, target = tmp_path_factory.mktemp("pair"), tiny_target()
    target.save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    (folder / "nothing").mkdir()
    return folder


def markov():
    return tiny_drafter(
        qwen3(), reducer="fc", target_layer_ids=[0], sequential_head="markov", head_rank=4, sample_from_anchor=True
    )


def without_memory():
    with torch.device("meta"):
        return qwen3()


RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "tiny-deepseek-v4" / "heads" / "results.jsonl"
REFUSED = {
    "a target as drafter": Refusal(lambda at: load_drafter(at / "target"), ("target", "`mtp.*`")),
    "a drafter's own one": Refusal(lambda at: DeepseekV4MTPDrafter.from_target(at / "drafter"), ("DeepSeek-V4",)),
    "no dtype": Refusal(lambda at: load_drafter(at / "drafter", dtype="float7"), ("`dtype`", "'float7'")),
    "no dtype of a target": Refusal(
        lambda at: load_target(str(at / "target"), dtype="flaot32"), ("`dtype`", "'flaot32'")
    ),
    "nowhere": Refusal(lambda at: load_drafter("./nowhere"), ("./nowhere", "drafter", str(Path.cwd())), OSError),
    "no subfolder": Refusal(lambda at: load_drafter(at, subfolder="outer"), ("/outer", "drafter"), OSError),
    "no name": Refusal(lambda at: load_drafter(None), ("drafter", "None", "folder")),
    "no option": Refusal(lambda at: load_drafter(at / "drafter", devise="cpu"), ("'devise'", "from_pretrained")),
    "no option of a target": Refusal(
        lambda at: load_target(str(at / "target"), devise="cpu"), ("'devise'", "from_pretrained")
    ),
    "no device": Refusal(lambda at: load_drafter(at / "drafter", device="gpu"), ("`device`", "'gpu'", "cuda:0")),
    "a name for a target": Refusal(lambda at: load_drafter(at / "drafter", target="org/name"), ("org/name", "model")),
    "a number for a target": Refusal(lambda at: load_drafter(at / "drafter", target=3), ("int", "model")),
    "a card of a target": Refusal(
        lambda at: drafter_card(MODELS / "tiny-deepseek-v4"), ("tiny-deepseek-v4", "EAGLE-3")
    ),
    "a card of nothing": Refusal(lambda at: drafter_card(at / "nothing"), ("config.json",), OSError),
    "no method": Refusal(lambda at: measured(RESULTS), ("compares",)),
    "no such method": Refusal(lambda at: measured(RESULTS, "Nothing like it"), ("Nothing like it",)),
    "four streams and their gate": Refusal(
        lambda at: export_dflash(load_drafter(at / "drafter"), at / "out"),
        ("'hc_gate'", "4 residual streams", "last layer"),
    ),
    "copies of no target": Refusal(lambda at: export_dflash(markov(), at / "out", "deepspec"), ("--target",)),
    "copies of another target": Refusal(
        lambda at: export_dflash(markov(), at / "out", "deepspec", tiny_target()), ("hidden_size", "64", "32")
    ),
    "copies of what is not in memory": Refusal(
        lambda at: export_dflash(markov(), at / "out", "deepspec", without_memory()), ("memory",)
    ),
    "two files": Refusal(lambda at: name_in_gguf("a.gguf", {"gguf_file": "b.gguf"}), ("a.gguf", "'b.gguf'")),
}


@pytest.mark.parametrize("refusal", REFUSED.values(), ids=REFUSED)
def test_it_is_refused_in_one_line(refusal: Refusal, pair: Path):
    refusal.check(pair)
    assert not (pair / "out").exists()


@pytest.mark.parametrize("check", [check_target, load_target])
def test_a_gguf_that_cannot_be_read(check, tmp_path, monkeypatch):
    write_gguf(tmp_path / "model.gguf", llama().eval())
    write_gguf(tmp_path / "newer.gguf", llama().eval(), architecture="llama9")
    (tmp_path / "none.gguf").write_bytes(b"not what it is called")
    whole = (tmp_path / "model.gguf").read_bytes()
    (tmp_path / "begun.gguf").write_bytes(whole[:300])
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    Refusal(lambda: check(str(tmp_path), gguf_file="other.gguf"), (str(tmp_path), "other.gguf"), OSError).check()
    Refusal(lambda: check(str(tmp_path / "newer.gguf")), ("newer.gguf", "'llama9'", "llama,")).check()
    for name in ("none", "begun", "cut"):
        Refusal(check, (f"{name}.gguf",), OSError).check(str(tmp_path / f"{name}.gguf"))
    monkeypatch.setattr("hf_hyperdflash.hub.gguf.is_gguf_available", lambda: False)
    Refusal(lambda: check(str(tmp_path / "model.gguf")), ("hf-hyperdflash[gguf]",)).check()


# A checkpoint in parts: what happens to its index and one of its parts, and what the line names.
DAMAGED = {
    "no JSON": (lambda index, shard: index.write_text("<html>404</html>"), ("index.json", "line 1")),
    "a list": (lambda index, shard: index.write_text("[1]"), ("index.json", "weight_map")),
    "no list of tensors": (lambda index, shard: index.write_text('{"metadata": {}}'), ("index.json", "weight_map")),
    "names no files": (lambda index, shard: index.write_text('{"weight_map": {"a": 1}}'), ("weight_map", "files")),
    "no text": (lambda index, shard: index.write_bytes(b"\xff\xfe\x00"), ("index.json", "UTF-8")),
    "no index": (lambda index, shard: index.unlink(), ("model.safetensors.index",)),
    "no part": (lambda index, shard: shard.unlink(), ("1 of", "model-")),
    "a part cut off": (lambda index, shard: shard.write_bytes(shard.read_bytes()[:-9]), ("damaged",)),
}


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("kind", ["ours", "a target", "DeepSeek-V4's own"])
def test_a_checkpoint_in_parts_that_is_not_whole(tmp_path, kind, damage):
    load = load_target if kind == "a target" else partial(load_drafter, dtype="float32")
    if kind == "DeepSeek-V4's own":
        write_shards(tmp_path, tiny_config(), random_tensors(mtp_shapes(tiny_config())))
    else:
        model = qwen3() if kind == "a target" else tiny_drafter(tiny_target())
        model.save_pretrained(tmp_path, max_shard_size="40KB" if kind == "a target" else "8KB")
    load(tmp_path)
    change, words = DAMAGED[damage]
    change(tmp_path / "model.safetensors.index.json", max(tmp_path.glob("model-*-of-*.safetensors")))
    error: type[Exception] = OSError
    if kind == "DeepSeek-V4's own" and damage in ("no index", "no part"):  # parts without its tensors may be missing
        error, words = ValueError, ("safetensors",)
    Refusal(lambda: load(tmp_path), (*words, str(tmp_path)), error).check()
