import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_hyperdflash.drafters.parts.block_attention import AttentionSpan
from hf_hyperdflash.drafters.parts.layers import block_inputs
from hf_hyperdflash.training.data.blocks import (
    anchor_candidates,
    anchor_seeds,
    block_labels,
    block_mask,
    expected_rounds,
    previous_tokens,
    sample_anchors,
    walk_rounds,
)

DOCUMENTS = st.lists(st.integers(1, 9), min_size=1, max_size=4)  # lengths of the documents packed in a row


def packed(lengths: list[int], seed: int):
    """A row of documents: ids, a random loss mask, positions, and for each token its document."""
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = [d for d, n in enumerate(lengths) for _ in range(n)]
    mask = torch.rand(positions.shape, generator=torch.Generator().manual_seed(seed)) < 0.7
    return torch.arange(100, 100 + len(documents))[None], mask, positions, documents


def test_a_block_is_the_anchor_and_mask_tokens():
    ids, positions = block_inputs(torch.tensor([[7, 8]]), torch.tensor([[3, 10]]), block_size=4, mask_token_id=1)
    assert ids.tolist() == [[7, 1, 1, 1, 8, 1, 1, 1]]
    assert positions.tolist() == [[3, 4, 5, 6, 10, 11, 12, 13]]


@settings(deadline=None, max_examples=60)
@given(DOCUMENTS, st.integers(1, 8), st.integers(0, 1000))
def test_anchors_and_labels_lie_in_supervised_text_of_one_document(lengths, count, seed):
    ids, mask, positions, documents = packed(lengths, seed)
    length = len(documents)
    expected = [
        i for i in range(length - 1) if mask[0, i] and mask[0, i + 1] and documents[i] == documents[i + 1]
    ]  # fmt: skip
    candidates = anchor_candidates(mask, positions)
    assert candidates[0].nonzero().flatten().tolist() == expected
    assert [a for a in sample_anchors(candidates)[0].tolist() if a >= 0] == expected
    anchors = sample_anchors(candidates, count, [seed])
    chosen = [a for a in anchors[0].tolist() if a >= 0]
    assert set(chosen) <= set(expected) and sorted(set(chosen)) == chosen and len(chosen) == min(len(expected), count)
    labels = block_labels(ids, mask, positions, anchors, drafts=3)
    for a, row in zip(anchors[0].tolist(), labels[0].tolist()):
        wanted, alive = [], a >= 0
        for k in (1, 2, 3):
            alive = alive and a + k < length and bool(mask[0, a + k]) and documents[a + k] == documents[a]
            wanted.append(int(ids[0, a + k]) if alive else -100)
        assert row == wanted
    for a, row, before in zip(anchors[0].tolist(), labels[0].tolist(), previous_tokens(ids, anchors, 3)[0].tolist()):
        for k in range(3):  # of a draft that has a label, the anchor or the label before
            assert row[k] == -100 or before[k] == (ids[0, a] if k == 0 else row[k - 1])
            assert before[k] == ids[0, min(max(a, 0) + k, length - 1)]


@settings(deadline=None, max_examples=60)
@given(
    DOCUMENTS, st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)), st.booleans(), st.booleans(),
    st.integers(0, 1000),
)  # fmt: skip
def test_mask_equals_a_loop(lengths, size, window, from_slot, causal, seed):
    _, _, positions, documents = packed(lengths, seed)
    context = len(documents)
    anchors = torch.randint(-1, context, (1, 3), generator=torch.Generator().manual_seed(seed))
    mask = block_mask(anchors, positions, size, AttentionSpan(window, from_slot, causal))
    for q in range(3 * size):
        anchor = int(anchors[0, q // size])
        for j in range(context):
            expected = (
                anchor >= 0
                and j < anchor
                and documents[j] == documents[anchor]
                and (window is None or (anchor + q % size - j < window if from_slot else anchor - j <= window))
            )
            assert bool(mask[0, 0, q, j]) == expected
        for j in range(3 * size):
            expected = q // size == j // size and (not causal or j <= q)
            if window is not None and from_slot:
                expected = expected and abs(j - q) < window
            assert bool(mask[0, 0, q, context + j]) == expected


def test_anchors_depend_on_seed_step_and_text_alone():
    ids = torch.arange(60).view(2, 30)
    mask = torch.ones(2, 30, dtype=torch.bool)

    def drawn(rows, pad=0, seed=0, step=0):
        padded, padding = torch.nn.functional.pad(ids[rows], (0, pad)), torch.nn.functional.pad(mask[rows], (0, pad))
        places = torch.arange(30 + pad).expand(len(rows), -1)
        seeds = anchor_seeds(padded, padding, seed, step)
        return sample_anchors(anchor_candidates(padding, places), 5, seeds).tolist()

    assert drawn([0, 1]) == drawn([0]) + drawn([1], pad=9)
    assert len({str(drawn([0], seed=s, step=t)) for s in range(2) for t in range(2)}) == 4


@pytest.mark.parametrize(
    "matched, following, rounds",
    [
        # Text of eight supervised tokens at 0..7, three drafts: anchors 0..6, up to four tokens follow each.
        ([3, 0, 0, 0, 3, 0, 0], [4, 4, 4, 4, 3, 2, 1], [(4, 3), (3, 3)]),  # all accepted; the last three end the text
        ([0] * 7, [4, 4, 4, 4, 3, 2, 1], [(1, 0)] * 7),
        ([1, 9, 2, 9, 9, 1, 9], [4, 4, 4, 4, 3, 2, 1], [(2, 1), (3, 2), (2, 1)]),
    ],
)
def test_walking_the_rounds(matched, following, rounds):
    anchors = torch.tensor([*range(7), -1])
    assert walk_rounds(anchors, torch.tensor([*matched, 0]), torch.tensor([*following, 0])) == rounds


def test_walking_goes_on_in_the_next_stretch():
    anchors = torch.tensor([0, 1, 10, 11])
    assert walk_rounds(anchors, torch.tensor([1, 0, 0, 0]), torch.tensor([2, 1, 2, 1])) == [(2, 1), (1, 0), (1, 0)]


@settings(deadline=None)
@given(st.data())
def test_expected_rounds_equal_a_recursion_over_what_a_round_may_emit(data):
    stretches = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))  # anchors of each; one more token
    drafts = data.draw(st.integers(1, 3))
    rate = st.sampled_from([0.0, 0.25, 0.7, 1.0])
    anchors, following, rates, expected, begin = [], [], [], 0.0, 2
    for length in stretches:
        left = {begin + i: length - i for i in range(length)}
        rate_of = {a: [data.draw(rate) for _ in range(drafts)] for a in left}

        def rounds_from(anchor, left=left, rate_of=rate_of):
            if anchor not in left:  # the text's last token is out
                return 0.0
            possible, total, alive = min(drafts, left[anchor]), 1.0, 1.0
            for accepted in range(possible):
                total += alive * (1 - rate_of[anchor][accepted]) * rounds_from(anchor + accepted + 1)
                alive *= rate_of[anchor][accepted]
            return total + alive * rounds_from(anchor + min(possible + 1, left[anchor]))

        expected += rounds_from(begin)
        anchors += left
        following += [min(n, drafts + 1) for n in left.values()]
        rates += rate_of.values()
        begin += length + 1
    found = expected_rounds(
        torch.tensor([*anchors, -1]), torch.tensor([*rates, [0.5] * drafts]), torch.tensor([*following, 0])
    )
    assert found == pytest.approx(expected)
