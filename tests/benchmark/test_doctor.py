"""Diagnoses of the shipped pair, whole and broken in every way the doctor knows."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hyperdflash import (
    HyperDFlashDrafter,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    PromptLookupDrafter,
    load_drafter,
)
from hf_hyperdflash.benchmark.doctor import ablations, config_variants, diagnosis, fit
from hf_hyperdflash.benchmark.doctor import examine as doctor
from hf_hyperdflash.benchmark.doctor.config_variants import Variant
from hf_hyperdflash.benchmark.doctor.diagnosis import MeasuredCosts, Timed
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS, examine
from hf_hyperdflash.benchmark.intervals import Interval
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub.cards import TRAINING_RECORD
from hf_hyperdflash.training import trials
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.features.fingerprint import short_fingerprint, target_fingerprint

from ..conftest import MODELS, mostly_nightly, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.tokenizers import characters
from ..helpers.unrolled import unrolled

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
TWICE = Timed({"num_assistant_tokens": "auto"}, Interval(2.0, 1.9, 2.1), Interval(1.0, 1.0, 1.0))
CHEAP = MeasuredCosts(9, 1, 1.0, {1: 1.0, 64: 1.0}, {1: 0.1})
FEW = {"prompts": PROMPTS[:1], "max_new_tokens": 12}
ENOUGH = {"prompts": PROMPTS[:8], "max_new_tokens": 12}  # for other settings to be tried


@pytest.fixture(scope="module")
def target():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture
def drafter(target):
    drafter = HyperDFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    drafter.config.target_fingerprint = short_fingerprint(target_fingerprint(target))
    return drafter


@pytest.fixture(autouse=True)
def _what_takes_long_is_measured_once(request, monkeypatch):
    """With the healthy pair. Other tests are of it, and of its parts."""
    if "healthy" not in request.node.name:
        monkeypatch.setattr(doctor, "time_settings", lambda *_, **__: [TWICE])
        monkeypatch.setattr(doctor, "measure_round_costs", lambda *_, **__: CHEAP)
        monkeypatch.setattr(ablations, "changes", lambda *_: iter(()))
        monkeypatch.setattr(ablations, "OTHER_LANGUAGES", ("1 + 1",))


@pytest.mark.nightly  # the shipped pair is diagnosed whole
def test_a_healthy_pair(target, drafter, tokenizer):
    own, config, said = type(target), copy.deepcopy(drafter.config), []
    found = examine(target, drafter, tokenizer, **ENOUGH, context=128, seconds=60, report=said.append)
    assert found.problems.keys() <= {"verification", "draft count"}  # which are this machine's
    assert found.differing == 0 and found.tau > 1.5 and found.speedup.value > 0
    assert "0 clearly better" in found.facts["other configurations"]
    assert "8 of 8" in found.facts["losslessness"] and len(found.verdict()) <= 10
    assert {"thinking", "no template"} <= {change.cause for change in found.changes}
    assert {"code", "mathematics", "chat", "German, Spanish, French, Chinese"} == set(found.kinds)
    if not found.problems:
        for temperature, line in zip((0, 1), found.verdict()[-3:-1]):
            assert line.startswith(f"Set, at temperature {temperature}: ") and found.timed[temperature]
    assert "'<｜mask｜>'" in found.facts["mask token"]
    assert type(target) is own and drafter.config == config
    assert [line for line in said if "thinking on" in line or "timing rounds of up to 64 tokens" in line]


# Drafters of other kinds


def shipped(_):
    return HyperDFlashDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()


# What is said of it and of its memory. In float32 a token takes the shipped one 1,024 B, of a window of 256.
KINDS = {
    "shipped": (shipped, (), ("1.02 kB", "sees 256", "262 kB", "524 kB")),
    "mtp": (lambda target: load_drafter(TARGET, target=target), ("multi-token-prediction",), ("4.22 MB and 256 B",)),
    "specblock": (lambda target: unrolled("specblock", target), ("a SpecBlock drafter",), ("512 B",)),
    "eagle3": (lambda target: unrolled("eagle3", target), ("an EAGLE-3 drafter",), ("256 B",)),
    "prompt lookup": (PromptLookupDrafter, ("PromptLookupDrafter", "no weights"), None),
}  # fmt: skip


@pytest.mark.parametrize(("make", "words", "sizes"), KINDS.values(), ids=KINDS)
def test_what_a_drafter_is_and_takes(target, make, words, sizes):
    drafter = make(target)
    examined = diagnosis.Examination(target, drafter, None)
    fit.check_memory(examined)
    said = examined.found.facts
    assert all(word in said["drafter"] for word in words), said
    assert ("memory" in said) == bool(sizes)
    if sizes:
        assert f"{sum(weight.numel() for weight in drafter.parameters()):,} parameters" in said["drafter"]
        assert all(size in said["memory"] for size in sizes), said


@pytest.mark.parametrize("kind", mostly_nightly(["mtp", "specblock", "eagle3"]))
def test_drafters_of_other_kinds(target, tokenizer, kind):
    found = examine(target, KINDS[kind][0](target), tokenizer, prompts=PROMPTS[:2], max_new_tokens=20)
    assert found.differing == 0 and (2 <= found.tau <= 4 if kind == "mtp" else 1 <= found.tau < 1.3)
    assert found.facts.keys().isdisjoint({"mask token", "other configurations"})
    assert bool(found.problems) == (kind != "mtp")  # of which nothing is accepted, as it is untrained


# One thing wrong


class Wrong(NamedTuple):
    """A pair with one thing changed, and what is said of it."""

    change: Callable  # of copies of target, drafter and tokenizer; it may return others
    kind: str  # "problem" or "remark"
    words: tuple[str, ...] = ()
    cause: str = ""
    alone: bool = True  # whether nothing else is a problem
    given: dict = FEW


def other_weights(target):
    target.model.layers[2].self_attn.o_b_proj.weight.data.mul_(1.02)


def rounded(target, drafter, _):
    """The drafter was trained for a target that had been rounded."""
    target.model.layers[2].self_attn.o_b_proj.weight.data.mul_(1 + 2**-12)
    fingerprint = short_fingerprint(target_fingerprint(target, rounded_to=torch.bfloat16))
    drafter.config.target_fingerprint = fingerprint


def other_ids(target, drafter, tokenizer):
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    vocabulary, added = state["model"]["vocab"], {token["id"] for token in state["added_tokens"]}
    names = [name for name, token in vocabulary.items() if token not in added]
    ids = [vocabulary[name] for name in names]
    vocabulary.update(zip(names, ids[977:] + ids[:977]))
    made = type(tokenizer.backend_tokenizer).from_str(json.dumps(state))
    return target, drafter, PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=tokenizer.chat_template, eos_token=tokenizer.eos_token
    )  # fmt: skip


def with_config(**fields):
    return lambda _, drafter, __: drafter.config.update(fields)


def other_anchor(_, drafter, __):
    drafter.config.sample_from_anchor, drafter.config.confidence_temperatures = True, None  # of eight positions


def fewer_layers(_, drafter, tokenizer):
    return AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=2, dtype=torch.float32), drafter, tokenizer


def untrained(target, _, tokenizer):
    return target, HyperDFlashDrafter.from_target(target, mask_token_id=3, num_hidden_layers=1).eval(), tokenizer


WRONG = {
    "nothing": Wrong(lambda *_: None, ""),
    "a target that was tuned since": Wrong(
        lambda target, *_: other_weights(target), "problem", ("weights (body)", "fine-tuned"), "other weights"
    ),
    "a target in another precision": Wrong(rounded, "remark", ("float32", "bfloat16")),
    "another configuration of the target": Wrong(
        lambda target, *_: setattr(target.config, "hc_eps", 1e-5), "remark", ("its configuration is not",)
    ),
    "a fingerprint of an earlier release": Wrong(
        with_config(target_fingerprint="cf0c35 09f889"), "remark", ("earlier release",)
    ),
    "no fingerprint": Wrong(with_config(target_fingerprint=""), "remark", ("does not say which weights",)),
    "another end of texts": Wrong(
        lambda target, *_: target.generation_config.update(eos_token_id=[5, 6]), "problem", ("[5, 6]",), "tokenizer"
    ),
    "a tokenizer with other ids": Wrong(other_ids, "problem", ("noise",), "tokenizer", alone=False),
    "a larger tokenizer": Wrong(
        lambda *pair: pair[2].add_tokens(["<more>"]), "problem", ("2049", "2048"), "tokenizer"
    ),
    "no chat template": Wrong(
        lambda *pair: setattr(pair[2], "chat_template", None), "problem", ("chat_template",), "template", alone=False
    ),
    "an ordinary mask token": Wrong(
        lambda _, drafter, tokenizer: drafter.config.update(
            {"mask_token_id": tokenizer.encode(" the", add_special_tokens=False)[0]}
        ), "remark", ("ordinary token",),
    ),
    "a pair that does not fit": Wrong(fewer_layers, "problem", ("layers",), "fit"),
    # Takes seconds: a pair is diagnosed whole.
    "an untrained drafter": Wrong(untrained, "problem", ("tau 1.",), "acceptance", given=ENOUGH),
    "another anchor convention": Wrong(
        other_anchor, "problem", ("`sample_from_anchor` False",), "anchor", given=ENOUGH
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(each, id=name, marks=[pytest.mark.nightly] * (name == "another anchor convention"))
        for name, each in WRONG.items()
    ],
)
def test_what_is_wrong_is_named(target, drafter, tokenizer, wrong):
    pair = copy.deepcopy(target), drafter, copy.deepcopy(tokenizer)
    changed = wrong.change(*pair)
    found = examine(*(changed if isinstance(changed, tuple) else pair), **wrong.given)
    said = {"problem": list(found.problems.values()), "remark": found.remarks, "": []}
    about = [text for text in said[wrong.kind] if all(word in text for word in wrong.words)]
    assert len(about) == bool(wrong.kind), found
    assert found.is_wrong == (wrong.kind == "problem") and (not wrong.alone or len(found.problems) == found.is_wrong)
    assert str(found).splitlines()[-1] == ("Problems found." if found.is_wrong else "No problem found.")
    if wrong.cause:
        assert about == [found.problems[wrong.cause]]
    if wrong.kind != "problem":
        assert found.remarks == about
    cannot_go_on = wrong.cause == "fit" or "2049" in wrong.words
    assert (found.tau is None) == cannot_go_on


def test_what_training_reached_is_told_beside_a_target_that_was_tuned_since(target, drafter, tokenizer, tmp_path):
    (tmp_path / TRAINING_RECORD).write_text(json.dumps({"metrics": {"eval_tau": 3.214}}))
    drafter.config._name_or_path = str(tmp_path)
    tuned = copy.deepcopy(target)
    other_weights(tuned)
    assert "it had 3.21 tokens a round" in examine(tuned, drafter, tokenizer, **FEW).problems["other weights"]


def test_a_quantized_target(target, drafter, tokenizer, monkeypatch):
    """Its logits depend on the width of a forward, as of kernels that look at a whole batch."""
    quantized = copy.deepcopy(target)
    quantized.config.quantization_config = {"quant_method": "ours"}
    project = quantized.lm_head.forward
    monkeypatch.setattr(quantized.lm_head, "forward", lambda states: project(states) + 0.1 * states.shape[1])
    text = torch.arange(5, 40)[None]
    ((cause, said),) = fit.check_widths(diagnosis.Examination(quantized, drafter, tokenizer, texts=[text]))
    assert cause == "quantization" and "(ours)" in said and "by up to 0.7" in said
    same = diagnosis.Examination(target, drafter, tokenizer, texts=[text])
    assert list(fit.check_widths(same)) == []
    assert "of the 8 best tokens 0 change" in same.found.facts["forwards of other widths"]
    drafter.config.target_fingerprint = short_fingerprint(target_fingerprint(tiny_target()))
    ((cause, said),) = fit.check_fingerprint(diagnosis.Examination(quantized, drafter, tokenizer))
    assert cause == "quantization" and "(ours)" in said


# What training would bring back


@pytest.mark.nightly  # a target is tuned, and its drafter trained
def test_what_training_brings_back_to_a_tuned_target(target, drafter, tokenizer, caplog, monkeypatch):
    """Trained on half of the texts, measured on the others; the drafter stays as it is, and no copy of it is announced
    once more."""
    teach, rounds, learned, measured = ablations.fine_tune_briefly, ablations.count_rounds, [], []

    def taught(target, drafter, texts, starts, seconds):
        learned.extend(text[0, :start].tolist() for text, start in zip(texts, starts))
        return teach(target, drafter, texts, starts, seconds)

    def counted(target, drafter, prompts, *rest):
        measured[:] = [(ids[0].tolist(), drafter) for ids in prompts]
        return rounds(target, drafter, prompts, *rest)

    monkeypatch.setattr(ablations, "fine_tune_briefly", taught)
    monkeypatch.setattr(ablations, "count_rounds", counted)
    drafter.config.target_name_or_path, before = "org/another-target", copy.deepcopy(drafter.state_dict())
    target = copy.deepcopy(target)
    other_weights(target)
    found = examine(target, drafter, tokenizer, **{**ENOUGH, "max_new_tokens": 16})
    (change,) = [change for change in found.changes if change.cause == "learning"]
    assert change.name == "16 training steps on 4 other texts"
    assert len(measured) == len(learned) == 4
    assert not any(prompt in learned or own is drafter for prompt, own in measured)
    said = f"{change.after:.2f} tokens a round instead of {change.before:.2f}"
    assert list(found.problems) == ["other weights"] and said in found.problems["other weights"]
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert sum("was made for 'org/another-target'" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize(("error", "said"), [("out of memory\nsome trace", "out of memory"), ("", "RuntimeError")])
def test_training_that_does_not_run_is_a_remark(monkeypatch, error, said):
    def fail(*_):
        raise RuntimeError(error)

    monkeypatch.setattr(ablations, "fine_tune_briefly", fail)
    ids = [torch.ones(1, 3, dtype=torch.long)] * 8
    found = diagnosis.Diagnosis(problems={"other weights": "so."})
    examined = diagnosis.Examination(None, None, None, prompts=ids, texts=ids, found=found)
    ((cause, text),) = ablations.try_learning(examined)
    assert cause == diagnosis.REMARK and text.endswith(f": {said}") and not found.changes


# Other configurations


def trained(folder):
    """A vanilla drafter that reads layer 2, trained on what its target answers to some of the doctor's own prompts."""
    torch.manual_seed(0)
    target, tokenizer = qwen3().eval(), characters()
    rows = []
    for ids in encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]} for text in PROMPTS[:10]]):
        text = target.generate(ids, max_new_tokens=40, do_sample=False)[0].tolist()
        mask = [False] * ids.shape[1] + [True] * (len(text) - ids.shape[1])
        rows.append({"input_ids": text, "loss_mask": mask})
    torch.manual_seed(0)
    drafter = HyperDFlashDrafter.from_target(
        target, reducer="fc", target_layer_ids=[2], mask_token_id=1, num_hidden_layers=1, num_draft_tokens=3,
        dtype=torch.float32,
    )  # fmt: skip
    args = HyperDFlashTrainingArguments(
        str(folder), max_steps=150, per_device_train_batch_size=5, num_anchors=16, kl_weight=0.0, learning_rate=5e-3,
        report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    HyperDFlashTrainer(drafter, target, args, train_dataset=Dataset.from_list(rows)).train()
    return target, drafter.eval(), tokenizer


@pytest.mark.nightly  # a drafter is trained, and pairs are diagnosed whole
def test_a_wrong_layer_costs_little_and_is_found_and_a_right_one_is_not_accused(tmp_path):
    target, drafter, tokenizer = trained(tmp_path)

    def accused(target, drafter):
        found = examine(target, drafter, tokenizer, prompts=PROMPTS[:10], max_new_tokens=20)
        said = [text for text in [*found.problems.values(), *found.remarks] if "nats a draft" in text]
        assert (", 0 clearly better" in found.facts["other configurations"]) == (not said)
        return found, said

    right, said = accused(target, drafter)
    assert right.tau > 1.5 and not said and "4 tried in 190 rounds" in right.facts["other configurations"]
    assert "4 certainly worse" in right.facts["other configurations"]
    drafter.config.target_layer_ids = [3]
    wrong, said = accused(target, drafter)
    assert drafter.config.target_layer_ids == [3]
    assert 1.02 < right.tau / wrong.tau < 1.15  # no such difference on ten prompts says anything by itself
    assert said == [wrong.problems["layers"]] and "`target_layer_ids` [2] instead of [3]" in said[0]
    idle = copy.deepcopy(target)  # whose layer 3 adds nothing: which of the two is read cannot matter
    idle.model.layers[3].self_attn.o_proj.weight.data.zero_()
    idle.model.layers[3].mlp.down_proj.weight.data.zero_()
    for layer in (2, 3):
        drafter.config.target_layer_ids = [layer]
        assert not accused(idle, drafter)[1]


@pytest.mark.parametrize(
    ("ahead", "tau", "kind"),
    [
        # To be certainly but hardly better is nothing: what a drafter that `train` trained with [-1] was accused for.
        ((0.014, 0.005, 0.027), 2.02, ""),
        ((0.014, 0.005, 0.027), 2.4, ""),
        ((0.336, 0.326, 0.346), 2.09, ""),
        ((-0.336, -0.346, -0.326), 2.4, ""),
        ((0.2, -0.1, 0.5), 2.2, "remark"),
        ((0.2, 0.1, 0.5), 2.2, "problem"),
    ],
)
def test_what_may_matter_is_a_remark_and_what_is_clearly_better_a_problem(
    monkeypatch, target, drafter, tokenizer, ahead, tau, kind
):
    other = Variant("`target_layer_ids` [6] instead of [-1]", tau, Interval(*ahead))
    worse = Variant("`rope_theta` 2 instead of 1", 1.0, Interval(-0.3, -0.4, -0.2))
    monkeypatch.setattr(config_variants, "compare_variants", lambda *_, **__: (1400, 2.0, [worse, other]))
    prompts = [torch.ones(1, 3, dtype=torch.long)] * 12
    examined = diagnosis.Examination(target, drafter, tokenizer, prompts=prompts, texts=prompts)
    found, tried = list(config_variants.try_variants(examined)), examined.found.facts["other configurations"]
    worse, better = 1 + (ahead[2] < 0), int(kind == "problem")
    counts = "2 tried in 1,400 rounds over 10 prompts", f"{worse} certainly worse", f"{better} clearly better"
    assert all(count in tried for count in counts), tried
    assert [cause for cause, _ in found] == {"problem": ["layers"], "remark": [diagnosis.REMARK], "": []}[kind]
    told = "{:+.2f} nats a draft, between {:+.2f} and {:+.2f}".format(*ahead)
    for _, text in found:
        assert told in text and other.name in text and "2.20 tokens a round instead of 2.00" in text


# Time


def small():
    """A pair that is quick."""
    target = qwen3().eval()
    return target, tiny_drafter(target, reducer="fc"), characters()


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        # To warm up, to see how long it takes, and two prompts at least.
        ({"prompts": PROMPTS[:3], "seconds": 1e-3}, [8] * 3 + [32] * 4),
        ({"seconds": 3600}, [8] * 3 + [64] * 4),
        ({"seconds": 1e-3, "max_new_tokens": 40}, [8] * 3 + [40] * 4),
    ],
)
def test_texts_are_shorter_where_the_time_is_short(monkeypatch, given, asked):
    generate, seen = trials.Local.generate, []
    monkeypatch.setattr(trials.Local, "generate", lambda *call: seen.append(call[-1]) or generate(*call))
    examine(*small(), **{"prompts": PROMPTS[:2], **given})
    assert seen == asked


def test_no_prompt_begins_that_would_end_after_its_share_of_the_time(monkeypatch):
    """With `doctor --quick`, on a machine where each takes long."""
    clock, generate, ended = SimpleNamespace(now=100.0), trials.Local.generate, []

    def slow(method, prompt, temperature, new):
        record = generate(method, prompt, temperature, 3)
        clock.now += 0.15 * new
        return replace(record, new_tokens=new, seconds=0.15 * new)

    for module in (doctor, trials):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now, perf_counter=lambda: 0.0))
    monkeypatch.setattr(trials.Local, "generate", slow)
    monkeypatch.setattr(
        doctor, "measure_round_costs", lambda *_, context, **__: ended.extend((clock.now, context)) or CHEAP
    )
    pair = small()
    pair[0].config.max_position_embeddings = 240
    found = examine(*pair, prompts=PROMPTS[:4], seconds=60.0)
    assert 115 < ended[0] <= 130 + 1e-6 and found.tau >= 1 and not found.differing
    assert ended[1] == (240 - 64) // 2, "half of what new tokens leave"


def test_the_command_is_quick_if_asked_and_shows_no_bar_in_a_pipe(tmp_path):
    result = CliRunner().invoke(
        app, ["doctor", "--target", str(TARGET), "--drafter", str(DRAFTER), "--quick", "--max-new-tokens", "4",
              "--output", str(tmp_path / "page")]
    )  # fmt: skip
    assert result.exit_code == 0 and not result.stdout.endswith("Problems found.\n"), result.output
    assert "4 of 4 greedy texts" in result.stdout and "that takes 8 prompts, there are 4" in result.stdout
    assert "s of about 60] generating from up to 4 prompts" in result.stderr
    page, facts = (tmp_path / "page" / name for name in ("doctor.md", "record.json"))
    assert "| tokens of a round |" in page.read_text() and page.with_name("costs.png").exists()
    told = facts.read_text()
    facts = json.loads(told)
    assert facts["verdict"]["tau"] >= 1 and facts["costs"]["rounds"]["1"] > 0 and str(MODELS) not in told
    assert not any(text in told + page.read_text() for text in PROMPTS)
    assert "generating:" not in result.stderr and "prompt/s" not in result.stderr
