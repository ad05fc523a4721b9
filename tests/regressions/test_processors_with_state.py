"""A batch's logits processors and stopping criteria with a state: each row has its own, as in plain decoding."""

from __future__ import annotations

import functools
import math
import threading

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    WatermarkLogitsProcessor,
)

from hf_hyperdflash import PromptLookupDrafter, bind

from ..conftest import prompt, tiny_target
from ..helpers import families
from ..helpers.tree_drafters import RandomChains, RandomTrees

NEW, ROWS, VOCABULARY = 20, 4, 64
OPTIONS = dict(do_sample=False, max_new_tokens=NEW, pad_token_id=0, eos_token_id=[1, 5, 9])


class ThinkingBudget(LogitsProcessor):
    """After so many calls a text goes on with its answer, the token 7 and then what follows."""

    def __init__(self, calls):
        self.calls, self.made = calls, 0

    def __call__(self, input_ids, scores):
        self.made += 1
        return scores.scatter(1, torch.full_like(input_ids[:, :1], 7), 100.0) if self.made == self.calls else scores


class Matcher(LogitsProcessor):
    """A toy grammar with one state a row, as xgrammar's: the token that was written moves it, and it says which tokens
    may be next."""

    def __init__(self):
        self.states = None

    def __call__(self, input_ids, scores):
        if self.states is None:
            self.states = [0] * len(input_ids)
        else:
            self.states = [(2 * state + int(row[-1]) + 1) % 5 for state, row in zip(self.states, input_ids)]
        assert len(self.states) == len(input_ids)
        state = torch.tensor(self.states)[:, None]
        return scores.masked_fill(torch.arange(scores.shape[1]) % 5 == state, -torch.inf)


class Repetitions(StoppingCriteria):
    """Stops a row after three tokens of the upper half of the vocabulary, counted one by one."""

    def __init__(self):
        self.seen = None

    def __call__(self, input_ids, scores, **kwargs):
        self.seen = [0] * len(input_ids) if self.seen is None else self.seen
        self.seen = [count + int(row[-1] >= VOCABULARY // 2) for count, row in zip(self.seen, input_ids)]
        return torch.tensor([count >= 3 for count in self.seen])


def stateful():
    processors = [ThinkingBudget(4), Matcher()]
    return dict(
        logits_processor=LogitsProcessorList(processors), stopping_criteria=StoppingCriteriaList([Repetitions()])
    )


@pytest.fixture(params=["one forward", "one after the other"])
def target(request):
    """A target whose rows share a forward, or one whose rows are written one after the other."""
    torch.manual_seed(0)
    return bind(families.qwen3().eval() if request.param == "one forward" else tiny_target())


def rows_of(out, length):
    """What was written in each row, up to the padding."""
    return [[token for token in row[length:].tolist() if token] for row in out]


@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
def test_each_row_has_the_state_of_its_own_text(target, kind):
    ids = torch.cat([prompt(8, seed=seed) for seed in range(ROWS)])
    alone = [target.generate(row[None], **OPTIONS, **stateful())[0] for row in ids]
    plain = target.generate(ids, **OPTIONS, **stateful())
    assert rows_of(plain, 8) == [rows_of(row[None], 8)[0] for row in alone]
    assert len({len(text) for text in alone}) > 1  # they end in different rounds
    assert any(7 in text[8:] for text in alone)
    drafter = kind(target, alone)
    asked = stateful()
    out = target.generate(ids, assistant_model=drafter, **OPTIONS, **asked)
    assert rows_of(out, 8) == rows_of(plain, 8)
    assert drafter.last_stats.tau > 1.1
    again = target.generate(ids, assistant_model=kind(target, alone), **OPTIONS, **asked)  # the caller's are as new
    assert torch.equal(again, out)


def test_a_text_drawn_at_random_has_its_own_budget_too(target):
    """Also of several texts of one prompt: each has the answer's token in its place."""
    out = target.generate(
        prompt(8), assistant_model=PromptLookupDrafter(target), do_sample=True, num_return_sequences=3,
        max_new_tokens=6, pad_token_id=0, logits_processor=LogitsProcessorList([ThinkingBudget(4)]),
    )  # fmt: skip
    assert out[:, 8 + 3].tolist() == [7, 7, 7]


def test_what_a_processor_and_a_criterion_share_they_share_in_each_row(target):
    class Answered(StoppingCriteria):
        def __init__(self, budget):
            self.budget = budget

        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), self.budget.made >= 6)

    ids, budget = torch.cat([prompt(8, seed=seed) for seed in range(2)]), ThinkingBudget(4)
    out = target.generate(
        ids, assistant_model=PromptLookupDrafter(target), do_sample=False, max_new_tokens=NEW, pad_token_id=0,
        logits_processor=LogitsProcessorList([budget]), stopping_criteria=StoppingCriteriaList([Answered(budget)]),
    )  # fmt: skip
    assert out.shape[1] == 8 + 6 and budget.made == 0


def test_models_and_their_weights_are_shared_by_the_copies(target):
    class Judge(LogitsProcessor):
        def __init__(self, model):
            self.models, self.weight, self.calls = {"judge": [model]}, 0.5 * model.weight, []

        def __call__(self, input_ids, scores):
            self.calls.append(len(input_ids[0]))
            used.append((id(self), self.models["judge"][0], self.weight))
            return scores + self.models["judge"][0](scores.float())

    torch.manual_seed(0)
    judge = Judge(torch.nn.Linear(VOCABULARY, VOCABULARY))  # with a weight that `copy.deepcopy` refuses
    ids, used = torch.cat([prompt(8, seed=seed) for seed in range(2)]), []
    expected = target.generate(ids, **OPTIONS, logits_processor=LogitsProcessorList([judge]))
    judge.calls.clear()
    used.clear()
    asked = LogitsProcessorList([judge])
    out = target.generate(ids, assistant_model=RandomChains(target, list(expected)), **OPTIONS, logits_processor=asked)
    assert rows_of(out, 8) == rows_of(expected, 8) and judge.calls == []
    assert len({copy for copy, _, _ in used} - {id(judge)}) == 2
    assert all(model is judge.models["judge"][0] and weight is judge.weight for _, model, weight in used)


class ByNumber(LogitsProcessor):
    """One grammar a row: row 0 writes even tokens, row 1 odd ones. It looks a grammar up by its row's number."""

    def __call__(self, input_ids, scores):
        for row, parity in enumerate([0, 1, 0, 1]):
            scores[row, 1 - parity :: 2] = -torch.inf
        return scores


class Longest(StoppingCriteria):
    """Each row its own length, `[rows]`."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids.shape[1] >= 8 + torch.tensor([3, 9, 5, 12])


@pytest.mark.parametrize("kind", [RandomChains, RandomTrees])
def test_each_row_is_asked_about_in_its_place(target, kind):
    ids = torch.cat([prompt(8, seed=seed) for seed in range(ROWS)])
    asked = {"logits_processor": LogitsProcessorList([ByNumber()]), "output_scores": True}
    asked |= {"stopping_criteria": StoppingCriteriaList([Longest()]), "return_dict_in_generate": True}
    options = {**OPTIONS, "eos_token_id": None}
    expected = target.generate(ids, **options, **asked).sequences
    out = target.generate(ids, assistant_model=kind(target, list(expected)), **options, **asked).sequences
    lengths = [3, 9, 5, 12]  # without an end token plain decoding writes on in all rows
    assert rows_of(out, 8) == [row[:length] for row, length in zip(rows_of(expected, 8), lengths)]
    assert [len(row) for row in rows_of(out, 8)] == lengths
    assert (out[:, 8:11] % 2).tolist() == [[0] * 3, [1] * 3] * 2


def budget_of_a_closure(calls):
    """[`ThinkingBudget`] as a function, and a criterion that reads the same variable."""
    made = 0
    log = []

    def budget(input_ids, scores):
        nonlocal made
        made += 1
        log.append(made)
        return scores.scatter(1, torch.full_like(input_ids[:, :1], 7), 100.0) if log[-1] == calls else scores

    def answered(input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), made >= calls + 2)

    def counted():
        return made

    return budget, answered, counted


@pytest.mark.parametrize("wrapped", [lambda function: function, functools.partial])
def test_a_function_keeps_its_closure_for_each_row(target, wrapped):
    ids = torch.cat([prompt(8, seed=seed) for seed in range(ROWS)])

    def asked():
        budget, answered, counted = budget_of_a_closure(4)
        processors, criteria = [wrapped(budget)], [answered]
        return counted, dict(logits_processor=processors, stopping_criteria=criteria)

    options = {**OPTIONS, "eos_token_id": None}
    expected = target.generate(ids, **options, **asked()[1])
    counted, given = asked()
    out = target.generate(ids, assistant_model=RandomChains(target, list(expected)), **options, **given)
    assert torch.equal(out, expected) and out.shape[1] == 8 + 6
    assert (out[:, 8 + 3] == 7).all() and counted() == 0


def test_a_function_without_a_state_is_taken_whatever_it_reads(target):
    def banned(words):
        def ban(input_ids, scores):
            return again(math, scores) if words else ban(input_ids, scores)

        def again(module, scores):
            return scores.index_fill(1, torch.tensor(words), -module.inf)

        return ban

    ids = torch.cat([prompt(8, seed=seed) for seed in range(2)])
    given = dict(logits_processor=[banned(list(range(0, VOCABULARY, 2)))])
    expected = target.generate(ids, **OPTIONS, **given)
    out = target.generate(ids, assistant_model=RandomChains(target, list(expected)), **OPTIONS, **given)
    assert rows_of(out, 8) == rows_of(expected, 8)


def count_calls(input_ids, scores):
    global called
    called = 1
    return scores


def locked():
    lock = threading.Lock()

    def hold(input_ids, scores, **kwargs):
        with lock:
            return torch.zeros(len(input_ids), dtype=torch.bool)

    return hold


class CannotBeCopied(LogitsProcessor):
    def __deepcopy__(self, memo):
        raise TypeError("cannot pickle 'GrammarMatcher' object")

    def __call__(self, input_ids, scores):
        raise AssertionError("no token is written before the refusal")


class Cancelled(StoppingCriteria):
    """Stops all texts when somebody says so; here it does after some calls."""

    def __init__(self):
        self.event, self.calls = threading.Event(), 0

    def __call__(self, input_ids, scores, **kwargs):
        self.calls += 1
        if self.calls == 6:
            self.event.set()
        return torch.full((len(input_ids),), self.event.is_set())


def test_an_event_reaches_every_text(target):
    ids, cancelled = torch.cat([prompt(8, seed=seed) for seed in range(2)]), Cancelled()
    asked = {**OPTIONS, "eos_token_id": None, "stopping_criteria": StoppingCriteriaList([cancelled])}
    out = target.generate(ids, assistant_model=PromptLookupDrafter(target), **asked)
    assert cancelled.event.is_set() and out.shape[1] == 8 + 6


class Locked(StoppingCriteria):
    def __init__(self):
        self.lock = threading.Lock()

    def __call__(self, input_ids, scores, **kwargs):
        return torch.zeros(len(input_ids), dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("CannotBeCopied", {"logits_processor": LogitsProcessorList([CannotBeCopied()])}),
        ("Locked", {"stopping_criteria": StoppingCriteriaList([Locked()])}),
        ("hold", {"stopping_criteria": [locked()]}),
        ("count_calls,.*`called`", {"logits_processor": [count_calls]}),
    ],
)
def test_what_cannot_be_copied_is_refused_by_name_before_the_first_token(target, name, asked):
    ids = torch.cat([prompt(8, seed=seed) for seed in range(2)])
    forwards = []
    handle = target.register_forward_pre_hook(lambda *_: forwards.append(1))
    with pytest.raises(ValueError, match=name) as refused:
        target.generate(ids, assistant_model=PromptLookupDrafter(target), **OPTIONS, **asked)
    handle.remove()
    assert not forwards and "\n" not in str(refused.value)


def test_one_text_needs_no_copy(target):
    asked = {"stopping_criteria": StoppingCriteriaList([Locked()])}
    ids = prompt(8)
    expected = target.generate(ids, **OPTIONS, **asked)
    assert torch.equal(target.generate(ids, assistant_model=PromptLookupDrafter(target), **OPTIONS, **asked), expected)


def test_transformers_own_processors_without_a_state_are_not_copied(target, monkeypatch):
    """Before torch 2.10 or so, that with a generator could not be."""
    monkeypatch.setattr(WatermarkLogitsProcessor, "__deepcopy__", CannotBeCopied.__deepcopy__, raising=False)
    ids = torch.cat([prompt(8, seed=seed) for seed in range(2)])
    asked = LogitsProcessorList([WatermarkLogitsProcessor(VOCABULARY, "cpu")])
    expected = target.generate(ids, **OPTIONS, logits_processor=asked)
    out = target.generate(ids, assistant_model=PromptLookupDrafter(target), **OPTIONS, logits_processor=asked)
    assert rows_of(out, 8) == rows_of(expected, 8)
