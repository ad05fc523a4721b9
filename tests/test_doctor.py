"""Diagnoses of the shipped pair, whole and broken in every way the doctor knows."""

import copy
import json
import re

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments
from hf_hyperdflash.cli import app
from hf_hyperdflash.data import encode_prompts
from hf_hyperdflash.doctor import PROMPTS, Diagnosis, _compare_fingerprints, examine
from hf_hyperdflash.fingerprint import as_words, target_fingerprint

from .conftest import MODELS, tiny_drafter, tiny_target
from .families import qwen3

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
FEW = {"prompts": PROMPTS[:2], "max_new_tokens": 20}


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def drafter(target):
    drafter = HyperDFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    drafter.config.target_fingerprint = as_words(target_fingerprint(target))
    return drafter


def problem(diagnosis) -> str:
    assert len(diagnosis.problems) == 1, diagnosis.problems
    assert str(diagnosis).splitlines()[-1] == "Problems found."
    return diagnosis.problems[0]


def test_a_healthy_pair(target, drafter, tokenizer):
    own, config = type(target), copy.deepcopy(drafter.config)
    found = examine(target, drafter, tokenizer, **FEW)
    assert not found.problems and not found.remarks and found.differing == 0 and found.tau > 1.5
    assert "2 of 2 greedy texts" in str(found) and str(found).endswith("No problem found.")
    assert f"{sum(p.numel() for p in drafter.parameters()):,} parameters" in found.facts["drafter"]
    assert "256" in found.facts["memory"] and "'<｜mask｜>'" in found.facts["mask token"]
    assert type(target) is own and drafter.config == config


def characters() -> PreTrainedTokenizerFast:
    """A tokenizer of 60 characters, which chats by spelling."""
    letters = [*"abcdefghijklmnopqrstuvwxyzAELTW0123456789 .,?$'"]
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<mask>", "<unk>", *letters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, mask_token="<mask>", unk_token="<unk>", pad_token="<pad>"
    )


def test_layers_counted_from_another_number(tmp_path):
    """A vanilla drafter, trained on what the target answers to the doctor's own prompts."""
    torch.manual_seed(0)
    target, tokenizer = qwen3().eval(), characters()
    rows = []
    for ids in encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS]):
        text = target.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
        mask = [False] * ids.shape[1] + [True] * (len(text) - ids.shape[1])
        rows.append({"input_ids": text, "loss_mask": mask})
    torch.manual_seed(0)
    drafter = HyperDFlashDrafter.from_target(
        target, reducer="fc", target_layer_ids=[1, 2], mask_token_id=1, num_hidden_layers=1, num_draft_tokens=3,
        dtype=torch.float32,
    )  # fmt: skip
    args = HyperDFlashTrainingArguments(
        str(tmp_path), max_steps=250, per_device_train_batch_size=5, num_anchors=16, learning_rate=5e-3, report_to=[],
        use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    HyperDFlashTrainer(drafter, target, args, train_dataset=Dataset.from_list(rows)).train()
    drafter.eval()
    healthy = examine(target, drafter, tokenizer, **FEW)
    assert healthy.tau > 1.5 and not any("target_layer_ids" in text for text in healthy.problems)
    drafter.config.target_layer_ids = [0, 1]
    broken = examine(target, drafter, tokenizer, **FEW)
    assert any("`target_layer_ids` [1, 2] instead of [0, 1]" in text for text in broken.problems), broken
    assert drafter.config.target_layer_ids == [0, 1]


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


@pytest.mark.parametrize(
    ("change", "problems", "remarks"),
    [
        (lambda target, config: None, "", ""),
        (lambda target, config: setattr(target.config, "hc_eps", 1e-3), "", "its configuration is not"),
        (lambda target, config: target.model.layers[1].mlp.gate.weight.data[0, 0].add_(1), r"weights \(body\)", ""),
        (lambda target, config: setattr(config, "target_fingerprint", "cf0c35 09f889"), "", "An earlier release"),
        (lambda target, config: setattr(config, "target_fingerprint", ""), "", "does not say which weights"),
    ],
)  # fmt: skip
def test_what_the_drafter_records_of_its_target(change, problems, remarks):
    target, found = tiny_target(), Diagnosis()
    config = tiny_drafter(target).config
    config.target_fingerprint = as_words(target_fingerprint(target))
    change(target, config)
    _compare_fingerprints(found, target, config)
    assert [bool(found.problems), bool(found.remarks)] == [bool(problems), bool(remarks)]
    assert re.search(problems, "".join(found.problems)) and re.search(remarks, "".join(found.remarks))
