"""Which settings the doctor recommends: timed with real generations, chosen from what was timed."""

import pytest

from hf_hyperdflash import DeepseekV4MTPDrafter
from hf_hyperdflash.benchmark import recommended
from hf_hyperdflash.benchmark.recommended import Timed, recommendation, time_settings

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
    assert [each.speedup for each in timed] == sorted((each.speedup for each in timed), reverse=True)


def test_speeds_are_tokens_over_seconds(monkeypatch):
    """By a clock that counts the target's forwards: of 37 tokens the prompt's makes one, a round 9 or 2."""
    target = tiny_target()
    ids = prompt(9)
    text = target.generate(ids, do_sample=False, max_new_tokens=37)[0]
    drafter = perfect(target, text, num_draft_tokens=8)
    drafter.bind(target)
    forwards = [0]
    target.model.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))
    monkeypatch.setattr(recommended, "clock", lambda device: lambda: forwards[0])
    tried = [{"num_assistant_tokens": 1}, {"num_assistant_tokens": 8}]
    monkeypatch.setattr(recommended, "_settings", lambda *_: tried)
    timed = time_settings(target, drafter, [ids, ids], max_new_tokens=37)
    assert timed == [Timed(tried[1], pytest.approx(37 / 5)), Timed(tried[0], pytest.approx(37 / 19))]


@pytest.mark.parametrize("kind", ["qwen3", "hybrid", "mtp"])
def test_any_pair_has_settings_that_run(kind):
    target = (tiny_target if kind == "mtp" else {"qwen3": qwen3, "hybrid": granite_hybrid}[kind])().eval()
    drafter = DeepseekV4MTPDrafter(target.config).eval() if kind == "mtp" else tiny_drafter(target, reducer="fc")
    drafter.bind(target)
    timed = time_settings(target, drafter, [prompt(9)], temperature=1.0, max_new_tokens=6)
    check_tried(timed, 1, 3, 6)


def test_what_is_recommended():
    auto, six = Timed({"num_assistant_tokens": "auto"}, 2.0), Timed({"num_assistant_tokens": 6}, 2.05)
    tree = Timed({"num_assistant_tokens": 6, "tree_budget": "auto"}, 2.09)
    assert recommendation([tree, six, auto]).startswith("`num_assistant_tokens='auto'` 2.00x the target alone (`num_")
    slow = auto._replace(speedup=1.5)
    assert recommendation([tree, six, slow]).startswith("`num_assistant_tokens=6` 2.05x the target alone")
    assert recommendation([tree._replace(speedup=3.0), six, slow]).startswith(
        "`num_assistant_tokens=6, tree_budget='auto'` 3.00x the target alone (`num_assistant_tokens=6` 2.05x; `num"
    )
    assert recommendation([slow._replace(speedup=1.04)]) == (
        "no drafter: of what was tried the fastest was `num_assistant_tokens='auto'` 1.04x the target alone"
    )
