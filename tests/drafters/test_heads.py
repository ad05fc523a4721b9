"""Heads, one step at a time and over whole blocks, against their formulas written out in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_hyperdflash.drafters.parts.heads import HEADS, ConfidenceHead, SequentialHead, run_heads

from ..helpers import oracle_heads as oracle

SIZES = st.integers(1, 5)


def config(width: int = 6, rank: int = 4, vocabulary: int = 9, drafted: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        target_hidden_size=width, head_rank=rank, vocab_size=vocabulary, draft_vocab_size=drafted,
        rms_norm_eps=oracle.EPSILON,
    )  # fmt: skip


def trained(module: nn.Module, seed: int = 0) -> nn.Module:
    """In float64, with other weights than it starts with."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.double().parameters():
        parameter.data.normal_(std=0.5, generator=generator)
    return module


def head_of(kind: str, *sizes: int, seed: int = 0) -> SequentialHead:
    return trained(HEADS[kind](config(*sizes)), seed)


def weights_of(module: nn.Module) -> oracle.Weights:
    return {name: value.numpy() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("kind", HEADS)
@settings(deadline=None, max_examples=25)
@given(SIZES, SIZES, SIZES, st.integers(0, 3), SIZES, st.tuples(SIZES, SIZES), st.integers(0, 10**6))
def test_every_head_follows_its_formula(kind, width, rank, vocabulary, fewer, drafts, rows, seed):
    """Step by step with the state that the step before left, and the same over blocks of a batch at once."""
    drafted = max(vocabulary - fewer, 1) if fewer else 0
    head = head_of(kind, width, rank, vocabulary, drafted, seed=seed)
    judge = trained(ConfidenceHead(config(width), head.memory_size), seed + 1)
    weights, judging = weights_of(head), weights_of(judge)
    off = 1e-4 if kind == "state" else 1e-12  # norms are computed in float32, and each step reads the one before
    torch.manual_seed(seed)
    hidden = torch.randn(*rows, drafts, width, dtype=torch.float64)
    embeds, ids = torch.randn_like(hidden), torch.randint(0, vocabulary, (*rows, drafts))
    with torch.no_grad():
        whole = run_heads(hidden, ids, embeds, head, judge)
    for row in np.ndindex(*rows):
        expected, carried = oracle.ORACLES[kind](weights), None
        for k in range(drafts):
            h, token, embedded = hidden[row][k].numpy(), int(ids[row][k]), embeds[row][k].numpy()
            z, bias = expected(h, token, embedded)
            with torch.no_grad():
                step = head(hidden[row][k], ids[row][k], embeds[row][k], carried)
            carried = step.carried
            for states, vectors in ((step.states, step.vectors), (whole.states[row][k], whole.vectors)):
                np.testing.assert_allclose(states, z, atol=off, rtol=off)
                if head.table is None:
                    assert vectors is None
                else:
                    vectors = vectors if vectors is step.vectors else vectors[row][k]
                    np.testing.assert_allclose(head.table.detach() @ vectors, bias, atol=off)
                    assert len(bias) == (drafted or vocabulary)
            sure = oracle.confidence(judging, h, oracle.remembered(kind, weights, token, embedded))
            with torch.no_grad():
                alone = judge(hidden[row][k], step.memory)
            np.testing.assert_allclose(torch.sigmoid(torch.stack([alone, whole.confidence[row][k]])), [sure] * 2, off)


@pytest.mark.parametrize("kind", HEADS)
def test_a_confidence_judges_drafts_and_does_not_shape_them(kind):
    head, hidden = head_of(kind), torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    embeds, ids = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), torch.randint(0, 9, (5,))
    judge = trained(ConfidenceHead(config(), head.memory_size))
    out = run_heads(hidden, ids, embeds, head, judge)
    out.confidence.sum().backward()
    assert all(part.grad is None for part in (hidden, embeds, *head.parameters()))
    assert all(part.grad.any() for part in judge.parameters())
    (out.states if out.vectors is None else out.vectors @ head.table.T).square().sum().backward()
    assert all(part.grad.any() for part in head.parameters())
