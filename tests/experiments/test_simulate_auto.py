"""The simulation of "auto" counts the rounds that are run, and its rules find the best count."""

import json
import random
import runpy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import auto, load_drafter
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.training.data.encoding import encode_prompts

from ..helpers.processes import python
from ..helpers.scripts import DRAFTER, EXAMPLES, ROOT, rows_of, run


class Exact:
    """Draws no noise."""

    def gauss(self, *_) -> float:
        return 0.0

    def random(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def auto_script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiments")
        return SimpleNamespace(**runpy.run_path(str(ROOT / "experiments/simulate_auto.py"), run_name="script"))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_is_drafted_from_everywhere_is_what_rounds_draft(auto_script, count):
    target = AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4", dtype=torch.float32).eval()
    tokenizer, drafter = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4"), load_drafter(DRAFTER)
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": "Count from 1 to 30."}]}])[0]
    text = target.generate(ids, max_new_tokens=60, do_sample=False)
    extend, following = drafter.extend, []

    def heard(target, context, residual, positions, next_ids):
        assert residual.shape[1] == positions.shape[1] == next_ids.shape[1]
        following.extend(zip(positions[0].tolist(), next_ids[0].tolist()))
        extend(target, context, residual, positions, next_ids)

    drafter.extend = heard
    drafted = auto_script.drafted_everywhere(target, drafter, text, ids.shape[1])
    drafter.extend = extend
    assert following == list(enumerate(text[0, 1:-1].tolist()))
    assert len(drafted) == text.shape[1] - ids.shape[1] - 1 > 20
    assert all(0 < signal <= 1 for each in drafted for signal in each.signals)
    drafter.bind(target)
    with keep_trees():
        target.generate(ids, assistant_model=drafter, num_assistant_tokens=count, max_new_tokens=60, do_sample=False)
    place, spent, rounds = 0, 0.0, auto_script.Rounds(plain=10.0, start=15.0, each=1.0)
    for tree in drafter.last_stats.trees:
        here = drafted[place]
        assert len(tree.drafts) == min(count, len(here.signals))
        assert len(tree.accepted) == min(count, here.accepted)
        place, spent = place + len(tree.tokens), spent + 15 + len(tree.drafts)
    last_alone = len(drafted) - place  # with no room for a draft that is no round of the drafter's
    assert last_alone in (0, 1)
    assert auto_script.fixed(count)(drafted, rounds, Exact()) == pytest.approx(spent + 10 * last_alone)


def test_rules_are_simulated_over_what_is_drafted(auto_script):
    rounds, easy, draw = auto_script.Rounds(plain=10.0, start=15.0, each=1.0), [], random.Random(0)
    for left in range(400, -1, -1):  # from each position, what is left of the text
        easy.append(auto_script.Drafted([0.99] * min(8, left), min(left, draw.choice((0, 8, 8, 8)))))
    known = auto_script.DraftingStats()
    for _ in range(8):
        took = auto_script.auto(known)(easy, rounds, Exact())
    best = min(auto_script.fixed(count)(easy, rounds, Exact()) for count in range(1, 9))
    foreseen = auto_script.by_choice(auto_script.foreseen)(easy, rounds, Exact())
    assert foreseen < best < 5 * len(easy) and foreseen < took < 1.1 * best
    hard = [auto_script.Drafted([0.02] * 8, 0)] * 400
    assert auto_script.by_choice(auto_script.foreseen)(hard, rounds, Exact()) == 10 * len(hard)
    hopeless = auto_script.DraftingStats()
    for _ in range(4):
        took = auto_script.auto(hopeless)(hard, rounds, Exact())
    assert 10 * len(hard) <= took < 10.3 * len(hard)
    taken, take = [], rounds.take
    rounds.take = lambda drafts, draw: taken.append(drafts) or take(drafts, draw)
    auto_script.auto(auto_script.DraftingStats())(hard, rounds, Exact())
    assert {None, 1} <= set(taken)  # the drafter is not asked, or makes the one draft that each of its rounds has
    rounds.take = take
    no_room = [auto_script.Drafted([], 0)]
    assert auto_script.auto(auto_script.DraftingStats())(no_room, rounds, Exact()) == 10
    rules = auto_script.all_rules({"a": [hard] * 2}, rounds, most=2)
    speeds = auto_script.simulate({"a": [hard] * 2}, rounds, rules, orders=1, prompts=1)
    assert speeds["2 drafts"][0]["a"] == pytest.approx(10 / 17, rel=0.03)
    noisy = [rounds.take(4, random.Random(seed)) for seed in range(2000)]
    assert 19 < sum(noisy) / len(noisy) < 19.5 and max(noisy) > 25 and min(noisy) < 18


def test_the_first_suite_of_an_order_is_shown_by_itself(auto_script):
    found = {"1 drafts": [{"b": 1.0, "a": 2.0}], "2 drafts": [{"b": 2.0, "a": 2.0}], "auto": [{"b": 1.0, "a": 3.0}]}
    found |= {auto_script.LEARNED: found["auto"], "foresight": [{"b": 4.0, "a": 4.0}]}
    rows = rows_of(auto_script.report(found, {}))
    assert [cell.split()[0] for cell in rows["auto"]] == ["2.00×", "+0.0", "-50.0", "+50.0"]
    assert [cell.split()[0] for cell in rows["foresight"]] == ["4.00×", *["+100.0"] * 3]
    assert "1 drafts" not in rows


def test_each_constant_is_halved_and_doubled(auto_script):
    constants = [(file, name) for file, names in auto_script.CONSTANTS.items() for name in names]
    before = [getattr(file, name) for file, name in constants]

    def simulated():
        now = [getattr(file, name) for file, name in constants]
        changed = [value / old for value, old in zip(now, before) if value != old]
        assert len(changed) <= 1
        return [{"a": now[0], "b": before[0]}, {"a": now[0], "b": before[0]}]

    table = rows_of("\n".join(auto_script.simulate_each_constant(simulated)))
    assert [getattr(file, name) for file, name in constants] == before
    assert table.pop("acceptance.MEMORY") == ["200", "-25.0 (0.0)", "+50.0 (0.0)"]
    assert len(table) == len(constants) - 1
    assert all(cells[1:] == ["+0.0 (0.0)"] * 2 for cells in table.values())


def test_no_constant_of_auto_is_forgotten(auto_script):
    """Neither here nor in the table of what defends each."""
    for file, names in auto_script.CONSTANTS.items():
        numbers = {name for name, value in vars(file).items() if name.isupper() and isinstance(value, (int, float))}
        assert numbers - {"UNKNOWN", "ANCHOR"} == {*names} | ({"MOST_NODES"} & numbers)
        for name in numbers - {"UNKNOWN", "ANCHOR"}:
            assert f"`{file.__name__.rpartition('.')[2]}.{name}`" in auto.__doc__


def test_what_auto_gains_is_simulated(tmp_path):
    suites = tmp_path / "suites"
    suites.mkdir()
    for name in ("gsm8k", "mbpp"):
        asked = ["What is 3 plus 4?", "List three fruits.", "Write a function that adds two numbers."]
        (suites / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in asked))
    options = {
        "--target": EXAMPLES / "models" / "tiny-deepseek-v4", "--drafter": DRAFTER, "--suites": suites, "--skip": 1,
        "--limit": 2, "--prompts": 2, "--orders": 4, "--max-new-tokens": 40, "--plain-ms": 12, "--round-ms": 18,
        "--draft-ms": 0.6, "--output": tmp_path / "out",
    }  # fmt: skip
    printed = run("experiments/simulate_auto.py", *(part for option in options.items() for part in option))
    assert printed.strip() == (tmp_path / "out" / "report.md").read_text().strip()
    rows = rows_of(printed[printed.index("| rule") :])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["draft_ms"] == 0.6
    ahead = {name: float(cells[1].split()[0]) for name, cells in rows.items() if cells[0].endswith("×")}
    assert [*ahead][1:] == ["auto", "auto, once it has learned", "foresight"]
    assert next(iter(ahead.values())) <= 0 < ahead["foresight"] == max(ahead.values())
    for option, value, told in (
        ("--prompts", 3, "The suite gsm8k has 2 prompts from 2 to 3, expected at least 3 (`--prompts`)."),
        ("--draft-ms", 0, "`--draft-ms` is 0.0, expected more than 0."),
        ("--skip", -1, "`--skip` is -1"),
        ("--accept", 0, "`--accept` is 0.0, expected more than 0."),
    ):
        wrong = {**options, option: value, "--output": tmp_path / "wrong"}
        result = python(ROOT / "experiments/simulate_auto.py", *(part for pair in wrong.items() for part in pair))
        assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("Error: ")
        assert told in result.stderr and "Traceback" not in result.stderr and not (tmp_path / "wrong").exists()
