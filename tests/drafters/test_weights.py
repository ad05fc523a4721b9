"""Checkpoints that are not whole, not finite, not safetensors or not drafters: refused, in one line that names what is
wrong."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_hyperdflash import DeepseekV4DSparkDrafter, DeepseekV4MTPDrafter, HyperDFlashDrafter, load_target
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.deepseek_v4.configuration_dspark import DeepseekV4DSparkConfig
from hf_hyperdflash.drafters.weights import check_draft_ids, check_finite, weight_files

from ..conftest import MODELS, tiny_config, tiny_drafter, tiny_target
from ..helpers.deepseek_checkpoints import dspark_fields

TARGET = MODELS / "tiny-deepseek-v4"


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


def edit(folder: Path, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def add(tensors):
    tensors["more.weight"] = torch.ones(2)


def widen(tensors):
    tensors["norm.weight"] = torch.ones(7)


def break_one(value):
    def change(tensors):
        tensors["norm.weight"][3] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("norm.weight"), r"1 missing \(norm\.weight\)"),
        (add, r"1 unexpected \(more\.weight\)"),
        (widen, r"1 of another shape \(norm\.weight, \[7\] for \[32\]\)"),
        (break_one(float("nan")), r"norm\.weight"),
        (break_one(-float("inf")), r"norm\.weight"),
    ],
)
def test_tensors_that_are_not_the_configurations(saved, change, message):
    kind, folder = saved
    kind.from_pretrained(folder)
    edit(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        kind.from_pretrained(folder, dtype=torch.bfloat16, device_map="cpu")
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


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
    with pytest.raises(ValueError, match="not finite"):
        kind.from_pretrained(folder)
    os.remove(folder / shards[0])
    with pytest.raises(OSError, match=shards[0]):
        kind.from_pretrained(folder)


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_a_pickle_is_refused_unread(saved):
    kind, folder = saved
    os.remove(folder / "model.safetensors")
    torch.save({"norm.weight": Payload(str(folder / "ran"))}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"has no model\.safetensors.*pickle"):
        kind.from_pretrained(folder)
    with pytest.raises(ValueError, match="`use_safetensors` is False"):
        kind.from_pretrained(folder, use_safetensors=False, weights_only=False)
    assert not (folder / "ran").exists()


def test_what_is_offloaded_or_on_meta_is_not_looked_at(saved):
    kind, folder = saved
    parts = {name: "cpu" for name, _ in kind.from_pretrained(folder).named_children()} | {"norm": "disk"}
    loaded = kind.from_pretrained(folder, device_map=parts, offload_folder=folder / "offloaded")
    assert loaded.norm.weight.is_meta
    check_finite(
        {"a": torch.full((2,), float("nan"), device="meta"), "b": torch.zeros(0), "c": torch.ones(2).int()}, "x"
    )


@pytest.mark.parametrize("kind", [HyperDFlashDrafter, DeepseekV4MTPDrafter, DeepseekV4DSparkDrafter])
def test_a_folder_that_is_not_there(kind, tmp_path):
    for name in (tmp_path / "none", "./none", "a/b/c", "~/none"):
        with pytest.raises(OSError, match=r"folder .*none does not exist|folder a/b/c does not exist"):
            kind.from_pretrained(name)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(OSError, match="is a file, expected a folder"):
        kind.from_pretrained(tmp_path / "model.safetensors")


def test_a_target_is_no_drafter():
    with pytest.raises(ValueError, match=r"is no drafter but a target, a DeepseekV4ForCausalLM\..*from_target"):
        DeepseekV4MTPDrafter.from_pretrained(TARGET)
    with pytest.raises(ValueError, match="not of its target"):
        HyperDFlashDrafter.from_pretrained(TARGET)


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_a_drafter_is_no_target(saved, command):
    with pytest.raises(ValueError, match="drafter, expected the target"):
        load_target(str(saved[1]))
    arguments = [
        command,
        "--target",
        str(saved[1]),
        "--drafter",
        str(saved[1]),
        *(["Hi"] if command == "generate" else []),
    ]
    result = CliRunner().invoke(app, arguments)
    told = "is an?( HyperDFlash| MTP| DSpark) drafter, expected the target"
    assert result.exit_code and re.search(told, str(result.exception))


def test_an_adapters_folder_loads_its_drafter_too(tmp_path):
    tiny_drafter(tiny_target()).save_pretrained(tmp_path / "base")
    base = HyperDFlashDrafter.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    loaded = HyperDFlashDrafter.from_pretrained(tmp_path / "adapter")
    weight = "layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(loaded.state_dict()[weight], adapted.state_dict()[f"base_model.model.{weight}"])


@pytest.mark.parametrize(
    "ids",
    [torch.tensor([0.0, 1.0]), torch.tensor([0, 64]), torch.tensor([-1, 2]), torch.tensor([3, 3]), torch.tensor([1])],
)
def test_draft_ids_are_different_tokens_of_the_vocabulary(ids):
    check_draft_ids(torch.tensor([5, 63]), 2, 64, "it")
    with pytest.raises(ValueError, match="2 different integers from 0 to 63"):
        check_draft_ids(ids, 2, 64, "it")


def test_a_configuration_that_was_damaged(saved):
    kind, folder = saved
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"config\.json"):
        kind.from_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**fields, "num_attention_heads": "four"}))
    with pytest.raises((ValueError, OSError), match="num_attention_heads"):
        kind.from_pretrained(folder)
