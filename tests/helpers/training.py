"""Rows and runs for the tests of training."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from datasets import Dataset

from hf_hyperdflash import HyperDFlashTrainer, HyperDFlashTrainingArguments

from .. import conftest
from ..conftest import prompt


def rows(count: int, seed: int = 0) -> Dataset:
    """Documents of uneven length whose second half is supervised."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        length = int(torch.randint(12, 30, (1,), generator=generator))
        ids = torch.randint(2, 64, (length,), generator=generator).tolist()
        made.append({"input_ids": ids, "loss_mask": [int(i >= length // 2) for i in range(length)]})
    return Dataset.from_list(made)


def packed_rows(lengths: list[tuple[int, ...]], seed: int = 0) -> list[dict]:
    """Rows of several documents each, of the given lengths."""
    made = []
    for i, row in enumerate(lengths):
        ids = prompt(sum(row), seed=100 * seed + i)[0].tolist()
        positions = [p for length in row for p in range(length)]
        made.append({"input_ids": ids, "loss_mask": [t % 2 for t in ids], "position_ids": positions})
    return made


@torch.no_grad()
def run_alone(target, row):
    """Oracle: the residual of every document of a row on its own, read where the collapse takes it."""
    starts = [i for i, position in enumerate(row["position_ids"]) if position == 0] + [len(row["position_ids"])]
    seen = []
    handle = target.model.hc_head.register_forward_pre_hook(lambda module, args: seen.append(args[0][0]))
    for start, stop in pairwise(starts):
        target(torch.tensor([row["input_ids"][start:stop]]))
    handle.remove()
    return torch.cat(seen)


def tiny_drafter(target, **fields):
    """The same weights every time."""
    torch.manual_seed(0)
    return conftest.tiny_drafter(target, **fields)


def headed_drafter(target, kind, seed=0, **fields):
    """One with a sequential and a confidence head, both with weights that count: fresh ones change no draft."""
    fields = {"sequential_head": kind, "head_rank": 8, "head_candidates": 0, "confidence_head": True, **fields}
    drafter = tiny_drafter(target, **fields)
    shake(drafter, 0.3, seed)
    return drafter


@torch.no_grad()
def shake(drafter, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for module in filter(None, (drafter.head, drafter.confidence_head)):
        for parameter in module.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def trainer_for(tmp_path, target, drafter, train=None, held_out=None, **args) -> HyperDFlashTrainer:
    defaults = dict(
        output_dir=str(tmp_path), per_device_train_batch_size=2, max_steps=3, logging_steps=1, learning_rate=1e-2,
        num_anchors=4, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, max_length=64,
        loss_chunk_size=16, dataloader_pin_memory=False,
    )  # fmt: skip
    arguments = HyperDFlashTrainingArguments(**{**defaults, **args})
    return HyperDFlashTrainer(drafter, target, arguments, train_dataset=train, eval_dataset=held_out)


def losses(trainer) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def weights(drafter) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in drafter.parameters()])


def softmax(row, temperature=1.0):
    top = max(row)
    weights = [math.exp((value - top) / temperature) for value in row]
    return [weight / sum(weights) for weight in weights]
