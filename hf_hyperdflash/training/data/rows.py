"""Datasets to training rows: loaded, tokenized, cut, packed, and what is left out of them said."""

from __future__ import annotations

import json
import logging
import os
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from operator import index
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from .blocks import anchor_candidates
from .encoding import encode_chat
from .file_positions import POSITION_COLUMN, locating_errors, read_rows
from .messages import is_trained, read_tools, says_nothing, to_messages
from .templates import ChatTemplate

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

_QUOTED = re.compile(r"""'[^']*'|"[^"]*"|\[.*\]|\{.*\}|\d+""")
_COLUMNS = ("input_ids", "loss_mask", "position_ids")
# Columns that are removed from the result: notes on a row for the log, and its position in the data.
_NOTES, _POSITION = "said", "where"
# Why an answer is not trained on. A row can have several of these notes.
_REASONS = {
    "excluded": "the row says so (`train`, `weight` or `loss`).",
    "unasked": "the conversation begins with them, and nothing asks for them.",
    "untrained": (
        "the chat template writes them otherwise once the conversation goes on, as without their reasoning, than they "
        "are generated."
    ),
    "unprompted": "the chat template does not write them as they follow its own generation prompt.",
    "unwritten": "the chat template writes nothing of them.",
    "untagged": "the chat template has nothing of them between its {{% generation %}} and {{% endgeneration %}}.",
    "uncut": "they hit a token limit, and what the chat template writes does not show where.",
    "joined": "they are part of a token that begins before them, which generation never writes.",
}
# Why a row is skipped: its first note.
_SKIPPED = {
    "refused": "rows that cannot be used, the first of them {first}: {why}",
    "unanswered": "rows that have no assistant text, the first of them {first}.",
    "empty": "rows whose answer is empty, the first of them {first}.",
    "untrainable": "rows that have nothing left to train on, the first of them {first}.",
    "unmarked": "rows whose `loss_mask` marks no assistant text, the first of them {first}.",
    "short": (
        "sequences: too short for a block, which needs two neighbouring tokens of an answer, the first of them "
        "{first}."
    ),
    "lost": (
        "sequences: cut to {max_length} tokens, {limit}, they have no two neighbouring tokens of an answer, the first "
        "of them {first}."
    ),
}
# The log's lines by note: the number of rows with it, the number of all rows, and the position of the first.
LOG_LINES = {
    **{name: f"Skipped {{count}} of {{of}} {what}" for name, what in _SKIPPED.items()},
    "cut": "Cut {count} of {of} sequences to {max_length} tokens, {limit}.",
    "retokenized": (
        "Tokenized again are {count} of {of} rows, the first of them {first}: their `input_ids` are of another "
        "tokenizer."
    ),
    "tail": "Left out what follows the last answer in {count} of {of} rows, the first of them {first}.",
    **{
        name: f"Not trained on are {{times}} answers in {{count}} of {{of}} rows, the first of them {{first}}: {why}"
        for name, why in _REASONS.items()
    },
    **{
        name: f"The chat template writes no {what} of {{count}} of {{of}} rows, the first of them {{first}}."
        for name, what in (
            ("system", "system message"), ("reasoning", "reasoning"), ("tools", "tools"), ("calls", "tool calls"),
        )
    },
}  # fmt: skip
_MOST_REASONS = 8  # counted one by one; the others are counted together
_FIRST_ROWS = 1000  # of a stream: one of them has to be trainable


def load_rows(source: str, split: str = "train", streaming: bool = False) -> Dataset | IterableDataset:
    """Load a dataset, with the position of each row in a column: a `.json`, `.jsonl` or `.parquet` file, a directory
    of such files or one that `save_to_disk` wrote, or a Hub name, optionally with a configuration after a colon
    (`"openai/gsm8k:main"`). Single files have one split. A stream reads rows as they are used. Raise a `ValueError`
    if there is no such file, split or dataset, a file is damaged or empty, or the Hub is not reached."""
    # An extra: only training needs it.
    from datasets import Dataset, DatasetDict, load_dataset, load_dataset_builder, load_from_disk
    from datasets.exceptions import DatasetsError

    suffix, is_there = os.path.splitext(source)[1].lower(), os.path.exists(source)
    if suffix in (".json", ".jsonl", ".parquet") and not is_there:
        raise ValueError(f"No dataset file at {source!r}: expected an existing file or a Hub name like 'org/name'.")
    name, _, config = (source, "", "") if is_there else source.partition(":")
    try:
        if os.path.isfile(source) and suffix != ".parquet":
            return _json_rows(source, streaming)
        if os.path.isfile(source):
            rows = load_dataset("parquet", data_files=source, split="train", streaming=streaming)
        elif any(os.path.exists(os.path.join(source, name)) for name in ("state.json", "dataset_dict.json")):
            rows = load_from_disk(source)
            if isinstance(rows, DatasetDict):
                if split not in rows:
                    raise ValueError(
                        f"The dataset at {source!r} has no split {split!r}: expected one of {sorted(rows)}."
                    )
                rows = rows[split]
            rows = rows.to_iterable_dataset() if streaming else rows
        else:
            files = load_dataset_builder(source).config.data_files if is_there else None
            if (files := (files or {}).get(split)) and all(file.endswith((".json", ".jsonl")) for file in files):
                return joined([load_rows(file, streaming=streaming) for file in files])
            rows = load_dataset(name, config or None, split=split, streaming=streaming)
    except (ConnectionError, FileNotFoundError) as error:
        if is_there:
            raise ValueError(
                f"{source} has no dataset: expected .json, .jsonl or .parquet files, or what `save_to_disk` wrote."
            ) from error
        raise ValueError(
            f"Dataset {source!r} is no local file or directory and could not be loaded from the Hub ({error}). Check "
            "the name, `HF_HUB_OFFLINE` and the network, or give the path of a .json, .jsonl or .parquet file."
        ) from error
    except (DatasetsError, StopIteration) as error:
        raise ValueError(
            f"{source} cannot be read as rows ({error.__cause__ or error}). Where a column has values of several "
            "types, `pip install -U datasets`, or make them alike."
        ) from error
    if POSITION_COLUMN in (rows.column_names or ()):  # saved with them
        return rows
    if isinstance(rows, Dataset):
        return rows.add_column(POSITION_COLUMN, [f"{source}, row {number}" for number in range(len(rows))])
    return rows.map(lambda row, number: {POSITION_COLUMN: f"{source}, row {number}"}, with_indices=True)


def _json_rows(path: str, streaming: bool) -> Dataset | IterableDataset:
    from datasets import IterableDataset, load_dataset

    positions = [row[POSITION_COLUMN] for row in read_rows(path)]  # all are read once, so that no damage is told late
    if streaming:
        return IterableDataset.from_generator(read_rows, gen_kwargs={"path": path})
    rows = load_dataset("json", data_files=path, split="train")
    if mixed := [name for name, feature in rows.features.items() if "Json(" in repr(feature)]:
        read = list(read_rows(path))
        for name in mixed:  # columns of several types, with the values of the file
            rows = _json_column(rows, name, [row.get(name) for row in read])
    return rows.add_column(POSITION_COLUMN, positions)


def joined(parts: list[Dataset | IterableDataset]) -> Dataset | IterableDataset:
    """Return datasets as one, each row with its own columns and types."""
    from datasets import Dataset, IterableDataset, concatenate_datasets

    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], Dataset):  # whose concatenation gives all rows the columns of the first
        return IterableDataset.from_generator(lambda parts: chain(*parts), gen_kwargs={"parts": parts})
    for name in dict.fromkeys(name for part in parts for name in part.column_names):
        types = {repr(part.features[name]) for part in parts if name in part.column_names}
        if len(types) > 1:
            parts = [_json_column(part, name, part[name]) if name in part.column_names else part for part in parts]
    return concatenate_datasets(parts)


def _json_column(rows: Dataset, name: str, values: Iterable[object]) -> Dataset:
    """Replace a column by one whose values may have several types."""
    try:
        from datasets import Json
    except ImportError as error:
        raise ValueError(
            f"`{name}` is of other types in one file than in another: make them alike, or `pip install -U datasets`."
        ) from error
    texts = [None if value is None else json.dumps(value) for value in values]
    unused = f"{name} of several types"
    return rows.add_column(unused, texts, feature=Json()).remove_columns(name).rename_column(unused, name)


def count_tokens(rows: Iterable[Mapping[str, object]], vocab_size: int) -> torch.Tensor:
    """Return how often supervised text has each token, `[vocab_size]`, of rows as [`prepare_dataset`] returns them."""
    seen = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        ids = torch.as_tensor(row["input_ids"]).long()[torch.as_tensor(row["loss_mask"]).bool()]
        seen.index_add_(0, ids, torch.ones_like(ids))
    return seen


def prepare_dataset(
    dataset: Dataset | IterableDataset | list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    packing: bool = False,
    vocab_size: int | None = None,
    positions: int | None = None,
    end_ids: Collection[int] | None = None,
) -> Dataset | IterableDataset:
    """Turn conversations that [`to_messages`] understands, or tokenized rows of `input_ids` and `loss_mask`, with
    `position_ids` if they are packed, into training rows: lists of these three; position ids count from 0 in every
    document. A list becomes a map-style dataset. `truncated` marks answers that hit a token limit.

    Skipped are conversations that cannot be read or that the chat template refuses, and rows without an anchor, two
    neighbouring supervised tokens of one document. How many, why and where the first is, how many were cut to
    `max_length` and what else of conversations is not trained on is logged: at once for a map-style dataset, at every
    doubling for a streaming one.

    `packing` puts several documents into a row, chosen from 1,000 at a time; none is split. `vocab_size` and
    `positions` are the target's: tokenized rows with other ids are refused, and no row can be longer. Raise a
    `ValueError` if no row (of the first 1,000 of a stream) is left, or a tokenized row does not fit the arguments."""
    from datasets import Dataset, Features, IterableDataset, Sequence, Value

    if isinstance(dataset, dict):
        raise ValueError(f"Expected one dataset, got several: {sorted(dataset)}. Choose one of these splits.")
    is_list = isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset)
    if not is_list and not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"The dataset is of type {type(dataset).__name__}, expected a `datasets.Dataset`, an `IterableDataset` or "
            "a list of rows, which are dictionaries."
        )
    if max_length < 2:
        raise ValueError(f"max_length={max_length}: a block needs an anchor and a label, so at least 2 tokens.")
    streaming = isinstance(dataset, IterableDataset)
    if not streaming and not len(dataset):
        raise ValueError("The dataset is empty: expected at least one row.")
    if isinstance(dataset, list):
        columns = list(dict.fromkeys(name for row in dataset for name in row))
    else:
        columns = dataset.column_names or list(next(iter(dataset), {}))
    if tokenizer is not None and "input_ids" not in columns:
        ChatTemplate(tokenizer)  # says that there is none, which is no row's fault
    features = Features({name: Sequence(Value("int32")) for name in _COLUMNS})
    with_notes = Features({**features, _NOTES: Sequence(Value("string")), _POSITION: Value("string")})
    how: dict[str, Any] = dict(tokenizer=tokenizer, max_length=max_length, vocab_size=vocab_size, end_ids=end_ids)
    if isinstance(dataset, list):  # one by one: a column of Arrow has one type, and rows of a list may have several
        encoded = [_encode_row(row, number, **how) for number, row in enumerate(dataset)]
        documents = Dataset.from_list(encoded, features=with_notes)
    else:
        documents = dataset.with_format(None).map(
            _encode_row, with_indices=True, fn_kwargs=how, remove_columns=columns, features=with_notes
        )
    report = _Report(max_length, positions, streaming)
    if streaming:
        first = _Report(max_length)
        if not any(first.add(row[_NOTES], row[_POSITION]) for row in documents.take(_FIRST_ROWS)):
            raise first.nothing_left(f"the first {_FIRST_ROWS:,} rows", columns)
        rows = documents.filter(report.add, input_columns=[_NOTES, _POSITION])
    else:
        rows = documents.filter(_is_usable, input_columns=[_NOTES])
        for notes, position in zip(documents[_NOTES], documents[_POSITION]):
            report.add(notes, position)
        if not len(rows):
            raise report.nothing_left(f"{len(documents)} rows", columns)
        reasons = sorted(report.why, key=lambda reason: -report.count[reason])
        for name in dict.fromkeys([*reasons, *LOG_LINES]):
            if report.count[name]:
                logger.warning(report.line(name))
    rows = rows.remove_columns([_NOTES, _POSITION])
    if not packing:
        return rows
    return rows.map(_pack_rows, batched=True, fn_kwargs={"max_length": max_length}, features=features)


def _encode_row(
    row: Mapping[str, Any],
    number: int,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    vocab_size: int | None,
    end_ids: Collection[int] | None,
) -> dict[str, object]:
    notes: list[str] = []
    with locating_errors(row, number):
        is_tokenized = row.get("input_ids") is not None and row.get("loss_mask") is not None
        if is_tokenized and tokenizer is not None and _has_other_tokens(row, tokenizer):
            is_tokenized, notes = False, ["retokenized"]
        if is_tokenized:
            ids, mask = _checked_tokens(row, vocab_size)
        elif tokenizer is None:
            raise ValueError(
                f"Rows with columns {sorted(set(row) - {POSITION_COLUMN})} are not tokenized: pass the target's "
                "tokenizer (`processing_class` of the trainer)."
            )
        else:
            ids, mask = [], []
            try:
                messages, tools, is_cut = to_messages(row), read_tools(row), bool(row.get("truncated"))
                ids, mask = encode_chat(tokenizer, messages, is_cut, tools, end_ids, notes).values()
                answers = [m for m in messages if m["role"] == "assistant" and is_trained(m)]
                if answers and all(map(says_nothing, answers)) and sum(mask) < 2:
                    notes = ["empty"]
            except ValueError as error:  # a row that cannot be used gets a note and stops no run
                notes = ["refused", str(error)]
        counted, whole = list(range(len(ids))), mask
        given = row.get("position_ids")
        positions = counted if given is None or not len(given) else list(map(index, given))
        if len(whole) > max_length:
            if positions != counted:
                raise ValueError(
                    f"A packed row of {len(ids)} tokens is longer than max_length={max_length}: raise max_length or "
                    "pack the documents again."
                )
            # Half of the length precedes the first answer, or more where little text follows, so that answers stay.
            first = mask.index(1) if 1 in mask else 0
            start = max(0, min(first - max_length // 2, len(ids) - max_length))
            ids, mask = ids[start : start + max_length], mask[start : start + max_length]
            positions = counted[:max_length]
    if _is_usable(notes):
        if _has_anchor(mask, positions):
            notes += ["cut"] * (len(whole) > max_length)
        elif len(whole) > max_length and _has_anchor(whole, counted):
            notes = ["lost"]
        elif reasons := [note for note in notes if note in _REASONS]:
            notes = ["untrainable", *reasons]
        else:
            notes = ["short" if any(mask) else "unmarked" if is_tokenized else "unanswered"]
    position = row.get(POSITION_COLUMN) or f"row {number} (the first is 0)"
    return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, _NOTES: notes, _POSITION: position}


def _has_other_tokens(row: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether `hf-hyperdflash answers` wrote a row with the tokens of another tokenizer: they do not have the
    words of its last answer."""
    if not row.get("prompt_id") or not row.get("messages"):
        return False
    last = row["messages"][-1]
    words = (last.get("content") or last.get("reasoning_content") or "").strip()
    return words not in tokenizer.decode(row["input_ids"], skip_special_tokens=True)


def _checked_tokens(row: Mapping[str, Iterable[int]], vocab_size: int | None) -> tuple[list[int], list[int]]:
    given, mask = list(row["input_ids"]), [int(bool(supervised)) for supervised in row["loss_mask"]]
    if len(given) != len(mask):
        raise ValueError(f"A row has {len(given)} input_ids but a loss_mask of {len(mask)}: expected equal lengths.")
    if nothing := [place for place, token in enumerate(given) if token is None]:
        raise ValueError(f"`input_ids` has nothing at {nothing[0]}, expected a token id.")
    ids = list(map(index, given))  # of a tensor, too
    for found in (min(ids, default=0), max(ids, default=0)):
        if found < 0 or (vocab_size is not None and found >= vocab_size):
            below = f", expected ids below {vocab_size}" if vocab_size is not None else ""
            raise ValueError(f"`input_ids` has {found}{below}. Tokenize with the target's own tokenizer.")
    return ids, mask


def _has_anchor(loss_mask: list[int], position_ids: list[int]) -> bool:
    marked = torch.tensor([loss_mask]).bool()
    return any(loss_mask) and bool(anchor_candidates(marked, torch.tensor([position_ids])).any())


def _is_usable(notes: list[str]) -> bool:
    return not notes or notes[0] not in _SKIPPED


class _Report:
    """Counts the notes on rows that are skipped or cut. Those of a stream are logged whenever a count has doubled."""

    def __init__(self, max_length: int, positions: int | None = None, is_stream: bool = False) -> None:
        self.max_length, self.is_stream = max_length, is_stream
        mend = "`max_length`: raise it to train on all of them"
        self.limit = "all the positions that the target has" if max_length == positions else mend
        self.seen = 0
        self.why: dict[str, str] = {}  # for each reason of refusals, the message of the first row
        self.count: Counter[str] = Counter()
        self.times: Counter[str] = Counter()
        self.first: dict[str, str] = {}

    def add(self, notes: list[str], position: str) -> bool:
        """Count a row, and return whether it is usable."""
        self.seen += 1
        counted = notes
        if notes[:1] == ["refused"]:  # messages that differ only in what they quote have one reason
            reason = f"refused {_QUOTED.sub('', notes[1])}"
            if reason not in self.why and len(self.why) >= _MOST_REASONS:
                reason = "refused"
            self.why.setdefault(reason, notes[1])
            counted = [reason]
        self.times.update(counted)
        for name in dict.fromkeys(counted):
            self.count[name] += 1
            self.first.setdefault(name, position)
            if self.is_stream and self.count[name].bit_count() == 1:
                logger.warning(self.line(name))
        return _is_usable(notes)

    def line(self, name: str) -> str:
        return LOG_LINES["refused" if name in self.why else name].format(
            count=self.count[name], times=self.times[name], of=self.seen, first=self.first[name],
            why=self.why.get(name), max_length=self.max_length, limit=self.limit,
        )  # fmt: skip

    def nothing_left(self, position: str, columns: list[str]) -> ValueError:
        most = max([*self.why, *_SKIPPED], key=lambda reason: self.count[reason])
        if most == "unanswered":
            return ValueError(
                f"No assistant text in {position}, the first {self.first[most]} (columns "
                f"{sorted(set(columns) - {POSITION_COLUMN})}): expected conversations that end with an answer of at "
                "least two tokens. `hf-hyperdflash answers` writes the target's answers to datasets that only ask."
            )
        if most == "untrainable":
            most = max(_REASONS, key=lambda reason: self.times[reason])
        return ValueError(f"Nothing to train on in {position}. {self.line(most)}")


def _pack_rows(documents: dict[str, list[list[int]]], max_length: int) -> dict[str, list[list[int]]]:
    """Distribute whole documents over rows of at most `max_length` tokens: best fit, longest documents first. In a
    row they are in their order, and rows are in that of their first document."""
    lengths = [len(ids) for ids in documents["input_ids"]]
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left and row, fullest rows first
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[i], -1))
        if at == len(free):
            rows.append([])
            free.append((max_length, len(rows) - 1))
        left, row = free.pop(at)
        rows[row].append(i)
        insort(free, (left - lengths[i], row))
    ordered = sorted(sorted(row) for row in rows)
    return {name: [[value for i in row for value in documents[name][i]] for row in ordered] for name in _COLUMNS}
