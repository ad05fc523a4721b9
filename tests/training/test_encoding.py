"""Conversations as tokens, and which of them are trained on, under chat templates and tokenizers of many families."""

import json
import re

import pytest
import torch
from transformers import Qwen3Config

from hf_hyperdflash.hub.loading import load_tokenizer
from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.messages import to_messages

from ..conftest import MODELS
from ..helpers.chats import BLOCKS, CALL, CHANNELS, LINES, WORDY, chat, supervised, templated
from ..helpers.refusals import Refusal
from ..helpers.tokenizers import SlowPieces, trained

# The shipped one: reasoning in every turn, and answers between tags.
SHIPPED = (MODELS / "tiny-deepseek-v4" / "chat_template.jinja").read_text(encoding="utf-8")


def test_prompts_of_rows_are_those_of_stock():
    tokenizer = templated(SHIPPED)
    rows = [{"turns": ["a", "b"]}, {"question": "q", "answer": "a"}]
    for prompt, asked in zip(encode_prompts(tokenizer, rows), (chat("a"), chat("q")), strict=True):
        stock = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        assert prompt.dtype == torch.long and torch.equal(prompt, stock["input_ids"])
    silent = {"messages": [{"role": "assistant", "content": "a"}]}
    assert len(encode_prompts(tokenizer, [silent, *rows, *rows], at_most=3)) == 3
    assert encode_prompts(tokenizer, [silent], at_most=0) == []


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


RESULT = {"role": "tool", "content": "three"}
THREE = {"role": "assistant", "content": "It is three."}
TWO, FINE = chat("hi", "It is", "why?", "I am fine"), {"role": "assistant", "content": "I am fine"}
USED = [*chat("hi"), CALL, RESULT, THREE]
ENDS, ALONE = {"ends": ["</s>", "<|user|>", "<s>"]}, {"ends": ["</s>"]}
CUT = {"truncated": True}
TOOL = {"type": "function", "function": {"name": "add", "description": "é"}}
# A call's arguments are the same text whether a row has them as a dictionary or, as OpenAI's wire format, as text.
ARGUMENTS = {"a": 1, "of": {"unit": "é"}, "list": [1, "two"]}
TEXT, SPACELESS = json.dumps(ARGUMENTS, ensure_ascii=False), json.dumps(ARGUMENTS, separators=(",", ":"))
GIVEN = [  # by a row, and what templates get that read a dictionary or write text
    (TEXT, ARGUMENTS, TEXT), (ARGUMENTS, ARGUMENTS, TEXT), (SPACELESS, ARGUMENTS, SPACELESS), ("{}", {}, "{}"),
    ({}, {}, "{}"), ("", {}, ""),
]  # fmt: skip
READING = {  # a template, and the call that it writes
    "Qwen2.5": (
        calling("""{{- '{"name": "' + tool_call.name + '", "arguments": ' }}{{- tool_call.arguments|tojson }}"""),
        lambda given: '{"name": "add", "arguments": ' + json.dumps(given, ensure_ascii=False),
    ),
    "GLM-4.5": (
        calling("{{- tool_call.name }}{%- for k, v in tool_call.arguments.items() %}"
                "{{- '<arg_key>' + k + '</arg_key>' }}{{- v | tojson if v is not string else v }}{%- endfor %}"),
        lambda given: "add" + "".join(
            f"<arg_key>{k}</arg_key>{json.dumps(v, ensure_ascii=False)}" for k, v in given.items()),
    ),
}  # fmt: skip
WRITING = {
    "bare": (calling("{{- tool_call.name }} {{ tool_call.arguments }}"), "add {}".format),
    # Refuses a call without `content`, and writes one with an empty one.
    "DeepSeek-V3": (
        calling(
            "{{- tool_call['name'] + '\n```json\n' + tool_call['arguments'] + '\n```' }}", "{{- '' + m.content }}"
        ),
        "add\n```json\n{}\n```".format,
    ),
}


def called(arguments, content=""):
    call = {"type": "function", "id": "call00000", "function": {"name": "add", "arguments": arguments}}
    return [*chat("What is it?"), {"role": "assistant", "content": content, "tool_calls": [call]}, RESULT, THREE]


# A template that reads `content` as a list of parts alone gets one: it writes nothing of a text.
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
SPOKEN = chat("What is it?", "It is three.", "and one?", "Hello", system="Hello.")


def in_parts(messages, roles="usat"):
    """The messages of some roles, by their first letters, with their texts as lists of parts."""
    parts = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]
    return [part if part["role"][0] in roles else message for part, message in zip(parts, messages)]


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
    "a question after the last answer": (BLOCKS, chat("hi", "It is", "why?"), {}, ["It is</s>"]),
    "nobody cut it, as it goes on": (BLOCKS, chat("hi", "It is", "why?"), CUT, ["It is</s>"]),
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
            template, not_trained(turn, **off), {}, ran,
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
            ("a newline of the next turn", TAGGED.replace("'<|user|>'", "'\n<|user|>'"), TWO,
             ["It is\n<|user|>", "I am fine\n<|user|>"]),
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
    **{
        f"the shipped template, {ran}": (template, messages, {}, ran)
        for template in (SHIPPED, re.sub(r"\{% (end)?generation %\}", "", SHIPPED))
        for messages, ran in (
            (chat("Hi", "Hello there 👋", "And now?", "Bye", system="Be brief. "), ["Hello there 👋</s>", "Bye</s>"]),
            (chat("Hi", ("I think\nso", "Yes"), "Why?", ("so", " it is.  ")),
             ["I think\nso</think>Yes</s>", "so</think> it is.  </s>"]),
            (chat("<|user|>", "it", "it", "it", "it"), ["it</s>", "it</s>"]),
        )
    },
    "an earlier answer, where the last that was cut does not follow its prompt": (
        LINES.replace("t|>\n' }}{% endif", "t|>\n' + ('<s>' if messages|length > 2 else '') }}{% endif"),
        chat("hi", "It is three.", "why?", "It is"), CUT, ["It is three.</s>"],
    ),
    "a cut within reasoning": (SHIPPED, chat("q?", ("I think", "")), CUT, ["I think"]),
    "a cut before a word": (SHIPPED, chat("a", "b", "c", ""), CUT, ["b</s>"]),
    "a cut that does not show": (SHIPPED.replace("m.content + eos", "'!' + eos"), chat("say yes", "yes"), CUT, []),
    "tools": (TOLD, chat("q", "a"), {"tools": [TOOL]}, ["a</s>"]),
    **{
        f"a call of {name}, {given!r}, {content!r}": (
            template, called(given, content), {"stock": called(known)}, [written(known) + "</s>", "It is three.</s>"],
        )
        for content in (None, "")
        for given, *known_by in GIVEN
        for known, templates in zip(known_by, (READING, WRITING))
        for name, (template, written) in templates.items()
    },
    **{
        f"parts by {name}, {len(roles)}": (
            template, in_parts(SPOKEN, roles), {"stock": in_parts(SPOKEN, read)}, ["It is three.</s>", "Hello</s>"],
        )
        for name, (template, read) in IN_PARTS.items()
        for roles in ("", "usat")
    },
    **{f"a cut by {name}": (template, SPOKEN, {"stock": in_parts(SPOKEN, read), **CUT}, ["It is three.</s>", "Hello"])
       for name, (template, read) in IN_PARTS.items()},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_is_trained_on(case):
    """The text is stock's up to the last answer that is trained on, and the end that follows it; the prompt is
    stock's, too."""
    template, given, options, ran = CASES[case]
    tokenizer, options = templated(template), dict(options)
    ends, known = options.pop("ends", None), options.pop("stock", None)
    messages = to_messages({"messages": given})
    ids = None if ends is None else tokenizer.convert_tokens_to_ids(ends)
    encoded = encode_chat(tokenizer, messages, end_ids=ids, **options)
    assert supervised(tokenizer, encoded) == ran
    reasons = [m.get("reasoning_content") for m in messages]
    known = known or [{**m, "thinking": why, "reasoning": why} for m, why in zip(messages, reasons)]

    def stock(count, thinks, **prompt):
        mode = dict.fromkeys(("thinking", "enable_thinking"), thinks)
        return tokenizer.apply_chat_template(
            known[:count], tools=options.get("tools"), tokenize=False, **mode, **prompt
        )

    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("train") is not False)
    text, whole = tokenizer.decode(encoded["input_ids"]), stock(last + 1, bool(reasons[last]))
    if "truncated" in options and last + 1 == len(messages):
        assert whole.startswith(text) and (text == whole or text.endswith(ran[-1]))
    else:
        assert text.startswith(whole) and text[len(whole) :].lstrip("\n") in ("", *ENDS["ends"])
    asked = max(i for i, m in enumerate(messages) if m["role"] != "assistant") + 1
    for thinks in (False, True):
        row = {"messages": given, "tools": options.get("tools")}
        prompt = tokenizer.decode(encode_prompts(tokenizer, [row], thinks)[0][0])
        assert prompt == stock(asked, thinks, add_generation_prompt=True)


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
