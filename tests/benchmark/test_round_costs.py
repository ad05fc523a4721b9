"""What rounds cost: of which widths they are, and what follows from the seconds."""

import pytest
import torch
from matplotlib.figure import Figure

from hf_hyperdflash import PromptLookupDrafter
from hf_hyperdflash.benchmark.doctor import round_costs
from hf_hyperdflash.benchmark.doctor.diagnosis import (
    Change,
    Diagnosis,
    Examination,
    MeasuredCosts,
    Timed,
    blame_costs,
    tables,
)
from hf_hyperdflash.benchmark.doctor.page import _draw_costs
from hf_hyperdflash.benchmark.doctor.round_costs import WIDTHS, measure_round_costs
from hf_hyperdflash.benchmark.intervals import Interval
from hf_hyperdflash.decoding.bind import learned_stats
from hf_hyperdflash.decoding.request import AUTO

from ..helpers.families import qwen3

COSTS = MeasuredCosts(100, 1, 2.0, {1: 2.0, 4: 3.0, 8: 7.0}, {1: 0.5, 5: 1.3})


def test_break_even_is_arithmetic():
    """Of 5 drafts: 6 tokens lie half way from 4 to 8, and drafting takes 1.3 of 2."""
    assert COSTS.verifying(5) == 2.5 and COSTS.asking(5) == pytest.approx(0.65)
    assert COSTS.asking(3) == pytest.approx(0.45) and COSTS.break_even(5) == pytest.approx(3.15)
    assert COSTS.speedup(5, [0.5, 0.25, 0.0, 0.0, 0.0]) == pytest.approx(1.75 / 3.15)


@pytest.mark.parametrize("texts", [1, 2])
def test_rounds_have_the_widths_that_are_timed(monkeypatch, texts):
    """By a clock that counts the positions of the target's forwards: each takes as long as it is wide."""
    target = qwen3().eval()
    drafter = PromptLookupDrafter(target, num_draft_tokens=3)
    drafter.bind(target)
    seen = [0]
    target.model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.__setitem__(0, seen[0] + kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    monkeypatch.setattr(round_costs, "clock", lambda device: lambda: seen[0])
    said = []
    found = measure_round_costs(
        target, drafter, torch.arange(3, 23)[None], context=30, texts=texts, report=said.append
    )
    assert found.plain == 1 and found.rounds == {width: width for width in WIDTHS}
    assert (found.context, found.texts) == (30, texts) and found.verifying(7) == 8
    assert len(said) == 3 and "64 tokens" in said[-1]
    prompts, steps, rounds = 6 + 2, 3 * (1 + 4), sum(WIDTHS) * 3 * 4
    assert seen[0] < 30 * prompts + steps + rounds + 100, "rounds of one token follow those that are timed"

    few = measure_round_costs(target, drafter, torch.arange(3, 23)[None], context=30, texts=texts, seconds=0)
    assert list(few.rounds) == [1, 2, 4, 8, 16], "where time is short, wide rounds are left out"


def diagnosed(rounds, drafting, acceptance, speedup, **more):
    costs = MeasuredCosts(100, 1, 1.0, rounds, drafting)
    tau, drafts = 1 + sum(acceptance), len(acceptance)
    found = Diagnosis(
        tau=tau, acceptance=acceptance, drafts=drafts, speedup=Interval(speedup, 1, 2), costs=costs, **more
    )
    for finding in blame_costs(Examination(None, None, None, found=found)):
        found.add(*finding)
    return found


CHEAP, FREE = {1: 1.0, 8: 1.2}, {1: 0.1, 7: 0.1}


@pytest.mark.parametrize(
    ("rounds", "drafting", "acceptance", "speedup", "cause", "limit"),
    [
        (CHEAP, FREE, [0.8, 0.6, 0.5], 2.2, None, "acceptance"),
        ({1: 1.0, 4: 2.6}, FREE, [0.8, 0.6, 0.5], 1.2, "verification", "verification"),
        ({1: 1.0, 8: 2.0}, FREE, [0.6, 0.1] + [0.0] * 5, 0.9, "verification", "verification"),
        ({1: 1.0, 8: 1.7}, FREE, [0.6, 0.1] + [0.0] * 5, 1.15, "draft count", "verification"),
        (
            {1: 1.0, 8: 1.2, 41: 3.0},
            FREE,
            [0.4, 0.1] + [0.0] * 38,
            0.5,
            "draft count",
            "verification",
        ),  # on any machine
        (CHEAP, {1: 1.0, 3: 1.5}, [0.8, 0.6, 0.5], 1.05, "drafting", "drafting"),
    ],
)
def test_what_makes_rounds_dear_is_named(rounds, drafting, acceptance, speedup, cause, limit):
    found = diagnosed(rounds, drafting, acceptance, speedup)
    assert list(found.problems) == ([cause] if cause else []) and found.limit == limit
    assert found.verdict()[2].startswith(f"What limits it: {limit},")
    assert len(found.verdict()) <= 10 and not found.is_wrong


def test_what_is_wrong_with_the_pair_comes_before_what_to_set():
    """Drafts that are hardly accepted are what a wrong layer looks like, too."""
    costs = ({1: 1.0, 8: 1.7}, FREE, [0.6, 0.1] + [0.0] * 5, 1.15)
    found = diagnosed(*costs, problems={"layers": "so."})
    assert list(found.problems) == ["layers"] and found.is_wrong
    assert [line.split()[0] for line in found.verdict()] == ["1.15", "Verifying", "PROBLEM", "First", "Problems"]
    timed = [Timed({"num_assistant_tokens": 2}, Interval(1.4, 1.2, 1.5), Interval(1, 1, 1))]
    timed += [Timed({"num_assistant_tokens": 7}, Interval(1.15, 1.1, 1.2), Interval(1.2, 1.1, 1.3))]
    found = diagnosed(*costs, timed={0.0: timed})
    assert "below" in found.problems["draft count"]
    assert found.verdict()[-2:] == [f"Set, at temperature 0: {timed[0]} the target alone.", ENDS]


ENDS = "The pair fits; its rounds cost too much here."


@pytest.mark.parametrize(
    ("drafts", "rounds", "acceptance", "words"),
    [
        (3, CHEAP, [0.8, 0.6, 0.5], ("`num_assistant_tokens='auto'`",)),  # nothing is faster
        (None, CHEAP, [0.8, 0.6, 0.5], ("`num_assistant_tokens='auto'`",)),
        (3, {1: 1.0, 4: 1.4}, [0.8, 0.1, 0.0], ("`num_assistant_tokens=1`", "1.15", " 3 ")),
        (1, {1: 1.0, 4: 7.0}, [0.8], ("no drafter",)),
    ],
)
def test_what_to_set_follows_from_the_costs(drafts, rounds, acceptance, words):
    costs = MeasuredCosts(100, 1, 1.0, rounds, FREE)
    found = Diagnosis(tau=1 + sum(acceptance), acceptance=acceptance, drafts=drafts, costs=costs)
    told = found.verdict()[-2]
    assert told.startswith("Set: ") and all(word in told for word in words), told


def test_the_verdict_has_the_numbers():
    found = diagnosed({1: 1.0, 4: 2.6}, FREE, [0.8, 0.6, 0.5], 2.2, is_mixture=True)
    first, second, third, *_ = found.verdict()
    assert all(number in first for number in ("2.20 times", "(1.00 to 2.00)", "3 drafts", "2.90 tokens"))
    assert all(number in second for number in ("4 tokens", "2.6 forwards", "drafting 0.1", "2.7 tokens", "have 2.9"))
    assert "verification" in third and "experts" in found.problems["verification"]
    found.problems = {cause: "so." for cause in "abcdef"}
    assert len(found.verdict()) <= 10 and "so. And 2 more: e, f." in str(found)


def test_tables_have_every_measurement():
    """Verifying two tokens costs 1 + 0.5 / 7 forwards, and drafting one 0.1."""
    compiled = MeasuredCosts(100, 1, 0.5, {4: 0.75}, {3: 0.1})
    costs = MeasuredCosts(100, 1, 1.0, {1: 1.0, 8: 1.5}, {1: 0.1, 7: 0.25}, compiled)
    timed = Timed({"num_assistant_tokens": "auto", "tree_budget": 8}, Interval(2.0, 1.9, 2.1), Interval(1, 1, 1))
    found = Diagnosis(
        costs=costs, acceptance=[0.5], expected=[1.0, 1.2], kinds={"code": 2.0}, timed={0.0: [timed]},
        changes=[Change("thinking", "thinking on", 2.0, 2.5, Interval(1.25, 1.1, 1.4))],
    )  # fmt: skip
    shown = list(tables(found).values())
    assert [rows for _, rows in shown] == [
        [["1", "1000.00", "1.00", "", ""], ["4", "", "", "750.00", "1.50"], ["8", "1500.00", "1.50", "", ""]],
        [["1", "100.00", "0.10"], ["7", "250.00", "0.25"]],
        [["1", "50", "1.50", "1.17", "1.20", "1.28"]],
        [["thinking on", "2.00", "2.50", "1.25 (1.10 to 1.40)"]],
        [["code", "2.00"]],
        [["num_assistant_tokens='auto', tree_budget=8", "2.00", "1.90 to 2.10"]],
    ]
    assert all(len(row) == len(head) for head, rows in shown for row in rows)
    axes = Figure().subplots()
    _draw_costs(found, axes)
    assert axes.lines[-1].get_xydata().tolist() == [[2, costs.break_even(1)]]
    assert tables(Diagnosis(acceptance=[0.5])) == {}


def test_what_auto_learned_stands_beside_what_was_measured():
    target = qwen3().eval()
    drafter = PromptLookupDrafter(target)
    assert learned_stats(target, drafter) is None
    drafter.bind(target)
    options = {"do_sample": False, "num_assistant_tokens": AUTO, "assistant_model": drafter}
    target.generate(torch.arange(3, 23)[None], max_new_tokens=40, **options)
    learned = learned_stats(target, drafter)
    assert learned.is_tried
    found = diagnosed(CHEAP, FREE, [0.8, 0.6, 0.5], 2.2)
    found.expected = learned.costs.predict(30, 3)
    head, rows = tables(found)["Speed by the number of drafts, from costs and acceptance"]
    at = head.index('needed, as "auto" learned')
    assert [row[at] for row in rows] == [f"{cost:.2f}" for cost in found.expected[1:]]
