"""A run ended with "nothing to train on" for a reason that was another row's, or true of no row."""

import logging

import pytest

from hf_hyperdflash.training.data.rows import prepare_dataset

from ..helpers.tokenizers import trained

LINES = (
    "{% for m in messages %}{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + '\n' }}"
    "{{ m.content + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
SPACED = PLAIN.replace("{% endfor %}", "{% if not loop.last %} {% endif %}{% endfor %}")
SILENT = "{% for m in messages %}{{ '<|user|>' + m.content if m.role != 'assistant' }}{% endfor %}"
OTHER = LINES.replace("m.content + eos", "('!' if m.role == 'assistant' else m.content) + eos")
NOTHING = LINES.replace("{{ m.content + eos", "{% generation %}{% endgeneration %}{{ m.content + eos")
OPENS = LINES.replace(
    "{{ '<|assistant|>\n' }}", "{{ '<|assistant|>\n' + ('<think>' if messages|length > 2 else '') }}"
)


def chat(*turns, off=()):
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
    return {"messages": [{**m, "train": False} if i in off else m for i, m in enumerate(messages)]}


CASES = {  # a template, rows that have nothing left for one reason, and a word that no other reason has
    "an empty one": (
        LINES.replace("m.content", "m.content.strip()"),
        [chat("hi", ""), chat("hi", "  "), {**chat("hi", ""), "truncated": True}], "empty",
    ),
    "a short one": (PLAIN, [chat("hi", "s")], "too short"),
    "no mark": (LINES, [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 0]}], "`loss_mask`"),
    "the row": (LINES, [chat("hi", "It is", off=[1]), chat("hi", "It is", "why?", "so", off=[1, 3])], "`train`"),
    "nobody asks": (LINES, [{"messages": [{"role": "assistant", "content": "It is"}]}], "nothing asks"),
    "nothing is written": (SILENT, [chat("hi", "It is")], "writes nothing"),
    "nothing is tagged": (NOTHING, [chat("hi", "It is"), chat("hi", "It is", "why?", "so")], "generation %}"),
    "a cut that does not show": (OTHER, [{**chat("hi", "It is"), "truncated": True}], "token limit"),
    "a token across the prompt's end": (
        SPACED + "{% if add_generation_prompt %} {% endif %}", [chat("hi", "Hello")], "begins before"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_row_has_its_own_reason_alone_and_beside_one_that_tells_no_more(name, caplog):
    template, rows, word = CASES[name]
    tokenizer = trained("first" if name == "a token across the prompt's end" else "bytes")
    tokenizer.chat_template = template

    def prepare(*rows):
        return prepare_dataset(list(rows), tokenizer, max_length=400)

    for row in rows:
        with pytest.raises(ValueError) as refused:
            prepare(row)
        said = str(refused.value)
        assert word in said and [other for _, _, other in CASES.values() if other in said] == [word], said
        caplog.clear()
        with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
            assert len(prepare({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}, row)) == 1
        assert any(word in line and "1 of 2" in line and "row 1" in line for line in caplog.messages), caplog.messages
        assert not [line for line in caplog.messages if word not in line and "nothing left" not in line]


def test_an_earlier_answer_is_kept_where_the_last_that_hit_a_limit_is_not_found():
    tokenizer = trained("bytes")
    tokenizer.chat_template = OPENS
    cut = {**chat("hi", "It is three.", "why?", "It is"), "truncated": True}
    (row,) = prepare_dataset([cut], tokenizer, max_length=400)
    answer = [token for token, marked in zip(row["input_ids"], row["loss_mask"]) if marked]
    assert tokenizer.decode(answer) == "It is three.</s>"


@pytest.mark.parametrize(("first", "start"), [(5, 0), (10, 0), (30, 20), (68, 50)])
def test_a_limit_cuts_what_is_far_from_the_first_answer(first, start, caplog):
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        rows = [{"input_ids": list(range(70)), "loss_mask": [0] * first + [1] * (70 - first)}]
        (row,) = prepare_dataset(rows, None, max_length=20)
    assert row["input_ids"] == list(range(start, start + 20))
    assert row["loss_mask"] == [int(token >= first) for token in row["input_ids"]]
    assert "1 of 1" in caplog.text and "20 tokens" in caplog.text
