"""Chat text to messages; supervised tokens to anchors, blocks, labels and masks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from datasets import Dataset

Message = dict[str, str]

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def load_rows(source: str, split: str = "train") -> Dataset:
    """Load a dataset from a local `.json` / `.jsonl` / `.parquet` file or by its Hub name.

    Args:
        source: A path, or a Hub name, optionally with a configuration after a colon (`"openai/gsm8k:main"`).
        split: The split of a Hub dataset. Files have only one.

    Raises:
        ValueError: If `source` looks like a path and no such file exists.
    """
    from datasets import load_dataset  # an extra: only training scripts need it

    suffix = os.path.splitext(source)[1].lower()
    if os.path.exists(source):
        reader = "parquet" if suffix == ".parquet" else "json"
        return load_dataset(reader, data_files=source, split="train")
    if suffix in (".json", ".jsonl", ".parquet"):
        raise ValueError(f"No dataset file at {source!r}: expected an existing file or a Hub name like 'org/name'.")
    name, _, config = source.partition(":")
    return load_dataset(name, config or None, split=split)


def to_messages(row: Mapping[str, Any]) -> list[Message]:
    """Turn one dataset row into chat messages.

    Understands `messages`, ShareGPT `conversations`, `turns` (user turns only), `instruction`/`input`/`output`,
    `prompt`/`completion` and `question`/`answer` (GSM8K's calculator marks are removed and its `#### 7` becomes a
    sentence with the answer in a box, as the benchmark prompts ask for).

    Raises:
        ValueError: If the row has none of these columns.
    """
    if row.get("messages"):
        return [{k: v for k, v in message.items() if v is not None} for message in row["messages"]]
    if row.get("conversations"):
        return [_from_sharegpt(turn) for turn in row["conversations"]]
    if row.get("turns"):
        return [{"role": "user", "content": turn} for turn in row["turns"]]
    if "instruction" in row and "output" in row:
        prompt = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
        return _exchange(prompt, row["output"])
    if "prompt" in row and "completion" in row:
        return _exchange(row["prompt"], row["completion"])
    if "question" in row and "answer" in row:
        return _exchange(row["question"], _clean_worked_answer(row["answer"]))
    raise ValueError(
        f"A row with columns {sorted(row)} is no conversation: expected messages, conversations, turns, "
        "instruction/output, prompt/completion or question/answer. Rename the columns of the dataset."
    )


def _exchange(prompt: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def _from_sharegpt(turn: Mapping[str, str]) -> Message:
    role = turn.get("from", turn.get("role", ""))
    if role not in _SHAREGPT_ROLES:
        raise ValueError(f"Unknown speaker {role!r} in a conversation: expected one of {sorted(_SHAREGPT_ROLES)}.")
    return {"role": _SHAREGPT_ROLES[role], "content": turn.get("value", turn.get("content", ""))}


def _clean_worked_answer(answer: str) -> str:
    steps, marker, final = re.sub(r"<<.*?>>", "", answer).partition("\n#### ")
    return f"{steps}\nThe answer is \\boxed{{{final.strip()}}}." if marker else steps


def sample_anchors(loss_mask: torch.Tensor, num_anchors: int, generator: torch.Generator) -> torch.Tensor:
    """Draw anchors among the supervised tokens that are followed by a supervised token, without repetition.

    Args:
        loss_mask: `[batch, seq]`, `True` on assistant tokens.
        num_anchors: Anchors per sequence.
        generator: Source of randomness.

    Returns:
        Positions `[batch, num_anchors]`, ascending; -1 where a sequence has fewer candidates.
    """
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    scores = torch.rand(candidates.shape, generator=generator).to(candidates.device).masked_fill(~candidates, -1.0)
    top = scores.topk(min(num_anchors, candidates.shape[1]), dim=1)
    return top.indices.masked_fill(top.values < 0, -1).sort(dim=1).values


def block_labels(input_ids: torch.Tensor, loss_mask: torch.Tensor, anchors: torch.Tensor, drafts: int) -> torch.Tensor:
    """Labels `[batch, anchors, drafts]`: draft position k of anchor a is the token at a+k; -100 from the first token on
    that is not supervised, and for missing anchors."""
    steps = torch.arange(1, drafts + 1, device=input_ids.device)
    positions = anchors.clamp(min=0).unsqueeze(-1) + steps
    inside = (positions < input_ids.shape[1]) & (anchors >= 0).unsqueeze(-1)
    positions = positions.clamp(max=input_ids.shape[1] - 1)
    flat = positions.flatten(1)
    supervised = loss_mask.gather(1, flat).view_as(positions) & inside
    labels = input_ids.gather(1, flat).view_as(positions)
    return labels.masked_fill(supervised.long().cumprod(-1) == 0, -100)


def block_mask(anchors: torch.Tensor, block_size: int, context: int, window: int | None = None) -> torch.Tensor:
    """Who sees whom: a block sees the context strictly before its anchor, and itself in both directions.

    Args:
        anchors: Positions `[batch, anchors]`, -1 for missing ones (they see only their own block).
        block_size: Slots per block.
        context: Length of the context, positions 0 to `context - 1`.
        window: How many positions before the anchor are visible; `None` for all.

    Returns:
        Boolean `[batch, 1, anchors * block_size, context + anchors * block_size]`.
    """
    per_slot = anchors.repeat_interleave(block_size, dim=1).unsqueeze(-1)
    positions = torch.arange(context, device=anchors.device)
    sees_context = positions < per_slot
    if window is not None:
        sees_context &= positions >= per_slot - window
    block = torch.arange(anchors.shape[1], device=anchors.device).repeat_interleave(block_size)
    sees_block = (block.unsqueeze(-1) == block).expand(anchors.shape[0], -1, -1)
    return torch.cat([sees_context, sees_block], dim=-1).unsqueeze(1)
