"""Diagnoses of the shipped pair, whole and broken in every way the doctor knows."""

import copy
import json
import re

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hyperdflash import HyperDFlashDrafter, HyperDFlashTrainer, HyperDFlashTrainingArguments, load_drafter
from hf_hyperdflash.benchmark.doctor import ablations, config_variants, diagnosis, fit
from hf_hyperdflash.benchmark.doctor import examine as doctor
from hf_hyperdflash.benchmark.doctor.config_variants import Comparison, Variant
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS, examine
from hf_hyperdflash.benchmark.doctor.recommended import Timed
from hf_hyperdflash.benchmark.doctor.round_costs import MeasuredCosts
from hf_hyperdflash.benchmark.intervals import Interval
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.drafters.saved import SavedDrafter
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.features.fingerprint import short_fingerprint, target_fingerprint
from hf_hyperdflash.training.trials import Local
from hf_hyperdflash.trees.tree import DraftTree

from ..conftest import MODELS, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.tokenizers import characters
from ..helpers.unrolled import unrolled

TARGET, DRAFTER = MODELS / "tiny-deepseek-v4", MODELS / "tiny-deepseek-v4-hyperdflash"
TWICE = Timed({"num_assistant_tokens": "auto"}, Interval(2.0, 1.9, 2.1), Interval(1.0, 1.0, 1.0))
CHEAP = MeasuredCosts(9, 1, 1.0, {1: 1.0, 64: 1.0}, {1: 0.1})
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
def _what_takes_long_is_measured_once(request, monkeypatch):
    """With the healthy pair. Other tests are of it, and of its parts."""
    if "healthy" not in request.node.name:
        monkeypatch.setattr(doctor, "time_settings", lambda *_, **__: [TWICE])
        monkeypatch.setattr(doctor, "measure_round_costs", lambda *_, **__: CHEAP)
        monkeypatch.setattr(ablations, "changes", lambda *_: iter(()))
        monkeypatch.setattr(ablations, "OTHER_LANGUAGES", ("1 + 1",))


def problem(diagnosis, cause=None) -> str:
    assert len(diagnosis.problems) == 1, diagnosis.problems
    assert str(diagnosis).splitlines()[-1] == "Problems found."
    assert cause in (None, *diagnosis.problems)
    return next(iter(diagnosis.problems.values()))


@pytest.mark.nightly  # the shipped pair is diagnosed whole
def test_a_healthy_pair(target, drafter, tokenizer):
    own, config, said = type(target), copy.deepcopy(drafter.config), []
    found = examine(target, drafter, tokenizer, **ENOUGH, context=128, seconds=60, report=said.append)
    assert found.problems.keys() <= {"verification", "draft count"}  # which are this machine's
    assert found.differing == 0 and found.tau > 1.5 and found.speedup.value > 0
    assert found.facts["other configurations"].endswith(
        "0 clearly better, of the others none makes a clear difference"
    )
    assert "8 of 8 greedy texts" in str(found) and len(found.verdict()) <= 10
    assert "you need" in found.verdict()[1] and "What limits it: " in found.verdict()[2]
    assert {"thinking", "no template"} <= {change.cause for change in found.changes}
    assert {"code", "mathematics", "chat", "German, Spanish, French, Chinese"} == set(found.kinds)
    if not found.problems:
        for temperature, line in zip((0, 1), found.verdict()[-3:-1]):
            assert line.startswith(f"Set, at temperature {temperature}: ") and found.timed[temperature]
    assert f"{sum(p.numel() for p in drafter.parameters()):,} parameters" in found.facts["drafter"]
    assert "256" in found.facts["memory"] and "'<｜mask｜>'" in found.facts["mask token"]
    assert type(target) is own and drafter.config == config
    assert [line for line in said if "thinking on" in line or "timing rounds of up to 64 tokens" in line]


@pytest.mark.nightly  # three pairs are diagnosed whole
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
        text
        for text in [*diagnosis.problems.values(), *diagnosis.remarks]
        if "nats a draft" in text or "sample_from_anchor" in text
    ]


@pytest.mark.nightly  # a pair is diagnosed whole
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
    found = [text for text in wrong.problems.values() if "`target_layer_ids` [2] instead of [3]" in text]
    assert len(found) == 1 and "correct it in `config.json`" in found[0].lower(), wrong
    assert "nats a draft, between +" in found[0]


def test_a_drafter_that_says_how_it_was_trained_is_not_accused(trained):
    right = examine(*trained[:2], trained[2], **SOME)
    assert right.tau > 1.5 and not settings_of(right), right
    assert right.facts["other configurations"] == (
        "4 tried in 190 rounds over 10 prompts, neighbouring layers, the other anchor convention, other bases of "
        "RoPE: 4 certainly worse, 0 clearly better, of the others none makes a clear difference"
    )


@pytest.fixture
def compared(monkeypatch, target, drafter, tokenizer):
    """Diagnoses as if one other layer was so much ahead and brought `tau` tokens a round instead of 2."""

    def examined(ahead, tau):
        other = Variant("`target_layer_ids` [6] instead of [-1]", tau, Interval(*ahead))
        monkeypatch.setattr(diagnosis, "LEAST_PROMPTS", 2)
        monkeypatch.setattr(config_variants, "compare_variants", lambda *_, **__: Comparison(1400, 2.0, [other]))
        return examine(target, drafter, tokenizer, **FEW)

    return examined


def test_certainly_but_hardly_better_is_no_problem(compared):
    """What a drafter that `train` had trained with [-1] was accused for once."""
    found = compared((0.014, 0.005, 0.027), 2.02)
    assert not found.problems and not found.remarks and found.timed[0] == [TWICE]
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


@pytest.mark.nightly  # a pair is diagnosed whole
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
    assert found.facts["not tried"] == told and not found.timed and not found.changes
    assert re.fullmatch(r"\[\d+ s of about 300\] generating from up to 2 prompts with and .*", said[0])
    with pytest.raises(ValueError, match="`prompts` is empty"):
        examine(*trained, prompts=[])
    with pytest.raises(ValueError, match="`context` is 4000: expected 1 to "):
        examine(*trained, context=4000)


def test_texts_are_shorter_where_the_time_is_short(trained, monkeypatch):
    asked = []

    generate = Local.generate

    def counted(method, prompt, temperature, new):
        asked.append(new)
        return generate(method, prompt, temperature, new)

    monkeypatch.setattr(Local, "generate", counted)
    said = []
    examine(*trained, prompts=PROMPTS[:3], seconds=1e-3, report=said.append)
    assert asked == [8, 8, 8, 32, 32, 32, 32]  # to warm up, to see how long it takes, and two prompts at least
    assert said[1].endswith("this takes long here: texts have 32 tokens")
    for enough in {"seconds": 3600}, {"seconds": 1e-3, "max_new_tokens": 40}:
        asked.clear()
        examine(*trained, prompts=PROMPTS[:2], **enough)
        assert asked == [8] * 3 + [enough.get("max_new_tokens", 64)] * 4


def test_memory_adds_up(target, drafter, tokenizer):
    """In float32 a token takes 1,024 B, of a window of 256."""
    told = "1.02 kB for each token of its context, of which it sees 256: 262 kB, and up to 524 kB while its buffer has"
    assert told in examine(target, drafter, tokenizer, **FEW).facts["memory"]


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
    assert json.loads(told)["verdict"]["tau"] >= 1 and str(MODELS) not in told
    assert not any(text in told + page.read_text() for text in PROMPTS)
    assert "generating:" not in result.stderr and "prompt/s" not in result.stderr


@pytest.mark.parametrize("none", ["org/name", None])
def test_names_are_no_models(target, drafter, tokenizer, none):
    with pytest.raises(ValueError, match=f"`drafter` is {none!r}, expected a drafter: load it"):
        examine(target, none, tokenizer)
    with pytest.raises(ValueError, match=f"`tokenizer` is {none!r}, expected a tokenizer: load it"):
        examine(target, drafter, none)


@pytest.mark.nightly  # a pair is diagnosed whole
def test_another_anchor_convention(target, drafter, tokenizer):
    drafter.config.sample_from_anchor, drafter.config.confidence_temperatures = True, None  # of eight positions
    assert "`sample_from_anchor` False" in problem(examine(target, drafter, tokenizer, **ENOUGH))


def test_another_name_is_said_once(target, drafter, tokenizer, caplog):
    drafter.config.target_name_or_path = "org/another-target"
    examine(target, drafter, tokenizer, **FEW)
    assert sum("was made for 'org/another-target'" in record.getMessage() for record in caplog.records) == 1


def test_the_command_says_another_name_once(drafter, tmp_path, caplog):
    drafter.config.target_name_or_path = "org/another-target"
    drafter.save_pretrained(tmp_path / "drafter")
    asked = ["--target", str(TARGET), "--drafter", str(tmp_path / "drafter"), "--quick", "--max-new-tokens", "3"]
    assert CliRunner().invoke(app, ["doctor", *asked]).exit_code == 0
    assert sum("was made for 'org/another-target'" in record.getMessage() for record in caplog.records) == 1


def test_a_target_that_was_tuned_since(drafter, tokenizer):
    tuned = other_weights()
    found = problem(examine(tuned, drafter, tokenizer, **FEW), "other weights")
    assert "weights (body)" in found and "fine-tuned since" in found and "Tried here" not in found


def other_weights():
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    with torch.no_grad():
        target.model.layers[2].self_attn.o_b_proj.weight.mul_(1.02)
    return target


@pytest.mark.nightly  # a target is tuned, and its drafter trained
def test_what_training_brings_back_to_a_tuned_target(drafter, tokenizer, caplog, monkeypatch):
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
    found = examine(other_weights(), drafter, tokenizer, **{**ENOUGH, "max_new_tokens": 16})
    (change,) = [change for change in found.changes if change.cause == "learning"]
    assert change.name == "16 training steps on 4 other texts"
    assert len(measured) == len(learned) == 4
    assert not any(prompt in learned or own is drafter for prompt, own in measured)
    said = f"texts it has {change.after:.2f} tokens a round instead of {change.before:.2f} on others ("
    assert said in problem(found, "other weights")
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert sum("was made for 'org/another-target'" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.nightly  # a pair is diagnosed whole
@pytest.mark.parametrize(("error", "said"), [("out of memory\nsome trace", "out of memory"), ("", "RuntimeError")])
def test_training_that_does_not_run_is_a_remark(drafter, tokenizer, monkeypatch, error, said):
    def fail(*_):
        raise RuntimeError(error)

    monkeypatch.setattr(ablations, "fine_tune_briefly", fail)
    found = examine(other_weights(), drafter, tokenizer, **ENOUGH)
    assert "Tried here" not in problem(found, "other weights") and not found.changes
    assert found.remarks == [f"What training would bring back was not tried: {said}"]


def test_a_target_in_another_precision_is_not_accused(target, drafter, tokenizer):
    """The drafter was trained for a target that had been rounded."""
    exact = copy.deepcopy(target)
    with torch.no_grad():
        exact.model.layers[2].self_attn.o_b_proj.weight.mul_(1 + 2**-12)
    drafter.config.target_fingerprint = short_fingerprint(target_fingerprint(exact, rounded_to=torch.bfloat16))
    found = examine(exact, drafter, tokenizer, **FEW)
    assert not found.problems and any("were in bfloat16 when" in text for text in found.remarks)


def test_a_quantized_target(target, drafter, tokenizer, monkeypatch):
    """Its logits depend on the width of a forward, as of kernels that look at a whole batch."""
    quantized = copy.deepcopy(target)
    quantized.config.quantization_config = {"quant_method": "ours"}
    project = quantized.lm_head.forward
    monkeypatch.setattr(quantized.lm_head, "forward", lambda states: project(states) + 0.1 * states.shape[1])
    text = torch.arange(5, 40)[None]
    _, found = fit.check_widths(diagnosis.Examination(quantized, drafter, tokenizer, texts=[text]))
    assert found[:2] == ("problem", "quantization") and "(ours)" in found.text and "by up to 0.7" in found.text
    (same,) = fit.check_widths(diagnosis.Examination(target, drafter, tokenizer, texts=[text]))
    assert same.kind == "fact" and "of the 8 best tokens 0 change" in same.text


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
    assert "look like noise" in examine(target, drafter, other, **FEW).problems["tokenizer"]


def test_a_larger_tokenizer(target, drafter, tokenizer):
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<more>"])
    assert "belongs to another model" in problem(examine(target, drafter, larger, **FEW))


def test_no_chat_template(target, drafter, tokenizer):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = None
    found = examine(target, drafter, plain, **FEW)
    assert "no chat template" in found.problems["template"] and found.tau is not None


def test_an_ordinary_mask_token(target, drafter, tokenizer):
    drafter.config.mask_token_id = tokenizer.encode(" the", add_special_tokens=False)[0]
    assert any("ordinary token" in text for text in examine(target, drafter, tokenizer, **FEW).remarks)


# Takes seconds: a pair is diagnosed whole.
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
    for texts, expected in ((found.problems.values(), problems), (found.remarks, remarks)):
        told = [text for text in texts if "weights" in text]
        assert len(told) == bool(expected) and all(re.search(expected, text) for text in told)
