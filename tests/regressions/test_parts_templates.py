"""A chat template that reads `content` as a list of parts alone, as those of Idefics 3, SmolVLM and LLaVA, gets one,
in rows and in prompts: it writes nothing of a text."""

import json

import pytest
from transformers import Qwen3Config, Qwen3ForCausalLM

from hf_hyperdflash.benchmark.doctor.ablations import encode
from hf_hyperdflash.hub.loading import load_tokenizer
from hf_hyperdflash.training.data.answers import AnswerSettings, Conversation
from hf_hyperdflash.training.data.encoding import encode_chat, encode_prompts
from hf_hyperdflash.training.data.messages import to_messages
from hf_hyperdflash.training.data.rows import prepare_dataset
from hf_hyperdflash.training.trials import Local

from ..helpers.tokenizers import trained

IDEFICS = (
    "{% for message in messages %}{{message['role'].capitalize()}}{% if message['content'][0]['type'] == 'image' %}"
    "{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if line['type'] == 'text' %}"
    "{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
LLAVA = (
    "{% for message in messages %}{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}"
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\n' }}{% endfor %}"
    "{% if message['role'] != 'assistant' %}{% for content in message['content'] | selectattr('type', 'equalto', "
    "'text') %}{{ content['text'] + ' ' }}{% endfor %}{% else %}{% for content in message['content'] | "
    "selectattr('type', 'equalto', 'text') %}{% generation %}{{ content['text'] + '</s>' }}{% endgeneration %}"
    "{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
FIRST = (  # the first part, and an error of a text
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content[0]['text'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
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
TEXT = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TEMPLATES = {"Idefics": IDEFICS, "LLaVA": LLAVA, "first": FIRST, "half": HALF, "either": EITHER, "text": TEXT}
IN_PARTS = {"Idefics": "usa", "LLaVA": "usa", "first": "usa", "half": "u", "either": "", "text": ""}
TURNS = [("system", "Hello."), ("user", "What is it?"), ("assistant", "It is three."), ("user", "and one?")]


def test_a_template_that_is_kept_with_the_processor_is_found(tmp_path):
    """As SmolVLM's and Idefics' are, whose tokenizers have none."""
    Qwen3Config(vocab_size=300).save_pretrained(tmp_path)
    trained("bytes").save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template is None
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": IDEFICS}))
    assert load_tokenizer(str(tmp_path)).chat_template == IDEFICS
    (tmp_path / "chat_template.json").write_text("[1]")
    with pytest.raises(OSError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "chat_template.json").unlink()
    tokenizer = trained("bytes")
    tokenizer.chat_template = TEXT
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": IDEFICS}))
    assert load_tokenizer(str(tmp_path)).chat_template == TEXT


def chat(name, *turns):
    """The messages as a template reads them, for the stock tokenizer."""
    return [
        {"role": role, "content": [{"type": "text", "text": text}] if role[0] in IN_PARTS[name] else text}
        for role, text in turns
    ]


@pytest.fixture(params=TEMPLATES)
def pair(request):
    tokenizer = trained("bytes")
    tokenizer.chat_template = TEMPLATES[request.param]
    return request.param, tokenizer


def test_rows_have_the_text_of_every_message(pair):
    name, tokenizer = pair
    turns = [*TURNS, ("assistant", "Hello there")]
    stock = tokenizer.apply_chat_template(chat(name, *turns), tokenize=False)
    rows = [{"messages": [{"role": role, "content": text} for role, text in turns]}]
    rows += [{"messages": [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in turns]}]
    for row in rows:
        encoded = encode_chat(tokenizer, to_messages(row))
        assert tokenizer.decode(encoded["input_ids"]).strip() == stock.strip()
        answers = [token for token, marked in zip(encoded["input_ids"], encoded["loss_mask"]) if marked]
        assert tokenizer.decode(answers) == "It is three.</s>Hello there</s>"
    first, second = prepare_dataset(rows, tokenizer, max_length=200).to_list()
    assert first == second == {**encoded, "position_ids": list(range(len(encoded["input_ids"])))}


def test_prompts_have_the_text_of_every_message(pair, tmp_path):
    name, tokenizer = pair
    messages = [{"role": role, "content": text} for role, text in TURNS]
    stock = tokenizer.apply_chat_template(chat(name, *TURNS), tokenize=False, add_generation_prompt=True)
    assert tokenizer.decode(encode_prompts(tokenizer, [{"messages": messages}])[0][0]) == stock
    assert all(text in stock for _, text in TURNS)
    doctors = encode(tokenizer, [[text for _, text in TURNS[1:]]])[0]
    assert tokenizer.decode(doctors[0]) == tokenizer.apply_chat_template(
        chat(name, *TURNS[1:]), tokenize=False, add_generation_prompt=True
    )
    asked = Conversation([messages[1]], None)
    assert asked.ask(tokenizer, AnswerSettings())
    assert tokenizer.decode(asked.ids) == tokenizer.apply_chat_template(
        chat(name, TURNS[1]), tokenize=False, add_generation_prompt=True
    )
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).chat_template == tokenizer.chat_template
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    target = Qwen3ForCausalLM(config).eval()
    prompt = encode_prompts(tokenizer, [{"messages": messages}])[0]
    assert len(Local(target).generate(prompt, 0.0, 3).output) == 3


def test_the_end_of_an_answer_that_hit_a_limit_is_found(pair):
    _, tokenizer = pair
    messages = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "It is"}]
    encoded = encode_chat(tokenizer, messages, truncated=True)
    answer = [token for token, marked in zip(encoded["input_ids"], encoded["loss_mask"]) if marked]
    assert tokenizer.decode(answer) == "It is" and encoded["loss_mask"][-1] == 1
