"""The loop of every measurement, with methods that take as long as they are told; and how far long work is."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from hf_hyperdflash.decoding.bind import bound
from hf_hyperdflash.training import trials
from hf_hyperdflash.training.runs import progress
from hf_hyperdflash.training.runs.progress import progress_bar
from hf_hyperdflash.training.trials import Local, Record, run

from ..conftest import prompt, tiny_drafter, tiny_target


@dataclass
class Timed:
    """A method that takes some seconds, and notes what it is asked and what is drawn meanwhile."""

    name: str
    clock: SimpleNamespace
    seconds: float = 1.0
    asked: list = field(default_factory=list)

    def generate(self, prompt, temperature, max_new_tokens):
        self.clock.now += self.seconds
        self.asked.append((prompt, temperature, max_new_tokens, torch.rand(1).item()))
        return Record(f"{prompt} by {self.name}", max_new_tokens, None, self.seconds, self.seconds)


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(trials, "time", SimpleNamespace(monotonic=lambda: clock.now))
    return clock


def test_methods_take_turns_at_being_first_and_start_each_prompt_from_the_same_seed(clock):
    methods, named = [Timed(name, clock) for name in "abc"], []
    announce = lambda method: named.append((method.name, len(method.asked)))  # noqa: E731
    found = list(run(methods, range(4), 5, temperature=1.0, seed=7, first=2, announce=announce))
    assert [(number, index) for number, index, _ in found] == [
        (n, (n + 2 + i) % 3) for n in range(4) for i in range(3)
    ]
    assert named[:4] == [("c", 0), ("a", 0), ("b", 0), ("a", 1)]  # each before it generates
    assert found[0][2].output == "0 by c" and methods[2].asked[0][:3] == (0, 1.0, 5)
    draws = [[draw for *_, draw in method.asked] for method in methods]
    assert draws[0] == draws[1] == draws[2] and len(set(draws[0])) == 4
    torch.manual_seed(8)
    assert torch.rand(1).item() == draws[0][1]
    state = torch.get_rng_state()
    list(run([SimpleNamespace(generate=lambda *_: None)], range(3), 5))
    assert torch.equal(torch.get_rng_state(), state)  # without a seed nothing is set


@pytest.mark.parametrize(("seconds", "fewest", "count"), [(10, 1, 5), (9.9, 1, 4), (0, 3, 3), (1e9, 1, 8)])
def test_no_prompt_begins_that_would_end_too_late(clock, seconds, fewest, count):
    methods = [Timed(name, clock) for name in "ab"]  # a prompt takes two seconds
    list(run(methods, range(8), 5, seconds=seconds, fewest=fewest))
    assert len(methods[0].asked) == len(methods[1].asked) == count


def test_what_is_recorded_of_a_generation_here():
    target = tiny_target(2)
    drafter, ids = tiny_drafter(target, num_hidden_layers=1), prompt(9)
    with bound(target):
        alone, drafted = (record for *_, record in run([Local(target), Local(target, drafter)], [ids], 12))
        few = Local(target, drafter, {"num_assistant_tokens": 2}).generate(ids, 0.0, 12)
        sampled = Local(target).generate(ids, 1.0, 12)
    assert alone.output == drafted.output == few.output != sampled.output and alone.stats is None
    assert (drafted.new_tokens, drafted.prompt_tokens) == (12, 9) == (drafted.stats.tokens, ids.shape[1])
    assert 0 < drafted.first_seconds < drafted.seconds and few.stats.draft_positions == 2


def test_a_bar_is_shown_where_it_is_asked_for(clock, capsys, monkeypatch):
    monkeypatch.undo()
    for disable, shown in ((False, True), (True, False)):
        list(run([Timed("a", clock)], range(3), 5, desc="measuring", disable_tqdm=disable))
        assert ("measuring: " in capsys.readouterr().err) == shown


@pytest.mark.parametrize(("seconds", "disable", "lines"), [(0, None, 3), (30, None, 0), (0, True, 0)])
def test_a_line_now_and_then_where_nobody_watches(monkeypatch, capsys, seconds, disable, lines):
    monkeypatch.setattr(progress, "_SECONDS", seconds)
    assert list(progress_bar(range(3), desc="work", unit="step", leave=False, disable=disable)) == [0, 1, 2]
    told = capsys.readouterr()
    assert told.out == "" and "\r" not in told.err and len(told.err.splitlines()) == lines
    assert all(line.startswith("work: ") and f"{i}/3" in line for i, line in enumerate(told.err.splitlines(), start=1))
    with progress_bar(total=50, desc="tokens", disable=disable) as bar:  # work that counts itself
        for count in (20, 30):
            bar.update(count)
    found = [line.split("|")[0].split()[-1] for line in capsys.readouterr().err.splitlines()]
    assert found == (["40%", "100%"] if lines else [])
