"""Diagnoses of the shipped pair, whole and broken in every way the doctor knows."""

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.cli import app
from hf_hyperdflash.doctor import PROMPTS, examine
from hf_hyperdflash.features import target_fingerprint

from .conftest import MODELS

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
FEW = {"prompts": PROMPTS[:3], "max_new_tokens": 24}


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def drafter(target):
    drafter = HyperDFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    prints = target_fingerprint(target)
    drafter.config.target_fingerprint = f"{prints['head'][:32]} {prints['body'][:32]}"
    return drafter


def problem(diagnosis) -> str:
    assert len(diagnosis.problems) == 1, diagnosis.problems
    assert str(diagnosis).splitlines()[-1] == "Problems found."
    return diagnosis.problems[0]


def test_a_healthy_pair(target, drafter, tokenizer):
    own, config = type(target), copy.deepcopy(drafter.config)
    found = examine(target, drafter, tokenizer, **FEW)
    assert not found.problems and not found.remarks and found.differing == 0 and found.tau > 1.8
    assert "3 of 3 greedy texts" in str(found) and str(found).endswith("No problem found.")
    assert f"{sum(p.numel() for p in drafter.parameters()):,} parameters" in found.facts["drafter"]
    assert "256" in found.facts["memory"] and "'<｜mask｜>'" in found.facts["mask token"]
    assert type(target) is own and drafter.config == config


def test_layers_counted_from_another_number(target, drafter, tokenizer):
    right = drafter.config.target_layer_ids
    drafter.config.target_layer_ids = [layer if layer == -1 else layer - 1 for layer in right]
    assert f"`target_layer_ids` {right} instead of" in problem(examine(target, drafter, tokenizer, **FEW))
    assert drafter.config.target_layer_ids != right


def test_another_anchor_convention(target, drafter, tokenizer):
    drafter.config.sample_from_anchor = True
    assert "`sample_from_anchor` False" in problem(examine(target, drafter, tokenizer, **FEW))


def test_a_target_that_was_tuned_since(drafter, tokenizer):
    tuned = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    with torch.no_grad():
        tuned.model.layers[2].self_attn.o_b_proj.weight.mul_(1.02)
    found = problem(examine(tuned, drafter, tokenizer, **FEW))
    assert "weights (body)" in found and "fine-tuned since" in found


def test_a_tokenizer_with_other_ids(target, drafter, tokenizer):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = state["model"]["vocab"], {token["id"] for token in state["added_tokens"]}
    names = [name for name, token in vocabulary.items() if token not in added]
    ids = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, ids[977:] + ids[:977]))
    other = PreTrainedTokenizerFast(
        tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(state)),
        chat_template=tokenizer.chat_template,
        eos_token=tokenizer.eos_token,
        bos_token=tokenizer.bos_token,
    )
    assert any("look like noise" in text for text in examine(target, drafter, other, **FEW).problems)


def test_a_larger_tokenizer(target, drafter, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<more>"])
    assert "belongs to another model" in problem(examine(target, drafter, larger, **FEW))


def test_no_chat_template(target, drafter, tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    assert "no chat template" in problem(examine(target, drafter, plain, **FEW))


def test_an_ordinary_mask_token(target, drafter, tokenizer):
    drafter.config.mask_token_id = tokenizer.encode(" the", add_special_tokens=False)[0]
    assert any("ordinary token" in text for text in examine(target, drafter, tokenizer, **FEW).remarks)


def test_an_untrained_drafter(target, tokenizer):
    fresh = HyperDFlashDrafter.from_target(target, mask_token_id=3, num_hidden_layers=1).eval()
    found = examine(target, fresh, tokenizer, **FEW)
    assert "Hardly any draft" in problem(found) and "does not say which weights" in found.remarks[0]


def test_a_pair_that_does_not_fit(drafter, tokenizer):
    small = AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=2, dtype=torch.float32)
    assert "layers" in problem(examine(small, drafter, tokenizer, **FEW))


def test_the_command():
    result = CliRunner().invoke(
        app, ["doctor", "--target", str(TARGET), "--drafter", str(DRAFTER), "--max-new-tokens", "8"]
    )
    assert result.exit_code == 0 and "No problem found." in result.output, result.output
