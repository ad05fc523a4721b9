"""What is particular to the MTP heads that transformers drops; their drafts are in `test_mtp`."""

from __future__ import annotations

import json

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hyperdflash import MTPConfig, MTPDrafter, load_drafter

from ..conftest import mostly_nightly, prompt
from ..contracts.test_drafters import of_eight
from ..helpers import families
from ..helpers.dropped_mtp import PUBLISHED
from ..helpers.mtp_targets import CARRIERS, loaded
from ..helpers.saved_folder import furthest_from_the_law
from ..helpers.training import losses, trainer_for


def rewrite(folder, change):
    """Change the tensors that a checkpoint has of its head, in one file of their own."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = {name: load_file(folder / shard)[name] for name, shard in index["weight_map"].items()}
    changed = change(stored)
    index["weight_map"] = {name: "model-00001-of-00001.safetensors" for name in changed}
    save_file(changed, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def stacked(stored):
    """The experts of a head as Qwen3.6 has them, in two tensors."""
    of = "mtp.layers.0.mlp.experts."
    own = {name: value for name, value in stored.items() if not name.startswith(of)}
    gate, up, down = (
        torch.stack([stored[f"{of}{i}.{part}_proj.weight"] for i in range(4)]) for part in ("gate", "up", "down")
    )
    return own | {f"{of}gate_up_proj": torch.cat([gate, up], dim=1), f"{of}down_proj": down}


def test_experts_may_be_stacked(tmp_path):
    """As in Qwen3.6; and they are saved so."""
    target = loaded("qwen3_5_moe_text", tmp_path)
    apart = load_drafter(tmp_path, target=target)
    rewrite(tmp_path, stacked)
    together = load_drafter(tmp_path, target=target)
    assert all(torch.equal(value, apart.state_dict()[name]) for name, value in together.state_dict().items())
    together.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved["mtp.layers.0.mlp.experts.gate_up_proj"].shape == (4, 32, 64) and len(saved) == 19
    again = load_drafter(tmp_path / "saved", target=target)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in apart.state_dict().items())


# Refused by name, by the configuration alone


def configured(folder, model_type, **fields):
    """A folder with the configuration of a family's tiny target, or its default one, and no weights."""
    made = CARRIERS.get(model_type)
    config = CONFIG_MAPPING[model_type]() if made is None else made.target().config.get_text_config()
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    names = () if made is None else PUBLISHED[model_type][0](config)
    index = {"weight_map": dict.fromkeys(names, "absent")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.mark.parametrize(
    ("model_type", "fields", "told"),
    [
        ("mimo_v2_flash", {}, "mimo_v2_flash model, whose MTP head is not read: SGLang gives"),
        ("minimax_m3_vl", {}, "minimax_m3_vl_text model, whose MTP head is not read: its attention sees"),
        ("deepseek_v32", {}, "deepseek_v32 model, whose MTP head is not read: its attention sees"),
        ("inkling_mm_model", {}, "inkling_text model, whose MTP head is not read: its layers have convolutions"),
        ("granite_docling", {}, "granite_docling_text model, whose MTP head is not read: how it computes is not"),
        ("qwen4_exp", {}, "qwen4_exp_text model, whose MTP head is not read: it reads and hands on several"),
        ("exaone4", {"num_nextn_predict_layers": 0}, "says in its config.json that it has none"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": 2}, "2 MTP heads, expected one"),
        ("ernie4_5_moe", {"num_nextn_predict_layers": 2}, "2 MTP heads, expected one"),
        ("qwen3_5_text", {"mtp_use_dedicated_embeddings": True}, "`mtp_use_dedicated_embeddings` is True"),
        ("nemotron_h", {"mtp_layers_block_type": ["full_attention"]}, "`mtp_layers_block_type` is ['full_attention']"),
        ("nemotron_h", {"num_nextn_predict_layers": 0}, "says in its config.json that it has none"),
    ],
)
def test_heads_of_no_published_layout_are_refused_before_weights_are_read(tmp_path, model_type, fields, told):
    with pytest.raises(ValueError) as error:
        load_drafter(configured(tmp_path, model_type, **fields))
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_checkpoint_without_its_head_is_refused(tmp_path):
    """As transformers saves it."""
    families.qwen3_next().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no tensors of MTP heads"):
        load_drafter(tmp_path)


# Trained, and drawn from


@pytest.mark.parametrize("family", mostly_nightly(["nemotron_h", *sorted(PUBLISHED.keys() - {"nemotron_h"})]))
def test_a_head_is_trained_on(tmp_path, family):
    """Every part of it learns, it is saved under its publisher's names, and drafts better."""
    target = loaded(family, tmp_path / "target")
    drafter, accepted = load_drafter(tmp_path / "target", target=target), []
    options = dict(do_sample=False, max_new_tokens=30)
    plain = target.generate(prompt(9), **options)
    data = [{"input_ids": plain[0].tolist(), "loss_mask": [1] * plain.shape[1]}] * 4
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    trainer = trainer_for(tmp_path / "run", target, drafter, Dataset.from_list(data), max_steps=25, num_anchors=16)
    for trained in (False, True):
        if trained:
            trainer.train()
        drafter.bind(target)
        for way in ({}, {"tree_budget": 6}):
            assert torch.equal(target.generate(prompt(9), assistant_model=drafter, **options, **way), plain)
        accepted.append(drafter.last_stats.tau)
    assert losses(trainer)[-1] < 0.7 * losses(trainer)[0] and accepted[1] > accepted[0] + 0.5
    assert not [name for name, value in drafter.named_parameters() if torch.equal(value, before[name])]
    drafter.save_pretrained(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = {*PUBLISHED[family][0](target.config.get_text_config())} | (
        {"model.norm.weight"} if family == "ernie4_5_moe" else set()
    )
    assert saved.keys() == {name.removeprefix("language_model.") for name in expected}


def of_config(target):
    return MTPDrafter(MTPConfig.from_target_config(target.config)).eval()


@pytest.mark.parametrize("budget", [None, 3])
@pytest.mark.parametrize(
    "family",
    mostly_nightly(
        ["ernie4_5_moe", "longcat_flash", "nemotron_h", "qwen3_next", "bailing_hybrid", "exaone_moe", "hy_v3"]
    ),
)
def test_sampled_text_has_the_targets_law(family, budget):
    """By every way that the draws can go."""
    told = furthest_from_the_law(*of_eight(CARRIERS[family].target, of_config)(), tree_budget=budget)
    # Running states round in another way over several tokens than over one.
    assert told["furthest"] < (1e-3 if family in ("nemotron_h", "qwen3_next") else 1e-5) and told["accepted"] > 0
