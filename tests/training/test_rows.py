"""Datasets as training rows, from any source: each as it would be alone, cut, packed, and what is left out said."""

import json
import logging
from itertools import product

import numpy as np
import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.script import ScriptArguments, load_data

from ..conftest import MODELS
from ..helpers.chats import BLOCKS, CALL, CHANNELS, LINES, WORDY, chat, templated

# Sources: each row is trained on as it would be alone, whatever types the others have

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ '<|assistant|>' if m.role == 'assistant' else '<|user|>' }}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
PARTS = [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]


def asked(question, answer="It is three.", **more):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]}


def called(**arguments):
    return asked("add", "", tool_calls=[{"function": {"name": "add", "arguments": arguments}}])


# Of texts that are JSON, `datasets` makes what they mean where another row has parts.
JSON_TEXTS = [asked("hi", text) for text in ("42", "true", "null", '"three"', '{"a": 1}', "[1, 2]", "1e5", "0.10")]
ALIKE = [{"question": str(n), "answer": "café"} for n in range(4)]
ROWS = {
    "alike": ALIKE,
    "text and parts": [asked("hi"), asked(PARTS), asked("hi", PARTS)],
    "texts that are JSON": [asked(PARTS), *JSON_TEXTS],
    "arguments": [called(a=1), called(a="one"), called(a=[1, "two"], b={"c": None}), called(),
                  asked("add", "", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
    "prompts": [{"prompt": "hi", "completion": "42"}, {"prompt": asked("hi")["messages"][:1], "completion": "three"}],
    "tools": [asked("hi"), {**asked("hi"), "tools": [{"name": "f"}]}, {**asked("hi"), "tools": '[{"name": "f"}]'}],
    "columns": [asked("hi"), {"question": "hi", "answer": "three"}, {**asked("hi"), "truncated": True}],
}  # fmt: skip


@pytest.fixture
def tokenizer():
    return templated(TEMPLATE)


def alone(rows):
    """The text of each row, written by hand: nothing of `datasets` has seen two of them."""
    texts = []
    for row in rows:
        messages = row.get("messages") or [
            {"content": row.get("prompt") or row["question"]}, {"content": row.get("completion") or row.get("answer")}
        ]  # fmt: skip
        tools = row.get("tools") or []
        text = "".join(map(json.dumps, json.loads(tools) if isinstance(tools, str) else tools))
        for role, message in zip(("<|user|>", "<|assistant|>"), messages):
            content = message["content"]
            if isinstance(content, list):
                content = "".join(part.get("text") or part["content"] for part in content)
            text += role + content
            for call in message.get("tool_calls", ()):
                arguments = call["function"]["arguments"]
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
                arguments = {name: {} if value == {"c": None} else value for name, value in arguments.items()}
                text += json.dumps({**call["function"], "arguments": arguments})
            text += "</s>" if not row.get("truncated") or role == "<|user|>" else ""
        texts.append(text)
    return texts


def sources_of(rows, folder):
    """The same rows in every way that a user may have them."""
    lines, marked, document = folder / "rows.jsonl", folder / "marked.jsonl", folder / "rows.json"
    parts = folder / "parts"  # two files, and one of another split
    parts.mkdir()
    as_lines, half = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows), len(rows) // 2
    lines.write_text(as_lines, encoding="utf-8")
    marked.write_text(as_lines, encoding="utf-8-sig")
    document.write_text(json.dumps(rows, indent=1))
    (parts / "train-0.jsonl").write_text("\n".join(map(json.dumps, rows[:half])))
    (parts / "train-1.json").write_text(json.dumps(rows[half:]))
    (parts / "test.jsonl").write_text(json.dumps(asked("of another split")))
    paths = [lines, marked, document, parts]
    if rows is ALIKE:  # which Arrow can hold as they are
        spread, abreast = folder / "spread.json", folder / "abreast.jsonl"  # objects of several lines, and two on one
        spread.write_text("\n".join(json.dumps(row, indent=1) for row in rows))
        abreast.write_text("\n".join(map(json.dumps, rows)).replace("\n", " ", 1))
        paths += [spread, abreast]
        table = Dataset.from_list(rows)
        (folder / "tables").mkdir()
        for path in (folder / "rows.parquet", folder / "tables" / "train.parquet"):
            table.to_parquet(path)
        table.save_to_disk(folder / "saved")
        DatasetDict({"train": table}).save_to_disk(folder / "splits")
        paths += [folder / name for name in ("rows.parquet", "tables", "saved", "splits")]
        yield from (table, table.to_iterable_dataset())
    yield from (rows, IterableDataset.from_generator(lambda: iter(rows)))
    for path in map(str, paths):
        for streaming in (False, True):
            found = load_rows(path, streaming=streaming)
            assert isinstance(found, IterableDataset) == streaming
            yield found


@pytest.mark.parametrize("kind", ROWS)
def test_rows_of_every_source_are_each_row_alone(kind, tokenizer, tmp_path):
    for source in sources_of(ROWS[kind], tmp_path):
        kept = list(prepare_dataset(source, tokenizer, max_length=200))
        assert [tokenizer.decode(row["input_ids"]) for row in kept] == alone(ROWS[kind])


@pytest.mark.parametrize("streaming", [False, True])
def test_several_files_are_one_dataset_and_some_rows_are_held_out(tokenizer, tmp_path, streaming):
    kinds = [asked("hi", "42"), asked(PARTS, PARTS), {"question": "hi", "answer": "so"}]
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path, row in zip(paths, kinds):
        path.write_text("\n".join(map(json.dumps, [row] * 3)))
    names = [str(path) for path in paths]
    more = dict(eval_dataset=names[0]) if streaming else {}
    script = ScriptArguments(
        target="t", dataset=names, rows=2, eval_rows=2, eval_prompts=0, streaming=streaming, **more
    )
    train, held_out = load_data(script, 0)
    texts = [tokenizer.decode(row["input_ids"]) for row in prepare_dataset(train, tokenizer, max_length=200)]
    assert set(texts) <= set(alone(kinds)) and len(texts) == (6 if streaming else 4)
    assert len(list(held_out)) == (3 if streaming else 2)  # all of another dataset, or so many of these
    if not streaming:
        again, _ = load_data(script, 0)
        assert list(again) == list(train) != list(load_data(script, 1)[0])


# Cut and packed


def cut(ids, mask, limit):
    """Oracle: neighbouring tokens, so that half of the limit is before the first that is trained on, or more where the
    document ends."""
    first = mask.index(1) if 1 in mask else 0
    start = 0
    while first - start > limit // 2 and len(ids) - start > limit:
        start += 1
    return ids[start : start + limit], mask[start : start + limit]


def documents_of(rows):
    """Documents of training rows, cut where positions restart."""
    for row in rows:
        assert row.keys() == {"input_ids", "loss_mask", "position_ids"} and row["position_ids"][0] == 0
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])]):
            assert row["position_ids"][start:stop] == list(range(stop - start))
            yield row["input_ids"][start:stop], row["loss_mask"][start:stop]


def packed_by_hand(lengths, limit):
    """Oracle: the longest document first, into the row with the least room for it, the first of several."""
    rows = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        with_room = [row for row in rows if sum(lengths[j] for j in row) + lengths[i] <= limit]
        if with_room:
            max(with_room, key=lambda row: sum(lengths[j] for j in row)).append(i)
        else:
            rows.append([i])
    return sorted(map(sorted, rows))


MASKS = st.lists(st.integers(0, 1), min_size=1, max_size=30)


@settings(deadline=None, max_examples=25)
@given(st.lists(MASKS, min_size=1, max_size=25), st.integers(2, 24), st.sampled_from([list, torch.tensor, np.array]))
def test_every_document_with_two_neighbouring_answer_tokens_is_there_once_and_packing_is_tight(masks, limit, kind):
    rows = [{"input_ids": [100 * i + j for j in range(len(m))], "loss_mask": m} for i, m in enumerate(masks)]
    expected = [cut(row["input_ids"], row["loss_mask"], limit) for row in rows]
    expected = [(ids, mask) for ids, mask in expected if "11" in "".join(map(str, mask))]
    assume(expected)  # a dataset without any is refused
    rows = [{name: kind(values) for name, values in row.items()} | {"x": "y"} for row in rows]
    plain, packed = (prepare_dataset(rows, None, max_length=limit, packing=packing) for packing in (False, True))
    together = packed_by_hand([len(ids) for ids, _ in expected], limit)
    assert list(documents_of(plain)) == expected
    assert list(documents_of(packed)) == [expected[i] for row in together for i in row] and len(packed) == len(
        together
    )
    again = packed.with_format("torch")  # prepared rows stay as they are
    assert list(prepare_dataset(again, None, max_length=limit)) == list(packed)
    stream = prepare_dataset(plain.to_iterable_dataset(), None, max_length=limit, packing=True)
    assert list(stream) == list(stream) == list(packed)


def test_caching_recognizes_the_same_work():
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    rows = Dataset.from_list(ALIKE)

    def fingerprint(tokenizer, max_length):
        return prepare_dataset(rows, tokenizer, max_length=max_length, packing=True)._fingerprint

    first = fingerprint(tokenizer, 20)
    tokenizer("some text", truncation=True, max_length=5, padding="max_length")  # leaves a trace in the tokenizer
    same = AutoTokenizer.from_pretrained(MODELS / "tiny-deepseek-v4")
    assert fingerprint(tokenizer, 20) == fingerprint(same, 20) == first
    same.chat_template += " "
    assert len({first, fingerprint(tokenizer, 21), fingerprint(same, 20)}) == 3


# What is left out


def told(rows, tokenizer, caplog, max_length=60):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        kept = list(prepare_dataset(rows, tokenizer, max_length=max_length))
        return kept, list(caplog.messages)


THREE, SO = {"role": "assistant", "content": "It is three."}, {"role": "assistant", "content": "so it is"}
GOOD = asked("hi")
RESULT, AGAIN = {"role": "tool", "content": "three"}, {"role": "user", "content": "why?"}
SILENT = LINES.replace("m.content", "(m.content if m.role != 'system' else '')")
MESSAGES = GOOD["messages"]
USES = [*chat("add"), CALL, RESULT, CALL, RESULT, THREE]
UNCUT = LINES.replace("m.content + eos", "'!' + eos")
LEFT_OUT = {  # template, rows, the numbers of those that are kept, and words of each line that is logged
    "no answer, and an empty one": (
        LINES.replace("m.content", "m.content.strip()"),
        [GOOD, asked("hi", "  "), {"turns": ["hi"]}, GOOD, {**asked("hi", ""), "truncated": True}, {"turns": ["q"]}],
        [0, 3], [("2 of 6", "row 2", "no assistant text"), ("2 of 6", "row 1", "empty")],
    ),
    "what cannot be read, the most frequent reason first": (
        LINES,
        [asked("hi") | {"messages": [{"role": "judge", "content": "q"}]}, GOOD,
         *({**GOOD, "images": [f"{n}.png"]} for n in range(3)), asked("hi", [{"type": "image"}])], [1],
        [("3 of 6", "row 2", "`images`", "0.png"), ("1 of 6", "row 0", "judge"), ("1 of 6", "row 5", "image")],
    ),
    "half a character": (LINES, [GOOD, asked("hi", "\ud83d")], [0], [("1 of 2", "row 1", "\\ud83d")]),
    "what the template refuses": (
        CHANNELS, [GOOD, {"messages": [*MESSAGES[:1], {**CALL, "content": "I", "thinking": "so"}]}, GOOD], [0, 2],
        [("1 of 3", "row 1", "Both content and thinking, one was expected")],
    ),
    "answers that are written otherwise later": (
        BLOCKS, [{"messages": [{**m, "thinking": "so"} if m is CALL else m for m in USES]}, {"messages": USES}],
        [0, 1], [("2 answers", "1 of 2", "row 1")],
    ),
    "what the template does not write": (
        SILENT,
        [GOOD, {"messages": [{"role": "system", "content": "Be brief."}, *MESSAGES]},
         {"messages": [*MESSAGES[:1], {**THREE, "reasoning": "so so"}]},
         {**GOOD, "tools": '[{"type": "function", "function": {"name": "add"}}]'},
         {"messages": [*MESSAGES[:1], CALL, *MESSAGES]}, {"messages": [*MESSAGES, AGAIN]}], range(6),
        [("follows the last answer", "1 of 6", "row 5"), ("system message", "row 1"), ("reasoning", "row 2"),
         ("tools", "row 3"), ("tool calls", "row 4")],
    ),
    "what is not to be trained on": (
        LINES,
        [GOOD, {"messages": [MESSAGES[0], {**THREE, "train": False}] * 2},
         {"messages": [*MESSAGES, AGAIN, {**SO, "train": False}]}],
        [0, 2], [("1 of 3", "row 1", "nothing left"), ("3 answers", "2 of 3", "row 1", "`train`")],
    ),
    "answers that nothing asks for": (
        LINES, [{"messages": [THREE, *MESSAGES]}], [0], [("1 answers", "1 of 1", "row 0")],
    ),
    "an answer within a token of its prompt": (
        lambda: templated(WORDY, "first"), [{"messages": chat("user: q", "Hello", "user: q", "Hello there, I am")}],
        [0], [("1 answers", "1 of 1", "row 0", "begins before")],
    ),
    "a cut that does not show": (
        UNCUT, [{"messages": [*MESSAGES, *MESSAGES], "truncated": True}, GOOD], [0, 1],
        [("1 answers", "1 of 2", "row 0", "token limit")],
    ),
    "an answer that the template leaves out": (
        LINES.replace("{% for m in messages %}", "{% for m in messages if m.content != 'It is three.' %}").replace(
            "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}", ""),
        [{"messages": [*MESSAGES, AGAIN, SO]}], [0],
        [("1 answers", "1 of 1", "row 0", "nothing")],
    ),
    "an answer that does not follow its prompt": (
        LINES.replace("{% for m in messages %}", "{% for m in messages %}{{ '!' if loop.index == 2 }}"),
        [{"messages": [*MESSAGES, AGAIN, THREE]}], [0], [("1 answers", "1 of 1", "row 0", "prompt")],
    ),
    "nothing between the tags": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content if m.content[:2] == 'so' }}"
        "{% endgeneration %}{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}",
        [{"messages": [*MESSAGES, AGAIN, SO]}], [0],
        [("1 answers", "1 of 1", "generation %}")],
    ),
    "answers that are too long": (
        None, [{"input_ids": [1] * 70, "loss_mask": [0] * 60 + [1] * 10},
               {"input_ids": [1] * 80, "loss_mask": [1] + [0] * 75 + [1] * 4}], [0],
        [("1 of 2", "row 1", "60 tokens", "max_length"), ("1 of 2", "60 tokens", "max_length")],
    ),
    "one token": (
        None, [{"input_ids": [1, 2, 3], "loss_mask": mask} for mask in ([0, 1, 1], [0, 1, 0], [0, 0, 0])], [0],
        [("1 of 3", "row 2", "loss_mask"), ("1 of 3", "row 1", "too short")],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_OUT)
def test_no_row_stops_a_run_and_each_reason_is_told_once_with_its_first_row(name, caplog):
    template, rows, numbers, lines = LEFT_OUT[name]
    tokenizer = template() if callable(template) else template and templated(template)
    kept, found = told(rows, tokenizer, caplog)
    assert kept == [told([rows[n]], tokenizer, caplog)[0][0] for n in numbers]
    assert len(found) == len(lines), found
    for line, words in zip(found, lines):
        assert [word for word in words if word not in line] == [], line
    streamed, found = told(IterableDataset.from_generator(lambda: iter(rows)), tokenizer, caplog)
    assert streamed == kept
    for words in lines:  # of a stream the number of rows is not known
        assert any(all(word in line for word in words if " of " not in word) for line in found), found


def test_a_stream_tells_of_every_doubling(caplog):
    rows = [asked("hi", "so" if n % 4 else "") for n in range(40)]
    _, lines = told(IterableDataset.from_generator(lambda: iter(rows)), templated(LINES), caplog)
    assert [line.split(" rows")[0] for line in lines] == [
        f"Skipped {n}" for n in ("1 of 1", "2 of 5", "4 of 13", "8 of 29")
    ]


def test_rows_of_files_are_told_by_their_line(tmp_path, caplog):
    """Empty lines count, as in an editor."""
    path, saved = tmp_path / "rows" / "rows.jsonl", tmp_path / "saved"
    path.parent.mkdir()
    path.write_text("\n".join(["", json.dumps(GOOD), "", json.dumps(asked("hi", ""))]))
    load_rows(str(path)).save_to_disk(saved)
    table = tmp_path / "rows.parquet"
    Dataset.from_list([GOOD, asked("hi", "")]).to_parquet(table)
    for source, streaming in product((path, path.parent, saved, table), (False, True)):
        kept, (line,) = told(load_rows(str(source), streaming=streaming), templated(LINES), caplog)
        assert len(kept) == 1 and (f"{table}, row 1" if source is table else f"{path}:4") in line


def test_nothing_left_is_told_early():
    read = []
    endless = IterableDataset.from_generator(lambda: ({"turns": [str(read.append(1))]} for _ in range(10**6)))
    with pytest.raises(ValueError, match="1,000"):
        prepare_dataset(endless, templated(LINES), max_length=20, packing=True)
    assert len(read) < 3000
