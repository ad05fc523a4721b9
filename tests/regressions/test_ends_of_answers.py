"""Where an answer ends with the marker of the next turn, which is one of the target's end tokens (GLM), the marker is
supervised, after the last answer, too: a drafter learns to end."""

import pytest
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash import HyperDFlashDrafter
from hf_hyperdflash.training.arguments import HyperDFlashTrainingArguments
from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.rows import prepare_dataset
from hf_hyperdflash.training.trainer import HyperDFlashTrainer

from ..helpers.tokenizers import trained

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
# As Nemotron's: a newline before the marker.
NEWLINE = TAGGED.replace("{% generation %}", "").replace("{% endgeneration %}", "{{ '\n' }}")
# As templates that write an answer's end where the next turn begins.
DEFERRED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|assistant|>' + (m.content or '!add') }}{% else %}"
    "{{ '</s>' if not loop.first }}{{ '<|user|>' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OWN_END = TAGGED.replace("'!add' }}", "'!add') + eos_token + '\n' }}").replace("{{ m.content or", "{{ (m.content or")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
RESULT = {"role": "tool", "content": "three"}
ENDS = ["</s>", "<|user|>", "<s>"]


def chat(*turns):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]


def marked(tokenizer, encoded):
    """The supervised runs, and the whole text."""
    runs, before = [], 0
    for token, mark in zip(encoded["input_ids"], encoded["loss_mask"]):
        if mark:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = mark
    return [tokenizer.decode(run) for run in runs], tokenizer.decode(encoded["input_ids"])


def read(template, messages, ends=ENDS, **options):
    tokenizer = trained("bytes")
    tokenizer.chat_template = template
    ids = ends and tokenizer.convert_tokens_to_ids(ends)
    return marked(tokenizer, encode_chat(tokenizer, messages, end_ids=ids, **options))


@pytest.mark.parametrize("ends", [ENDS, None])
def test_the_next_turns_marker_ends_an_answer(ends):
    messages = chat("hi", "It is", "why?", "I am fine")
    assert read(GLM, messages, ends) == (
        ["\nIt is<|user|>", "\nI am fine<|user|>"],
        "<|user|>\nhi<|assistant|>\n[]\nIt is<|user|>\nwhy?<|assistant|>\n[]\nI am fine<|user|>",
    )
    called = [*chat("hi"), CALL, RESULT, {"role": "assistant", "content": "It is three."}]
    assert read(GLM, called, ends)[0] == ["\n!add<s>", "\nIt is three.<|user|>"]
    assert read(GLM, called[:2], ends)[0] == ["\n!add<s>"]  # whose result is not there
    thought = [*chat("hi"), {"role": "assistant", "content": "It is", "reasoning_content": "so"}]
    assert read(GLM, thought, ends)[0] == ["\n[so]\nIt is<|user|>"]
    assert read(TAGGED, called, ends)[0] == ["!add<s>", "It is three.<|user|>"]
    assert read(NEWLINE, messages, ends)[0] == ["It is\n<|user|>", "I am fine\n<|user|>"]
    assert read(DEFERRED, messages, ends)[0] == ["It is</s>", "I am fine</s>"]


def test_what_follows_is_left_out_but_for_the_marker():
    assert read(GLM, chat("hi", "It is", "why?")) == read(GLM, chat("hi", "It is"))
    excluded = chat("hi", "It is", "why?", "so")
    excluded[3]["train"] = False
    assert read(GLM, excluded) == read(GLM, chat("hi", "It is"))
    excluded = chat("hi", "It is", "why?", "I am fine")
    excluded[1]["train"] = False
    assert read(GLM, excluded)[0] == ["\nI am fine<|user|>"]


def test_only_an_end_token_ends_an_answer():
    messages = chat("hi", "It is", "why?", "I am fine")
    for ends in (["</s>"], []):
        assert read(GLM, messages, ends)[0] == ["\nIt is", "\nI am fine"]
    assert read(OWN_END, messages)[0] == ["It is</s>", "I am fine</s>"]
    runs, text = read(GLM, messages, truncated=True)  # the last was cut off
    assert runs == ["\nIt is<|user|>", "\nI am fine"] and text.endswith("fine")
    twice = [*chat("hi", "It is"), {"role": "assistant", "content": "I am fine"}]
    assert read(TAGGED, twice)[0] == ["It is", "I am fine<|user|>"]  # nobody ended the first


@pytest.fixture(scope="module")
def target():
    tokenizer = trained("bytes")
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).eval()


@pytest.mark.parametrize("ends", [ENDS, ["</s>"]])
def test_the_trainer_knows_the_targets_end_tokens(target, ends, tmp_path):
    tokenizer = trained("bytes")
    tokenizer.chat_template = GLM
    target.generation_config = GenerationConfig(eos_token_id=tokenizer.convert_tokens_to_ids(ends))
    rows = [{"messages": chat("hi", "It is three.")}]
    drafter = HyperDFlashDrafter.from_target(target, mask_token_id=1, num_hidden_layers=1)
    arguments = HyperDFlashTrainingArguments(output_dir=str(tmp_path), report_to="none", use_cpu=True)
    trainer = HyperDFlashTrainer(drafter, target, arguments, train_dataset=rows, processing_class=tokenizer)
    row = trainer.train_dataset[0]
    assert marked(tokenizer, row)[0] == ["\nIt is three." + "<|user|>" * ("<|user|>" in ends)]
    ids = target.generation_config.eos_token_id
    assert prepare_dataset(rows, tokenizer, max_length=50, end_ids=ids)[0] == row
    prompt = encode_prompts(tokenizer, rows)[0][0].tolist()  # of which nothing changes
    assert row["input_ids"][: len(prompt)] == prompt and row["loss_mask"][len(prompt) - 1 : len(prompt) + 1] == [0, 1]
