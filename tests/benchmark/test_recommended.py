"""Which settings the doctor recommends: timed with real generations, chosen from what was timed."""

import numpy as np
import pytest

from hf_hyperdflash import DeepseekV4MTPDrafter
from hf_hyperdflash.benchmark.doctor import recommended
from hf_hyperdflash.benchmark.doctor.recommended import Timed, ranked, recommendation, time_settings
from hf_hyperdflash.benchmark.intervals import Interval
from hf_hyperdflash.training import trials

from ..conftest import perfect, prompt, tiny_drafter, tiny_target
from ..helpers.families import granite_hybrid, qwen3


def check_tried(timed, *counts):
    expected = [{"num_assistant_tokens": count} for count in (*counts, "auto")]
    expected.append({"num_assistant_tokens": counts[-1], "tree_budget": "auto"})
    assert len(timed) == 5 and all(settings in [each.settings for each in timed] for settings in expected)


def test_what_is_tried_and_how_it_did():
    target = tiny_target()
    ids = prompt(9)
    text = target.generate(ids, do_sample=False, max_new_tokens=40)[0]
    drafter = perfect(target, text, num_draft_tokens=8)
    drafter.bind(target)
    timed = time_settings(target, drafter, [ids, ids], max_new_tokens=40)
    check_tried(timed, 2, 4, 8)
    assert [each.speedup.value for each in timed] == sorted((each.speedup.value for each in timed), reverse=True)
    assert timed[0].fastest == (1, 1, 1) and all(each.fastest.value >= 1 for each in timed)
    assert all(each.speedup.low <= each.speedup.high for each in timed)


def test_speeds_are_tokens_over_seconds(monkeypatch):
    """By a clock that counts the target's forwards: of 37 tokens the prompt's makes one, a round 9 or 2."""
    target = tiny_target()
    ids = prompt(9)
    text = target.generate(ids, do_sample=False, max_new_tokens=37)[0]
    drafter = perfect(target, text, num_draft_tokens=8)
    drafter.bind(target)
    forwards = [0]
    target.model.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    monkeypatch.setattr(trials, "clock", lambda device: lambda: forwards[0])
    tried = [{"num_assistant_tokens": 1}, {"num_assistant_tokens": 8}]
    monkeypatch.setattr(recommended, "_settings", lambda *_: tried)
    timed = time_settings(target, drafter, [ids, ids], max_new_tokens=37)
    assert [each.settings for each in timed] == tried[::-1]
    assert [each.speedup.value for each in timed] == pytest.approx([37 / 5, 37 / 19])
    assert timed[1].fastest == pytest.approx([19 / 5] * 3)  # both prompts are the same


def test_prompts_that_disagree_widen_the_interval():
    tokens = np.ones((4, 3))
    seconds = np.array([[1, 0.5, 0.9], [1, 0.5, 0.9], [1, 0.5, 0.9], [1, 0.5, 4.0]])
    both = np.stack([tokens, seconds], axis=-1)
    steady, shaky = ranked([{"num_assistant_tokens": 1}, {"num_assistant_tokens": 2}], both)
    assert steady.speedup == pytest.approx([2, 2, 2]) and steady.near
    assert shaky.speedup.low < 0.5 and shaky.speedup.high > 1 and not shaky.near
    one = ranked([{"num_assistant_tokens": 1}], both[:1, :2])
    assert one[0].speedup == pytest.approx([2, 2, 2])  # of one prompt there is nothing to draw


@pytest.mark.parametrize("kind", ["qwen3", "hybrid", "mtp"])
def test_any_pair_has_settings_that_run(kind):
    target = (tiny_target if kind == "mtp" else {"qwen3": qwen3, "hybrid": granite_hybrid}[kind])().eval()
    drafter = DeepseekV4MTPDrafter(target.config).eval() if kind == "mtp" else tiny_drafter(target, reducer="fc")
    drafter.bind(target)
    timed = time_settings(target, drafter, [prompt(9)], temperature=1.0, max_new_tokens=6)
    check_tried(timed, 1, 3, 6)


def timed(settings, speedup, fastest=1.0, noise=0.1):
    """Settings that others are drawn around, by `noise`."""
    around = [Interval(value, value * (1 - noise), value * (1 + noise)) for value in (speedup, fastest)]
    return Timed(settings, *around)


def test_what_is_recommended():
    auto, six = timed({"num_assistant_tokens": "auto"}, 2.0, 1.05), timed({"num_assistant_tokens": 6}, 2.05, 1.02)
    tree = timed({"num_assistant_tokens": 6, "tree_budget": "auto"}, 2.09)
    told = recommendation([tree, six, auto])
    assert told.startswith(
        "`num_assistant_tokens='auto'` 2.00x (1.80 to 2.20) the target alone, within noise of the fastest"
    )
    assert told.endswith("and finds its number by itself")
    slow = timed({"num_assistant_tokens": "auto"}, 1.5, 1.4)
    told = recommendation([tree, six, slow])
    assert told.startswith("`num_assistant_tokens=6` 2.05x (") and "the fastest, and is shorter to write" in told
    fast = timed(tree.settings, 3.0)
    told = recommendation([fast, timed(six.settings, 2.05, 1.46), slow])
    assert told.startswith("`num_assistant_tokens=6, tree_budget='auto'` 3.00x (2.70 to 3.30) the target alone")
    assert "within noise" not in told


def test_fast_by_less_than_noise_is_no_verdict():
    auto, six = timed({"num_assistant_tokens": "auto"}, 1.11, 1.0), timed({"num_assistant_tokens": 6}, 0.89, 1.25)
    assert recommendation([auto, six]).startswith("cannot be told: nothing is certain to be faster than the")
    sure = timed({"num_assistant_tokens": 6}, 1.08, 1.03, noise=0.05)
    assert recommendation([auto, sure]).startswith(
        "`num_assistant_tokens=6` 1.08x (1.03 to 1.13) the target alone, within"
    )
    assert recommendation([timed({"num_assistant_tokens": 6}, 0.9)]).startswith(
        "no drafter: nothing that was tried is"
    )
    assert recommendation([timed({"num_assistant_tokens": 6}, 0.94)]).startswith("cannot be told")  # up to 1.03
    none = recommendation([timed({"num_assistant_tokens": 6}, 1.02, noise=0.01)])
    assert none == (
        "no drafter: nothing that was tried is clearly faster than the target alone; at best "
        "`num_assistant_tokens=6` 1.02x (1.01 to 1.03)"
    )


def test_a_bar_counts_the_prompts_that_are_timed_and_says_at_which_temperature(capsys):
    target = tiny_target()
    drafter = tiny_drafter(target)
    drafter.bind(target)
    time_settings(target, drafter, [prompt(9)] * 3, temperature=1.0, max_new_tokens=4, disable_tqdm=False)
    shown = capsys.readouterr().err
    assert "timing settings, temperature 1: " in shown and "/3 [" in shown
