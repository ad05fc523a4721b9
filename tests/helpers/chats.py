"""Conversations, chat templates as families have them, and what is trained on of a tokenized row."""

from __future__ import annotations

from .tokenizers import trained

# As Qwen's and Gemma's: a newline after the special token, none in the answer.
LINES = (
    "{% for m in messages %}{{ ('<|assistant|>' if m.role == 'assistant' else '<|user|>') + '\n' }}"
    "{{ m.content + eos_token + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
WORDY = (  # no special token, and the prompt ends with a space
    "{% for m in messages %}{{ m.role + ': ' + m.content }}{% if m.role != 'assistant' or not loop.last %}{{ '\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
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


def chat(*turns, system=None):
    """user, assistant, user, ...; an answer of two texts is reasoning and content, a dictionary a message."""
    messages = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        if isinstance(turn, dict):
            messages.append(turn)
        elif isinstance(turn, tuple):
            messages.append({"role": "assistant", "reasoning_content": turn[0], "content": turn[1]})
        else:
            messages.append({"role": ("user", "assistant")[i % 2], "content": turn})
    return messages


def templated(template, kind="bytes"):
    """A tokenizer of a kind of [`trained`], or a given one, with a chat template."""
    tokenizer = trained(kind) if isinstance(kind, str) else kind
    tokenizer.chat_template = template
    return tokenizer


def supervised(tokenizer, encoded):
    """The runs of tokens that are trained on, decoded."""
    runs, before = [], 0
    for token, mark in zip(encoded["input_ids"], encoded["loss_mask"]):
        if mark:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = mark
    return [tokenizer.decode(run) for run in runs]
