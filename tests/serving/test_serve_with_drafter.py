"""The conversations of `examples/serve_with_drafter.py`, without the server: `tools/check_programs.py` runs that."""

import importlib.util
import json
import sys
import threading
import types
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from hf_hyperdflash import load_drafter, load_target, load_tokenizer

from ..conftest import MODELS, prompt, tiny_drafter, tiny_target

PATH = Path(__file__).parents[2] / "examples" / "serve_with_drafter.py"
GREEDY = GenerationConfig(do_sample=False, max_new_tokens=20)


@pytest.fixture
def served(monkeypatch):
    """The example, the target with its own `generate`, and one that answers with conversations."""
    monkeypatch.setitem(sys.modules, "transformers.cli.serve", types.SimpleNamespace(Serve=object))
    spec = importlib.util.spec_from_file_location("serve_with_drafter", PATH)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "serve_with_drafter", example)
    spec.loader.exec_module(example)
    target = tiny_target(hidden_size=64)
    drafter = tiny_drafter(target)
    drafter.bind(target, as_default=True)
    return target, example.Conversations(target, drafter, 2)


def answered(target, conversations, ids, config=GREEDY, **options):
    """An answer, which is the target's own."""
    out = target.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, **options)
    alone = conversations.alone(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    assert torch.equal(out, alone)
    return out


def said(text, seed):
    return torch.cat([text, prompt(30, seed)], dim=1)


def test_each_chat_keeps_its_own_cache(served, capsys):
    target, conversations = served
    texts = [prompt(60, seed) for seed in (1, 2)]
    for turn in range(3):
        texts = [said(answered(target, conversations, text), turn) for text in texts]
    logged = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()]
    assert logged == [0, 0, 79, 79, 129, 129]
    kept = list(conversations.free)
    answered(target, conversations, said(prompt(60, 1), 5))  # another chat, which begins as the first one did
    assert len(conversations.free) == 2 and conversations.free[0] is kept[1] and kept[0] not in conversations.free


def test_requests_at_once_do_not_share_one(served):
    target, conversations = served
    first = answered(target, conversations, prompt(60, 1))
    found, inside = [], threading.Barrier(2, timeout=60)

    class Streamer:
        def __init__(self):
            self.waited = False

        def put(self, value):
            if not self.waited:
                self.waited = True
                inside.wait()

        def end(self):
            pass

    def ask(seed):
        ids = said(first, seed)
        config = GenerationConfig(do_sample=False, max_new_tokens=5)
        found.append(target.generate(input_ids=ids, generation_config=config, streamer=Streamer()))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in (3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and len(conversations.free) == 2
    for out in found:
        assert torch.equal(out, conversations.alone(out[:, :-5], do_sample=False, max_new_tokens=5))


def test_an_error_gives_the_conversation_back(served):
    target, conversations = served
    text = answered(target, conversations, prompt(60, 1))

    class Cancelled:
        def put(self, value):
            raise ConnectionError("cancelled")

    with pytest.raises(ConnectionError):
        answered(target, conversations, said(text, 2), streamer=Cancelled())
    (conversation,) = conversations.free
    answered(target, conversations, said(text, 2))
    assert conversations.free == [conversation] and conversation.cached_tokens >= 79


def test_what_a_conversation_does_not_do_goes_the_usual_way(served):
    target, conversations = served
    for config in (
        GenerationConfig(num_beams=2, max_new_tokens=3, do_sample=False),
        GenerationConfig(use_cache=False, max_new_tokens=3, do_sample=False),
        GenerationConfig(num_return_sequences=2, do_sample=True, max_new_tokens=3),
    ):
        options = {"assistant_model": None} if config.use_cache is False else {}
        target.generate(input_ids=prompt(9), generation_config=config, **options)
    answered(target, conversations, prompt(9).repeat(2, 1))
    assert not conversations.free


# Formats


class Handler:
    """What transformers' handlers have of their own."""

    _unused_fields = frozenset({"response_format", "text", "n"})

    def _build_generation_config(self, body, model_generation_config, use_cb=False):
        return GenerationConfig(do_sample=False, max_new_tokens=body["max_tokens"], eos_token_id=1)


class HTTPException(Exception):
    def __init__(self, status_code, detail):
        super().__init__(f"{status_code}: {detail}")


@pytest.fixture
def formatted(served, monkeypatch):
    """Answers of the shipped target to a question, with the fields of a request."""
    pytest.importorskip("xgrammar")
    monkeypatch.setitem(sys.modules, "fastapi", types.SimpleNamespace(HTTPException=HTTPException))
    name = MODELS / "tiny-deepseek-v4"
    target, tokenizer = load_target(name, dtype="float32"), load_tokenizer(name)
    drafter = load_drafter(f"{name}-hyperdflash", target=target)
    drafter.bind(target, as_default=True)
    example, handler = sys.modules[type(served[1]).__module__], Handler()
    example.Formats(tokenizer, target.config.vocab_size).read_for(handler)
    assert handler._unused_fields == {"n"} and Handler._unused_fields > {"n"}

    def answer(question, options=(2,), **fields):
        example.Conversations(target, drafter, *options)
        config = handler._build_generation_config({"max_tokens": 40, **fields}, target.generation_config)
        ids = tokenizer(question, return_tensors="pt").input_ids
        try:
            out = target.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=config, tokenizer=tokenizer
            )
        finally:
            vars(target).pop("generate")
        return tokenizer.decode(out[0, ids.shape[1] :]).removesuffix(tokenizer.eos_token)

    return answer


SCHEMA = {"type": "object", "properties": {"left": {"enum": [7, 8]}}, "required": ["left"]}
OF_CHAT = {"type": "json_schema", "json_schema": {"name": "marbles", "schema": SCHEMA}}


@pytest.mark.parametrize("number", [2, 0])
def test_an_answer_has_its_format(formatted, number):
    question = "Tom has 12 marbles and gives 5 away. How many are left?"
    plain = formatted(question, (number,))
    assert formatted(question, (number,), response_format={"type": "text"}) == plain
    of_response = {"format": {"type": "json_schema", "name": "marbles", "schema": SCHEMA}}
    for fields in ({"response_format": OF_CHAT}, {"text": of_response}):
        assert json.loads(formatted(question, (number,), **fields))["left"] in (7, 8)
    assert formatted(question, (number,), response_format={"type": "json_object"}).startswith("{")


def test_a_format_begins_behind_the_reasoning(formatted):
    question, end = "Tom has 12 marbles. The total number of", "</think>"
    assert end not in formatted(question, (2, end))
    assert formatted(question, (2, end, 4)).count(end) == 1
    reasoning, _, answer = formatted(question, (2, end, 4), response_format=OF_CHAT).partition(end)
    assert reasoning and json.loads(answer)["left"] in (7, 8)
    assert formatted(question + end, (2, end, 4), response_format=OF_CHAT).startswith('{"left": ')


@pytest.mark.parametrize("wrong, words", [
    ("json", ("'json'", "an object")), ({"type": "xml"}, ("'xml'", "'json_schema'")),
    ({"type": "json_schema"}, ("lacks 'schema'",)),
    ({"type": "json_schema", "schema": {"type": "objct"}}, ("objct",)),
])  # fmt: skip
def test_a_format_that_cannot_be_kept_is_refused(formatted, wrong, words):
    with pytest.raises(HTTPException) as refused:
        formatted("Why?", response_format=wrong)
    message = str(refused.value)
    assert message.startswith("400: ") and "\n" not in message and ".cc" not in message
    assert all(word in message for word in words), message
