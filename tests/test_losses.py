import math

import pytest
import torch

from hf_hyperdflash.losses import draft_cross_entropy, draft_kl, drafter_loss


def example(blocks=5, drafts=4, vocab=7, positions=2):
    logits = torch.randn(blocks, drafts, vocab, dtype=torch.float64)
    teacher = torch.randn(blocks, positions, vocab, dtype=torch.float64)
    labels = torch.randint(0, vocab, (blocks, drafts))
    labels[1, 2:] = -100
    labels[3] = -100
    return logits, teacher, labels


def softmax(row, temperature=1.0):
    top = max(row)
    weights = [math.exp((value - top) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]


def test_cross_entropy_equals_a_loop():
    logits, _, labels = example()
    terms = [
        -math.log(softmax(logits[b, k].tolist())[labels[b, k]])
        for b in range(5) for k in range(4) if labels[b, k] != -100
    ]  # fmt: skip
    assert draft_cross_entropy(logits, labels).item() == pytest.approx(sum(terms) / len(terms), rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_kl_equals_equation_2(temperature):
    logits, teacher, labels = example()
    total = 0.0
    for k in range(2):
        terms = []
        for b in range(5):
            if labels[b, k] == -100:
                continue
            p, q = softmax(teacher[b, k].tolist(), temperature), softmax(logits[b, k].tolist(), temperature)
            terms.append(sum(pi * math.log(pi / qi) for pi, qi in zip(p, q)))
        total += sum(terms) / len(terms)
    expected = temperature**2 / 2 * total
    assert draft_kl(logits, teacher, labels, temperature).item() == pytest.approx(expected, rel=1e-5)


def test_loss_is_equation_3():
    logits, teacher, labels = example()
    expected = draft_cross_entropy(logits, labels) + 0.15 * draft_kl(logits, teacher, labels)
    torch.testing.assert_close(drafter_loss(logits, labels, teacher, kl_weight=0.15), expected)
    torch.testing.assert_close(drafter_loss(logits, labels), draft_cross_entropy(logits, labels))


def test_no_labels_is_zero_not_nan():
    logits, teacher, labels = example()
    assert drafter_loss(logits, torch.full_like(labels, -100), teacher).item() == 0


def test_shapes_are_checked():
    logits, _, labels = example()
    with pytest.raises(ValueError, match="expected equal"):
        drafter_loss(logits, labels[:, :2])
