"""Diagnoses of the shipped pair, whole and broken in every way the doctor knows."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments, load_drafter
from hf_hyperdflash.benchmark.doctor import examine as doctor
from hf_hyperdflash.benchmark.doctor import recommended
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS, examine
from hf_hyperdflash.benchmark.doctor.other_settings import Comparison, Setting
from hf_hyperdflash.benchmark.doctor.recommended import Timed
from hf_hyperdflash.benchmark.intervals import Interval
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.saved import SavedDrafter
from hf_hyperdflash.training.data.rows import encode_prompts
from hf_hyperdflash.training.features.fingerprint import short_fingerprint, target_fingerprint
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import MODELS, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.tokenizers import characters
from ..helpers.unrolled import unrolled

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
TWICE = Timed({"num_assistant_tokens": "auto"}, Interval(2.0, 1.9, 2.1), Interval(1.0, 1.0, 1.0))
FEW = {"prompts": PROMPTS[:2], "max_new_tokens": 20}
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
def _settings_are_timed_once(request, monkeypatch):
    """They take longer than the rest: with the healthy pair they are."""
    if "healthy" not in request.node.name:
        monkeypatch.setattr(doctor, "time_settings", lambda *_, **__: [TWICE])


def problem(diagnosis) -> str:
    assert len(diagnosis.problems) == 1, diagnosis.problems
    assert str(diagnosis).splitlines()[-1] == "Problems found."
    return diagnosis.problems[0]


def test_a_healthy_pair(target, drafter, tokenizer):
    own, config = type(target), copy.deepcopy(drafter.config)
    found = examine(target, drafter, tokenizer, **ENOUGH)
    assert not found.problems and found.differing == 0 and found.tau > 1.5
    for temperature in (0, 1):
        assert re.match(
            r"`num_assistant_tokens=.*` [0-9.]+x \([0-9.]+ to [0-9.]+\) the target alone|no drafter|cannot be told",
            found.facts[f"recommended, temperature {temperature}"],
        )
    assert not found.remarks  # nothing of layers that it hardly reads, beside its gate
    assert found.facts["other configurations"].endswith(
        "0 clearly better, of the others none makes a clear difference"
    )
    assert "8 of 8 greedy texts" in str(found) and str(found).endswith("No problem found.")
    assert f"{sum(p.numel() for p in drafter.parameters()):,} parameters" in found.facts["drafter"]
    assert "256" in found.facts["memory"] and "'<｜mask｜>'" in found.facts["mask token"]
    assert type(target) is own and drafter.config == config


@pytest.mark.parametrize("kind", ["specblock", "eagle3", "mtp"])
def test_drafters_of_other_kinds(target, tokenizer, kind):
    if kind == "mtp":
        drafter = load_drafter(TARGET, target=target)
        told, memory, tau = "multi-token-prediction", "4.22 MB and 256 B", (2, 4)
    else:
        drafter, memory, tau = unrolled(kind, target), "512 B" if kind == "specblock" else "256 B", (1, 1.2)
        told = "a SpecBlock drafter" if kind == "specblock" else "an EAGLE-3 drafter"
    found = examine(target, drafter, tokenizer, **FEW)
    assert told in found.facts["drafter"] and memory in found.facts["memory"], found
    assert tau[0] <= found.tau <= tau[1] and found.differing == 0
    assert found.facts.keys().isdisjoint({"mask token", "other configurations"})
    assert bool(found.problems) == (kind != "mtp")  # of which nothing is accepted, as it is untrained


class RepeatingConfig(PreTrainedConfig):
    """Of somebody's own drafter: it says nothing of layers or keys."""

    model_type = "repeating"


class RepeatingDrafter(SavedDrafter):
    """Drafts the anchor again, and remembers one more thing by heart: its weight."""

    config_class = RepeatingConfig

    def __init__(self, config):
        super().__init__(config)
        self.times = torch.nn.Parameter(torch.tensor([3.0]))
        self.post_init()

    def propose(self, target, context, ids, position_ids, count, sampler):
        return DraftTree.chain(ids[0, -1:].repeat(min(count, int(self.times))))


def test_a_drafter_of_somebodys_own(target, tokenizer):
    config = RepeatingConfig(vocab_size=target.config.vocab_size)
    found = examine(target, RepeatingDrafter(config).eval(), tokenizer, **FEW)
    assert found.differing == 0 and found.tau >= 1
    assert "a repeating drafter" in found.facts["drafter"] and "1 parameters" in found.facts["drafter"]
    assert re.fullmatch(r"target [\d.]+ MB, drafter 4 B", found.facts["memory"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
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
        str(tmp_path_factory.mktemp("trained")), max_steps=150, per_device_train_batch_size=5, num_anchors=16,
        kl_weight=0.0,
        learning_rate=5e-3, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    HyperDFlashTrainer(drafter, target, args, train_dataset=Dataset.from_list(rows)).train()
    return target, drafter.eval(), tokenizer


SOME = {"prompts": PROMPTS[:10], "max_new_tokens": 20}


def settings_of(diagnosis) -> list[str]:
    return [
        text for text in diagnosis.problems + diagnosis.remarks if "instead of" in text or "sample_from_anchor" in text
    ]


def test_layers_counted_one_too_high_cost_little_and_are_found(trained):
    target, drafter, tokenizer = trained
    right = examine(target, drafter, tokenizer, **SOME)
    drafter.config.target_layer_ids = [3]
    try:
        wrong = examine(target, drafter, tokenizer, **SOME)
        assert drafter.config.target_layer_ids == [3]
    finally:
        drafter.config.target_layer_ids = [2]
    assert 1.02 < right.tau / wrong.tau < 1.15  # no such difference on ten prompts says anything by itself
    found = [text for text in wrong.problems if "`target_layer_ids` [2] instead of [3]" in text]
    assert len(found) == 1 and "correct it in `config.json`" in found[0].lower(), wrong
    assert "nats a draft, between +" in found[0]


def test_a_drafter_that_says_how_it_was_trained_is_not_accused(trained):
    right = examine(*trained[:2], trained[2], **SOME)
    assert right.tau > 1.5 and not settings_of(right), right
    assert right.facts["other configurations"] == (
        "3 tried in 190 rounds over 10 prompts, neighbouring layers and the other anchor convention: 3 certainly "
        "worse, 0 clearly better, of the others none makes a clear difference"
    )


@pytest.fixture
def compared(monkeypatch, target, drafter, tokenizer):
    """Diagnoses as if one other layer was so much ahead and brought `tau` tokens a round instead of 2."""

    def examined(ahead, tau):
        other = Setting("`target_layer_ids` [6] instead of [-1]", tau, Interval(*ahead))
        monkeypatch.setattr(doctor, "LEAST_PROMPTS", 2)
        monkeypatch.setattr(doctor, "compare_settings", lambda *_, **__: Comparison(1400, 2.0, [other]))
        return examine(target, drafter, tokenizer, **FEW)

    return examined


def test_certainly_but_hardly_better_is_no_problem(compared):
    """What a drafter that `train` had trained with [-1] was accused for once."""
    found = compared((0.014, 0.005, 0.027), 2.02)
    assert not found.problems + found.remarks and "recommended, temperature 0" in found.facts
    assert found.facts["other configurations"].startswith("1 tried in 1,400 rounds over 2 prompts")


def test_what_may_matter_is_said_with_what_tells(compared):
    found = compared((0.2, -0.1, 0.5), 2.2)
    assert not found.problems and found.remarks == [
        "The drafter may have been trained with `target_layer_ids` [6] instead of [-1] (+0.20 nats a draft, between "
        "-0.10 and +0.50; 2.20 tokens a round instead of 2.00 in 1,400 rounds over 2 prompts): longer texts may tell, "
        "from a larger `--max-new-tokens` (in Python `max_new_tokens`)."
    ]


def test_what_is_clearly_better_is_a_problem(compared):
    assert "Correct it in `config.json`" in problem(compared((0.2, 0.1, 0.5), 2.2))


def test_a_layer_that_adds_nothing_is_not_spoken_of(trained):
    """Which of the two is read cannot matter then."""
    target, drafter, tokenizer = trained
    idle = copy.deepcopy(target)
    with torch.no_grad():
        idle.model.layers[3].self_attn.o_proj.weight.zero_()
        idle.model.layers[3].mlp.down_proj.weight.zero_()
    drafter = copy.deepcopy(drafter)
    for layer in (2, 3):
        drafter.config.target_layer_ids = [layer]
        found = examine(idle, drafter, tokenizer, **SOME)
        assert not settings_of(found) and ", 0 clearly better" in found.facts["other configurations"]


def test_few_prompts_are_quick(trained):
    said = []
    found = examine(*trained, prompts=PROMPTS[:2], max_new_tokens=8, report=said.append)
    told = "other configurations and settings of `generate`: that takes 8 prompts, there are 2"
    assert found.facts["not tried"] == told and found.facts.keys().isdisjoint(
        {"other configurations", "recommended, temperature 0"}
    )
    assert len(said) == 1 and re.fullmatch(
        r"Generating 4 texts of up to 8 tokens from 2 prompts: about \d+ seconds \.\.\.", said[0]
    )
    with pytest.raises(ValueError, match="`prompts` is empty"):
        examine(*trained, prompts=[])


def test_every_text_is_announced(target, drafter, tokenizer, monkeypatch):
    """2 prompts with the drafter and without, and 3 with each of six settings at two temperatures."""
    said, count, generate = [], [0], target.generate

    def counted(*args, **kwargs):
        count[0] += 1
        return generate(*args, **kwargs)

    monkeypatch.setattr(target, "generate", counted)
    monkeypatch.setattr(doctor, "LEAST_PROMPTS", 2)
    monkeypatch.setattr(doctor, "compare_settings", lambda *_, **__: Comparison(1, 2.0, []))
    monkeypatch.setattr(doctor, "time_settings", recommended.time_settings)
    examine(target, drafter, tokenizer, prompts=PROMPTS[:2], max_new_tokens=6, report=said.append)
    assert f"Generating {count[0] - 1} texts of up to 6 tokens from 2 prompts" in said[0]  # the first says how long
    assert count[0] == 1 + 2 * 2 + 2 * 3 * 6


def test_memory_adds_up(target, drafter, tokenizer):
    """In float32 a token takes 1,024 B, of a window of 256."""
    told = "1.02 kB for each token of its context, of which it sees 256: 262 kB, and up to 524 kB while its buffer has"
    assert told in examine(target, drafter, tokenizer, **FEW).facts["memory"]


def test_the_command_is_quick_if_asked_and_shows_no_bar_in_a_pipe():
    result = CliRunner().invoke(
        app, ["doctor", "--target", str(TARGET), "--drafter", str(DRAFTER), "--quick", "--max-new-tokens", "4"]
    )
    assert result.exit_code == 0 and result.stdout.endswith("No problem found.\n"), result.output
    assert "4 of 4 greedy texts" in result.stdout and "that takes 8 prompts, there are 4" in result.stdout
    assert "Generating 8 texts of up to 4 tokens from 4 prompts: about" in result.stderr
    assert "generating:" not in result.stderr and "prompt/s" not in result.stderr


@pytest.mark.parametrize("none", ["org/name", None])
def test_names_are_no_models(target, drafter, tokenizer, none):
    with pytest.raises(ValueError, match=f"`drafter` is {none!r}, expected a drafter: load it"):
        examine(target, none, tokenizer)
    with pytest.raises(ValueError, match=f"`tokenizer` is {none!r}, expected a tokenizer: load it"):
        examine(target, drafter, none)


def test_another_anchor_convention(target, drafter, tokenizer):
    drafter.config.sample_from_anchor, drafter.config.confidence_temperatures = True, None  # of eight positions
    assert "`sample_from_anchor` False" in problem(examine(target, drafter, tokenizer, **ENOUGH))


def test_another_name_is_said_once(target, drafter, tokenizer, caplog):
    drafter.config.target_name_or_path = "org/another-target"
    examine(target, drafter, tokenizer, **FEW)
    assert sum("was made for 'org/another-target'" in record.getMessage() for record in caplog.records) == 1


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


def test_eight_bits_round_by_width():
    found = doctor.Diagnosis()
    doctor._report_rounding(found, SimpleNamespace(is_loaded_in_8bit=True))
    assert "8 bits by bitsandbytes" in found.remarks[0] and "4 bits" in found.remarks[0] and not found.problems


def test_an_ordinary_mask_token(target, drafter, tokenizer):
    drafter.config.mask_token_id = tokenizer.encode(" the", add_special_tokens=False)[0]
    assert any("ordinary token" in text for text in examine(target, drafter, tokenizer, **FEW).remarks)


def test_an_untrained_drafter(target, tokenizer):
    fresh = HyperDFlashDrafter.from_target(target, mask_token_id=3, num_hidden_layers=1).eval()
    found = examine(target, fresh, tokenizer, **ENOUGH)
    assert "Hardly any draft" in problem(found) and len(found.remarks) == 1  # nothing to be told of settings
    assert "does not say which weights" in found.remarks[0]


def test_a_pair_that_does_not_fit(drafter, tokenizer):
    small = AutoModelForCausalLM.from_pretrained(TARGET, num_hidden_layers=2, dtype=torch.float32)
    assert "layers" in problem(examine(small, drafter, tokenizer, **FEW))


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
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.config.target_fingerprint = short_fingerprint(target_fingerprint(target))
    change(target, drafter.config)
    found = examine(target, drafter, characters(), prompts=PROMPTS[:1], max_new_tokens=3)
    for texts, expected in ((found.problems, problems), (found.remarks, remarks)):
        told = [text for text in texts if "weights" in text]
        assert len(told) == bool(expected) and all(re.search(expected, text) for text in told)
