"""Which settings the doctor recommends: timed with real generations, chosen from what was timed."""

import numpy as np
import pytest

from hf_hyperdflash import DeepseekV4MTPDrafter
from hf_hyperdflash.benchmark.doctor import recommended
from hf_hyperdflash.benchmark.doctor.diagnosis import Timed, recommendation
from hf_hyperdflash.benchmark.doctor.recommended import ranked, time_settings
from hf_hyperdflash.benchmark.intervals import Interval
from hf_hyperdflash.training import trials

from ..conftest import perfect, prompt, tiny_drafter, tiny_target
from ..helpers.families import granite_hybrid, qwen3


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
    seconds = 2 * np.array([[1, 0.5, 0.9], [1, 0.5, 0.9], [1, 0.5, 0.9], [1, 0.5, 4.0]])
    both = np.stack([tokens, seconds], axis=-1)
    steady, shaky = ranked([{"num_assistant_tokens": 1}, {"num_assistant_tokens": 2}], both)
    assert steady.speedup == pytest.approx([2, 2, 2]) and steady.near
    assert shaky.speedup.low < 0.5 and shaky.speedup.high > 1 and not shaky.near
    one = ranked([{"num_assistant_tokens": 1}], both[:1, :2])
    assert one[0].speedup == pytest.approx([2, 2, 2])  # of one prompt there is nothing to draw


@pytest.mark.parametrize(
    ("kind", "counts"), [("perfect", (2, 4, 8)), ("qwen3", (1, 3, 6)), ("hybrid", (1, 3, 6)), ("mtp", (1, 3, 6))]
)
def test_any_pair_has_settings_that_run(capsys, kind, counts):
    target = {"qwen3": qwen3, "hybrid": granite_hybrid}.get(kind, tiny_target)().eval()
    if kind == "perfect":
        drafter = perfect(target, target.generate(prompt(9), do_sample=False, max_new_tokens=6)[0], num_draft_tokens=8)
    else:
        mtp = kind == "mtp"
        drafter = DeepseekV4MTPDrafter(target.config).eval() if mtp else tiny_drafter(target, reducer="fc")
    drafter.bind(target)
    timed = time_settings(target, drafter, [prompt(9)], temperature=1.0, max_new_tokens=6, disable_tqdm=False)
    expected = [{"num_assistant_tokens": count} for count in (*counts, "auto")]
    expected.append({"num_assistant_tokens": counts[-1], "tree_budget": "auto"})
    assert len(timed) == 5 and all(settings in [each.settings for each in timed] for settings in expected)
    assert timed[0].fastest == (1, 1, 1) and all(each.fastest.value >= 1 for each in timed)
    shown = capsys.readouterr().err  # a bar counts the prompts that are timed
    assert "temperature 1: " in shown and "/1 [" in shown


def timed(settings, speedup, fastest=1.0, noise=0.1):
    """Settings that others are drawn around, by `noise`."""
    around = [Interval(value, value * (1 - noise), value * (1 + noise)) for value in (speedup, fastest)]
    return Timed(settings, *around)


def of_count(count, *parts, **more):
    return timed({"num_assistant_tokens": count}, *parts, **more)


TREE = {"num_assistant_tokens": 6, "tree_budget": "auto"}
NEAR = [timed(TREE, 2.09), of_count(6, 2.05, 1.02)]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([*NEAR, of_count("auto", 2.0, 1.05)], ("`num_assistant_tokens='auto'` 2.00x (1.80 to 2.20)", "by itself")),
        ([*NEAR, of_count("auto", 1.5, 1.4)], ("`num_assistant_tokens=6` 2.05x (1.84 to 2.25)", "shorter to write")),
        ([timed(TREE, 3.0), of_count(6, 2.05, 1.46)], ("`num_assistant_tokens=6, tree_budget='auto'` 3.00x",)),
        # What is faster by less than noise is no verdict.
        ([of_count("auto", 1.11), of_count(6, 0.89, 1.25)], ("cannot be told", "'auto'` 1.11x")),
        ([of_count("auto", 1.11), of_count(6, 1.08, 1.03, noise=0.05)], ("`num_assistant_tokens=6` 1.08x (1.03 to",)),
        ([of_count(6, 0.94)], ("cannot be told", "6` 0.94x")),  # up to 1.03
        ([of_count(6, 0.9)], ("no drafter: ", "6` 0.90x")),
        ([of_count(6, 1.02, noise=0.01)], ("no drafter: ", "6` 1.02x (1.01 to 1.03)")),
    ],
)
def test_what_is_recommended(found, words):
    told = recommendation(found)
    assert all(word in told for word in words), told
    is_fastest = told.startswith(str(found[0]))
    assert ("within noise" in told) == (told.startswith("`") and not is_fastest)
