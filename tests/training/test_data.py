import json
import logging
import re

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from hf_hyperdflash.training.data.blocks import anchor_candidates
from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.file_positions import add_file_positions
from hf_hyperdflash.training.data.messages import read_tools, to_messages
from hf_hyperdflash.training.data.rows import load_rows, pack, prepare_dataset, truncate

from ..conftest import MODELS

TARGET = MODELS / "tiny-deepseek-v4"
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
# As Qwen's: no tags, a newline after the end token, reasoning kept only in the last turn, where it may be empty.
DROPS_REASONING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:\n' }}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}{{ '<think>\n' + (m.reasoning_content or parts[0].split('<think>')[-1] if parts|length > 1 or "
    "m.reasoning_content else '') + '\n</think>\n' }}{% endif %}{{ parts[-1] + eos_token + '\n' }}"
    "{% else %}{{ m.role + ':\n' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:\n' + ('' if enable_thinking else '<think>\n\n</think>\n') }}{% endif %}"
)
# As DeepSeek-R1's: the generation prompt opens reasoning that the rendered answer does not have.
OPENS_REASONING = (
    "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:<think>\n' }}{% endif %}"
)


def chat(*turns, system=None):
    """user, assistant, user, assistant, ...; an assistant turn of two texts is reasoning and content."""
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        if isinstance(turn, tuple):
            messages.append({"role": "assistant", "reasoning_content": turn[0], "content": turn[1]})
        else:
            messages.append({"role": ("user", "assistant")[i % 2], "content": turn})
    return messages


CHATS = [
    chat("What is 1+1?", "It is 2."),
    chat("Hi", "Hello there 👋", "And now?", "Bye", system="Be brief. "),
    chat("Hi", ("I think\nso", "Yes"), "Why?", ("because", " it is so.  ")),
    chat("Hi", "Yes", "Why?"),
    chat(USER, "the answer", "the answer", "the answer"),
]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


def untagged(tokenizer):
    tokenizer.chat_template = re.sub(r"\{% (end)?generation %\}", "", tokenizer.chat_template)
    return tokenizer


def by_hand(tokenizer, messages):
    """What the shipped template says, turn by turn, up to the last answer."""
    while messages[-1]["role"] == "user":
        messages = messages[:-1]
    pieces = [(BOS, 0)]
    for message in messages:
        if message["role"] == "assistant":
            reasoning = message.get("reasoning_content")
            pieces.append((ASSISTANT + ("<think>" if reasoning else "</think>"), 0))
            pieces.append(((reasoning + "</think>" if reasoning else "") + message["content"] + EOS, 1))
        else:
            pieces.append(((USER if message["role"] == "user" else "") + message["content"], 0))
    encoded = [(tokenizer(text, add_special_tokens=False)["input_ids"], supervised) for text, supervised in pieces]
    return {
        "input_ids": [token for tokens, _ in encoded for token in tokens],
        "loss_mask": [supervised for tokens, supervised in encoded for _ in tokens],
    }


def supervised_text(tokenizer, encoded):
    """The supervised runs, decoded."""
    runs, previous = [], 0
    for token, supervised in zip(encoded["input_ids"], encoded["loss_mask"]):
        if supervised:
            runs = runs if previous else [*runs, []]
            runs[-1].append(token)
        previous = supervised
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "q", "name": None}, {"role": "assistant", "content": "a"}]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], "messages": None},
        {"instruction": "q", "input": "", "output": "a"},
        {"prompt": "q", "completion": "a"},
        {"prompt": [{"role": "user", "content": "q"}], "completion": [{"role": "assistant", "content": "a"}]},
        {"prompt": [{"role": "user", "content": "q"}], "completion": "a"},
        {"question": "q", "answer": "a"},
    ],
)
def test_every_spelling_of_a_conversation(row):
    assert to_messages(row) == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def test_turns_and_worked_answers():
    assert to_messages({"turns": ["a", "b"]}) == [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    answer = to_messages({"question": "?", "answer": "1+1=<<1+1=2>>2\n#### 2"})[1]["content"]
    assert answer == "1+1=2\nThe answer is \\boxed{2}."


def test_reasoning_and_all_speakers():
    turns = [("system", "s"), ("human", "q"), ("gpt", "call"), ("observation", "o"), ("assistant", "a")]
    messages = to_messages({"conversations": [{"from": role, "value": text} for role, text in turns]})
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert to_messages({"messages": CHATS[2]}) == CHATS[2]
    rows = Dataset.from_list([{"messages": CHATS[0]}, {"messages": CHATS[2]}])  # fills the gaps of the first with None
    assert to_messages(rows[0]) == CHATS[0]
    thinking = {"from": "gpt", "value": "a", "reasoning_content": "r"}
    assert to_messages({"conversations": [thinking]})[0]["reasoning_content"] == "r"
    with pytest.raises(ValueError, match="narrator"):
        to_messages({"conversations": [{"from": "narrator", "value": "q"}]})
    spoken = [{"role": role, "content": "x"} for role in ("developer", "human", "tool", "gpt")]
    assert [m["role"] for m in to_messages({"messages": spoken})] == ["developer", "user", "tool", "assistant"]
    for wrong, near in (("usr", r" \(user, perhaps\)"), (None, ""), (["user"], r" \(user, perhaps\)")):
        with pytest.raises(ValueError, match=rf"Unknown speaker .*conversation{near}: expected one of .*'developer'"):
            to_messages({"messages": [{"role": wrong, "content": "q"}]})


def test_unknown_columns_and_missing_files_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="text"):
        to_messages({"text": "x"})
    with pytest.raises(ValueError, match=r"absent\.jsonl"):
        load_rows(str(tmp_path / "absent.jsonl"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    for streaming in (False, True):
        with pytest.raises(ValueError, match=r"'nobody/nothing:main'.*network"):
            load_rows("nobody/nothing:main", streaming=streaming)


def test_rows_from_files_and_directories(tmp_path):
    rows = [{"question": str(i), "answer": "a"} for i in range(3)]
    files, saved, splits = tmp_path / "files", tmp_path / "saved", tmp_path / "splits"
    files.mkdir()
    (files / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(saved)
    DatasetDict({"train": Dataset.from_list(rows)}).save_to_disk(splits)
    for source in (files / "train.jsonl", tmp_path / "rows.json", tmp_path / "rows.parquet", files, saved, splits):
        assert list(load_rows(str(source))) == rows
        stream = load_rows(str(source), streaming=True)
        assert isinstance(stream, datasets.IterableDataset) and list(stream) == rows
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no dataset: expected \.json, \.jsonl or \.parquet files"):
        load_rows(str(tmp_path / "empty"))
    with pytest.raises(ValueError, match=r"'test'.*'train'"):
        load_rows(str(splits), "test")


@pytest.mark.parametrize("messages", CHATS)
def test_answers_are_supervised_with_their_end(tokenizer, messages):
    expected = by_hand(tokenizer, messages)
    assert encode_chat(tokenizer, messages) == expected
    stock = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    length = len(expected["input_ids"])
    assert (stock["input_ids"][:length], stock["assistant_masks"][:length]) == tuple(expected.values())
    assert not any(stock["assistant_masks"][length:])
    assert encode_chat(untagged(tokenizer), messages) == expected
    answers = [(m.get("reasoning_content", ""), m["content"]) for m in messages if m["role"] == "assistant"]
    spoken = [(reasoning + "</think>" if reasoning else "") + content + EOS for reasoning, content in answers]
    assert supervised_text(tokenizer, expected) == spoken


@pytest.mark.parametrize("template", ["tags", "prefixes", DROPS_REASONING])
@pytest.mark.parametrize("messages", [CHATS[0], CHATS[1], CHATS[2], CHATS[4]])
def test_last_answer_follows_its_generation_prompt(tokenizer, messages, template):
    if template == "prefixes":
        untagged(tokenizer)
    elif template != "tags":
        tokenizer.chat_template = template
    encoded = encode_chat(tokenizer, messages)
    thinking = "reasoning_content" in messages[-1]
    prompt = encode_prompts(tokenizer, [{"messages": messages}], thinking)[0][0].tolist()
    assert encoded["input_ids"][: len(prompt)] == prompt
    assert encoded["loss_mask"][len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_prompt_and_answer_share_no_token(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% endfor %}"
    )
    encoded = encode_chat(tokenizer, [{"role": "assistant", "content": "the sum"}])
    pieces = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("assistant: ", "the sum" + EOS)]
    assert encoded == {"input_ids": [*pieces[0], *pieces[1]], "loss_mask": [0] * len(pieces[0]) + [1] * len(pieces[1])}
    joined = tokenizer("assistant: the sum" + EOS, add_special_tokens=False)["input_ids"]
    assert joined != encoded["input_ids"]  # " the" is one token: the case is a real one


def test_templates_learn_of_thinking_mode(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'on ' if thinking and enable_thinking else 'off ' }}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert tokenizer.decode(encode_chat(tokenizer, chat("q", ("r", "a")))["input_ids"]) == "on qon a"
    assert tokenizer.decode(encode_chat(tokenizer, chat("q", "a"))["input_ids"]) == "off qoff a"


def test_templates_that_drop_old_reasoning(tokenizer):
    tokenizer.chat_template = DROPS_REASONING
    messages = chat("q", ("old", "a"), "q", ("new", "b"))
    assert supervised_text(tokenizer, encode_chat(tokenizer, messages)) == [f"<think>\nnew\n</think>\nb{EOS}"]
    assert supervised_text(tokenizer, encode_chat(tokenizer, chat("q", "a", "q", "b"))) == [f"b{EOS}"]
    inline = chat("q", "<think>new</think>b")
    assert supervised_text(tokenizer, encode_chat(tokenizer, inline)) == [f"<think>\nnew\n</think>\nb{EOS}"]
    text = tokenizer.decode(encode_chat(tokenizer, messages)["input_ids"])
    assert text.endswith(EOS + "\n") and "old" not in text


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.mark.parametrize("tags", [True, False])
def test_tools_are_the_chat_templates(tokenizer, tags):
    """As a list or its JSON text; what `datasets` fills rows of other tools with is left out."""
    tokenizer = tokenizer if tags else untagged(tokenizer)
    told = "{% for tool in tools or [] %}{{ tool | tojson + '\n' }}{% endfor %}"
    tokenizer.chat_template = told + tokenizer.chat_template
    other = [{"type": "function", "function": {"name": "now", "description": "The time."}}]
    rows = [{"messages": CHATS[0], "tools": tools} for tools in (TOOLS, other, None)]
    texts = [{**row, "tools": row["tools"] and json.dumps(row["tools"])} for row in rows]
    trained = prepare_dataset(Dataset.from_list(rows), tokenizer, max_length=500).to_list()
    assert trained == prepare_dataset(Dataset.from_list(texts), tokenizer, max_length=500).to_list()
    assert trained == prepare_dataset(rows, tokenizer, max_length=500).to_list()
    prompts = encode_prompts(tokenizer, Dataset.from_list(rows))
    for row, ids, prompt in zip(rows, trained, prompts):
        options = dict(tools=row["tools"], tokenize=False)
        assert tokenizer.decode(ids["input_ids"]) == tokenizer.apply_chat_template(CHATS[0], **options)
        stock = tokenizer.apply_chat_template(CHATS[0][:-1], add_generation_prompt=True, **options)
        assert tokenizer.decode(prompt[0]) == stock
    calls = [[{"name": name, "arguments": {"of": name}}] for name in ("add", "now")]
    calls[1][0]["arguments"] = {"zone": "UTC"}
    asked = [[*CHATS[0][:1], {"role": "assistant", "tool_calls": call}] for call in calls]
    assert list(map(to_messages, Dataset.from_list([{"messages": messages} for messages in asked]))) == asked
    for wrong in ("{", "add", ["add"], {"name": "add"}, 3):
        with pytest.raises(ValueError, match=r"`tools` is .*, expected a list of JSON schemas"):
            read_tools({"tools": wrong})


def test_templates_that_cannot_be_used(tokenizer):
    tokenizer.chat_template = OPENS_REASONING
    with pytest.raises(ValueError, match=r"<think>.*\{% generation %\}"):
        encode_chat(tokenizer, CHATS[0])
    encoded = encode_chat(tokenizer, [{"role": "user", "content": "q"}])
    assert not any(encoded["loss_mask"])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="--chat-template"):
        encode_chat(tokenizer, CHATS[0])
    with pytest.raises(ValueError, match="--chat-template"):
        encode_prompts(tokenizer, [{"messages": CHATS[0]}])
    with pytest.raises(ValueError, match=r"^The tokenizer .* has no chat template"):  # no row's fault
        prepare_dataset([{"messages": CHATS[0]}], tokenizer, max_length=20)


@pytest.mark.parametrize("tags", [True, False])
def test_truncated_answers_have_no_end(tokenizer, tags):
    tokenizer = tokenizer if tags else untagged(tokenizer)
    for messages in (CHATS[0], CHATS[1], CHATS[2], CHATS[4]):
        full, cut = encode_chat(tokenizer, messages), encode_chat(tokenizer, messages, truncated=True)
        assert cut == {name: values[:-1] for name, values in full.items()}
    in_reasoning = encode_chat(tokenizer, chat("q?", ("I think", "")), truncated=True)
    assert supervised_text(tokenizer, in_reasoning) == ["I think"] and in_reasoning["loss_mask"][-1] == 1
    empty = encode_chat(tokenizer, chat("a", "b", "c", ""), truncated=True)
    assert supervised_text(tokenizer, empty) == ["b" + EOS]
    tokenizer.chat_template = DROPS_REASONING
    assert supervised_text(tokenizer, encode_chat(tokenizer, CHATS[0], truncated=True)) == ["It is 2."]
    tokenizer.chat_template = AutoTokenizer.from_pretrained(TARGET).chat_template.replace(
        "m.content + eos", "'!' + eos"
    )
    unlike = encode_chat(tokenizer, chat("say yes", "yes"), truncated=True)  # its end cannot be told
    assert not any(unlike["loss_mask"]) and tokenizer.decode(unlike["input_ids"]).endswith("</think>!" + EOS)


def test_generation_prompts(tokenizer):
    rows = [{"messages": CHATS[1]}, {"turns": ["a", "b"]}, {"question": "q", "answer": "a"}]
    asked = [CHATS[1][:-1], chat("a"), chat("q")]
    for thinking in (False, True):
        prompts = encode_prompts(tokenizer, rows, thinking)
        for prompt, messages in zip(prompts, asked):
            stock = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, thinking=thinking, return_tensors="pt", return_dict=True
            )
            assert prompt.dtype == torch.long and torch.equal(prompt, stock["input_ids"])
    with pytest.raises(ValueError, match=r"Row 0 .* is 'hello', expected a row"):
        encode_prompts(tokenizer, ["hello"])
    with pytest.raises(ValueError, match="asks nothing"):
        encode_prompts(tokenizer, [{"messages": [{"role": "assistant", "content": "a"}]}])


@settings(deadline=None, max_examples=150)
@given(st.lists(st.integers(0, 1), max_size=40), st.integers(2, 24))
def test_truncation_keeps_supervised_text(mask, limit):
    ids = list(range(len(mask)))
    kept, kept_mask = truncate(ids, mask, limit)
    assert kept_mask == [mask[i] for i in kept] and len(kept) == min(limit, len(ids))
    assert kept == list(range(kept[0], kept[0] + len(kept))) if kept else not ids
    if 1 not in mask:
        assert kept == ids[:limit]
        return
    first = mask.index(1)
    assert first in kept
    if first < limit / 2:
        assert kept == ids[:limit]
    else:  # half of the limit precedes it, more only where the document ends
        assert first - kept[0] == limit // 2 or (first - kept[0] > limit // 2 and kept[-1] == ids[-1])


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(1, n), max_size=30))))
def test_packing_is_whole_and_tight(case):
    limit, lengths = case
    rows = pack(lengths, limit)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert all(load <= limit for load in loads)
    assert all(a + b > limit for i, a in enumerate(loads) for b in loads[:i])  # no two rows fit into one
    assert rows == sorted(rows) == pack(lengths, limit)
    assert pack([3, 3, 3, 7, 7, 7], 10) == [[0, 3], [1, 4], [2, 5]]  # in their order they would take four rows


def split_documents(rows):
    """Documents of training rows, cut where positions restart."""
    for row in rows:
        assert row.keys() == {"input_ids", "loss_mask", "position_ids"}
        starts = [i for i, position in enumerate(row["position_ids"]) if position == 0]
        assert starts[0] == 0
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])]):
            assert row["position_ids"][start:stop] == list(range(stop - start))
            yield row["input_ids"][start:stop], row["loss_mask"][start:stop]


def random_documents(count, seed):
    generator = torch.Generator().manual_seed(seed)
    for i in range(count):
        length = int(torch.randint(1, 30, (), generator=generator))
        mask = (torch.rand(length, generator=generator) < 0.4).int().tolist()
        yield {"input_ids": [1000 * i + j for j in range(length)], "loss_mask": mask, "other": "x"}


@settings(deadline=None, max_examples=8)
@given(st.integers(5, 40), st.integers(0, 1000), st.integers(8, 40))
def test_every_document_is_there_once(count, seed, limit):
    source = list(random_documents(count, seed))
    cut = [truncate(row["input_ids"], row["loss_mask"], limit) for row in source]
    expected = [(ids, mask) for ids, mask in cut if "11" in "".join(map(str, mask))]
    assume(expected)  # a dataset without any is refused
    rows = Dataset.from_list(source)
    plain, packed = (prepare_dataset(rows, None, max_length=limit, packing=packing) for packing in (False, True))
    assert list(split_documents(plain)) == expected
    assert sorted(split_documents(packed)) == expected and max(map(len, packed["input_ids"])) <= limit
    for row in packed:
        columns = {name: torch.tensor([values]) for name, values in row.items()}
        assert anchor_candidates(columns["loss_mask"].bool(), columns["position_ids"]).any()


@pytest.mark.parametrize("packing", [False, True])
def test_streams_give_the_same_rows(tokenizer, packing):
    rows = Dataset.from_list([{"messages": messages, "truncated": i % 2 == 0} for i, messages in enumerate(CHATS * 4)])
    expected = prepare_dataset(rows, tokenizer, max_length=40, packing=packing)
    stream = prepare_dataset(rows.to_iterable_dataset(), tokenizer, max_length=40, packing=packing)
    assert list(stream) == list(stream) == list(expected)
    generated = datasets.IterableDataset.from_generator(lambda: iter(rows))  # knows no columns
    assert list(prepare_dataset(generated, tokenizer, max_length=40, packing=packing)) == list(expected)
    if not packing:
        encoded = encode_chat(tokenizer, CHATS[0], truncated=True)
        assert next(split_documents(expected)) == (encoded["input_ids"], encoded["loss_mask"])


def test_prepared_rows_stay_as_they_are():
    rows = Dataset.from_list(list(random_documents(30, 0)))
    packed = prepare_dataset(rows, None, max_length=30, packing=True)
    assert list(prepare_dataset(packed, None, max_length=30)) == list(packed)
    again = prepare_dataset(packed.with_format("torch"), None, max_length=60, packing=True)
    assert sorted(split_documents(again)) == sorted(split_documents(packed)) and len(again) < len(packed)
    apart = {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 1, 1, 0], "position_ids": [0, 1, 0, 1]}
    with pytest.raises(ValueError, match="two neighbouring tokens"):  # these are of different documents
        prepare_dataset(Dataset.from_list([apart]), None, max_length=30)
    with pytest.raises(ValueError, match=r"packed row of \d+ tokens.*max_length=20"):
        prepare_dataset(packed, None, max_length=20)


def test_short_rows_are_counted(tokenizer, caplog):
    rows = Dataset.from_list([{"question": "q", "answer": "a" if i % 4 else ""} for i in range(40)])
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        assert len(prepare_dataset(rows, tokenizer, max_length=20)) == 30
    assert [r.getMessage() for r in caplog.records] == [
        "Skipped 10 of 40 rows whose answer is empty, the first of them row 0 (the first is 0)."
    ]
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        assert len(list(prepare_dataset(rows.to_iterable_dataset(), tokenizer, max_length=20))) == 30
    counts = [r.getMessage().split(" rows")[0] for r in caplog.records]
    assert counts == ["Skipped 1 of 1", "Skipped 2 of 5", "Skipped 4 of 13", "Skipped 8 of 29"]


def test_data_without_answers_ends_early(tokenizer):
    asks = Dataset.from_list([{"turns": ["a"]}, {"turns": ["b"]}])
    for rows in (asks, asks.to_iterable_dataset()):
        with pytest.raises(ValueError, match=r"No assistant text in .*turns.*hf-hyperdflash answers"):
            prepare_dataset(rows, tokenizer, max_length=20)
    read = []
    endless = datasets.IterableDataset.from_generator(lambda: ({"turns": [str(read.append(1))]} for _ in range(10**6)))
    with pytest.raises(ValueError, match="first 1,000 rows"):
        prepare_dataset(endless, tokenizer, max_length=20, packing=True)
    assert len(read) < 3000
    tokenizer.chat_template = "{% for m in messages %}{% generation %}{% endgeneration %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="generation"):
        prepare_dataset(Dataset.from_list([{"messages": CHATS[0]}]), tokenizer, max_length=20)


def test_rows_without_an_answer_are_told_apart_from_those_that_are_too_short(tokenizer, tmp_path, caplog):
    path, asked = tmp_path / "rows.jsonl", {"messages": [{"role": "user", "content": "q"}]}
    short = {"messages": [*asked["messages"], {"role": "assistant", "content": ""}]}
    lines = [{"messages": CHATS[0]}, short, asked, {"messages": CHATS[0]}, asked]
    path.write_text("\n".join(map(json.dumps, lines)))
    rows = add_file_positions(load_rows(str(path)), str(path))
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        assert len(prepare_dataset(rows, tokenizer, max_length=20)) == 2
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == f"Skipped 2 of 5 rows that have no assistant text, the first of them {path}:3."
    assert told[1] == f"Skipped 1 of 5 rows whose answer is empty, the first of them {path}:2."
    caplog.clear()
    stream = add_file_positions(load_rows(str(path), streaming=True), str(path))
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        assert len(list(prepare_dataset(stream, tokenizer, max_length=20))) == 2
    assert any(f"no assistant text, the first of them {path}, row 2." in line for line in caplog.messages)
    assert any(f"answer is empty, the first of them {path}, row 1." in line for line in caplog.messages)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        prepare_dataset(
            [{"input_ids": [1, 2, 3], "loss_mask": mask} for mask in ([0, 1, 1], [0, 1, 0])], None, max_length=9
        )
    assert caplog.messages[-1].endswith("the first of them row 1 (the first is 0).")
    with pytest.raises(ValueError, match=rf"No assistant text in 2 rows, the first {re.escape(str(path))}:3 \(col"):
        prepare_dataset(rows.select([2, 4]), tokenizer, max_length=20)


def test_arguments_that_do_not_fit(tokenizer):
    rows = Dataset.from_list([{"messages": CHATS[0]}])
    with pytest.raises(ValueError, match="max_length=1"):
        prepare_dataset(rows, tokenizer, max_length=1)
    with pytest.raises(ValueError, match="train"):
        prepare_dataset(DatasetDict({"train": rows}), tokenizer, max_length=20)
    with pytest.raises(ValueError, match="tokenizer"):
        prepare_dataset(rows, None, max_length=20)
    for wrong, message in (
        (5, "is of type int"),
        ([5], "is of type list"),
        ([], "is empty"),
        (rows.select([]), "is empty"),
    ):
        with pytest.raises(ValueError, match=f"The dataset {message}"):
            prepare_dataset(wrong, tokenizer, max_length=20)
    listed = prepare_dataset([{"messages": CHATS[0]}], tokenizer, max_length=20)
    assert listed.to_list() == prepare_dataset(rows, tokenizer, max_length=20).to_list()
    later = [{"messages": CHATS[0]}, {"messages": CHATS[0], "truncated": True}, {"question": "q", "answer": "a"}]
    alone = [prepare_dataset([row], tokenizer, max_length=20)[0] for row in later]
    assert prepare_dataset(later, tokenizer, max_length=20).to_list() == alone and alone[0] != alone[1]
    with pytest.raises(ValueError, match="loss_mask of 1"):
        prepare_dataset(Dataset.from_list([{"input_ids": [1, 2], "loss_mask": [1]}]), None, max_length=20)


def test_caching_recognizes_the_same_work(tokenizer):
    rows = Dataset.from_list([{"question": "q", "answer": "a"}])

    def fingerprint(tokenizer, max_length):
        return prepare_dataset(rows, tokenizer, max_length=max_length, packing=True)._fingerprint

    first = fingerprint(tokenizer, 20)
    tokenizer("some text", truncation=True, max_length=5, padding="max_length")  # leaves a trace in the tokenizer
    assert fingerprint(tokenizer, 20) == fingerprint(AutoTokenizer.from_pretrained(TARGET), 20) == first
    assert len({first, fingerprint(tokenizer, 21), fingerprint(untagged(tokenizer), 20)}) == 3
