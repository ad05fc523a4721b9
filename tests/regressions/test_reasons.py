"""Each reason why an answer is not trained on is its own, and true of the row that gets it."""

import logging
import re

import pytest

from hf_hyperdflash.training.data.rows import LOG_LINES, prepare_dataset

from ..helpers.tokenizers import trained

LINES = (
    "{% for m in messages %}{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + '\n' }}"
    "{{ m.content + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
TAGGED = LINES.replace("{{ m.content + eos_token", (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content if m.content != 'so' }}{% endgeneration %}"
    "{% else %}{{ m.content }}{% endif %}{{ eos_token"
))  # fmt: skip
FORGETFUL = LINES.replace("m.content + eos", "(m.content if loop.last or m.role != 'assistant' else '-') + eos")
STRIPPING = LINES.replace("m.content", "m.content.strip()")
OPENS = LINES.replace("{{ '<|assistant|>\n' }}", "{{ '<|assistant|>\n<think>' }}")
SILENT = "{% for m in messages %}{{ '<|user|>' + m.content if m.role != 'assistant' }}{% endfor %}"
OTHER = LINES.replace("m.content + eos", "('!' if m.role == 'assistant' else m.content) + eos")
JOINING = (
    "{% for m in messages %}{{ m.content }}{% if not loop.last %}{{ ' ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ ' ' }}{% endif %}"
)
NOTHING = LINES.replace("{{ m.content + eos", "{% generation %}{% endgeneration %}{{ m.content + eos")


def chat(*turns, off=()):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{**m, "train": False} if i in off else m for i, m in enumerate(messages)]}


GOOD, LONG = chat("hi", "It is three."), "It is three. " * 30
BEGUN = {"messages": [{"role": "assistant", "content": "It is"}]}
# For each reason: the template, rows that have it, and what else is said of them; rows of no reason are `GOOD`.
CASES = {
    "unanswered": (LINES, [{"turns": ["hi"]}, {"messages": chat("hi", "so", "why?")["messages"][2:]}]),
    "empty": (STRIPPING, [chat("hi", ""), chat("hi", "  "), {**chat("hi", ""), "truncated": True}]),
    "short": ("{% for m in messages %}{{ m.content }}{% endfor %}", [chat("hi", "s")]),
    "unmarked": (LINES, [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}]),
    "excluded": (LINES, [chat("hi", "It is", off=[1]), chat("hi", "It is", "why?", "so", off=[1, 3])]),
    "unasked": (LINES, [BEGUN]),
    "unprompted": (OPENS, []),
    "unwritten": (SILENT, [chat("hi", "It is")]),
    "untagged": (NOTHING, [chat("hi", "It is"), chat("hi", "It is", "why?", "so")]),
    "uncut": (OTHER, [{**chat("hi", "It is"), "truncated": True}]),
    "joined": (JOINING, [chat("hi", "Hello")]),
}


def reasons(rows, template, caplog, kind="bytes", **options):
    """The keys of the log's lines, each with its number of rows, and the row that is named."""
    tokenizer = trained(kind)
    tokenizer.chat_template = template
    caplog.clear()
    error = None
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        try:
            prepare_dataset(rows, tokenizer, **{"max_length": 400, **options})
        except ValueError as raised:
            error = str(raised)
    found = {}
    for line in caplog.messages if error is None else [error]:
        keys = [
            key for key, text in LOG_LINES.items()
            if re.search(re.sub(r"\\\{\w+\\\}", ".*", re.escape(text.replace("{{", "\1").replace("}}", "\2"))).replace(
                "\1", re.escape("{")).replace("\2", re.escape("}")), line)
        ]  # fmt: skip
        assert len(keys) == 1 or (error and not keys), line
        row = re.search(r"row (\d+)", line)
        found[keys[0] if keys else "unanswered"] = int(row[1]) if row else None
    return found


@pytest.mark.parametrize("key", [key for key, (_, rows) in CASES.items() if rows])
def test_a_row_has_its_own_reason_alone_and_among_others(key, caplog):
    template, rows = CASES[key]
    kind = "first" if key == "joined" else "bytes"
    for row in rows:
        assert reasons([row], template, caplog, kind) == {key: 0}
        both = [{"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, row]
        found = reasons(both, template, caplog, kind)
        assert found.pop("untrainable", 1) == 1 and found == {key: 1}


def test_an_answer_of_a_row_that_is_used_has_its_own_reason(caplog):
    long = chat("hi", "It is", "why?", "I am fine")
    assert reasons([GOOD, long], LINES, caplog) == {} == reasons([GOOD, long], TAGGED, caplog)
    assert reasons([GOOD, long], FORGETFUL, caplog) == {"untrained": 1}
    assert reasons([GOOD, chat("hi", "It is", "why?", "so", off=[1])], LINES, caplog) == {"excluded": 1}
    assert reasons([GOOD, chat("hi", "It is", "why?", "so", off=[3])], LINES, caplog) == {"excluded": 1}
    assert reasons([GOOD, chat("hi", "It is", "why?")], LINES, caplog) == {"tail": 1}
    begun = {"messages": [*BEGUN["messages"], *GOOD["messages"]]}
    assert reasons([GOOD, begun], LINES, caplog) == {"unasked": 1}
    inline = OPENS.replace("<think>' }}", "' + ('<think>' if messages|length > 2 else '') }}")
    assert reasons([GOOD, long], inline, caplog) == {"unprompted": 1}
    cut = {**chat("hi", "It is three.", "why?", "so"), "truncated": True}
    altering = LINES.replace("m.content + eos", "('!' if m.content == 'so' else m.content) + eos")
    assert reasons([GOOD, cut], altering, caplog) == {"uncut": 1}
    assert reasons([GOOD, chat("hi", "It is", "why?", "so")], TAGGED, caplog) == {"untagged": 1}


def test_an_earlier_answer_is_kept_where_the_last_that_hit_a_limit_is_not_found():
    tokenizer = trained("bytes")
    tokenizer.chat_template = OPENS.replace("<think>' }}", "' + ('<think>' if messages|length > 2 else '') }}")
    cut = {**chat("hi", "It is three.", "why?", "It is"), "truncated": True}
    (row,) = prepare_dataset([cut], tokenizer, max_length=400)
    answer = [token for token, marked in zip(row["input_ids"], row["loss_mask"]) if marked]
    assert tokenizer.decode(answer) == "It is three.</s>"


def test_what_a_limit_takes_is_said_to_be_cut(caplog):
    row = chat(LONG, "It is three.")
    assert reasons([row], LINES, caplog, max_length=2) == {"lost": 0}
    assert reasons([GOOD, row], LINES, caplog, max_length=40) == {"cut": None}


def test_every_reason_has_a_row_here():
    others = {"refused", "untrainable", "lost", "cut", "tail", "untrained", "system", "reasoning", "tools", "calls"}
    assert set(CASES) == set(LOG_LINES) - others
    told = list(LOG_LINES.values())
    assert len(set(told)) == len(told)
