"""Rows and tokenizers of others: what is supervised is what the tokenizer writes, and no row stops a run."""

import json
import logging
import re

import pytest
from datasets import Dataset

from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.messages import to_messages
from hf_hyperdflash.training.data.rows import prepare_dataset

from ..helpers.tokenizers import JoiningPieces, SlowPieces, trained

# As Llama 2's and Mistral's: the answer begins with a space, after no special token.
SPACED = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[Q] ' + m.content + ' [/Q]' }}{% endif %}{% endfor %}"
)
# As Qwen's and Gemma's: a newline after the special token, none in the answer.
LINES = (
    "{% for m in messages %}{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + '\n' }}"
    "{{ m.content + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
# As Zephyr's and DeepSeek's: the answer begins right after a special token.
BARE = LINES.replace(" + '\n'", "").replace("'<|assistant|>\n'", "'<|assistant|>'")
TAGGED = LINES.replace("{{ m.content + eos_token + '\n' }}", (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + eos_token + '\n' }}{% endif %}"
))  # fmt: skip
WORDY = (  # no special token, and the prompt ends with a space
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role != 'assistant' or not loop.last %}{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TEMPLATES = {"spaced": SPACED, "lines": LINES, "bare": BARE, "tagged": TAGGED}
KINDS = ("first", "always", "legacy", "bytes", "trimmed", "stripping")
TURNS = ("What is the sum of one?", "It is three 👋", "Hello", "  I am fine.\n\nHello")


def chat(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def with_template(tokenizer, template):
    tokenizer.chat_template = template
    return tokenizer


def answers_in(text, messages, ends=("</s>",)):
    """Where the answers are, found in the text by their words alone."""
    spans, at = [], 0
    for message in messages:
        start = text.index(message["content"], at)
        at = start + len(message["content"])
        if message["role"] == "assistant":
            at += next((len(end) for end in ends if text.startswith(end, at)), 0)
            spans.append((start, at))
    return spans


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_text_and_answers_are_where_their_words_are(kind, template):
    """Tokens that a text in parts would have, as a SentencePiece's "▁" before each, are in neither."""
    tokenizer, messages = with_template(trained(kind), TEMPLATES[template]), chat(*TURNS)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    encoded = encode_chat(tokenizer, messages)
    assert encoded["input_ids"] == whole["input_ids"]
    spans = [(start - (template == "spaced"), end) for start, end in answers_in(text, messages)]  # the space is said
    wanted = [
        int(any(start <= first and not text[max(end, first) : last].strip() and first < end for start, end in spans))
        for first, last in whole["offset_mapping"]
    ]
    assert encoded["loss_mask"] == wanted and sum(wanted) > 10
    prompt = encode_prompts(tokenizer, [{"messages": messages}])[0][0].tolist()
    last = len(encoded["loss_mask"]) - encoded["loss_mask"][::-1].index(0, encoded["loss_mask"][::-1].index(1))
    if kind != "stripping":
        assert encoded["input_ids"][: len(prompt)] == prompt and last == len(prompt)


@pytest.mark.parametrize("kind", ["first", "always", "legacy"])
def test_no_space_is_supervised_that_nobody_said(kind):
    tokenizer = with_template(trained(kind), SPACED)
    encoded = encode_chat(tokenizer, chat("What is it?", "It is three."))
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    answer = "".join(token for token, supervised in zip(tokens, encoded["loss_mask"]) if supervised)
    assert answer == "▁It▁is▁three.</s>"


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_across_the_end_of_a_prompt_is_cut_there_or_not_supervised(kind):
    """Generation begins with the tokens of the prompt alone; a SentencePiece cannot go on without a space there."""
    tokenizer, messages = with_template(trained(kind), WORDY), chat("user: q", "Hello there")
    encoded = encode_chat(tokenizer, messages)
    marked = [t for t, supervised in zip(encoded["input_ids"], encoded["loss_mask"]) if supervised]
    prompt = encode_prompts(tokenizer, [{"messages": messages}])[0][0].tolist()
    if kind in ("first", "always", "legacy"):
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert encoded["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(marked) == "there"
    else:
        assert encoded["input_ids"] == prompt + marked and tokenizer.decode(marked) == "Hello there"


def test_a_slow_tokenizer_tells_where_its_tokens_are_by_its_prompts_or_is_refused():
    tokenizer, messages = with_template(SlowPieces(), LINES), chat("hi", "I am fine", "why?", "so")
    encoded = encode_chat(tokenizer, messages)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert encoded["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    marked = "".join(token if supervised else "|" for token, supervised in zip(tokens, encoded["loss_mask"]))
    assert re.findall(r"[^|]+(?=\|)", marked) == ["I am fine</s>", "so</s>"]
    joining = with_template(JoiningPieces(), WORDY)
    with pytest.raises(ValueError, match=r"^JoiningPieces does not say where .*assistant: ' otherwise where 'so' fo"):
        encode_chat(joining, chat("hi", "so"))


# As gpt-oss's: reasoning by the name `thinking`, not beside text where a tool is called, and not of earlier turns.
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% if m.content and m.thinking %}{{ raise_exception('Both content and thinking, one was expected') }}{% endif %}"
    "{{ '<|assistant|>' + (m.thinking or m.content or '') + '!' + m.tool_calls[0].function.name + eos_token }}"
    "{% elif loop.last %}{{ '<|assistant|>' + (m.thinking + '!' if m.thinking else '') + m.content + eos_token }}"
    "{% else %}{{ '<|assistant|>' + m.content + '<s>' }}{% endif %}"
    "{% else %}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As Qwen3's: the turns after the last user message have a block of reasoning, an empty one only at the end.
BLOCKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
    "{{ '[' + (m.reasoning_content or '') + ']\n' }}{% endif %}{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}{{ '!' + (call.function or call).name }}{% endfor %}{{ eos_token + '\n' }}"
    "{% else %}{{ '<|user|>\n' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% if not enable_thinking %}{{ '[]\n' }}{% endif %}"
    "{% endif %}"
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}


def supervised(tokenizer, encoded):
    runs, before = [], 0
    for token, mark in zip(encoded["input_ids"], encoded["loss_mask"]):
        if mark:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = mark
    return [tokenizer.decode(run) for run in runs]


def test_what_follows_the_last_answer_is_left_out():
    tokenizer = with_template(trained("bytes"), BLOCKS)
    asked_again = [*chat("hi", "It is", "why"), {"role": "user", "content": "why?"}]
    assert encode_chat(tokenizer, asked_again) == encode_chat(tokenizer, chat("hi", "It is"))
    assert supervised(tokenizer, encode_chat(tokenizer, asked_again)) == ["It is</s>"]
    whole = encode_chat(tokenizer, asked_again, truncated=True)  # which nobody cut: it goes on
    assert supervised(tokenizer, whole) == ["It is</s>"]


def test_reasoning_is_written_by_the_name_that_the_template_knows():
    tokenizer = with_template(trained("bytes"), CHANNELS)
    for name in ("reasoning_content", "reasoning", "thinking"):
        messages = to_messages({"messages": [*chat("hi"), {"role": "assistant", name: "so", "content": "It is"}]})
        assert messages[1] == {"role": "assistant", "reasoning_content": "so", "content": "It is"}
        assert supervised(tokenizer, encode_chat(tokenizer, messages)) == ["so!It is</s>"]
    with_template(tokenizer, CHANNELS.replace("m.thinking", "m['reasoning']"))
    assert supervised(tokenizer, encode_chat(tokenizer, messages)) == ["so!It is</s>"]
    with_template(tokenizer, BLOCKS)
    assert supervised(tokenizer, encode_chat(tokenizer, messages)) == ["[so]\nIt is</s>"]


def told(rows, tokenizer, caplog, **options):
    caplog.clear()
    with caplog.at_level(logging.WARNING, "hf_hyperdflash.training.data.rows"):
        kept = prepare_dataset(rows, tokenizer, max_length=60, **options)
        return kept.to_list() if isinstance(kept, Dataset) else list(kept), list(caplog.messages)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_that_the_template_refuses_are_skipped_and_counted(caplog, streaming):
    tokenizer = with_template(trained("bytes"), CHANNELS)
    good = {"messages": chat("hi", "It is three.")}
    bad = {"messages": [*chat("hi"), {**CALL, "content": "I add", "thinking": "so"}]}
    rows = Dataset.from_list([good, bad, good, bad])
    kept, lines = told(rows.to_iterable_dataset() if streaming else rows, tokenizer, caplog)
    assert kept == told([good, good], tokenizer, caplog)[0]
    why = "The chat template refuses the conversation (Both content and thinking, one was expected)."
    first = "the first of them row 1 (the first is 0)"
    counts = ["1 of 2", "2 of 4"] if streaming else ["2 of 4"]
    assert lines == [f"Skipped {count} rows that cannot be used, {first}: {why}" for count in counts]
    with pytest.raises(ValueError, match=r"^Nothing to train on in .*rows. Skipped .*row 0 .*one was expected\)\.$"):
        told(Dataset.from_list([bad]).to_iterable_dataset() if streaming else [bad], tokenizer, caplog)


RAISING = {
    "raise_exception('Roles must\n alternate')": r"\(Roles must alternate\)",
    "messages[0].absent.more": r"\(UndefinedError: .*absent",
    "messages[0].content + 1": r"\(TypeError: ",
    "1 / 0": r"\(ZeroDivisionError: ",
    "messages[0].content | tojson | fromjson": r"\(TemplateAssertionError: .*fromjson",
    "strftime_now(3)": r"\(TypeError: ",
}


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("expression", RAISING)
def test_whatever_a_template_raises_is_a_line_with_its_row(expression, tags):
    tokenizer, why = trained("bytes"), RAISING[expression]
    tokenizer.chat_template = "{{ " + expression + " }}" + "{% generation %}{% endgeneration %}" * tags
    rows = [{"messages": chat("hi", "so"), "_place": "rows.jsonl:7"}]
    line = r"^rows\.jsonl:7: The chat template refuses the conversation "
    with pytest.raises(ValueError, match=rf"{line}{why}") as refused:
        encode_prompts(tokenizer, rows)
    assert "\n" not in str(refused.value) and str(refused.value).endswith(").")
    with pytest.raises(ValueError, match=rf"rows\.jsonl:7: The chat template refuses the conversation {why}"):
        prepare_dataset(rows, tokenizer, max_length=20)
    with pytest.raises(ValueError, match=rf"^The chat template refuses the conversation {why}"):
        encode_chat(tokenizer, chat("hi", "so"))


def test_answers_that_are_written_otherwise_later_are_counted(caplog):
    """Qwen3's turns that call a tool without reasoning: in generation an empty block is before them."""
    tokenizer = with_template(trained("bytes"), BLOCKS)
    result = {"role": "tool", "content": "three"}
    row = {"messages": [*chat("add"), CALL, result, CALL, result, {"role": "assistant", "content": "It is three."}]}
    thought = {"messages": [{**m, "reasoning_content": "so"} if m is CALL else m for m in row["messages"]]}
    kept, lines = told([thought, row], tokenizer, caplog)
    assert [supervised(tokenizer, encoded) for encoded in kept] == [
        ["[so]\n!add</s>", "[so]\n!add</s>", "It is three.</s>"],
        ["It is three.</s>"],
    ]
    assert len(lines) == 1 and lines[0].startswith(
        "Not trained on are 2 answers in 1 of 2 rows, the first of them row 1 (the first is 0): the chat template"
    )


def test_what_the_template_does_not_write_is_counted(caplog):
    tokenizer = with_template(
        trained("bytes"), LINES.replace("m.content", "(m.content if m.role != 'system' else '')")
    )
    tools = json.dumps([{"type": "function", "function": {"name": "add"}}])
    rows = [
        {"messages": chat("hi", "It is three.")},
        {"messages": [{"role": "system", "content": "Be brief."}, *chat("hi", "It is three.")]},
        {"messages": [*chat("hi"), {"role": "assistant", "content": "It is three.", "reasoning": "so so"}]},
        {"messages": chat("hi", "It is three."), "tools": tools},
        {"messages": [*chat("hi"), CALL, *chat("hi", "It is three.")]},
        {"messages": chat("hi", "It is three.", "why")},
    ]
    kept, lines = told(rows, tokenizer, caplog)
    assert len(kept) == len(rows)
    wanted = {"system message": 1, "reasoning": 2, "tools": 3, "tool calls": 4}
    assert [line.removesuffix(" (the first is 0).") for line in lines] == [
        "Left out what follows the last answer in 1 of 6 rows, the first of them row 5",
        *(
            f"The chat template writes no {what} of 1 of 6 rows, the first of them row {n}"
            for what, n in wanted.items()
        ),
    ]


@pytest.mark.parametrize("template", [LINES, TAGGED])
def test_an_answer_that_is_not_to_be_trained_on_is_not(template, caplog):
    tokenizer = with_template(trained("bytes"), template)
    for off in ({"train": False}, {"weight": 0}, {"weight": 0.0}, {"loss": False}):
        first, last = chat("hi", "It is", "why?", "I am fine"), chat("hi", "It is", "why?", "I am fine")
        first[1] |= off
        last[3] |= off
        marked = supervised(tokenizer, encode_chat(tokenizer, to_messages({"messages": first})))
        assert marked == ["I am fine</s>"]
        assert encode_chat(tokenizer, to_messages({"messages": last})) == encode_chat(tokenizer, chat("hi", "It is"))
        none = chat("hi", "It is")
        none[1] |= off
        kept, lines = told([{"messages": none}, {"messages": first}], tokenizer, caplog)
        assert len(kept) == 1 and "Skipped 1 of 2 rows" in lines[0] and "`train`" in lines[1]
    twice = template.replace("{% endgeneration %}", "{% endgeneration %}{% generation %} {% endgeneration %}")
    if twice != template:
        with pytest.raises(ValueError, match="2 answers have 4 blocks"):
            encode_chat(with_template(tokenizer, twice), to_messages({"messages": first}))


def test_each_reason_is_told_once_the_most_frequent_first_and_a_few_of_them(caplog):
    tokenizer, good = with_template(trained("bytes"), LINES), {"messages": chat("hi", "It is three.")}
    images = [{**good, "images": [f"{n}.png"]} for n in range(3)]
    speakers = [{"messages": [{"role": name, "content": "q"}]} for name in ("narrator", "judge")]
    kept, lines = told([speakers[0], good, images[0], speakers[1], *images[1:]], tokenizer, caplog)
    assert len(kept) == 1 and [line.split(" (the")[0] for line in lines] == [
        "Skipped 3 of 6 rows that cannot be used, the first of them row 2",
        "Skipped 2 of 6 rows that cannot be used, the first of them row 0",
    ]
    assert "`images` of a row is ['0.png']" in lines[0] and "Unknown speaker 'narrator'" in lines[1]
    raising = "{% if m.role == 'user' %}{{ raise_exception(m.content) }}{% endif %}{{ m.content }}{% endfor %}"
    tokenizer.chat_template = "{% for m in messages %}" + raising
    letters = [{"messages": chat(letter, "It is three.")} for letter in "abcdefghijk"]
    asked = {"messages": [{"role": "assistant", "content": "It is three."}]}
    with pytest.raises(ValueError, match=r"^Nothing to train on in 12 rows\. Skipped 3 of 12 rows .*\(i\)\.$"):
        prepare_dataset([*letters, asked], tokenizer, max_length=60)
