"""Weights in shards, on other devices, and with an adapter. What is refused is in tests/refusals."""

import os

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, HyperDFlashDrafter
from hf_hyperdflash.drafters.deepseek_v4.configuration import DeepseekV4DSparkConfig
from hf_hyperdflash.drafters.weights import check_finite, weight_files

from ..conftest import tiny_config, tiny_drafter, tiny_target
from ..helpers.deepseek_checkpoints import dspark_fields
from ..helpers.refusals import Refusal


@pytest.fixture(params=["HyperDFlash", "MTP", "DSpark"])
def saved(request, tmp_path):
    """A drafter's class and its folder."""
    if request.param == "MTP":
        drafter = DeepseekV4MTPDrafter(tiny_target().config)
    elif request.param == "DSpark":
        drafter = DeepseekV4DSparkDrafter(DeepseekV4DSparkConfig.from_target_config(tiny_config(**dspark_fields())))
    else:
        drafter = tiny_drafter(tiny_target())
    drafter.save_pretrained(tmp_path)
    return type(drafter), tmp_path


def test_shards_are_one_checkpoint(saved):
    kind, folder = saved
    whole = load_file(folder / "model.safetensors")
    os.remove(folder / "model.safetensors")
    kind.from_pretrained(None, config=kind.config_class.from_pretrained(folder), state_dict=whole).save_pretrained(
        folder, max_shard_size=8000
    )
    shards = weight_files(folder)
    assert len(shards) > 2 and not (folder / "model.safetensors").exists()
    again, told = kind.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and all(torch.equal(v, whole[k]) for k, v in again.state_dict().items())
    tensors = load_file(folder / shards[0])
    first = next(iter(tensors))
    save_file({**tensors, first: torch.full_like(tensors[first], float("nan"))}, folder / shards[0])
    Refusal(lambda: kind.from_pretrained(folder), ("finite", first)).check()
    os.remove(folder / shards[0])
    Refusal(lambda: kind.from_pretrained(folder), (shards[0],), OSError).check()


def test_what_is_offloaded_or_on_meta_is_not_looked_at(saved):
    kind, folder = saved
    parts = {name: "cpu" for name, _ in kind.from_pretrained(folder).named_children()} | {"norm": "disk"}
    loaded = kind.from_pretrained(folder, device_map=parts, offload_folder=folder / "offloaded")
    assert loaded.norm.weight.is_meta
    check_finite(
        {"a": torch.full((2,), float("nan"), device="meta"), "b": torch.zeros(0), "c": torch.ones(2).int()}, "x"
    )


def test_an_adapters_folder_loads_its_drafter_too(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "base")
    base = HyperDFlashDrafter.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = HyperDFlashDrafter.from_pretrained(tmp_path / "adapter")
    weight = "layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(loaded.state_dict()[weight], adapted.state_dict()[f"base_model.model.{weight}"])
