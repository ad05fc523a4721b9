import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_hyperdflash.drafters.parts.heads import HeadOutput
from hf_hyperdflash.training.losses.loss import (
    DraftHead,
    LossTerms,
    drafter_loss,
    loss_counts,
    position_weights,
)

from ..helpers.live_memory import LiveMemory
from ..helpers.training import naive_cross_entropy, naive_kl

VOCAB, WIDTH = 7, 5


class RecordingHead(nn.Linear):
    """An LM head that remembers how many rows each of its calls got."""

    def __init__(self, dtype=torch.float64):
        super().__init__(WIDTH, VOCAB, bias=False, dtype=dtype)
        self.rows = []

    def forward(self, states):
        self.rows.append(len(states))
        return super().forward(states)


def example(blocks=5, drafts=4, positions=2, seed=0, labelled=None):
    """States, labels and teacher states; `labelled` is the chance of a label, `None` for two fixed gaps."""
    generator = torch.Generator().manual_seed(seed)
    hidden = 3 * torch.randn(blocks, drafts, WIDTH, dtype=torch.float64, generator=generator)
    teacher = 3 * torch.randn(blocks, positions, WIDTH, dtype=torch.float64, generator=generator)
    labels = torch.randint(0, VOCAB, (blocks, drafts), generator=generator)
    if labelled is None:
        labels[1, 2:] = -100
        labels[3] = -100
    else:
        labels[torch.rand(labels.shape, generator=generator) >= labelled] = -100
    return hidden.requires_grad_(), labels, teacher


def loss_of(hidden, labels, head=None, teacher=None, chunk_size=3, counts=None, weights=None, **options):
    """The loss of what a drafter gives and of the settings in `options`, each by its own name."""
    parts = {name: options.pop(name) for name in ("vectors", "confidence", "blind") if name in options}
    how = {name: options.pop(name) for name in ("table", "draft_ids", "candidates") if name in options}
    terms = LossTerms(chunk_size=chunk_size, position_weights=weights, **options)
    how |= {} if head is None else {"lm_head": head}
    return drafter_loss(HeadOutput(hidden, **parts), labels, teacher, terms, DraftHead(**how), counts)


def unchunked(logits, labels, teacher_logits=None, kl_weight=0.15, kl_temperature=1.0, weights=None, counts=None):
    """Oracle: Eq. 3 of logits that all exist at once, with a gradient by autograd alone."""
    positions = 0 if teacher_logits is None else teacher_logits.shape[1]
    weights = torch.ones(labels.shape[1], dtype=logits.dtype) if weights is None else weights
    counts = loss_counts(labels, positions, weights) if counts is None else counts
    loss = logits.sum() * 0
    for b, k in ((labels != -100).nonzero()).tolist():
        student = (logits[b, k] / kl_temperature).log_softmax(-1)
        loss = loss - weights[k] * logits[b, k].log_softmax(-1)[labels[b, k]] / counts[0]
        if k < positions:
            teacher = (teacher_logits[b, k] / kl_temperature).log_softmax(-1)
            divergence = (teacher.exp() * (teacher - student)).sum()
            loss = loss + kl_weight * kl_temperature**2 / positions * divergence / counts[1 + k]
    return loss


def test_losses_are_torch_alone():
    code = "import sys, hf_hyperdflash.training.losses.loss; print({'transformers', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_position_weights_are_dflash_s():
    assert position_weights(4, None) is None
    expected = [math.exp(-(k - 1) / 2.5) for k in (1, 2, 3, 4)]
    assert position_weights(4, 2.5).tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weights", [None, [1.0, 0.5, 0.25, 0.1]])
def test_counts_equal_a_loop(weights):
    _, labels, _ = example()
    tensor = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    labelled = [(b, k) for b in range(5) for k in range(4) if labels[b, k] != -100]
    expected = [sum(weights[k] if weights else 1.0 for _, k in labelled)]
    expected += [sum(k == position for _, k in labelled) for position in range(3)]
    counts = loss_counts(labels, 3, tensor)
    assert counts.is_floating_point() and counts.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("decay", [None, 2.0])
def test_loss_is_equations_2_and_3(temperature, decay):
    hidden, labels, teacher = example()
    head = RecordingHead()
    weights = position_weights(4, decay)
    logits, teacher_logits = head(hidden.detach()), head(teacher)
    cross_entropy = naive_cross_entropy(logits, labels, [1.0] * 4 if weights is None else weights.tolist())
    kl = naive_kl(logits, teacher_logits, labels, temperature)
    options = {"kl_weight": 0.3, "kl_temperature": temperature}
    if weights is not None:
        options["weights"] = weights.double()
    assert loss_of(logits, labels, None, teacher_logits, **options).loss.item() == pytest.approx(
        cross_entropy + 0.3 * kl
    )
    result = loss_of(hidden, labels, head, teacher, **options)
    assert result.loss.item() == pytest.approx(cross_entropy + 0.3 * kl, rel=1e-12)
    assert result.cross_entropy.item() == pytest.approx(cross_entropy, rel=1e-12)
    assert result.kl.item() == pytest.approx(kl, rel=1e-12)
    without_teacher = loss_of(hidden, labels, head, weights=options.get("weights"))
    assert without_teacher.loss.item() == pytest.approx(cross_entropy, rel=1e-12) and without_teacher.kl == 0


@settings(deadline=None, max_examples=80)
@given(st.data())
def test_chunked_equals_unchunked_for_any_shape(data):
    blocks, drafts, chunk_size = (data.draw(st.integers(1, top)) for top in (5, 4, 8))
    positions = data.draw(st.integers(0, drafts))
    labelled = data.draw(st.sampled_from([0.0, 0.3, 0.8, 1.0]))
    hidden, labels, teacher = example(blocks, drafts, positions, data.draw(st.integers(0, 1000)), labelled)
    decay, temperature = data.draw(st.sampled_from([None, 1.5])), data.draw(st.sampled_from([1.0, 0.7, 2.5]))
    weights = position_weights(drafts, decay)
    options = {"kl_temperature": temperature, "weights": None if weights is None else weights.double()}
    teacher, head = teacher if positions else None, RecordingHead()
    logits = head(hidden)
    expected = unchunked(logits, labels, None if teacher is None else head(teacher).detach(), **options)
    (gradient,) = torch.autograd.grad(expected, hidden)
    head.rows.clear()
    result = loss_of(hidden, labels, head, teacher, chunk_size, **options)
    torch.testing.assert_close(result.loss, expected, rtol=1e-11, atol=1e-13)
    (2.5 * result.loss).backward()
    torch.testing.assert_close(hidden.grad, 2.5 * gradient, rtol=1e-11, atol=1e-13)
    assert head.weight.grad is None and max(head.rows, default=0) <= chunk_size
    taught = 0 if teacher is None else (labels != -100)[:, :positions].sum()
    assert sum(head.rows) == (labels != -100).sum() + taught
    assert torch.equal(result.predictions, logits.argmax(-1).masked_fill(labels == -100, -1))
    assert not (result.cross_entropy.requires_grad or result.kl.requires_grad or result.predictions.requires_grad)


def test_no_labels_is_zero_with_zero_gradient():
    hidden, labels, teacher = example()
    labels, head = torch.full_like(labels, -100), RecordingHead()
    result = loss_of(hidden, labels, head, teacher)
    result.loss.backward()
    assert result.loss == result.cross_entropy == result.kl == 0
    assert hidden.grad.count_nonzero() == 0 and head.rows == [] and (result.predictions == -1).all()


def test_a_count_of_zero_contributes_zero():
    hidden, labels, teacher = example()
    labels[:, 1] = -100  # no block has a label at the second position, which has a teacher
    head = RecordingHead()
    expected = 0.15 * naive_kl(head(hidden.detach()), head(teacher), labels, 1.0)
    counts = loss_counts(labels, 2)
    counts[0] = 0
    result = loss_of(hidden, labels, head, teacher, counts=counts)
    result.loss.backward()
    assert result.cross_entropy == 0 and result.loss.item() == pytest.approx(expected)
    assert hidden.grad.isfinite().all() and hidden.grad[:, 2:].count_nonzero() == 0
    for total in (counts, torch.zeros(3)):  # also in float32, where a division by nearly nothing shows
        states, single = hidden.detach().float().requires_grad_(), RecordingHead(torch.float32)
        single.load_state_dict(head.state_dict())
        result = loss_of(states, labels, single, teacher.float(), counts=total)
        result.loss.backward()
        assert result.loss.item() == pytest.approx(expected if total.any() else 0, rel=1e-5)
        assert states.grad.isfinite().all()


def test_autocast():
    hidden, labels, teacher = example()
    states, head = hidden.detach().float().requires_grad_(), RecordingHead(torch.float32)
    teacher = teacher.float()
    expected = loss_of(states, labels, head, teacher)
    (gradient,) = torch.autograd.grad(expected.loss, states)
    with torch.autocast("cpu", torch.bfloat16):
        result = loss_of(states, labels, head, teacher)
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and not torch.equal(result.loss, expected.loss)
    torch.testing.assert_close(result.loss, expected.loss, rtol=3e-2, atol=0)
    assert (states.grad - gradient).norm() < 3e-2 * gradient.norm()


# Acceptance itself: total variation, a sequential head's table, a confidence head, a choice among the block's best

RANK, ACCEPTANCE = 3, {"tv_weight": 0.7, "ce_weight": 0.4, "confidence_weight": 1.3}


def path_example(labelled=None, blocks=5, drafts=4, seed=0, has_table=True, chooses=False):
    """What a drafter with heads gives, `[states, vectors, table, confidence, blind]`, labels, and a teacher
    everywhere."""
    states, labels, teacher = example(blocks, drafts, drafts, seed, labelled)
    generator = torch.Generator().manual_seed(seed + 1)
    vectors, table, confidence, blind = (
        2 * torch.randn(shape, dtype=torch.float64, generator=generator)
        for shape in ((blocks, drafts, RANK), (VOCAB, RANK), (blocks, drafts), (blocks, drafts, WIDTH))
    )
    heads = [vectors, table, confidence] if has_table else [None, None, confidence]
    return [states.detach(), *heads, *([blind] if chooses else [])], labels, teacher


def naive_acceptance_loss(
    drafted, labels, teacher, head, *, kl_positions, ce_weight, tv_weight, confidence_weight, kl_weight=0.15,
    kl_temperature=1.0, weights=None, counts=None, blind_weight=0.0, candidates=0,
):  # fmt: skip
    """Oracle: one position after the other in float64, gradients by autograd alone. Acceptance is counted as what
    speculative sampling accepts: a token of the draft's q with probability min(1, p / q), where q is nothing but among
    the block's best tokens."""
    states, vectors, table, confidence, *blind = drafted
    weights = torch.ones(labels.shape[1], dtype=torch.float64) if weights is None else weights
    counts = loss_counts(labels, kl_positions, weights) if counts is None else counts
    cross_entropy = kl = tv = foretold = of_block = states.sum() * 0
    acceptance = torch.zeros(labels.shape, dtype=torch.float64)
    predictions = torch.full_like(labels, -1)
    for b, k in (labels != -100).nonzero().tolist():
        logits = states[b, k] @ head.weight.T
        if table is not None:
            logits = logits + torch.stack([vectors[b, k] @ row for row in table])
        p, q = (teacher[b, k] @ head.weight.T).softmax(-1), logits.softmax(-1)
        share = weights[k] / counts[0]
        cross_entropy = cross_entropy - share * q[labels[b, k]].log()
        tv = tv + share * (q - p).abs().sum() / 2
        chosen = range(VOCAB)
        if blind:
            own = (blind[0][b, k] @ head.weight.T).softmax(-1)
            of_block = of_block - share * own[labels[b, k]].log()
            chosen = sorted(chosen, key=lambda token: -own[token].item())[:candidates]
        drawn = {token: logits[token].exp() / sum(logits[other].exp() for other in chosen) for token in chosen}
        predictions[b, k] = max(drawn, key=drawn.get)
        accepted = acceptance[b, k] = sum(q * (p[i] / q).clamp(max=1) for i, q in drawn.items()).detach()
        c = confidence[b, k].sigmoid()
        foretold = foretold - share * (accepted * c.log() + (1 - accepted) * (1 - c).log())
        if k < kl_positions:
            soft_p = (teacher[b, k] @ head.weight.T / kl_temperature).softmax(-1)
            soft_q = (logits / kl_temperature).softmax(-1)
            divergence = (soft_p * (soft_p / soft_q).log()).sum()
            kl = kl + kl_temperature**2 / kl_positions * divergence / counts[1 + k]
    loss = ce_weight * cross_entropy + kl_weight * kl + tv_weight * tv + confidence_weight * foretold
    return [loss + blind_weight * of_block, cross_entropy, kl, tv, foretold, of_block], acceptance, predictions


def acceptance_loss(drafted, labels, teacher, head, chunk_size=3, **options):
    states, vectors, table, confidence, *blind = drafted
    heads = {"vectors": vectors, "table": table, "confidence": confidence, "blind": blind[0] if blind else None}
    return loss_of(states, labels, head, teacher, chunk_size, **heads, **options)


def assert_acceptance_loss_is_the_naive_one(drafted, labels, teacher, chunk_size=3, **options):
    head = RecordingHead()
    leaves = [[None if t is None else t.clone().requires_grad_() for t in drafted] for _ in range(2)]
    expected, acceptance, predictions = naive_acceptance_loss(leaves[0], labels, teacher, head, **options)
    expected[0].backward()
    gradients = [t if t is None else t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves[0]]
    head.zero_grad()
    result = acceptance_loss(leaves[1], labels, teacher, head, chunk_size, **options)
    for found, wanted in zip(result, expected):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.acceptance, acceptance, rtol=1e-10, atol=1e-12)
    assert torch.equal(result.predictions, predictions)
    (2.5 * result.loss).backward()
    for tensor, gradient in zip(leaves[1], gradients):
        if tensor is not None and (gradient.any() or tensor.grad is not None):
            torch.testing.assert_close(tensor.grad, 2.5 * gradient, rtol=1e-9, atol=1e-12)
    assert head.weight.grad is None and max(head.rows, default=0) <= chunk_size
    heads = 2 + (len(drafted) == 5)  # student, teacher, and the block alone
    assert sum(head.rows) == heads * (labels != -100).sum()
    assert not any(term.requires_grad for term in result[1:])


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_acceptance_loss_is_the_naive_one_for_any_shape(data):
    blocks, drafts, chunk_size = (data.draw(st.integers(1, top)) for top in (4, 4, 6))
    positions, labelled = data.draw(st.integers(0, drafts)), data.draw(st.sampled_from([0.0, 0.4, 1.0]))
    seed, has_table, chooses = data.draw(st.integers(0, 1000)), data.draw(st.booleans()), data.draw(st.booleans())
    drafted, labels, teacher = path_example(labelled, blocks, drafts, seed, has_table, chooses)
    weights = position_weights(drafts, data.draw(st.sampled_from([None, 1.5])))
    options = {name: data.draw(st.sampled_from([0.0, 0.3, 2.0])) for name in (*ACCEPTANCE, "kl_weight")}
    if chooses:
        options["candidates"] = data.draw(st.integers(1, VOCAB))
        options["blind_weight"] = data.draw(st.sampled_from([0.0, 0.3, 2.0]))
    options |= {"weights": None if weights is None else weights.double(), "kl_positions": positions}
    options["kl_temperature"] = data.draw(st.sampled_from([1.0, 0.7]))
    if data.draw(st.booleans()):  # of a larger optimizer step
        options["counts"] = 3 + loss_counts(labels, positions, options["weights"])
    assert_acceptance_loss_is_the_naive_one(drafted, labels, teacher, chunk_size, **options)


# A vocabulary of the drafter's own: fewer tokens, in any order, scored by an LM head of its own


def naive_loss_of_an_own_vocabulary(
    states, table, ids, labels, teacher, head, *, kl_positions, ce_weight, tv_weight, kl_weight, kl_temperature
):
    """Oracle: what is learned of each position, from probabilities of single tokens."""
    counts = loss_counts(labels, kl_positions)
    loss = states.sum() * 0
    acceptance, predictions = torch.zeros(labels.shape, dtype=torch.float64), torch.full_like(labels, -1)
    for b, k in (labels != -100).nonzero().tolist():
        logits = torch.stack([states[b, k] @ row for row in table])
        q, of_teacher = logits.softmax(-1), teacher[b, k] @ head.weight.T
        p = of_teacher.softmax(-1)
        accepted = sum(torch.minimum(q[place], p[token]) for place, token in enumerate(ids))
        acceptance[b, k], predictions[b, k] = accepted.detach(), ids[int(q.argmax())]
        loss = loss + tv_weight * (1 - accepted) / counts[0]
        if int(labels[b, k]) in ids:
            loss = loss - ce_weight * q[ids.index(int(labels[b, k]))].log() / counts[0]
        if k < kl_positions:
            soft_p = (of_teacher[ids] / kl_temperature).softmax(-1)
            soft_q = (logits / kl_temperature).softmax(-1)
            divergence = sum(p[token] for token in ids) * (soft_p * (soft_p / soft_q).log()).sum()
            loss = loss + kl_weight * kl_temperature**2 / kl_positions * divergence / counts[1 + k]
    return loss, acceptance, predictions


@settings(deadline=None, max_examples=50)
@given(st.data())
def test_the_loss_of_an_own_vocabulary_is_the_naive_one_for_any_shape(data):
    blocks, drafts, chunk_size = (data.draw(st.integers(1, top)) for top in (4, 4, 6))
    ids = data.draw(st.permutations(range(VOCAB)))[: data.draw(st.integers(1, VOCAB))]
    width, head = data.draw(st.integers(1, 6)), RecordingHead()
    _, labels, teacher = example(blocks, drafts, drafts, data.draw(st.integers(0, 1000)), 0.7)
    states = torch.randn(blocks, drafts, width, dtype=torch.float64, requires_grad=True)
    table = torch.randn(len(ids), width, dtype=torch.float64, requires_grad=True)
    options = {name: data.draw(st.sampled_from([0.0, 0.3, 2.0])) for name in ("ce_weight", "tv_weight", "kl_weight")}
    options |= {
        "kl_positions": data.draw(st.integers(0, drafts)),
        "kl_temperature": data.draw(st.sampled_from([1, 2])),
    }
    expected, acceptance, predictions = naive_loss_of_an_own_vocabulary(
        states, table, ids, labels, teacher, head, **options
    )
    gradients = torch.autograd.grad(expected, [states, table], allow_unused=True)
    result = loss_of(states, labels, head, teacher, chunk_size, table=table, draft_ids=torch.tensor(ids), **options)
    torch.testing.assert_close(result.loss, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.acceptance, acceptance, rtol=1e-10, atol=1e-12)
    assert torch.equal(result.predictions, predictions)
    found = torch.autograd.grad(result.loss, [states, table])
    for gradient, wanted in zip(found, gradients):
        wanted = torch.zeros_like(gradient) if wanted is None else wanted
        torch.testing.assert_close(gradient, wanted, rtol=1e-9, atol=1e-11)
    assert sum(head.rows) == (labels != -100).sum()  # the teacher's alone


def test_the_confidence_term_trains_nothing_but_the_confidence_head():
    drafted, labels, teacher = path_example()
    leaves = [tensor.clone().requires_grad_() for tensor in drafted]
    acceptance_loss(leaves, labels, teacher, RecordingHead(), ce_weight=0.0, kl_weight=0.0, confidence_weight=1.0)[
        0
    ].backward()
    assert [bool(leaf.grad.count_nonzero()) for leaf in leaves] == [False, False, False, True]
    assert leaves[3].grad[labels == -100].count_nonzero() == 0
    unweighted = acceptance_loss(leaves, labels, teacher, RecordingHead(), confidence_weight=0.0)
    (zero,) = torch.autograd.grad(
        unweighted.loss, leaves[3]
    )  # in the graph all the same: DDP waits for every gradient
    assert zero.count_nonzero() == 0 and unweighted.confidence > 0


def test_micro_batches_of_the_acceptance_loss_sum_to_the_big_batch():
    drafted, labels, teacher = path_example(0.6, blocks=9, chooses=True)
    labels[4:6] = -100
    head, weights = RecordingHead(), position_weights(4, 2.0).double()
    options = {**ACCEPTANCE, "weights": weights, "kl_positions": 2, "candidates": 3, "blind_weight": 0.6}
    whole, leaves = ([tensor.clone().requires_grad_() for tensor in drafted] for _ in range(2))
    expected = acceptance_loss(whole, labels, teacher, head, **options)
    expected.loss.backward()
    parts = [slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 9)]
    counts = sum(loss_counts(labels[part], 2, weights) for part in parts)
    results = []
    for part in parts:
        states, vectors, table, confidence, blind = leaves
        rows = [states[part], vectors[part], table, confidence[part], blind[part]]
        results.append(acceptance_loss(rows, labels[part], teacher[part], head, counts=counts, **options))
        results[-1].loss.backward()
    for total, terms in zip(expected[:6], zip(*(result[:6] for result in results))):
        torch.testing.assert_close(sum(terms), total, rtol=1e-11, atol=1e-13)
    for leaf, wanted in zip(leaves, whole):
        torch.testing.assert_close(leaf.grad, wanted.grad, rtol=1e-11, atol=1e-13)


def test_evaluation_takes_no_gradients_and_finds_the_same():
    drafted, labels, teacher = path_example()
    head, leaves = RecordingHead(), [tensor.clone().requires_grad_() for tensor in drafted]
    expected = acceptance_loss(leaves, labels, teacher, head, **ACCEPTANCE)
    with torch.no_grad():
        evaluated = acceptance_loss(leaves, labels, teacher, head, **ACCEPTANCE)
    assert not evaluated.loss.requires_grad and all(torch.equal(a, b) for a, b in zip(evaluated, expected))


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_a_half_precision_head_loses_no_gradient_of_a_large_batch(dtype, tolerance):
    drafted, labels, teacher = path_example(blocks=40, chooses=True)
    head, options = RecordingHead(), {**ACCEPTANCE, "counts": 1e6 * loss_counts(labels, 4), "blind_weight": 0.6}
    options["candidates"] = VOCAB
    exact = [tensor.clone().requires_grad_() for tensor in drafted]
    acceptance_loss(exact, labels, teacher, head, **options).loss.backward()
    half = RecordingHead(dtype)
    half.load_state_dict(head.state_dict())
    leaves = [tensor.float().requires_grad_() for tensor in drafted]
    result = acceptance_loss(leaves, labels, teacher, lambda rows: half(rows.to(dtype)), **options)
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and result.acceptance.dtype == torch.float32
    for leaf, wanted in zip(leaves, exact):
        assert leaf.grad.dtype == torch.float32
        assert (leaf.grad - wanted.grad).norm() < tolerance * wanted.grad.norm()


def test_a_half_precision_table_s_gradient_is_summed_over_chunks_in_float32():
    drafted, labels, teacher = path_example(blocks=150)
    head, gradients = RecordingHead(), []
    for dtype in (torch.float64, torch.bfloat16):
        table = drafted[2].clone().to(dtype).requires_grad_()
        tensors = [drafted[0], drafted[1], table, drafted[3]]
        acceptance_loss(tensors, labels, teacher, head, 1, **ACCEPTANCE).loss.backward()
        gradients.append(table.grad.double())
    assert (gradients[1] - gradients[0]).norm() < 1e-2 * gradients[0].norm()


def test_total_variation_is_exact_at_a_large_vocabulary():
    p = 3 * torch.randn(4, 1, 50_000, dtype=torch.float64)
    q = p + 0.7 * torch.randn(4, 1, 50_000, dtype=torch.float64)
    expected = 1 - (p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2
    result = loss_of(q.float(), torch.zeros(4, 1, dtype=torch.long), None, p.float())
    torch.testing.assert_close(result.acceptance.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_in_memory_at_once(dtype):
    """In tensors of a chunk's logits in float32. Before total variation was there, a third of the positions distilled
    took 3.0 of them in float32 and 2.5 in bfloat16."""
    vocab, width, chunk_size, drafts = 2000, 8, 256, 6
    head = nn.Linear(width, vocab, bias=False, dtype=dtype).requires_grad_(False)
    states, teacher = (torch.randn(90, drafts, width, dtype=dtype) for _ in range(2))
    labels = torch.randint(0, vocab, (90, drafts))

    def peak(taught, **options):
        leaf = states.clone().requires_grad_()
        with LiveMemory() as memory:
            loss_of(leaf, labels, head, taught, chunk_size, **options).loss.backward()
        return memory.peak / (chunk_size * vocab * 4)

    is_single = dtype == torch.float32
    assert peak(teacher[:, :2]) < 2.3
    assert peak(teacher, kl_positions=2, tv_weight=1.0) < (3.3 if is_single else 2.9)
    # A table whose gradient is as large as a chunk's logits.
    vectors, table = (
        torch.randn(shape, requires_grad=True) for shape in ((90, drafts, chunk_size), (vocab, chunk_size))
    )
    assert peak(teacher, kl_positions=2, tv_weight=1.0, vectors=vectors, table=table) < (4.7 if is_single else 4.9)
    blind = torch.randn_like(states).requires_grad_()
    chosen = dict(blind=blind, candidates=64, blind_weight=1.0)
    assert peak(teacher, kl_positions=2, tv_weight=1.0, **chosen) < (3.5 if is_single else 3.1)
