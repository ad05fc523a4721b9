"""What is found of a text's last tokens, as by a naive search; what a `Lookup` remembers; and what is a wrong one."""

import random
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash import Lookup
from hf_hyperdflash.drafters.without_weights import lookup
from hf_hyperdflash.drafters.without_weights.lookup import LONGEST, SIZES, Match, TextIndex


def naive(tokens: list[int], last: list[int]) -> tuple[int, int] | None:
    """The latest place at which the longest run of `SIZES` that ends with `last` was followed by a token, and how
    many tokens are the same before."""
    for size in SIZES:
        for place in range(len(tokens) - 1, size - 1, -1):
            if len(last) >= size and tokens[place - size : place] == last[-size:]:
                same = size
                while same < min(LONGEST, len(last), place) and tokens[place - 1 - same] == last[-1 - same]:
                    same += 1
                return place, same
    return None


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(0, 2), max_size=80), st.integers(0, 80))
def test_the_longest_run_is_found_where_it_was_last(tokens, cut):
    index = TextIndex(tokens[:cut])
    for token in tokens[cut:]:
        index.append(token)
    assert index.tokens == tokens
    for end in range(len(tokens) + 1):
        found = index.find(tokens[:end])
        assert (found and (found.place, found.length)) == naive(tokens, tokens[:end])


def test_added_at_once_is_as_added_one_by_one():
    tokens = [random.Random(0).randrange(4) for _ in range(300)]
    one, many = TextIndex(), TextIndex(tokens[:1])
    for token in tokens:
        one.append(token)
    for start, end in ((1, 2), (2, 9), (9, 30), (30, 300)):
        many.extend(tokens[start:end])
    assert one.tokens == many.tokens and one._places == many._places


def test_what_follows_the_end_of_a_text_is_the_copy_again():
    match = TextIndex([5, 7, 8, 9, 7, 8, 9, 7]).find([5, 7, 8, 9, 7, 8, 9, 7])
    assert match.copy(2) == [8, 9] and match.copy(7) == [8, 9, 7, 8, 9, 7, 8]


@settings(deadline=None, max_examples=80)
@given(st.lists(st.integers(-1, 2), min_size=2, max_size=60), st.lists(st.integers(0, 2), min_size=1), st.data())
def test_a_copy_goes_on_near_its_end_behind_what_is_most_alike(tokens, last, data):
    place = data.draw(st.integers(0, len(tokens) - 1))
    end = next((at for at in range(place, len(tokens)) if tokens[at] == -1), len(tokens))  # of its text
    same = {}
    for at in range(place + 1, min(place + lookup.NEAR + 1, end)):
        while (
            same.setdefault(at, 0) < min(LONGEST, len(last), at) and tokens[at - 1 - same[at]] == last[-1 - same[at]]
        ):
            same[at] += 1
    length = max(same.values(), default=0)
    found = Match(tokens, place, 5).resumed(last)
    assert found == (Match(tokens, min(at for at in same if same[at] == length), length, True) if length else None)


def test_texts_of_a_lookup_do_not_run_into_each_other():
    known = Lookup(documents=[[1, 2, 3], torch.tensor([[2, 3, 4, 5]])])
    known.add(torch.tensor([8, 0, 9]))
    known.remember([3, 9, 6])
    assert known.find([8, 0]).copy(5) == [9]
    assert known.find([2, 3]).copy(5) == [4, 5]  # after the first document nothing follows
    assert known.find([4, 5]) is None  # nor after the second one
    assert known.find([5, 9]).length == 1 and known.find([9, 3]).length == 1
    assert known.find([3, 9]).copy(5) == [6]


def test_the_longest_match_wins_and_of_equals_the_latest_request():
    known = Lookup(documents=[[1, 2, 3, 4, 5, 6]])
    known.remember([0, 4, 5, 7])
    assert known.find([4, 5]).copy(1) == [7]
    assert known.find([1, 2, 3, 4, 5]).copy(1) == [6]
    known.remember([0, 4, 5, 8])
    assert known.find([4, 5]).copy(1) == [8]


def test_a_conversation_is_remembered_once():
    known, text = Lookup(), []
    for turn in range(5):
        text = [*text, *range(100 * turn, 100 * turn + 100)]
        known.remember(text)
    held = known._requests[1].tokens
    assert len(held) == 500 + 5 + 4 * SIZES[0]  # of each turn what is new, a run before it, and an end
    assert known.find(text[:250]).copy(3) == [250, 251, 252] and known.find(text[385:400]).copy(2) == [400, 401]


def test_old_requests_are_forgotten(monkeypatch):
    monkeypatch.setattr(lookup, "MEMORY", 200)
    known, texts = Lookup(documents=[[7000, 7001, 7002]]), [list(range(10 * n, 10 * n + 10)) for n in range(60)]
    for number, text in enumerate(texts, 1):  # of eleven tokens, with its end
        known.remember(text)
        are_kept = [known.find(each[:2]) is not None for each in texts[:number]]
        assert are_kept == sorted(are_kept) and min(number, 100 // 11) <= sum(are_kept) <= 200 // 11 + 2
        assert known.find([7000, 7001]).copy(1) == [7002]


def test_several_threads_add_and_find():
    known, wrong = Lookup(), []

    def write(number):
        for text in range(30):
            start = 10_000 * number + 100 * text
            known.remember(list(range(start, start + 100)))
            for at in range(start, start + 97, 7):
                found = known.find(list(range(start, at + 2)))
                if at > start and (found is None or found.copy(1) != [at + 2]):
                    wrong.append(at)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(known._requests[1].tokens) == 4 * 30 * 101


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        ("a text", r"`documents` is 'a text', expected a list with the token ids of each"),
        (7, "`documents` is 7, expected a list"),
        ([1, 2, 3], r"`documents\[0\]` is 1, expected a list of token ids: pass `tokenizer\(text\).input_ids`"),
        ([[1, 2], "a text"], r"`documents\[1\]` is 'a text', expected a list of token ids"),
        ([[1, -2]], r"`documents\[0\]` is \[1, -2\], expected"),
        ([torch.rand(3)], r"`documents\[0\]` is tensor\(.*, expected"),
        ([torch.ones(2, 3, dtype=torch.long)], r"`documents\[0\]` is tensor\(.*, expected"),
    ],
)
def test_wrong_documents_are_refused_in_a_line(documents, said):
    with pytest.raises(ValueError, match=said) as refused:
        Lookup(documents=documents)
    assert "\n" not in str(refused.value)
