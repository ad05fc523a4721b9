"""Conversations as tokens, and which of them are trained on, under chat templates and tokenizers of many families."""

import json
import re

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config

from hf_hyperdflash.hub.loading import load_tokenizer
from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.messages import to_messages

from ..conftest import MODELS
from ..helpers.chats import BLOCKS, CALL, CHANNELS, LINES, WORDY, chat, supervised, templated
from ..helpers.refusals import Refusal
from ..helpers.tokenizers import SlowPieces, trained

TARGET = MODELS / "tiny-deepseek-v4"
BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"


@pytest.fixture
def shipped():
    return AutoTokenizer.from_pretrained(TARGET)


# The shipped template, turn by turn

CHATS = [
    chat("What is 1+1?", "It is 2."),
    chat("Hi", "Hello there 👋", "And now?", "Bye", system="Be brief. "),
    chat("Hi", ("I think\nso", "Yes"), "Why?", ("because", " it is so.  ")),
    chat(USER, "the answer", "the answer", "the answer"),
    chat("Hi", "Yes", "Why?"),
]


def by_hand(tokenizer, messages):
    """What the shipped template says, up to the last answer; each answer with its end, reasoning before it."""
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


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize("messages", CHATS)
def test_answers_are_trained_on_with_their_end_after_their_generation_prompt(shipped, messages, tags):
    expected = by_hand(shipped, messages)
    stock = shipped.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    length = len(expected["input_ids"])
    assert (stock["input_ids"][:length], stock["assistant_masks"][:length]) == tuple(expected.values())
    if not tags:
        shipped.chat_template = re.sub(r"\{% (end)?generation %\}", "", shipped.chat_template)
    assert encode_chat(shipped, messages) == expected
    if messages[-1]["role"] == "assistant":
        cut = encode_chat(shipped, messages, truncated=True)
        assert cut == {name: values[:-1] for name, values in expected.items()}
        thinking = "reasoning_content" in messages[-1]
        prompt = encode_prompts(shipped, [{"messages": messages}], thinking)[0][0].tolist()
        assert expected["input_ids"][: len(prompt)] == prompt
        assert expected["loss_mask"][len(prompt) - 1 : len(prompt) + 1] == [0, 1]


def test_prompts_are_those_of_stock(shipped):
    rows = [{"messages": CHATS[1]}, {"turns": ["a", "b"]}, {"question": "q", "answer": "a"}]
    asked = [CHATS[1][:-1], chat("a"), chat("q")]
    for thinking in (False, True):
        for prompt, messages in zip(encode_prompts(shipped, rows, thinking), asked, strict=True):
            stock = shipped.apply_chat_template(
                messages, add_generation_prompt=True, thinking=thinking, return_tensors="pt", return_dict=True
            )
            assert prompt.dtype == torch.long and torch.equal(prompt, stock["input_ids"])
    silent = {"messages": [{"role": "assistant", "content": "a"}]}
    assert len(encode_prompts(shipped, [silent, *rows, *rows], at_most=4)) == 4
    assert encode_prompts(shipped, [silent], at_most=0) == []


# Tokenizers: ids are those of the whole text, and answers are where their words are

SPACED = (  # as Llama 2's and Mistral's: the answer begins with a space, after no special token
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ '[Q] ' + m.content + ' [/Q]' }}{% endif %}{% endfor %}"
)
# As Zephyr's: the answer begins right after a special token.
BARE = LINES.replace(" + '\n'", "").replace("'<|assistant|>\n'", "'<|assistant|>'")
TAGGED_LINES = LINES.replace("{{ m.content + eos_token + '\n' }}", (
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + eos_token }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + eos_token + '\n' }}{% endif %}"
))  # fmt: skip
TEMPLATES = {"spaced": SPACED, "lines": LINES, "bare": BARE, "tagged": TAGGED_LINES}
KINDS = ("first", "always", "legacy", "bytes", "trimmed", "stripping")
SENTENCE_PIECES = KINDS[:3]


def answers_in(text, messages):
    """Where the answers are, found in the text by their words alone."""
    spans, at = [], 0
    for message in messages:
        start = text.index(message["content"], at)
        at = start + len(message["content"])
        if message["role"] == "assistant":
            at += len("</s>") * text.startswith("</s>", at)
            spans.append((start, at))
    return spans


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_text_and_answers_are_where_their_words_are(kind, template):
    """Tokens that a text in parts would have, as a SentencePiece's "▁" before each, are in neither."""
    messages = chat("What is the sum of one?", "It is three 👋", "Hello", "  I am fine.\n\nHello")
    tokenizer = templated(TEMPLATES[template], kind)
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
    if kind != "stripping":
        prompt = encode_prompts(tokenizer, [{"messages": messages}])[0][0].tolist()
        assert encoded["input_ids"][: len(prompt)] == prompt
        assert encoded["loss_mask"][len(prompt) - 1 : len(prompt) + 1] == [0, 1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_across_the_end_of_a_prompt_is_cut_there_or_not_trained_on(kind):
    """Generation begins with the tokens of the prompt alone; a SentencePiece cannot go on without a space there."""
    tokenizer, messages = templated(WORDY, kind), chat("user: q", "Hello there")
    encoded = encode_chat(tokenizer, messages)
    marked = [t for t, supervised in zip(encoded["input_ids"], encoded["loss_mask"]) if supervised]
    prompt = encode_prompts(tokenizer, [{"messages": messages}])[0][0].tolist()
    if kind in SENTENCE_PIECES:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        assert encoded["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(marked) == "there"
        encoded = encode_chat(templated(SPACED, kind), chat("What is it?", "It is three."))
        tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
        said = "".join(token for token, supervised in zip(tokens, encoded["loss_mask"]) if supervised)
        assert said == "▁It▁is▁three.</s>"  # no space that nobody said
    else:
        assert encoded["input_ids"] == prompt + marked and tokenizer.decode(marked) == "Hello there"


def test_a_slow_tokenizer_tells_where_its_tokens_are_by_its_prompts():
    tokenizer, messages = templated(LINES, SlowPieces()), chat("hi", "I am fine", "why?", "so")
    encoded = encode_chat(tokenizer, messages)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    tokens = tokenizer.convert_ids_to_tokens(encoded["input_ids"])
    assert encoded["input_ids"] == tokenizer(text, add_special_tokens=False)["input_ids"]
    marked = "".join(token if supervised else "|" for token, supervised in zip(tokens, encoded["loss_mask"]))
    assert re.findall(r"[^|]+(?=\|)", marked) == ["I am fine</s>", "so</s>"]


# Templates: a conversation, and what is trained on of it

# As Qwen's before: reasoning is kept only in the last turn, where it may be empty, and may stand in the content.
DROPS_REASONING = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'A:\n' }}{% set parts = m.content.split('</think>') %}"
    "{% if loop.last %}{{ '<think>\n' + (m.reasoning_content or parts[0].split('<think>')[-1] if parts|length > 1 or "
    "m.reasoning_content else '') + '\n</think>\n' }}{% endif %}{{ parts[-1] + eos_token + '\n' }}"
    "{% else %}{{ m.role + ':\n' + m.content + eos_token + '\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'A:\n' + ('' if enable_thinking else '<think>\n\n</think>\n') }}{% endif %}"
)
MODES = (
    "{% for m in messages %}{{ 'on ' if thinking and enable_thinking else 'off ' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# As GLM-4.5's: no end of its own; old reasoning is dropped; a tool is `<s>`, GLM's `<|observation|>`.
GLM = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content }}"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>' }}{% if loop.index0 > ns.last and m.reasoning_content %}"
    "{{ '\n[' + m.reasoning_content + ']' }}{% else %}{{ '\n[]' }}{% endif %}"
    "{% if m.content %}{{ '\n' + m.content }}{% endif %}{% for call in m.tool_calls or [] %}"
    "{{ '\n!' + call.function.name }}{% endfor %}{% elif m.role == 'tool' %}{{ '<s>\n' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' + ('' if enable_thinking else '\n[]') }}{% endif %}"
)
TAGGED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ m.content or '!add' }}{% endgeneration %}"
    "{% elif m.role == 'tool' %}{{ '<s>' + m.content }}{% else %}{{ '<|user|>' + m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# As Nemotron's: a newline before the marker of the next turn.
NEWLINE = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "{{ '\n' }}")
# As templates that write an answer's end where the next turn begins.
DEFERRED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + (m.content or '!add') }}{% else %}"
    "{{ '</s>' if not loop.first }}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OWN_END = TAGGED.replace("'!add' }}", "'!add') + eos_token + '\n' }}").replace("{{ m.content or", "{{ (m.content or")
TOLD = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + LINES
RESULT = {"role": "tool", "content": "three"}
THREE = {"role": "assistant", "content": "It is three."}
TWO, FINE = chat("hi", "It is", "why?", "I am fine"), {"role": "assistant", "content": "I am fine"}
USED = [*chat("hi"), CALL, RESULT, THREE]
ENDS, ALONE = {"ends": ["</s>", "<|user|>", "<s>"]}, {"ends": ["</s>"]}
CUT = {"truncated": True}
TOOL = {"type": "function", "function": {"name": "add", "description": "é"}}


def not_trained(turn, **off):
    return [{**message, **(off or {"train": False})} if i == turn else message for i, message in enumerate(TWO)]


CASES = {  # template, conversation, options, what is trained on
    "reasoning of the last turn alone": (
        DROPS_REASONING, chat("q", ("old", "a"), "q", ("new", "b")), {}, ["<think>\nnew\n</think>\nb</s>"],
    ),
    "no reasoning": (DROPS_REASONING, chat("q", "a", "q", "b"), {}, ["b</s>"]),
    "reasoning in the content": (
        DROPS_REASONING, chat("q", "<think>new</think>b"), {}, ["<think>\nnew\n</think>\nb</s>"],
    ),
    "an answer that was cut off": (DROPS_REASONING, chat("q", "It is 2."), CUT, ["It is 2."]),
    "thinking is switched on": (MODES, chat("q", ("r", "a")), {}, ["a"]),
    "thinking is switched off": (MODES, chat("q", "a"), {}, ["a"]),
    "a question after the last answer": (BLOCKS, [*chat("hi", "It is", "why"), *chat("why?")], {}, ["It is</s>"]),
    "nobody cut it, as it goes on": (BLOCKS, [*chat("hi", "It is", "why"), *chat("why?")], CUT, ["It is</s>"]),
    "reasoning by its common name": (BLOCKS, chat("hi", ("so", "It is")), {}, ["[so]\nIt is</s>"]),
    "reasoning by another name": (CHANNELS, chat("hi", ("so", "It is")), {}, ["so!It is</s>"]),
    "reasoning by a third name": (
        CHANNELS.replace("m.thinking", "m['reasoning']"), chat("hi", ("so", "It is")), {}, ["so!It is</s>"],
    ),
    "nothing is asked": (LINES, [THREE, *TWO], {}, ["It is</s>", "I am fine</s>"]),
    "calls": (BLOCKS, [*chat("add"), CALL, RESULT, THREE], {}, ["It is three.</s>"]),
    "calls with reasoning": (
        BLOCKS, [*chat("add"), {**CALL, "reasoning_content": "so"}, RESULT, THREE], {},
        ["[so]\n!add</s>", "It is three.</s>"],
    ),
    **{
        f"an answer that is not to be trained on, {name}, {off}": (
            template, to_messages({"messages": not_trained(turn, **off)}), {}, ran,
        )
        for name, template in (("lines", LINES), ("tags", TAGGED_LINES))
        for off in ({"train": False}, {"weight": 0.0})
        for turn, ran in ((1, ["I am fine</s>"]), (3, ["It is</s>"]))
    },
    # Where an answer ends with the marker of the next turn, one of the target's end tokens, that is trained on.
    **{
        f"the next turn's marker, {name}, {options}": (template, messages, options, ran)
        for options in (ENDS, {})
        for name, template, messages, ran in (
            ("GLM", GLM, TWO, ["\nIt is<|user|>", "\nI am fine<|user|>"]),
            ("GLM's tool", GLM, USED, ["\n!add<s>", "\nIt is three.<|user|>"]),
            ("a result that is not there", GLM, USED[:2], ["\n!add<s>"]),
            ("reasoning", GLM, chat("hi", ("so", "It is")), ["\n[so]\nIt is<|user|>"]),
            ("tags", TAGGED, USED, ["!add<s>", "It is three.<|user|>"]),
            ("a newline", NEWLINE, TWO, ["It is\n<|user|>", "I am fine\n<|user|>"]),
            ("deferred", DEFERRED, TWO, ["It is</s>", "I am fine</s>"]),
        )
    },
    "what follows is left out but for the marker": (GLM, chat("hi", "It is", "why?"), ENDS, ["\nIt is<|user|>"]),
    "as where the next is not trained on": (GLM, not_trained(3), ENDS, ["\nIt is<|user|>"]),
    "where the first is not": (GLM, not_trained(1), ENDS, ["\nI am fine<|user|>"]),
    "only an end token ends an answer": (GLM, TWO, ALONE, ["\nIt is", "\nI am fine"]),
    "no end tokens": (GLM, TWO, {"ends": []}, ["\nIt is", "\nI am fine"]),
    "an end of its own": (OWN_END, TWO, ENDS, ["It is</s>", "I am fine</s>"]),
    "the last was cut off": (GLM, TWO, {**ENDS, **CUT}, ["\nIt is<|user|>", "\nI am fine"]),
    "nobody ended the first": (TAGGED, [*TWO[:2], FINE], ENDS, ["It is", "I am fine<|user|>"]),
    "tools": (TOLD, chat("q", "a"), {"tools": [TOOL]}, ["a</s>"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_on(case):
    """The text is stock's up to the last answer that is trained on, and the end that follows it."""
    template, messages, options, ran = CASES[case]
    tokenizer, options = templated(template), dict(options)
    ends = options.pop("ends", None)
    ends = None if ends is None else tokenizer.convert_tokens_to_ids(ends)
    encoded = encode_chat(tokenizer, messages, end_ids=ends, **options)
    assert supervised(tokenizer, encoded) == ran
    asked = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is not False]
    known = [{**m, "thinking": m.get("reasoning_content"), "reasoning": m.get("reasoning_content")} for m in messages]
    known = known[: asked[-1] + 1]
    mode = dict(tools=options.get("tools")) | dict.fromkeys(
        ("thinking", "enable_thinking"), bool(known[-1]["thinking"])
    )
    stock, text = tokenizer.apply_chat_template(known, tokenize=False, **mode), tokenizer.decode(encoded["input_ids"])
    if "truncated" in options and asked[-1] + 1 == len(messages):
        assert stock.startswith(text) and text.endswith(ran[-1])
    else:
        assert text.startswith(stock) and text[len(stock) :] in ("", *ENDS["ends"])
    if "tools" in options:
        assert text.startswith(json.dumps(TOOL, ensure_ascii=False))


def test_answers_that_cannot_be_told_from_their_prompts_or_ends(shipped):
    in_reasoning = encode_chat(shipped, chat("q?", ("I think", "")), truncated=True)
    assert supervised(shipped, in_reasoning) == ["I think"] and in_reasoning["loss_mask"][-1] == 1
    empty = encode_chat(shipped, chat("a", "b", "c", ""), truncated=True)
    assert supervised(shipped, empty) == ["b" + EOS]
    shipped.chat_template = shipped.chat_template.replace("m.content + eos", "'!' + eos")
    unlike = encode_chat(shipped, chat("say yes", "yes"), truncated=True)  # its end cannot be told
    assert not any(unlike["loss_mask"]) and shipped.decode(unlike["input_ids"]).endswith("</think>!" + EOS)
    shipped.chat_template = (
        "{% for m in messages %}{{ m.role + ': ' }}{% generation %}{{ m.content + eos_token }}{% endgeneration %}"
        "{% endfor %}"
    )
    pieces = [shipped(text, add_special_tokens=False)["input_ids"] for text in ("assistant: ", "the sum" + EOS)]
    joined = shipped("assistant: the sum" + EOS, add_special_tokens=False)["input_ids"]
    encoded = encode_chat(shipped, [{"role": "assistant", "content": "the sum"}])
    assert encoded == {"input_ids": [*pieces[0], *pieces[1]], "loss_mask": [0] * len(pieces[0]) + [1] * len(pieces[1])}
    assert joined != encoded["input_ids"]  # " the" is one token: prompt and answer would share it


# Arguments of calls are the same text whether a row has them as a dictionary or, as OpenAI's wire format, as JSON text


def calling(call, before=""):
    """A template of turns, with `call` where the assistant calls a tool."""
    return (
        "{%- for m in messages %}{%- if m.role == 'assistant' %}{{- '<|assistant|>' }}"
        "{%- if m.tool_calls %}" + before + "{%- for tool_call in m.tool_calls %}"
        "{%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}"
        + call + "{%- endfor %}{%- else %}{{- m.content }}{%- endif %}{{- '</s>' }}"
        "{%- else %}{{- '<|user|>' + m.content }}{%- endif %}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
    )  # fmt: skip


READING = {  # a dictionary
    "Qwen2.5": calling(
        """{{- '{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments|tojson }}"""
    ),
    "GLM-4.5": calling(
        "{{- tool_call.name }}{%- set _args = tool_call.arguments %}{%- for k, v in _args.items() %}"
        "{{- '<arg_key>' + k + '</arg_key>' }}{{- v | tojson if v is not string else v }}{%- endfor %}"
    ),
}
WRITING = {  # text
    "bare": calling("{{- tool_call.name }} {{ tool_call.arguments }}"),
    # Refuses a call without `content`, and writes one with an empty one.
    "DeepSeek-V3": calling(
        "{{- tool_call['name'] + '\n```json\n' + tool_call['arguments'] + '\n```' }}", before="{{- '' + m.content }}"
    ),
}
ARGUMENTS = {"a": 1, "of": {"unit": "é"}, "list": [1, "two"]}
TEXT, SPACELESS = json.dumps(ARGUMENTS, ensure_ascii=False), json.dumps(ARGUMENTS, separators=(",", ":"))


def called(arguments, content=None):
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}
    return [*chat("What is it?"), {"role": "assistant", "content": content, "tool_calls": [call]}]


@pytest.mark.parametrize("name", [*READING, *WRITING])
def test_arguments_of_a_call_are_the_same_as_text_and_as_a_dictionary(name):
    tokenizer = templated({**READING, **WRITING}[name])
    stock = tokenizer.apply_chat_template(called(ARGUMENTS if name in READING else TEXT, ""), tokenize=False)
    for arguments in (TEXT, ARGUMENTS):
        for content in (None, ""):
            messages = to_messages({"messages": called(arguments, content)})
            encoded = encode_chat(tokenizer, messages)
            (answer,) = supervised(tokenizer, encoded)
            assert tokenizer.decode(encoded["input_ids"]) == stock and stock.endswith(answer) and "add" in answer
            assert answer.endswith("</s>") and (TEXT in answer or name == "GLM-4.5")
            row = {"messages": [*messages, {"role": "tool", "content": "three"}, THREE]}
            prompt = tokenizer.decode(encode_prompts(tokenizer, [row])[0][0])
            assert prompt == stock + "<|user|>three<|assistant|>"
    own = encode_chat(tokenizer, to_messages({"messages": called(SPACELESS)}))
    assert (SPACELESS in tokenizer.decode(own["input_ids"])) == (name in WRITING)  # text that is written is the row's
    empty = [encode_chat(tokenizer, to_messages({"messages": called(none)})) for none in ("{}", "", {})]
    assert empty[0] == empty[2] and (empty[1] == empty[0] or name in WRITING)


# A template that reads `content` as a list of parts alone gets one: it writes nothing of a text

IDEFICS = (
    "{% for message in messages %}{{message['role'].capitalize()}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{% if message['role'] != 'assistant' %}{% for content in message['content'] | selectattr('type', 'equalto', "
    "'text') %}{{ content['text'] + ' ' }}{% endfor %}{% else %}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{% generation %}{{ content['text'] + '</s>' }}{% endgeneration %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Parts of the user, text of the others.
HALF = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>' }}{% for part in m.content %}{{ part.text }}"
    "{% endfor %}{% else %}{{ '<|' + m.role + '|>' + m.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
EITHER = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ '[' + part.text + ']' }}{% endfor %}{% endif %}{{ '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
IN_PARTS = {"Idefics": (IDEFICS, "usat"), "LLaVA": (LLAVA, "usat"), "half": (HALF, "u"), "either": (EITHER, "")}


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_template_that_reads_parts_gets_the_text_of_every_message(name):
    template, roles = IN_PARTS[name]
    tokenizer = templated(template)
    messages = chat("What is it?", "It is three.", "and one?", "Hello", system="Hello.")
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    stock = [part if part["role"][0] in roles else message for part, message in zip(parts, messages)]
    text = tokenizer.apply_chat_template(stock, tokenize=False)
    for given in (messages, parts):
        encoded = encode_chat(tokenizer, to_messages({"messages": given}))
        assert tokenizer.decode(encoded["input_ids"]).strip() == text.strip()
        assert "".join(supervised(tokenizer, encoded)) == "It is three.</s>Hello</s>"
        prompt = encode_prompts(tokenizer, [{"messages": given}])[0][0]
        assert tokenizer.decode(prompt) == tokenizer.apply_chat_template(
            stock[:-1], tokenize=False, add_generation_prompt=True
        )
    cut = encode_chat(tokenizer, chat("What is it?", "It is"), truncated=True)
    assert supervised(tokenizer, cut) == ["It is"] and cut["loss_mask"][-1] == 1


def test_a_template_that_is_kept_with_the_processor_is_found(tmp_path):
    """As SmolVLM's and Idefics' are, whose tokenizers have none."""
    Qwen3Config(vocab_size=300).save_pretrained(tmp_path)
    trained("bytes").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    beside = tmp_path / "chat_template.json"
    beside.write_text(json.dumps({"chat_template": IDEFICS}))
    assert load_tokenizer(str(tmp_path)).chat_template == IDEFICS
    templated(LINES).save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == LINES
    beside.write_text("[1]")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    Refusal(lambda: load_tokenizer(str(tmp_path)), ("tokenizer", str(tmp_path)), OSError).check()
