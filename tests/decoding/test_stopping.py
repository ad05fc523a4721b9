"""`Stopping` against transformers' own list of criteria, on texts that grow token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EosTokenCriteria, MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation import stopping_criteria

from hf_hyperdflash.decoding.sequence import Stopping
from hf_hyperdflash.decoding.tokens import TokenBuffer


class AfterCalls(StoppingCriteria):
    """A criterion with a memory: it must see every prefix once, whatever the others say."""

    def __init__(self, count: int) -> None:
        self.count, self.seen = count, []

    def __call__(self, input_ids, scores, **kwargs):
        self.seen.append((input_ids.tolist(), scores))
        return torch.tensor([len(self.seen) >= self.count])


class TwiceEos(EosTokenCriteria):
    """Somebody's own rule in a known one's clothes."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -2:], self.eos_token_id).all(dim=-1)


class OneMore(MaxLengthCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.tensor([input_ids.shape[1] > self.max_length])


def made(kind: str, number: int, other: int) -> StoppingCriteria:
    return {
        "eos": lambda: EosTokenCriteria(number),
        "one of": lambda: EosTokenCriteria([number, other]),
        "eos as a number's tensor": lambda: EosTokenCriteria(torch.tensor(number)),
        "eos as a tensor": lambda: EosTokenCriteria(torch.tensor([other, number])),
        "twice": lambda: TwiceEos([number, other]),
        "length": lambda: MaxLengthCriteria(number),
        "length of a target": lambda: MaxLengthCriteria(number, max_position_embeddings=other),
        "one more": lambda: OneMore(number),
        "calls": lambda: AfterCalls(number),
    }[kind]()


KINDS = ["eos", "one of", "eos as a number's tensor", "eos as a tensor", "twice", "length", "length of a target",
         "one more", "calls"]  # fmt: skip
CRITERIA = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 12), st.integers(0, 12)), max_size=4)


def written(tokens: list[int]) -> TokenBuffer:
    return TokenBuffer(torch.tensor([tokens]), 0, None, None)


@settings(deadline=None, max_examples=250)
@given(CRITERIA, st.lists(st.integers(0, 12), min_size=1, max_size=14), st.booleans())
def test_a_text_ends_where_transformers_criteria_end_it(criteria, tokens, with_scores):
    ours, stock = (StoppingCriteriaList([made(*each) for each in criteria]) for _ in range(2))
    stopping, length = Stopping(ours), len(ours)
    for end, token in enumerate(tokens, start=1):
        ids = torch.tensor([tokens[:end]])
        scores = (torch.zeros(1, 13),) * end if with_scores else None
        ended = stopping(token, written(tokens[:end]), scores or ())
        assert isinstance(ended, bool) and ended == bool(stock(ids, scores))
    assert len(ours) == length  # the caller's list is theirs
    for mine, theirs in zip(ours, stock):
        if isinstance(mine, AfterCalls):
            assert [text for text, _ in mine.seen] == [text for text, _ in theirs.seen]
            assert [scores and len(scores) for _, scores in mine.seen] == [
                scores and len(scores) for _, scores in theirs.seen
            ]


def test_texts_longer_than_the_target_was_made_for_are_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(stopping_criteria.logger, "warning_once", said.append)  # a process says it once
    texts = [list(range(end)) for end in range(1, 12)]
    for most, made_for, warned in ((10, 6, True), (6, 6, False), (7, 6, False), (8, 6, True), (5, 6, False)):
        criteria = StoppingCriteriaList([MaxLengthCriteria(most, made_for)])
        stopping = Stopping(criteria)
        for text in texts:
            stopping(text[-1], written(text), ())
        ours, said[:] = {*said}, []
        for text in texts:
            criteria(torch.tensor([text]), None)
        assert ours == {*said} and len(ours) == warned
        said.clear()
