"""Chat datasets: rows to messages, messages to supervised tokens, documents to training rows."""

from __future__ import annotations

import glob
import json
import logging
import os
import re
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from .blocks import anchor_candidates
from .places import PLACE, at_row, why_no_text, why_unlike, why_unreadable

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Spans = list[tuple[int, int]]

_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "model"), "assistant"),
    **dict.fromkeys(("tool", "observation"), "tool"),
    **{role: role for role in ("system", "developer")},
}
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_COLUMNS = ("input_ids", "loss_mask", "position_ids")
# Not in the rows that are returned: a document's tokens before it was cut, and how many of it are an answer's.
_LENGTH, _ANSWERED = "length", "answered"
_SKIPPED = (
    "Skipped %d of %d sequences: too short for a block, which needs two neighbouring tokens of an answer, the first "
    "of them %s."
)
_UNANSWERED = "Skipped %d of %d rows that have no assistant text, the first of them %s."
_CUT = "Cut %d of %d sequences to %d tokens, %s."
_FIRST_ROWS = 1000  # of a stream, looked through for a trainable one before training starts


def load_rows(source: str, split: str = "train", streaming: bool = False) -> Dataset | IterableDataset:
    """Load a dataset from a local file or directory, or by its Hub name.

    Args:
        source: A `.json`, `.jsonl` or `.parquet` file, a directory of such files or one that `save_to_disk` wrote, or
            a Hub name, optionally with a configuration after a colon (`"openai/gsm8k:main"`).
        split: The split. Single files have only one.
        streaming: Read rows as they are used instead of converting all of them first.

    Raises:
        ValueError: If there is no such file, split or dataset, a file is damaged or empty, or the Hub is not reached.
    """
    from datasets import load_dataset  # an extra: only training needs it

    suffix = os.path.splitext(source)[1].lower()
    if os.path.exists(source):
        with _saying_why(source, suffix, streaming):
            if not os.path.isdir(source):
                reader = "parquet" if suffix == ".parquet" else "json"
                return load_dataset(reader, data_files=source, split="train", streaming=streaming)
            if any(os.path.exists(os.path.join(source, name)) for name in ("state.json", "dataset_dict.json")):
                return _load_saved(source, split, streaming)
            return load_dataset(source, split=split, streaming=streaming)
    if suffix in (".json", ".jsonl", ".parquet"):
        raise ValueError(f"No dataset file at {source!r}: expected an existing file or a Hub name like 'org/name'.")
    name, _, config = source.partition(":")
    try:
        return load_dataset(name, config or None, split=split, streaming=streaming)
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"Dataset {source!r} is no local file or directory and could not be loaded from the Hub ({error}). Check "
            "the name, `HF_HUB_OFFLINE` and the network, or give the path of a .json, .jsonl or .parquet file."
        ) from error


@contextmanager
def _saying_why(path: str, suffix: str, streaming: bool) -> Iterator[None]:
    """Errors of `datasets` in words, with the line of a JSON file; the first lines of a stream are read at once."""
    from datasets.exceptions import DatasetsError

    files = [path] if suffix in (".json", ".jsonl") else sorted(glob.glob(os.path.join(path, "*.jsonl")))
    if streaming:
        _refuse(why_unreadable(file, _FIRST_ROWS) for file in files)
    else:  # the reader looks at no text, which then fails where it is used
        _refuse(why_no_text(file) for file in files)
    reader = logging.getLogger("datasets.packaged_modules")
    level = reader.level
    reader.setLevel(logging.CRITICAL)  # it would say what is wrong, and not where
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(
            f"{path} has no dataset: expected .json, .jsonl or .parquet files, or what `save_to_disk` wrote."
        ) from error
    except (DatasetsError, StopIteration, ValueError) as error:
        _refuse(why_unreadable(file) for file in files)
        _refuse(why_unlike(file) for file in files)
        if isinstance(error, ValueError):
            raise
        raise ValueError(f"{path} cannot be read as rows ({error.__cause__ or error}).") from error
    finally:
        reader.setLevel(level)


def _refuse(reasons: Iterable[str | None]) -> None:
    if reason := next(filter(None, reasons), None):
        raise ValueError(reason)


def _load_saved(path: str, split: str, streaming: bool) -> Dataset | IterableDataset:
    from datasets import DatasetDict, load_from_disk

    saved = load_from_disk(path)
    if isinstance(saved, DatasetDict):
        if split not in saved:
            raise ValueError(f"The dataset at {path!r} has no split {split!r}: expected one of {sorted(saved)}.")
        saved = saved[split]
    return saved.to_iterable_dataset() if streaming else saved


def to_messages(row: Mapping[str, Any]) -> list[Message]:
    """Turn one dataset row into chat messages.

    Understands `messages`, ShareGPT `conversations`, `turns` (user turns only), `instruction`/`input`/`output`,
    `prompt`/`completion` (texts or lists of messages) and `question`/`answer` (GSM8K's calculator marks are removed
    and its `#### 7` becomes a sentence with the answer in a box, as the benchmark prompts ask for). A thinking model's
    reasoning is a message's `reasoning_content`.

    Raises:
        ValueError: If the row has none of these columns, or a conversation an unknown speaker.
    """
    given = {name: value for name, value in row.items() if value is not None and name != PLACE}
    if given.get("messages"):
        return _as_messages(given["messages"])
    if given.get("conversations"):
        return _as_messages([_from_sharegpt(turn) for turn in _listed(given["conversations"])])
    if given.get("turns"):
        return _as_messages([{"role": "user", "content": turn} for turn in _listed(given["turns"])])
    if "instruction" in given and "output" in given:
        prompt = "\n".join(str(part) for part in (given["instruction"], given.get("input")) if part)
        return _exchange(prompt, given["output"])
    if "prompt" in given and "completion" in given:
        return _exchange(given["prompt"], given["completion"])
    if "question" in given and "answer" in given:
        return _exchange(given["question"], _clean_worked_answer(given["answer"]))
    empty = sorted(set(row) - set(given) - {PLACE})
    raise ValueError(
        f"A row with columns {sorted(given)}{f' and nothing in {empty}' if empty else ''} is no conversation: "
        "expected messages, conversations, turns, instruction/output, prompt/completion or question/answer. Rename "
        "the columns of the dataset, or leave such rows out."
    )


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """The tools that a row's conversation may call, for the chat template: a list of JSON schemas or its JSON text.

    Raises:
        ValueError: If its `tools` are neither.
    """
    given = row.get("tools")
    if not given:
        return None
    try:
        tools = json.loads(given) if isinstance(given, str) else _without_gaps(given)
        return _listed(tools, dict) or None
    except ValueError as error:
        raise ValueError(
            f"`tools` is {str(given)[:100]!r}, expected a list of JSON schemas, or the JSON text of one: correct "
            "it, or leave the column out."
        ) from error


def _without_gaps(part: Any) -> Any:
    """Without what `datasets` fills with None where other rows have something."""
    if isinstance(part, dict):
        return {name: _without_gaps(value) for name, value in part.items() if value is not None}
    return [_without_gaps(value) for value in part] if isinstance(part, list) else part


def _exchange(prompt: Any, answer: Any) -> list[Message]:
    return _as_messages(prompt, "user") + _as_messages(answer, "assistant")


def _as_messages(given: Any, role: str | None = None) -> list[Message]:
    """A list of messages, or a text of somebody, without the gaps that `datasets` fills with None."""
    if isinstance(given, str) and role:
        return [{"role": role, "content": given}]
    messages = [_without_gaps(message) for message in _listed(given, dict)]
    for message in messages:
        speaker, said = message.get("role"), message.get("content")
        if not isinstance(speaker, str) or speaker not in _ROLES:  # a template would render it as it pleases
            near = get_close_matches(str(speaker), _ROLES, n=1)
            raise ValueError(
                f"Unknown speaker {speaker!r} in a conversation{f' ({near[0]}, perhaps)' if near else ''}: expected "
                f"one of {sorted(_ROLES)}. Map the dataset's speakers to these."
            )
        message["role"] = _ROLES[speaker]
        if not isinstance(said, (str, list)) and not {"tool_calls", "reasoning_content"} & set(message):
            raise ValueError(f"A message by {message['role']!r} says {said!r}, expected text. Leave such rows out.")
    return messages


def _listed(given: Any, kind: type = object) -> list[Any]:
    if isinstance(given, list) and all(isinstance(part, kind) for part in given):
        return given
    raise ValueError(f"A conversation is {str(given)[:100]!r}, expected a list of messages.")


def _from_sharegpt(turn: Any) -> Message:
    if not isinstance(turn, Mapping):
        raise ValueError(f"A turn of a conversation is {turn!r}, expected `from` and `value`.")
    message = {"role": turn.get("from") or turn.get("role"), "content": turn.get("value") or turn.get("content") or ""}
    reasoning = turn.get("reasoning_content")
    return {**message, "reasoning_content": reasoning} if reasoning else message


def _clean_worked_answer(answer: Any) -> Any:
    if not isinstance(answer, str):
        return answer
    steps, marker, final = re.sub(r"<<.*?>>", "", answer).partition("\n#### ")
    return f"{steps}\nThe answer is \\boxed{{{final.strip()}}}." if marker else steps


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    truncated: bool = False,
    tools: list[Any] | None = None,
) -> dict[str, list[int]]:
    """Tokenize a conversation with the tokenizer's chat template and mark what the assistant says.

    The answers are the text inside the template's `{% generation %}` tags. In a template without tags, an answer is
    what the conversation up to it adds to its generation prompt; an answer that is rendered differently once the
    conversation goes on (templates that drop old reasoning) is not supervised. Prompts and answers are tokenized
    apart, so that their first tokens are those of generation. A turn with `reasoning_content` is in thinking mode.

    Args:
        tokenizer: The target's tokenizer, byte-level as DeepSeek's.
        messages: The conversation.
        truncated: The last answer hit a token limit: it has no end to learn from, and none is encoded.
        tools: What the assistant may call, as [`tools_of`] a row.

    Returns:
        `input_ids` `[seq]` and `loss_mask` `[seq]`, 1 on the tokens of answers including the end of the turn, else 0.

    Raises:
        ValueError: If the tokenizer has no chat template, or an answer is there but none can be located.
    """
    text, spans = _answer_spans(tokenizer, messages, tools)
    spans = [(start, _without_newline(tokenizer, text, start, end)) for start, end in spans]
    if truncated and spans and messages[-1]["role"] == "assistant":
        text, spans = _cut_after_answer(text, spans, messages[-1])
    ids: list[int] = []
    mask: list[int] = []
    cursor = 0
    for start, end in [*spans, (len(text), len(text))]:
        for piece, supervised in ((text[cursor:start], 0), (text[start:end], 1)):
            tokens = tokenizer(piece, add_special_tokens=False)["input_ids"] if piece else []
            ids += tokens
            mask += [supervised] * len(tokens)
        cursor = end
    return {"input_ids": ids, "loss_mask": mask}


def _answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None
) -> tuple[str, Spans]:
    """The rendered conversation and where in it, `text[start:end]`, the answers are."""
    template = _chat_template(tokenizer)
    if not _GENERATION_TAG.search(template):
        return _spans_by_prefix(tokenizer, messages, tools)
    thinking = bool(messages[-1].get("reasoning_content"))
    variables: dict[str, Any] = {**tokenizer.special_tokens_map, "thinking": thinking, "enable_thinking": thinking}
    # What apply_chat_template renders; its own mask would come from tokens that may straddle prompt and answer.
    rendered: Any = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True, **variables
    )
    (text,), (spans,) = rendered
    return text, [(start, end) for start, end in spans if start < end]


def _chat_template(tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template:
        return tokenizer.get_chat_template()
    raise ValueError(
        f"The tokenizer {tokenizer.name_or_path!r} has no chat template, so prompts and answers cannot be told apart: "
        "set `tokenizer.chat_template` to a Jinja template (`--chat-template FILE` of `hf-hyperdflash train`)."
    )


def _render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    tools: list[Any] | None,
    thinking: bool,
    prompt: bool,
) -> str:
    mode: dict[str, Any] = {"thinking": thinking, "enable_thinking": thinking}
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **mode)
    return str(text)


def _spans_by_prefix(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], tools: list[Any] | None
) -> tuple[str, Spans]:
    thinks = [bool(message.get("reasoning_content")) for message in messages]
    text = _render(tokenizer, messages, tools, thinks[-1], prompt=False)
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    spans = []
    for i in answers:
        through = _render(tokenizer, messages[: i + 1], tools, thinks[i], prompt=False)
        for thinking in (thinks[i], not thinks[i]):  # the other one where reasoning is written into the content
            prompt = _render(tokenizer, messages[:i], tools, thinking, prompt=True)
            if through.startswith(prompt) and text.startswith(through):
                spans.append((len(prompt), len(through)))
                break
    if answers and not spans:
        raise ValueError(
            f"No answer can be located in the conversation that begins with {str(messages[0])[:200]}: the chat "
            f"template renders {text[-200:]!r}, which does not continue its own generation prompt {prompt[-100:]!r}. "
            "Put the assistant's text of the template between {% generation %} and {% endgeneration %}, or move "
            "reasoning to `reasoning_content`."
        )
    return text, spans


def _without_newline(tokenizer: PreTrainedTokenizerBase, text: str, start: int, end: int) -> int:
    """The end of an answer, without the white space that templates write after the end token: nothing generates it."""
    answer = text[start:end].rstrip()
    return start + len(answer) if answer.endswith(tuple(tokenizer.all_special_tokens)) else end


def _cut_after_answer(text: str, spans: Spans, message: Message) -> tuple[str, Spans]:
    """End the conversation right after the words of its last answer. It is not supervised if they cannot be found."""
    answer = message.get("content") or message.get("reasoning_content") or ""
    for words in (answer, answer.strip()):
        first = text.rfind(words) if words else -1
        end = first + len(words)
        if any(start <= first and end <= stop for start, stop in spans):
            return text[:end], [(start, min(stop, end)) for start, stop in spans if start < end]
    return text, spans[:-1]


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Iterable[Mapping[str, Any]], thinking: bool = False
) -> list[torch.Tensor]:
    """Generation prompts of dataset rows: each conversation without its last answer.

    Args:
        tokenizer: The target's tokenizer.
        rows: Anything [`to_messages`] understands, with `tools` if there are any. Of several user turns without an
            answer, only the first is asked.
        thinking: Ask for reasoning, by the chat template's `thinking` or `enable_thinking`.

    Returns:
        One tensor of token ids per row, `[1, seq]`.

    Raises:
        ValueError: If the tokenizer has no chat template, or a row no user turn.
    """
    _chat_template(tokenizer)
    prompts = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f'Row {number} (the first is 0) is {row!r}, expected a row like {{"turns": ["..."]}}.')
        with at_row(row, number):
            text = _render(tokenizer, _asked(to_messages(row)), tools_of(row), thinking, prompt=True)
        prompts.append(tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"])
    return prompts


def _asked(messages: list[Message]) -> list[Message]:
    roles = [message["role"] for message in messages]
    while roles and roles[-1] == "assistant":
        roles.pop()
    while roles[-2:] == ["user", "user"]:
        roles.pop()
    if not roles:
        raise ValueError("The conversation asks nothing: expected a message before the answer.")
    return messages[: len(roles)]


def truncate(input_ids: list[int], loss_mask: list[int], max_length: int) -> tuple[list[int], list[int]]:
    """Cut a document to at most `max_length` neighbouring tokens, so that supervised ones stay.

    The beginning is kept if the first supervised token lies in its first half. Otherwise the document is cut on the
    left until half of `max_length`, or more if little text follows, precedes the first supervised token.
    """
    first = loss_mask.index(1) if 1 in loss_mask else 0
    start = max(0, min(first - max_length // 2, len(input_ids) - max_length))
    return input_ids[start : start + max_length], loss_mask[start : start + max_length]


def pack(lengths: list[int], max_length: int) -> list[list[int]]:
    """Distribute whole documents over rows of at most `max_length` tokens: best fit, longest documents first.

    Returns:
        For every row the indices of its documents, ascending; rows in the order of their first document.
    """
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
    return sorted(sorted(row) for row in rows)


def frequent_tokens(rows: Iterable[Mapping[str, Any]], count: int, vocab_size: int) -> torch.Tensor:
    """The tokens that supervised text has most often, `[count]`, ascending; of equally frequent ones the first.

    Args:
        rows: `input_ids` and `loss_mask`, as [`prepare_dataset`] returns them.
        count: How many.
        vocab_size: Of the target's vocabulary.
    """
    seen = torch.zeros(vocab_size, dtype=torch.long)
    for row in rows:
        ids = torch.as_tensor(row["input_ids"]).long()[torch.as_tensor(row["loss_mask"]).bool()]
        seen.index_add_(0, ids, torch.ones_like(ids))
    return seen.sort(descending=True, stable=True).indices[:count].sort().values


def prepare_dataset(
    dataset: Dataset | IterableDataset | list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    max_length: int,
    packing: bool = False,
    vocab_size: int | None = None,
    num_proc: int | None = None,
    positions: int | None = None,
) -> Dataset | IterableDataset:
    """Turn conversations into training rows.

    Rows without an anchor, two neighbouring supervised tokens of one document, are skipped. How many, and how many
    were cut to `max_length`, is logged: at once for a map-style dataset, at every doubling for a streaming one.

    Args:
        dataset: Rows that [`to_messages`] understands (`truncated` marks answers that hit a token limit, `tools` are
            what the assistant may call), or tokenized ones: `input_ids` and `loss_mask`, with `position_ids` if they
            are packed already.
        tokenizer: The target's tokenizer; may be `None` for tokenized rows.
        max_length: Longest row, in tokens. [`truncate`] shortens documents.
        packing: Put several documents into a row, chosen from 1,000 at a time; none is split.
        vocab_size: The target's: tokenized rows with other ids are refused.
        num_proc: Processes that tokenize a map-style dataset.
        positions: The target's: longer rows than these cannot be had.

    Returns:
        A dataset of the same kind (of a list, map-style) with lists `input_ids`, `loss_mask` and `position_ids`, which
        count from 0 in every document. As many documents were kept as there are zeros among `position_ids`.

    Raises:
        ValueError: If no row (of the first 1,000 of a stream) has an anchor, or a row is no conversation or does not
            fit the arguments: with its file and line, if [`with_places`] has been there.
    """
    from datasets import Dataset, Features, IterableDataset, Sequence, Value

    if isinstance(dataset, dict):
        raise ValueError(f"Expected one dataset, got several: {sorted(dataset)}. Choose one of these splits.")
    if isinstance(dataset, list) and all(isinstance(row, dict) for row in dataset):
        names = dict.fromkeys(name for row in dataset for name in row)  # `from_list` takes the first row's alone
        dataset = Dataset.from_dict({name: [row.get(name) for row in dataset] for name in names})
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"The dataset is of type {type(dataset).__name__}, expected a `datasets.Dataset`, an `IterableDataset` or "
            "a list of rows, which are dictionaries."
        )
    if max_length < 2:
        raise ValueError(f"max_length={max_length}: a block needs an anchor and a label, so at least 2 tokens.")
    streaming = isinstance(dataset, IterableDataset)
    if isinstance(dataset, Dataset) and not len(dataset):
        raise ValueError("The dataset is empty: expected at least one row.")
    columns = dataset.column_names or list(next(iter(dataset), {}))
    if tokenizer is not None and "input_ids" not in columns:
        _chat_template(tokenizer)  # says that there is none, which is no row's fault
    features = Features({name: Sequence(Value("int32")) for name in _COLUMNS})
    processes = {} if streaming else {"num_proc": num_proc}
    documents = dataset.with_format(None).map(
        _encode_row,
        with_indices=True,
        fn_kwargs={"tokenizer": tokenizer, "max_length": max_length, "vocab_size": vocab_size},
        remove_columns=columns,
        features=Features({**features, _LENGTH: Value("int32"), _ANSWERED: Value("int32")}),
        **processes,
    )
    report = _Report(max_length, positions)
    rows = _in_stream(documents, columns, report) if streaming else _kept(documents, dataset, report, num_proc)
    rows = rows.remove_columns([_LENGTH, _ANSWERED])
    if not packing:
        return rows
    return rows.map(_pack_rows, batched=True, fn_kwargs={"max_length": max_length}, features=features, **processes)


def _encode_row(
    row: Mapping[str, Any],
    number: int,
    tokenizer: PreTrainedTokenizerBase | None,
    max_length: int,
    vocab_size: int | None,
) -> dict[str, Any]:
    with at_row(row, number):
        if row.get("input_ids") is not None and row.get("loss_mask") is not None:
            ids, mask = _tokenized(row, vocab_size)
        elif tokenizer is None:
            raise ValueError(
                f"Rows with columns {sorted(set(row) - {PLACE})} are not tokenized: pass the target's tokenizer "
                "(`processing_class` of the trainer)."
            )
        else:
            truncated = bool(row.get("truncated"))
            ids, mask = encode_chat(tokenizer, to_messages(row), truncated, tools_of(row)).values()
        counted = list(range(len(ids)))
        positions, length = row.get("position_ids") or counted, len(ids)
        if length > max_length:
            if positions != counted:
                raise ValueError(
                    f"A packed row of {length} tokens is longer than max_length={max_length}: raise max_length or "
                    "pack the documents again."
                )
            ids, mask = truncate(ids, mask, max_length)
            positions = counted[:max_length]
        counts = {_LENGTH: length, _ANSWERED: sum(mask)}
        return {"input_ids": ids, "loss_mask": mask, "position_ids": positions, **counts}


def _tokenized(row: Mapping[str, Any], vocab_size: int | None) -> tuple[list[int], list[int]]:
    ids, mask = list(row["input_ids"]), [int(bool(supervised)) for supervised in row["loss_mask"]]
    if len(ids) != len(mask):
        raise ValueError(f"A row has {len(ids)} input_ids but a loss_mask of {len(mask)}: expected equal lengths.")
    if None in ids:
        raise ValueError(f"`input_ids` has nothing at {ids.index(None)}, expected a token id.")
    for found in (min(ids, default=0), max(ids, default=0)):
        if found < 0 or (vocab_size is not None and found >= vocab_size):
            below = f", expected ids below {vocab_size}" if vocab_size is not None else ""
            raise ValueError(f"`input_ids` has {found}{below}. Tokenize with the target's own tokenizer.")
    return ids, mask


def _has_anchor(loss_mask: list[int], position_ids: list[int]) -> bool:
    return bool(anchor_candidates(torch.tensor([loss_mask]).bool(), torch.tensor([position_ids])).any())


def _kept(documents: Dataset, dataset: Dataset, report: _Report, num_proc: int | None) -> Dataset:
    """The documents that have an anchor."""
    rows = documents.filter(_has_anchor, input_columns=["loss_mask", "position_ids"], num_proc=num_proc)
    (unanswered,) = np.nonzero(np.asarray(documents.with_format("numpy")[_ANSWERED]) == 0)
    if not len(rows):
        number = int(unanswered[0]) if len(unanswered) else 0
        raise _no_assistant_text(f"{len(documents)} rows, the first {_place(dataset, number)}", dataset.column_names)
    if len(unanswered):
        report.unanswered(len(unanswered), len(documents), _place(dataset, int(unanswered[0])))
    if skipped := len(documents) - len(rows) - len(unanswered):
        report.skipped(skipped, len(documents), _first_too_short(documents, dataset))
    if cut := int((np.asarray(rows.with_format("numpy")[_LENGTH]) > report.max_length).sum()):
        report.cut(cut, len(rows))
    return rows


def _first_too_short(documents: Dataset, dataset: Dataset) -> str:
    found = enumerate(zip(documents["loss_mask"], documents["position_ids"]))
    number = next(i for i, (mask, positions) in found if any(mask) and not _has_anchor(mask, positions))
    row = dataset[number]
    answer = {} if row.get("input_ids") is not None else to_messages(row)[-1]
    is_empty = answer.get("role") == "assistant" and not (answer.get("content") or answer.get("reasoning_content"))
    return _place(dataset, number) + ", whose answer is empty" * is_empty


def _place(dataset: Dataset, number: int) -> str:
    place = dataset.select_columns([PLACE])[number][PLACE] if PLACE in dataset.column_names else None
    return place or f"row {number} (the first is 0)"


def _in_stream(documents: IterableDataset, columns: list[str], report: _Report) -> IterableDataset:
    if not any(_has_anchor(row["loss_mask"], row["position_ids"]) for row in documents.take(_FIRST_ROWS)):
        raise _no_assistant_text(f"the first {_FIRST_ROWS:,} rows", columns)
    return documents.filter(_Counted(report), input_columns=["loss_mask", "position_ids", _LENGTH, _ANSWERED])


class _Report:
    """What is said of rows that are not trained on, or not whole."""

    def __init__(self, max_length: int, positions: int | None) -> None:
        self.max_length = max_length
        mend = "`max_length`: raise it to train on all of them"
        self.limit = "all the positions that the target has" if max_length == positions else mend

    def unanswered(self, count: int, of: int, first: str) -> None:
        logger.warning(_UNANSWERED, count, of, first)

    def skipped(self, count: int, of: int, first: str) -> None:
        logger.warning(_SKIPPED, count, of, first)

    def cut(self, count: int, of: int) -> None:
        logger.warning(_CUT, count, of, self.max_length, self.limit)


class _Counted:
    """[`_has_anchor`] for a stream, whose end is not known: counts so far are logged whenever they have doubled."""

    def __init__(self, report: _Report) -> None:
        self.report, self.seen, self.skipped, self.cut, self.unanswered, self.first = report, 0, 0, 0, 0, ""
        self.first_short = ""

    def __call__(self, loss_mask: list[int], position_ids: list[int], length: int, answered: int) -> bool:
        self.seen += 1
        if not answered:
            self.unanswered += 1
            self.first = self.first or f"number {self.seen} of the stream"
            if self.unanswered.bit_count() == 1:
                self.report.unanswered(self.unanswered, self.seen, self.first)
            return False
        if not _has_anchor(loss_mask, position_ids):
            self.skipped += 1
            self.first_short = self.first_short or f"number {self.seen} of the stream"
            if self.skipped.bit_count() == 1:
                self.report.skipped(self.skipped, self.seen, self.first_short)
            return False
        if length > self.report.max_length:
            self.cut += 1
            if self.cut.bit_count() == 1:
                self.report.cut(self.cut, self.seen)
        return True


def _no_assistant_text(where: str, columns: list[str]) -> ValueError:
    return ValueError(
        f"No assistant text in {where} (columns {sorted(set(columns) - {PLACE})}): expected conversations that end "
        "with an answer of at least two tokens, and a chat template whose {% generation %} tags, if it has any, "
        "enclose the assistant's text. `examples/regenerate_answers.py` writes the target's answers to datasets that "
        "only ask."
    )


def _pack_rows(documents: dict[str, list[list[int]]], max_length: int) -> dict[str, list[list[int]]]:
    rows = pack([len(ids) for ids in documents["input_ids"]], max_length)
    return {name: [[value for i in row for value in documents[name][i]] for row in rows] for name in _COLUMNS}
