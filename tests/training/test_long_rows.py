"""Memory of a training step over long rows: bounded by anchors and a window, and never by the square of a row."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_hyperdflash.drafters.unrolled import drafter as of_unrolled
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.data import blocks
from hf_hyperdflash.training.losses.objective import make_objective

from ..conftest import prompt, tiny_drafter
from ..helpers.families import qwen3
from ..helpers.unrolled import unrolled

WINDOWS = [("anchor", 16), ("slot", 16), ("anchor", None)]


def made(tmp_path, kind, anchors, window=("anchor", 16)):
    target = qwen3(8).eval()
    if kind == "hyperdflash":
        read = dict(reducer="fc", target_layer_ids=[1, 5], num_draft_tokens=4)
        drafter = tiny_drafter(target, **read, sliding_window=window[1], window_from=window[0])
    else:
        drafter = unrolled(kind, target, max_blocks=3)
    settings = dict(use_cpu=True, report_to="none", num_anchors=anchors, recipe=kind)
    arguments = HyperDFlashTrainingArguments(str(tmp_path), **settings)
    return drafter.train(), make_objective(drafter, target_of(target), arguments, 0)


def batch_of(objective, lengths):
    """Rows of several documents each, of the given lengths."""
    rows = [prompt(sum(row), seed=i)[0] for i, row in enumerate(lengths)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    positions = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    for i, own in enumerate(positions):  # padding belongs to the last document
        more = ids.shape[1] - len(own)
        positions[i] = torch.cat([own, own[-1] + torch.arange(1, more + 1)])
    mask = ids % 3 != 0
    for row, own in zip(mask, rows):
        row[len(own) :] = False
    mask[0, : len(rows[0]) * 3 // 4] = False  # fewer anchors than the others have
    streams = len(objective.layer_ids) * objective.target.streams
    residual = torch.randn(*ids.shape, streams, objective.target.config.hidden_size)
    batch = {"input_ids": ids, "loss_mask": mask, "position_ids": torch.stack(positions), "residual": residual}
    objective.add_anchors(batch, 0)
    return batch


def step(drafter, objective, batch):
    drafter.zero_grad()
    loss = objective.step(drafter, dict(batch)).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_in_pieces_learn_as_under_one_mask(tmp_path, monkeypatch, window):
    drafter, objective = made(tmp_path, "hyperdflash", 9, window)
    batch = batch_of(objective, [(30, 25), (40,), (12, 20, 9)])
    assert (batch["anchors"] < 0).any()
    whole = step(drafter, objective, batch)
    monkeypatch.setattr(blocks, "_LARGE", 0)
    monkeypatch.setattr(blocks, "_BLOCKS_OF_A_PIECE", 4)
    in_pieces = []
    real = blocks.block_pieces
    monkeypatch.setattr(blocks, "block_pieces", lambda *given: in_pieces.append(real(*given)) or in_pieces[-1])
    torch.testing.assert_close(step(drafter, objective, batch), whole, atol=1e-6, rtol=1e-4)
    (pieces,) = in_pieces
    assert len(pieces.pieces) == 9


@pytest.mark.parametrize("kind", ["eagle3", "specblock"])
def test_entries_in_pieces_learn_as_under_one_mask(tmp_path, monkeypatch, kind):
    drafter, objective = made(tmp_path, kind, 5)
    batch = batch_of(objective, [(30, 25), (40,), (12, 20, 9)])
    in_pieces = step(drafter, objective, batch)
    monkeypatch.setattr(of_unrolled, "entry_pieces", of_unrolled.entry_mask)
    torch.testing.assert_close(in_pieces, step(drafter, objective, batch), atol=1e-6, rtol=1e-4)


class Largest(TorchDispatchMode):
    """Counts the elements of the largest tensor that is made."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return out


@pytest.mark.parametrize(
    ("kind", "row", "anchors"), [("hyperdflash", 4096, 96), ("eagle3", 1024, 8), ("specblock", 1024, 4)]
)
def test_no_tensor_has_as_many_elements_as_pairs_of_positions(tmp_path, monkeypatch, kind, row, anchors):
    with Largest() as alone:  # of torch itself
        query, key = torch.randn(1, 4, 256, 16, requires_grad=True), torch.randn(1, 2, 256, 16)
        torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
    if alone.elements >= 256**2:
        pytest.skip("this torch has no kernel on a CPU for heads that share keys, and computes all scores")
    monkeypatch.setattr(blocks, "_LARGE", 2**20)
    drafter, objective = made(tmp_path, kind, anchors)
    batch = batch_of(objective, [(row,)])
    with Largest() as seen:
        step(drafter, objective, batch)
    queries, slots = anchors * drafter.config.block_size, row * drafter.config.block_size
    pairs = queries * (row + queries) if kind == "hyperdflash" else slots**2
    assert row * drafter.config.hidden_size <= seen.elements < pairs / 2
