"""The loop of every measurement, with methods that take as long as they are told."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from hf_hyperdflash.training import trials
from hf_hyperdflash.training.trials import Local, Record, bound, run

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


def test_methods_take_turns_at_being_first(clock):
    methods = [Timed(name, clock) for name in "abc"]
    order = [(number, index) for number, index, _ in run(methods, range(4), 5)]
    assert order == [(n, (n + i) % 3) for n in range(4) for i in range(3)]
    named = []
    turn = run(methods, range(1), 5, first=2, announce=lambda method: named.append((method.name, len(method.asked))))
    assert [index for _, index, _ in turn] == [2, 0, 1]
    assert named == [("c", 4), ("a", 4), ("b", 4)]  # each before it generates
    records = {(n, i): record.output for n, i, record in run(methods, ["one", "two"], 5)}
    assert records[1, 2] == "two by c" and methods[2].asked[-1][:3] == ("two", 0.0, 5)


def test_every_method_starts_a_prompt_from_the_same_seed(clock):
    methods = [Timed(name, clock) for name in "ab"]
    list(run(methods, range(3), 5, temperature=1.0, seed=7))
    first, second = ([draw for *_, draw in method.asked] for method in methods)
    assert first == second and len(set(first)) == 3
    torch.manual_seed(8)
    assert torch.rand(1).item() == first[1]
    state = torch.get_rng_state()
    list(run([SimpleNamespace(generate=lambda *_: None)], range(3), 5))
    assert torch.equal(torch.get_rng_state(), state)  # without a seed nothing is set


@pytest.mark.parametrize(("seconds", "fewest", "count"), [(10, 1, 5), (9.9, 1, 4), (0, 3, 3), (1e9, 1, 8)])
def test_no_prompt_begins_that_would_end_too_late(clock, seconds, fewest, count):
    methods = [Timed(name, clock) for name in "ab"]  # a prompt takes two seconds
    list(run(methods, range(8), 5, seconds=seconds, fewest=fewest))
    assert len(methods[0].asked) == len(methods[1].asked) == count


def test_a_bar_is_shown_where_it_is_asked_for(clock, capsys, monkeypatch):
    monkeypatch.undo()
    list(run([Timed("a", clock)], range(3), 5, desc="measuring", disable_tqdm=False))
    assert "measuring: " in capsys.readouterr().err
    list(run([Timed("a", clock)], range(3), 5, desc="measuring"))
    assert not capsys.readouterr().err


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


def test_what_no_drafter_can_do_is_refused_before_it_generates():
    target = tiny_target(2)
    for count in (0, 99):
        with pytest.raises(ValueError, match=f"cannot draft {count} tokens"):
            Local(target, tiny_drafter(target), {"num_assistant_tokens": count})
    with pytest.raises(ValueError, match="`tree_budget` is 0, expected"):
        Local(target, tiny_drafter(target), {"tree_budget": 0})
