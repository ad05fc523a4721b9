"""The loss against a loop over positions and tokens; its numbers in half precision; its memory."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_hyperdflash.drafters.parts.heads import HeadOutput
from hf_hyperdflash.training.losses.loss import DraftHead, LossTerms, drafter_loss, loss_counts, position_weights

from ..helpers.live_memory import LiveMemory

VOCAB, WIDTH, RANK = 7, 5, 3
ACCEPTANCE = {"tv_weight": 0.7, "ce_weight": 0.4, "confidence_weight": 1.3}
NAMES = ("states", "vectors", "table", "confidence", "blind")


class RecordingHead(nn.Linear):
    """An LM head that remembers how many rows each of its calls got."""

    def __init__(self, dtype=torch.float64):
        super().__init__(WIDTH, VOCAB, bias=False, dtype=dtype)
        self.rows = []

    def forward(self, states):
        self.rows.append(len(states))
        return super().forward(states)


def example(blocks=5, drafts=4, seed=0, labelled=0.8, given=("states", "vectors", "table", "confidence"), own=VOCAB):
    """What a drafter gives, by name, labels, and a teacher everywhere; `labelled` is the chance of a label."""
    chance = torch.Generator().manual_seed(seed)
    shapes = {
        "states": (blocks, drafts, WIDTH), "vectors": (blocks, drafts, RANK), "confidence": (blocks, drafts),
        "blind": (blocks, drafts, WIDTH), "table": (own, RANK if "vectors" in given else WIDTH),
    }  # fmt: skip
    made = {name: 2 * torch.randn(shapes[name], dtype=torch.float64, generator=chance) for name in given}
    labels = torch.randint(0, VOCAB, (blocks, drafts), generator=chance)
    labels[torch.rand(labels.shape, generator=chance) >= labelled] = -100
    return made, labels, 3 * torch.randn(blocks, drafts, WIDTH, dtype=torch.float64, generator=chance)


def loss_of(made, labels, teacher, head=None, chunk_size=3, counts=None, ids=None, candidates=0, **terms):
    how = {"table": made.get("table"), "candidates": candidates} | ({"lm_head": head} if head else {})
    drafted = HeadOutput(**{name: value for name, value in made.items() if name != "table"})
    how["draft_ids"] = None if ids is None else torch.tensor(ids)
    return drafter_loss(drafted, labels, teacher, LossTerms(chunk_size=chunk_size, **terms), DraftHead(**how), counts)


def leaves_of(made, dtype=torch.float64):
    return {name: value.to(dtype, copy=True).requires_grad_() for name, value in made.items()}


def naive_loss(
    made, labels, teacher, head, *, kl_positions, ce_weight, tv_weight, kl_weight, confidence_weight, kl_temperature,
    blind_weight, position_weights, counts, ids, candidates, kl_by_token,
):  # fmt: skip
    """Oracle: one position and one token after the other in float64, gradients by autograd alone. Acceptance is what
    speculative sampling accepts: a token of the draft's q with probability min(1, p / q), where q is nothing but among
    the block's best tokens. A drafter with a vocabulary of its own learns nothing of tokens that it cannot draft."""
    drafts, taught = labels.shape[1], 0 if teacher is None else teacher.shape[1]
    kl_positions, ids = min(taught, kl_positions), list(range(VOCAB)) if ids is None else ids
    weights = [1.0] * drafts if position_weights is None else position_weights.tolist()
    at = (labels != -100).nonzero().tolist()
    of_batch = [sum(weights[k] for _, k in at), *(sum(k == each for _, k in at) for each in range(kl_positions))]
    counts = of_batch if counts is None else counts.tolist()
    cross_entropy = kl = tv = foretold = blind = made["states"].sum() * 0
    acceptance, predictions = torch.zeros(labels.shape, dtype=torch.float64), torch.full_like(labels, -1)
    for b, k in at:
        state, label, share = made["states"][b, k], int(labels[b, k]), weights[k] / counts[0]
        if "table" in made and "vectors" not in made:  # an LM head of its own
            logits = torch.stack([state @ row for row in made["table"]])
        else:
            logits = state @ head.weight.T
            if "table" in made:
                logits = logits + torch.stack([made["vectors"][b, k] @ row for row in made["table"]])
        q = logits.softmax(-1)
        if label in ids:
            cross_entropy = cross_entropy - share * q[ids.index(label)].log()
        chosen = range(len(ids))
        if "blind" in made and (candidates or blind_weight):
            is_own = "table" in made and "vectors" not in made
            own = ((made["table"] if is_own else head.weight) @ made["blind"][b, k]).softmax(-1)
            if label in ids:
                blind = blind - share * own[ids.index(label)].log()
            if candidates:
                chosen = sorted(chosen, key=lambda token: -own[token].item())[:candidates]
        drawn = {place: logits[place].exp() / sum(logits[other].exp() for other in chosen) for place in chosen}
        predictions[b, k] = ids[max(drawn, key=drawn.get)]
        if k >= taught:
            continue
        of_teacher = teacher[b, k] @ head.weight.T
        p = of_teacher.softmax(-1)
        if taught == drafts:
            tv = tv + share * (1 - sum(torch.minimum(q[place], p[token]) for place, token in enumerate(ids)))
            accepted = sum(q * (p[ids[place]] / q).clamp(max=1) for place, q in drawn.items()).detach()
            acceptance[b, k] = accepted
            if "confidence" in made:
                c = made["confidence"][b, k].sigmoid()
                foretold = foretold - share * (accepted * c.log() + (1 - accepted) * (1 - c).log())
        if k < kl_positions:
            soft_p, soft_q = (of_teacher[ids] / kl_temperature).softmax(-1), (logits / kl_temperature).softmax(-1)
            divergence = p[ids].sum() * (soft_p * (soft_p / soft_q).log()).sum()
            part = share if kl_by_token else 1 / kl_positions / counts[1 + k]
            kl = kl + kl_temperature**2 * divergence * part
    loss = ce_weight * cross_entropy + kl_weight * kl + tv_weight * tv + confidence_weight * foretold
    return [loss + blind_weight * blind, cross_entropy, kl, tv, foretold, blind], acceptance, predictions


@pytest.mark.parametrize("kind", ["plain", "table", "candidates", "own"])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_the_loss_is_the_loops_for_any_drafter_and_any_shape(kind, data):
    """Plain, with a head's table, with a choice among candidates, with a vocabulary of its own; with no teacher, with
    one of the first positions, and with one of all, which acceptance and confidence need; also of a part of a step."""
    draw = lambda strategy: data.draw(strategy)  # noqa: E731
    blocks, drafts, chunk_size = (draw(st.integers(1, top)) for top in (4, 4, 6))
    taught = draw(st.sampled_from([drafts, drafts, draw(st.integers(0, drafts))]))
    more = ["blind"] * draw(st.booleans())  # which has a loss of its own without candidates, too
    given = {"plain": more, "table": ["vectors", "table", *more], "own": ["table", *more],
             "candidates": draw(st.sampled_from([["blind"], ["vectors", "table", "blind"]]))}[kind]  # fmt: skip
    given = ["states", *given, *["confidence"] * (taught == drafts and draw(st.booleans()))]
    ids = draw(st.permutations(range(VOCAB)))[: draw(st.integers(1, VOCAB))] if kind == "own" else None
    labelled, seed = draw(st.sampled_from([1.0, 0.4, 0.0])), draw(st.integers(0, 1000))
    made, labels, teacher = example(blocks, drafts, seed, labelled, given, len(ids or range(VOCAB)))
    teacher, head = teacher[:, :taught] if taught else None, RecordingHead()
    weights = position_weights(drafts, draw(st.sampled_from([None, 1.5])))
    options = {name: draw(st.sampled_from([0.3, 2.0, 0.0])) for name in (*ACCEPTANCE, "kl_weight", "blind_weight")}
    options["position_weights"] = None if weights is None else weights.double()
    options |= {
        "kl_positions": draw(st.sampled_from([drafts, max(1, drafts - 1), 0])),
        "kl_temperature": draw(st.sampled_from([1.0, 0.7])),
    }
    options["kl_by_token"] = draw(st.booleans())
    options |= {"candidates": draw(st.integers(1, VOCAB)) if kind == "candidates" else 0, "ids": ids}
    distilled = min(taught, options["kl_positions"])
    is_part = draw(st.booleans())
    options["counts"] = 3 + loss_counts(labels, distilled, options["position_weights"]) if is_part else None
    leaves, expected_leaves = leaves_of(made), leaves_of(made)
    expected, acceptance, predictions = naive_loss(expected_leaves, labels, teacher, head, **options)
    (2.5 * expected[0]).backward()
    head.zero_grad()
    result = loss_of(leaves, labels, teacher, head, chunk_size, **options)
    has_label = labels != -100
    of_teacher = has_label if taught == drafts else has_label[:, :distilled]
    has_block = "blind" in made and kind != "own" and bool(options["candidates"] or options["blind_weight"])
    calls = (kind != "own") * has_label.sum() + of_teacher.sum() + has_block * has_label.sum()
    assert sum(head.rows) == calls and max(head.rows, default=0) <= chunk_size
    (2.5 * result.loss).backward()
    for found, wanted in zip(result, expected):
        torch.testing.assert_close(found, wanted.detach(), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result.acceptance, acceptance, rtol=1e-10, atol=1e-12)
    assert torch.equal(result.predictions, predictions) and not any(term.requires_grad for term in result[1:])
    for name, leaf in leaves.items():
        wanted = expected_leaves[name].grad
        if name == "blind" and not options["blind_weight"]:
            assert leaf.grad is None
        else:  # also of a weight of 0: DDP waits for every gradient
            torch.testing.assert_close(
                leaf.grad, torch.zeros_like(leaf) if wanted is None else wanted, rtol=1e-9, atol=1e-11
            )
    assert head.weight.grad is None
    with torch.no_grad():
        evaluated = loss_of(leaves, labels, teacher, head, chunk_size, **options)
    assert not evaluated.loss.requires_grad and all(torch.equal(a, b) for a, b in zip(evaluated, result))


def test_losses_are_torch_alone():
    code = "import sys, hf_hyperdflash.training.losses.loss; print({'transformers', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_position_weights_are_dflash_s_and_counts_are_a_loop_s():
    assert position_weights(4, None) is None
    weights = [math.exp(-(k - 1) / 2.5) for k in (1, 2, 3, 4)]
    assert position_weights(4, 2.5).tolist() == pytest.approx(weights, rel=1e-6)
    _, labels, _ = example()
    at = (labels != -100).nonzero().tolist()
    for each in (None, torch.tensor(weights, dtype=torch.float64)):
        expected = [sum(1.0 if each is None else weights[k] for _, k in at)]
        expected += [sum(k == position for _, k in at) for position in range(3)]
        counts = loss_counts(labels, 3, each)
        assert counts.is_floating_point() and counts.tolist() == pytest.approx(expected)


def test_a_count_of_zero_contributes_zero():
    """Of cross-entropy there is none, or of anything; also in float32, where a division by nearly nothing shows."""
    made, labels, teacher = example(given=("states",))
    labels[:, 1] = -100  # no block has a label at the second position, which has a teacher
    head, teacher = RecordingHead(torch.float32), teacher[:, :2].float()
    expected = loss_of(leaves_of(made, torch.float32), labels, teacher, head, ce_weight=0.0).loss.item()
    counts = loss_counts(labels, 2)
    counts[0] = 0
    for total in (counts, torch.zeros(3)):
        leaves = leaves_of(made, torch.float32)
        result = loss_of(leaves, labels, teacher, head, counts=total)
        result.loss.backward()
        assert result.cross_entropy == 0
        assert result.loss.item() == pytest.approx(expected if total.any() else 0, rel=1e-5)
        gradient = leaves["states"].grad
        assert gradient.isfinite().all() and gradient[:, 2:].count_nonzero() == 0


def test_autocast():
    made, labels, teacher = example(given=("states",))
    leaves, head, teacher = leaves_of(made, torch.float32), RecordingHead(torch.float32), teacher.float()
    expected = loss_of(leaves, labels, teacher, head)
    (gradient,) = torch.autograd.grad(expected.loss, leaves["states"])
    with torch.autocast("cpu", torch.bfloat16):
        result = loss_of(leaves, labels, teacher, head)
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and not torch.equal(result.loss, expected.loss)
    torch.testing.assert_close(result.loss, expected.loss, rtol=3e-2, atol=0)
    assert (leaves["states"].grad - gradient).norm() < 3e-2 * gradient.norm()


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 3e-2), (torch.float16, 4e-3)])
def test_a_half_precision_head_loses_no_gradient_of_a_large_batch(dtype, tolerance):
    made, labels, teacher = example(40, given=NAMES)
    head, options = RecordingHead(), {**ACCEPTANCE, "blind_weight": 0.6, "candidates": VOCAB}
    options["counts"] = 1e6 * loss_counts(labels, 4)
    exact, leaves = leaves_of(made), leaves_of(made, torch.float32)
    loss_of(exact, labels, teacher, head, **options).loss.backward()
    half = RecordingHead(dtype)
    half.load_state_dict(head.state_dict())
    result = loss_of(leaves, labels, teacher, lambda rows: half(rows.to(dtype)), **options)
    result.loss.backward()
    assert result.loss.dtype == torch.float32 and result.acceptance.dtype == torch.float32
    for name, leaf in leaves.items():
        assert leaf.grad.dtype == torch.float32
        assert (leaf.grad - exact[name].grad).norm() < tolerance * exact[name].grad.norm()


def test_a_half_precision_table_s_gradient_is_summed_over_chunks_in_float32():
    made, labels, teacher = example(150)
    head, gradients = RecordingHead(), []
    for dtype in (torch.float64, torch.bfloat16):
        table = made["table"].to(dtype, copy=True).requires_grad_()
        loss_of(made | {"table": table}, labels, teacher, head, 1, **ACCEPTANCE).loss.backward()
        gradients.append(table.grad.double())
    assert (gradients[1] - gradients[0]).norm() < 1e-2 * gradients[0].norm()


def test_a_chunk_of_any_size_is_the_same_loss():
    """Also of many rows, which are computed a few at a time."""
    made, labels, teacher = example(40, given=NAMES)
    head, options = RecordingHead(), {**ACCEPTANCE, "blind_weight": 0.6, "candidates": 3}
    results, gradients = [], []
    for chunk_size in (3, 1000):
        leaves = leaves_of(made)
        results.append(loss_of(leaves, labels, teacher, head, chunk_size, **options))
        results[-1].loss.backward()
        gradients.append([leaf.grad for leaf in leaves.values()])
    assert max(head.rows) > 100
    for one, other in zip((*results[0], *gradients[0]), (*results[1], *gradients[1]), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-9, atol=1e-11)


def test_total_variation_is_exact_at_a_large_vocabulary():
    p = 3 * torch.randn(4, 1, 50_000, dtype=torch.float64)
    q = p + 0.7 * torch.randn(4, 1, 50_000, dtype=torch.float64)
    expected = 1 - (p.softmax(-1) - q.softmax(-1)).abs().sum(-1) / 2
    result = loss_of({"states": q.float()}, torch.zeros(4, 1, dtype=torch.long), p.float())
    torch.testing.assert_close(result.acceptance.double(), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_in_memory_at_once(dtype):
    """In tensors of a chunk's logits in float32. Before total variation was there, a third of the positions distilled
    took 3.0 of them in float32 and 2.5 in bfloat16."""
    vocab, width, chunk_size, drafts = 2000, 8, 256, 6
    head = nn.Linear(width, vocab, bias=False, dtype=dtype).requires_grad_(False)
    states, teacher = (torch.randn(90, drafts, width, dtype=dtype) for _ in range(2))
    labels = torch.randint(0, vocab, (90, drafts))

    def peak(taught, candidates=0, others=(), **terms):
        with LiveMemory() as memory:
            made = {"states": states.clone().requires_grad_(), **dict(others)}
            loss_of(made, labels, taught, head, chunk_size, candidates=candidates, **terms).loss.backward()
        return memory.peak / (chunk_size * vocab * 4)

    is_single, all_terms = dtype == torch.float32, {"kl_positions": 2, "tv_weight": 1.0}
    assert peak(teacher[:, :2]) < 2.3
    assert peak(teacher, **all_terms) < (3.3 if is_single else 2.9)
    # A table whose gradient is as large as a chunk's logits.
    shapes = {"vectors": (90, drafts, chunk_size), "table": (vocab, chunk_size)}
    large = {name: torch.randn(shape, requires_grad=True) for name, shape in shapes.items()}
    assert peak(teacher, others=large, **all_terms) < (4.7 if is_single else 4.9)
    chosen = {"blind": torch.randn_like(states).requires_grad_()}
    assert peak(teacher, 64, chosen, blind_weight=1.0, **all_terms) < (3.5 if is_single else 3.1)
