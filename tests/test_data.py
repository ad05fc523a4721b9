import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.data import block_labels, block_mask, load_rows, sample_anchors, to_messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"instruction": "q", "input": "", "output": "a"},
        {"prompt": "q", "completion": "a"},
        {"question": "q", "answer": "a"},
    ],
)
def test_every_spelling_of_a_conversation(row):
    assert to_messages(row) == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_turns_and_worked_answers():
    assert to_messages({"turns": ["a", "b"]}) == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    answer = to_messages({"question": "?", "answer": "1+1=<<1+1=2>>2\n#### 2"})[1]["content"]
    assert answer == "1+1=2\nThe answer is \\boxed{2}."


def test_unknown_columns_and_missing_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="text"):
        to_messages({"text": "x"})
    with pytest.raises(ValueError, match=r"absent\.jsonl"):
        load_rows(str(tmp_path / "absent.jsonl"))


def test_rows_from_a_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"question": str(i), "answer": "a"}) for i in range(3)))
    assert [row["question"] for row in load_rows(str(path))] == ["0", "1", "2"]


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 20), st.integers(1, 8), st.integers(0, 1000))
def test_anchors_and_labels_lie_in_supervised_text(length, count, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, length, generator=generator) < 0.6
    ids = torch.arange(2 * length).view(2, length)
    anchors = sample_anchors(mask, count, generator)
    labels = block_labels(ids, mask, anchors, drafts=3)
    for b in range(2):
        candidates = {i for i in range(length - 1) if mask[b, i] and mask[b, i + 1]}
        chosen = [a for a in anchors[b].tolist() if a >= 0]
        assert set(chosen) <= candidates and len(set(chosen)) == len(chosen) == min(len(candidates), count, length - 1)
        for a, row in zip(anchors[b].tolist(), labels[b].tolist()):
            expected, alive = [], a >= 0
            for k in (1, 2, 3):
                alive = alive and a + k < length and bool(mask[b, a + k])
                expected.append(int(ids[b, a + k]) if alive else -100)
            assert row == expected


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 4), st.integers(1, 9), st.one_of(st.none(), st.integers(1, 5)), st.integers(0, 1000))
def test_mask_equals_a_loop(size, context, window, seed):
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randint(-1, context, (2, 3), generator=generator)
    mask = block_mask(anchors, size, context, window)
    for b in range(2):
        for q in range(3 * size):
            anchor = int(anchors[b, q // size])
            for j in range(context):
                expected = j < anchor and (window is None or j >= anchor - window)
                assert bool(mask[b, 0, q, j]) == expected
            for j in range(3 * size):
                assert bool(mask[b, 0, q, context + j]) == (q // size == j // size)
