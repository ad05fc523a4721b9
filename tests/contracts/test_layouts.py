"""Every layout of other programs against every promise that holds for all of them. A new layout is one more row of
`LAYOUTS`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_hyperdflash import load_drafter
from hf_hyperdflash.benchmark.doctor.diagnosis import Examination
from hf_hyperdflash.benchmark.doctor.fit import check_weights
from hf_hyperdflash.hub.formats import FORMATS, export_dflash
from hf_hyperdflash.hub.found import check_drafter

from ..conftest import tiny_drafter
from ..helpers.families import qwen3
from ..helpers.refusals import Refusal
from ..helpers.released_layouts import EACH, EMBEDDINGS, LAYOUTS, PART, SLIDING, check_rounds, medusa
from ..helpers.tokenizers import characters

BLOCKS = [name for name, layout in LAYOUTS.items() if layout.written is not None]
WITHOUT_DEPTH = {"speculators"}  # layouts that do not say how many layers the target has, which SGLang needs
SECTIONS = ("dflash_config", "transformer_layer_config", "eagle_config")


def made(name, folder):
    """A target, and a drafter that somebody released for it."""
    torch.manual_seed(0)
    target = LAYOUTS[name].target().eval()
    LAYOUTS[name].write(folder, target)
    return target


def without(fields, *names):
    return {name: value for name, value in fields.items() if name not in names}


def fields_of(folder):
    return json.loads((folder / "config.json").read_text())


def assert_same(drafter, again):
    assert drafter.state_dict().keys() == again.state_dict().keys()
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in drafter.state_dict().items())
    given = {name: getattr(drafter.config, name) for name in type(drafter.config).__annotations__}
    given.pop("hyperdflash_version", None)  # of what saved it
    given["rope_parameters"] = drafter.config.rope_parameters
    assert {name: getattr(again.config, name) for name in given} == given


# Up to 5 s on a busy machine: the oracles loop over channels and rounds.
@pytest.mark.parametrize("name", LAYOUTS)
def test_drafts_are_the_oracles_and_so_they_are_when_it_is_saved(name, tmp_path):
    target = made(name, tmp_path)
    drafter = load_drafter(tmp_path, target=None if "deepspec eagle3" in name else target, dtype=torch.float32)
    LAYOUTS[name].check(drafter, target, tmp_path)
    drafter.save_pretrained(tmp_path / "ours")
    assert_same(drafter, load_drafter(tmp_path / "ours", dtype=torch.float32))


@pytest.mark.parametrize("name", BLOCKS)
def test_written_again_it_is_the_same(name, tmp_path):
    """In each layout that has words for it; the others refuse it in one line, and write nothing."""
    target = made(name, tmp_path)
    drafter = load_drafter(tmp_path, target=target)
    for format in FORMATS:
        folder = tmp_path / format
        if format not in LAYOUTS[name].written:
            Refusal(export_dflash, (format,)).check(drafter, folder, format, target)
            assert not folder.exists()
            continue
        export_dflash(drafter, folder, format, target)
        check_rounds(drafter, target, folder, (0.7,))
        again = load_drafter(folder, target=target)
        known = drafter.config.target_num_layers
        assert again.config.target_num_layers == (0 if format in WITHOUT_DEPTH else 4)
        drafter.config.target_num_layers = again.config.target_num_layers
        drafter.config.target_name_or_path = again.config.target_name_or_path
        assert_same(drafter, again)
        drafter.config.target_num_layers = known


MIXED = {"sliding_window": 6, "layer_types": ["full_attention", SLIDING]}
OURS = {  # what others' drafters do not have, or not together
    "z-lab": (
        {}, {**MIXED, "window_from": "slot"}, {"causal_layers": "all"}, {"target_layer_ids": [EMBEDDINGS, 2]},
        {"sliding_window": 4, "window_from": "slot", "causal_layers": "sliding"}, {"rope_parameters": PART},
    ),
    "speculators": ({}, {"sliding_window": 6}, {**MIXED, "causal_layers": "sliding"}, {"rope_parameters": PART}),
    "deepspec": ({"sequential_head": "markov", "head_rank": 4, "sample_from_anchor": True, "rope_parameters": PART},),
}  # fmt: skip


@pytest.mark.parametrize(("format", "fields"), [(format, each) for format in OURS for each in OURS[format]])
def test_the_oracle_reads_what_is_written_of_ours(format, fields, tmp_path):
    torch.manual_seed(0)
    target = qwen3().eval()
    fields = {"target_layer_ids": [0, 2], "num_draft_tokens": 4, "sliding_window": None, **fields}
    fields["target_name_or_path"] = "org/target"
    drafter = tiny_drafter(target, reducer="fc", **fields).float()
    told = export_dflash(drafter, tmp_path, format, target)
    assert f'"num_speculative_tokens": {drafter.max_draft_tokens}' in told
    assert ("SGLang" in told) == (format not in WITHOUT_DEPTH) == ("num_target_layers" in fields_of(tmp_path))
    check_rounds(drafter, target, tmp_path)
    again = load_drafter(tmp_path)
    assert torch.equal(again.state_dict()["fc.weight"], drafter.state_dict()["fc.weight"])
    for kind in again.config.kinds:
        assert again.config.attention_span(kind) == drafter.config.attention_span(kind)
    assert again.config.target_name_or_path == "org/target" * (format == "speculators")  # others have no place for it
    assert again.config.kinds == drafter.config.kinds and again.target_layer_ids == drafter.target_layer_ids


def test_how_many_streams_there_are_is_a_matter_of_the_target(tmp_path):
    """It is not in the file: the same drafter reads a target with one."""
    made("modal-labs' and incoai's GLM-5.3-Flash", tmp_path)
    check_rounds(load_drafter(tmp_path), qwen3().eval(), tmp_path)


@pytest.mark.parametrize("name", EACH)
def test_unknown_numbers_and_texts_are_warned_of(name, tmp_path, caplog):
    """Wherever they stand; by loading each time, by a look at it not, and by the doctor."""
    target = made(name, tmp_path)
    load_drafter(tmp_path)
    assert "nothing is known" not in caplog.text
    caplog.clear()
    fields = fields_of(tmp_path)
    fields |= {"chunked": 4, "switched": False, "listed": [], "some_token_id": 7, "_comment": "what for"}
    inner = next((section for section in SECTIONS if section in fields), None)
    (fields if inner is None else fields[inner])["rotated"] = "half"
    (tmp_path / "config.json").write_text(json.dumps(fields))
    found = check_drafter(tmp_path)
    assert found.unknown_fields == {"chunked": 4, "rotated": "half"} and not caplog.text
    drafter = load_drafter(found)
    assert caplog.text.count("`chunked` (4), `rotated` ('half')") == 1
    findings = check_weights(Examination(target, drafter, characters()))
    assert any("`chunked` (4), `rotated` ('half')" in text for _, text in findings)


# What changes drafts, in fields that any layout may have, and what may, in fields that nobody knows.
OF_ANY = {
    "attention_multiplier": 2.0, "attention_value_scale": 0.5, "attn_logit_softcapping": 30.0, "clip_qkv": 1.0,
    "dim_model_base": 256, "embedding_multiplier": 2, "input_embedding_scale": 2, "logit_scale": 0.25,
    "logits_scaling": 2, "output_multiplier": 2, "query_pre_attn_scalar": 256, "residual_multiplier": 0.22,
    "rotary_pct": 0.5, "scale_depth": 1.4, "scale_emb": 12, "attention_mode": "mla", "norm_type": "layer",
    "ptd_token_id": 5, "chunked": True, "chunks": [4], "chunking": {"size": 4},
}  # fmt: skip
# And in those of some.
OF_BLOCKS = {
    "shift_label": True, "attention_sink_bias": True, "add_swa_attention_sink_bias": True, "is_neox_style": False,
    "rope_is_neox_style": False, "use_aux_hidden_state": False,
}  # fmt: skip
OF_DOMINO = {
    **{name: value for name, value in OF_BLOCKS.items() if name != "shift_label"}, "heterogeneous_kv": True,
    "fusion_mode": "flare", "use_embed_proj": False, "use_hidden_proj": True,
}  # fmt: skip
OF_EAGLE3 = {
    "norm_output": False, "norm_before_fc": True, "is_causal": False, "causal": False, "use_rotary_pos_emb": False,
    "use_aux_hidden_state": False, "use_last_layernorm": False, "use_mtp_layernorm": True, "mask_token_id": 5,
    "use_input_layernorm_in_first_layer": False, "next_layer_regular": False, "parallel_draft_step": 3,
    "noise_token_id": 5, "mlp_bias": True, "parallel_drafting": True, "eh_proj_before_attn": True,
}  # fmt: skip
# These two make an EAGLE-3 drafter a P-EAGLE one.
OF_PEAGLE = ("ptd_token_id", "parallel_drafting")
CHANGES_DRAFTS = {
    **{name: {**OF_ANY, **OF_BLOCKS} for name in ("z-lab", "deepspec", "specforge", "z-lab dflash2")},
    "domino": {**OF_ANY, **OF_DOMINO},
    **{name: OF_ANY for name in ("speculators", "speculators dspark", "Muse-Glimmer's")},
    **{name: without({**OF_ANY, **OF_EAGLE3}, *OF_PEAGLE) for name in ("safeailab", "deepspec eagle3")},
    "Amazon's P-EAGLE": without({**OF_ANY, **OF_EAGLE3}, *OF_PEAGLE, "mask_token_id"),
    "speculators peagle": {**OF_ANY, "causal": False, "is_causal": False},
    "speculators eagle3": {**OF_ANY, "causal": False, "is_causal": False, "mask_token_id": 5},
    "specblock": {**OF_ANY, "rank_classes": 5, "is_causal": False, "use_aux_hidden_state": False},
}


@pytest.mark.parametrize("name", EACH)
def test_what_changes_drafts_is_refused(name, tmp_path):
    """In any part of a config.json, before weights are read."""
    made(name, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    fields = fields_of(tmp_path)
    for field, value in CHANGES_DRAFTS[name].items():
        for section in {None, *SECTIONS} & {None, *fields}:
            inner = {field: value} if section is None else {section: {**fields[section], field: value}}
            (tmp_path / "config.json").write_text(json.dumps({**fields, **inner}))
            for read in (load_drafter, lambda folder: check_drafter(folder).config):
                Refusal(read, (f"`{field}`", repr(value), str(tmp_path))).check(tmp_path)


TENSORS = {
    "missing": lambda tensors, norm: tensors.pop(norm),
    "unexpected": lambda tensors, _: tensors.update({"gate.weight": torch.ones(2)}),
    "of another shape": lambda tensors, norm: tensors.update({norm: torch.ones(2)}),
    "not finite": lambda tensors, norm: tensors[norm].mul_(torch.inf),
}


@pytest.mark.parametrize("damage", TENSORS)
@pytest.mark.parametrize("name", EACH)
def test_tensors_that_are_not_those_of_its_configuration_are_refused(name, damage, tmp_path):
    made(name, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    # The last norm's, whatever the layout puts before its name.
    TENSORS[damage](tensors, min((name for name in tensors if name.endswith("norm.weight")), key=len))
    save_file(tensors, tmp_path / "model.safetensors")
    words = (damage, "gate.weight" if damage == "unexpected" else "norm.weight", str(tmp_path))
    Refusal(load_drafter, words).check(tmp_path)


MLX = {"group_size": 64, "bits": 4}
QUANTIZED = {  # what says it, and what is said of it
    "compressed-tensors (pack-quantized)": {
        "quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    },
    "modelopt (NVFP4)": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    "MLX (4 bits)": {"quantization": MLX, "quantization_config": MLX},
    "fp8": {"transformer_layer_config": {"quantization_config": {"quant_method": "fp8"}}},
    "a program that it does not name (W4A16)": {"quantization_config": {"quant_algo": "W4A16"}},
    "modelopt (FP8)": {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}},
}


@pytest.mark.parametrize("name", [*EACH, "medusa"])
def test_quantized_weights_are_refused_before_they_are_read(name, tmp_path):
    medusa(tmp_path) if name == "medusa" else made(name, tmp_path)
    for weights in tmp_path.glob("*.safetensors"):
        weights.write_bytes(b"no weights")
    fields = fields_of(tmp_path)
    for by, said in QUANTIZED.items():
        more = dict(said)
        of_modelopt = tmp_path / "hf_quant_config.json"
        if of_modelopt.name in more:
            of_modelopt.write_text(json.dumps(more.pop(of_modelopt.name)))
        layers = {**fields.get("transformer_layer_config", {}), **more.pop("transformer_layer_config", {})}
        (tmp_path / "config.json").write_text(json.dumps({**fields, **more, "transformer_layer_config": layers}))
        for load in (load_drafter, check_drafter):
            Refusal(load, (f"quantized by {by}", "original", str(tmp_path))).check(tmp_path)
