"""Rows whose parts have several types, from a list, a file, a stream or several files, are trained on as each would be
alone."""

import json

import pytest
import torch
from datasets import Dataset, IterableDataset

from hf_hyperdflash.training.data.file_positions import add_file_positions
from hf_hyperdflash.training.data.rows import load_rows, prepare_dataset
from hf_hyperdflash.training.script import ScriptArguments, load_data

from ..helpers.tokenizers import trained

TEMPLATE = (
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
ROWS = {
    "text and parts": [asked("hi"), asked(PARTS), asked("hi", PARTS)],
    "parts first": [asked(PARTS), asked("hi")],
    "texts that are JSON": [asked(PARTS), *JSON_TEXTS],
    "arguments": [called(a=1), called(a="one"), called(a=[1, "two"], b={"c": None}), called()],
    "arguments of text": [called(a=1), asked("add", "", tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])],
    "prompts": [{"prompt": "hi", "completion": "42"}, {"prompt": asked("hi")["messages"][:1], "completion": "three"}],
    "tools": [asked("hi"), {**asked("hi"), "tools": [{"name": "f"}]}, {**asked("hi"), "tools": '[{"name": "f"}]'}],
    "columns": [asked("hi"), {"question": "hi", "answer": "three"}, {**asked("hi"), "truncated": True}],
}


@pytest.fixture
def tokenizer():
    tokenizer = trained("bytes")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def alone(rows, tokenizer):
    """Each row as it is alone, written by hand: nothing of `datasets` has seen two of them."""
    texts = []
    for row in rows:
        messages = row.get("messages") or [
            {"content": row.get("prompt") or row["question"]}, {"content": row.get("completion") or row.get("answer")}
        ]  # fmt: skip
        text = ""
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


@pytest.mark.parametrize("kind", ROWS)
def test_a_list_a_file_and_a_stream_are_each_row_alone(kind, tokenizer, tmp_path):
    rows = ROWS[kind]
    expected = alone(rows, tokenizer)
    lines, document = tmp_path / "rows.jsonl", tmp_path / "rows.json"
    lines.write_text("\n".join(map(json.dumps, rows)))
    document.write_text(json.dumps(rows))
    sources = [rows, IterableDataset.from_generator(lambda: iter(rows))]
    for path in map(str, (lines, document)):
        sources += [add_file_positions(load_rows(path, streaming=way), path) for way in (False, True)]
    folder = tmp_path / "folder"  # of two files, and one of another split
    folder.mkdir()
    half = len(rows) // 2
    (folder / "train-0.jsonl").write_text("\n".join(map(json.dumps, rows[:half])))
    (folder / "train-1.json").write_text(json.dumps(rows[half:]))
    (folder / "test.jsonl").write_text(json.dumps(asked("of another split")))
    sources += [load_rows(str(folder), streaming=way) for way in (False, True)]
    for source in sources:
        kept = list(prepare_dataset(source, tokenizer, max_length=200))
        assert [tokenizer.decode(row["input_ids"]) for row in kept] == expected


def test_several_files_of_one_type_each(tokenizer, tmp_path):
    paths = []
    for number, rows in enumerate(([asked("hi", "42")], [asked(PARTS, PARTS)], [{"question": "hi", "answer": "so"}])):
        paths.append(str(tmp_path / f"{number}.jsonl"))
        (tmp_path / f"{number}.jsonl").write_text("\n".join(map(json.dumps, rows * 3)))
    for streaming in (False, True):
        script = ScriptArguments(
            target="t", dataset=paths, eval_dataset=paths[0], eval_rows=2, eval_prompts=0, streaming=streaming
        )
        rows = prepare_dataset(load_data(script, 0)[0], tokenizer, max_length=200)
        texts = {tokenizer.decode(row["input_ids"]) for row in rows}
        texts_alone = alone([asked("hi", "42"), asked(PARTS, PARTS), {"question": "hi", "answer": "so"}], tokenizer)
        assert texts == set(texts_alone)


def test_the_line_of_a_row_that_cannot_be_used_is_named(tokenizer, caplog):
    rows = [asked("hi"), asked(PARTS), asked("hi", [{"type": "image"}])]
    assert len(prepare_dataset(rows, tokenizer, max_length=200)) == 2
    assert "row 2" in caplog.text and "image" in caplog.text


def test_tokens_of_a_list_may_be_tensors():
    row = {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "position_ids": [0, 1, 2]}
    tensors = {name: torch.tensor(values) for name, values in row.items()}
    arrays = {name: values.numpy() for name, values in tensors.items()}
    expected = prepare_dataset(Dataset.from_list([row] * 3), None, max_length=9).to_list()
    assert prepare_dataset([row, tensors, arrays], None, max_length=9).to_list() == expected
