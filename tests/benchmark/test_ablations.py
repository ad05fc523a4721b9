"""Where acceptance is lost: each change is of one thing, and is named where it matters."""

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from hf_hyperdflash import Eagle3Drafter, PromptLookupDrafter, load_drafter, load_target
from hf_hyperdflash.benchmark.doctor import ablations
from hf_hyperdflash.benchmark.doctor.ablations import (
    as_saved,
    changes,
    compare,
    count_rounds,
    encode,
    fine_tune_briefly,
    judge_changes,
    long_conversations,
    with_window,
)
from hf_hyperdflash.benchmark.doctor.config_variants import CAUSES
from hf_hyperdflash.benchmark.doctor.diagnosis import Diagnosis, Examination
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.training.adaptation.learner import Learner

from ..conftest import MODELS, prompt, tiny_drafter, tiny_target
from ..helpers.families import qwen3
from ..helpers.tokenizers import characters


def test_ratios_are_of_the_same_questions():
    """The third of the first has no counterpart."""
    change = compare("it", "so", np.array([[4, 2], [8, 2], [90, 1]]), np.array([[6, 2], [18, 2]]))
    assert (change.before, change.after) == (3, 6) and change.ratio.value == 2
    assert change.ratio.low == pytest.approx(1.5) and change.matters(2) and not change.matters(2.1)
    assert compare("it", "so", np.array([[4, 2]]), np.array([[6, 2]])).ratio == (1.5, 1.5, 1.5)


def test_long_conversations_are_other_questions_and_their_answers():
    tokenizer = characters()
    asked = [("one", "1" * 20), ("two", "2" * 20), ("three", "3" * 20)]
    first, second, _ = long_conversations(tokenizer, asked, 100)
    assert first[:4] == ["two", "2" * 20, "three", "3" * 20] and first[-1] == "one" and len(first) % 2 == 1
    assert second[-1] == "two" and "two" not in second[:-1]
    ids = encode(tokenizer, [first])[0]
    assert 90 <= ids.shape[1] <= 200
    tokenizer.chat_template = None
    (plain,) = encode(tokenizer, [["one", "1", "two"]])
    assert torch.equal(plain, tokenizer("one\n\n1\n\ntwo\n\n", return_tensors="pt")["input_ids"])


def test_copies_have_one_thing_changed():
    target = tiny_target()
    drafter = tiny_drafter(target, sliding_window=None)
    windowed = with_window(drafter)
    assert windowed.config.sliding_window == 256 and drafter.config.sliding_window is None
    assert windowed.new_context().window == 256 and drafter.new_context().window is None
    assert with_window(tiny_drafter(target, sliding_window=1024)).new_context().window == 256
    assert with_window(tiny_drafter(target, sliding_window=8)) is None is with_window(PromptLookupDrafter(target))
    mixed = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 512}
    assert with_window(tiny_drafter(target, **mixed)) is None is with_window(Eagle3Drafter.from_target(qwen3()))
    assert as_saved(drafter) is None is as_saved(PromptLookupDrafter(target))
    assert as_saved(drafter.bfloat16()) is None  # it was never saved


def test_a_copy_learns_from_rows_as_serving_records_them(monkeypatch):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    learning, texts, learned = drafter.adapt(target, policy="never"), [], []
    for seed in range(2):
        ids = prompt(7 + seed, seed)
        texts.append(target.generate(ids, assistant_model=drafter, do_sample=False, max_new_tokens=12 + seed))
    learning.stop()
    learn = Learner.learn

    def recorded(learner, arm, batches, seconds):
        learned.extend(batches)
        learn(learner, arm, batches, seconds)

    monkeypatch.setattr(Learner, "learn", recorded)
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    taught, steps, _ = fine_tune_briefly(target, drafter, texts, [7, 8], seconds=1e3)
    assert steps == len(learned) == 16
    lengths = (learned[0]["loss_mask"].flip(1).int().argmax(1) - learned[0]["loss_mask"].shape[1]).neg().tolist()
    expected = {len(row["input_ids"]): row for row in learning.replay.rows}
    assert sorted(lengths) == sorted(expected) == [18, 20]
    for name in ("input_ids", "position_ids", "loss_mask", "residual"):
        for row, length in zip(learned[0][name], lengths):  # of the first token serving knows nothing
            torch.testing.assert_close(row[1:length], expected[length][name][1:], atol=1e-4, rtol=1e-4)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())
    assert any(not torch.equal(value, before[name]) for name, value in taught.state_dict().items())
    assert fine_tune_briefly(target, drafter, texts, [7, 8], seconds=0)[1] == 1


def test_a_precision_that_does_not_hold_the_drafter_is_named(tmp_path):
    """Of the shipped drafter's MLPs one half is made 65,536 times as large, and the other as small."""
    target = load_target(MODELS / "tiny-deepseek-v4", dtype=torch.float32)
    drafter = load_drafter(MODELS / "tiny-deepseek-v4-hyperdflash", target=target, dtype=torch.bfloat16)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.mlp.up_proj.weight.mul_(2.0**16)
            layer.mlp.down_proj.weight.mul_(2.0**-16)
    drafter.save_pretrained(tmp_path)
    assert as_saved(load_drafter(tmp_path, target=target, dtype=torch.bfloat16)) is None
    half = load_drafter(tmp_path, target=target, dtype=torch.float16)
    saved = as_saved(half)
    half.bind(target)
    ids = encode(AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4"), [[text] for text in PROMPTS[:3]])
    rounds = [count_rounds(target, each, ids, 12, 60.0) for each in (half, saved)]
    found = judged(changes=[compare("drafter dtype", "as saved", *rounds)])
    assert saved.dtype == torch.bfloat16 and found.changes[0].after > 1.5 > found.changes[0].before
    assert "was saved in the drafter has" in found.problems["drafter dtype"]


def test_each_change_is_of_one_thing(monkeypatch):
    """Its rounds are those that `count` is asked for, tens of tokens each, beside those of the pair as it is, or in
    long texts."""
    target, tokenizer, asked = tiny_target(), AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4"), []
    drafter, saved = tiny_drafter(target, sliding_window=None), tiny_drafter(target).bfloat16()
    monkeypatch.setattr(ablations, "as_saved", lambda _: saved)
    prompts = encode(tokenizer, [[text] for text in PROMPTS[:3]])
    texts = [torch.cat([ids, ids[:, :9]], dim=1) for ids in prompts[:2]]
    examined = Examination(
        target, drafter, tokenizer, PROMPTS[:3], prompts, new_tokens=4, context=200, texts=texts,
        rounds=np.array([[5, 1], [5, 1]]),
    )  # fmt: skip

    def count(prompts, drafter=None):
        asked.append((prompts, drafter))
        return np.array([[10 * len(asked), 1]] * 2)

    found = list(changes(examined, count))
    assert [(each.cause, each.before, each.after) for each in found] == [
        ("long texts", 10, 5), ("position", 10, 20), ("drafter dtype", 5, 30), ("thinking", 5, 40),
        ("no template", 5, 50),
    ]  # fmt: skip
    (far, own), (far_again, windowed), as_was_saved, (thinking, _), (plain, _) = asked
    lengths = [ids.shape[1] for ids in far]
    assert len(far) == 2 and own is None and 120 < min(lengths) < max(lengths) < 330, lengths
    assert far_again is far and windowed.config.sliding_window == 256
    assert as_was_saved[1] is saved and all(map(torch.equal, as_was_saved[0], prompts[:2]))
    assert all(map(torch.equal, thinking, encode(tokenizer, [[text] for text in PROMPTS[:2]], thinking=True)))
    assert all(map(torch.equal, plain, encode(tokenizer, [[text] for text in PROMPTS[:2]], as_chat=False)))
    examined.context = 2 * (max(ids.shape[1] for ids in prompts[:2]) + 4) - 1  # too short for long texts
    assert [each.cause for each in changes(examined, count)] == ["drafter dtype", "thinking", "no template"]


def judged(**fields):
    """What the changes of an examination mean."""
    examined = Examination(None, None, None, found=Diagnosis(**fields))
    for finding in judge_changes(examined):
        examined.found.add(*finding)
    return examined.found


def change(cause, before, after):
    return compare(cause, f"no {cause}", np.array([[before, 1]] * 3), np.array([[after, 1]] * 3))


@pytest.mark.parametrize(
    ("changes", "problems", "remarks", "before"),
    [
        ([("thinking", 2, 2.4), ("drafter dtype", 2, 2.1), ("position", 2, 2.1), ("long texts", 2, 2.4)], [], 0, ""),
        ([("thinking", 2, 2.6)], ["thinking"], 0, ""),
        ([("long texts", 2, 3), ("position", 2, 2.5)], ["position"], 0, ""),
        ([("long texts", 2, 3), ("position", 2, 2)], [], 1, ""),
        ([("no template", 2, 3.1)], [], 1, ""),
        ([("drafter dtype", 1, 1.3)], ["drafter dtype"], 0, ""),
        # Who reads the wrong layers does better with less of them: a window is not named beside that.
        *(([("position", 2, 3), ("thinking", 2, 3)], [cause, "thinking"], 0, cause) for cause in CAUSES.values()),
    ],
)
def test_what_matters_is_named(changes, problems, remarks, before):
    found = judged(changes=[change(*each) for each in changes], problems={before: "so."} if before else {})
    assert list(found.problems) == problems and len(found.remarks) == remarks
    assert not [text for text in found.problems.values() if "{" in text]
