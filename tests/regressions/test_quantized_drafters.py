"""Others' drafters that something quantized were refused with the advice to delete what says so; of ModelOpt, whose
word for it is in a file of its own, they were read as they are."""

import json

import pytest
from safetensors.torch import save_file

from hf_hyperdflash import load_drafter
from hf_hyperdflash.hub.found import check_drafter

from ..helpers.families import qwen3
from ..helpers.oracle_dflash import write_speculators, write_zlab
from ..hub.test_unrolled_layouts import eagle3_tensors, safeailab, specblock, specblock_tensors

SHAPE = {"block_size": 5, "mask_token_id": 1}


def medusa(folder):
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    save_file({}, folder / "medusa_lm_head.safetensors")


LAYOUTS = {
    "z-lab": lambda folder: write_zlab(folder, qwen3(), nested=True, layer_ids=[0, 2], **SHAPE),
    "speculators": lambda folder: write_speculators(folder, qwen3(), layer_ids=[1, 3], **SHAPE),
    "eagle3": lambda folder: safeailab(folder, eagle3_tensors()),
    "specblock": lambda folder: specblock(folder, specblock_tensors()),
    "medusa": medusa,
}
MLX = {"group_size": 64, "bits": 4}
SAID = {
    "compressed-tensors": {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
    "modelopt": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
    "MLX": {"quantization": MLX, "quantization_config": MLX},
    "fp8": {"transformer_layer_config": {"quantization_config": {"quant_method": "fp8"}}},
    "a program": {"quantization_config": {"quant_algo": "W4A16"}},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("by", SAID)
def test_it_is_said_what_quantized_it_before_weights_are_read(tmp_path, monkeypatch, layout, by):
    LAYOUTS[layout](tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["transformer_layer_config"] = {
        **fields.get("transformer_layer_config", {}), **SAID[by].get("transformer_layer_config", {})
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**SAID[by], **fields}))
    monkeypatch.setattr("hf_hyperdflash.hub.foreign.load_file", None)  # weights are not read
    for load in (load_drafter, check_drafter):
        with pytest.raises(ValueError, match=f"quantized by {by}") as caught:
            load(tmp_path)
        told = str(caught.value)
        assert str(tmp_path) in told and "original" in told and "Take it out" not in told and "\n" not in told


def test_modelopts_own_file_is_read(tmp_path):
    safeailab(tmp_path, eagle3_tensors())
    load_drafter(tmp_path)
    told = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"quantized by modelopt \(FP8\)"):
        load_drafter(tmp_path)
