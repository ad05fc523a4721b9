"""`hf-hyperdflash answers`: what the target answers is written, a stopped run goes on."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub import loading
from hf_hyperdflash.training.data import answers
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.data.messages import read_tools

from ..conftest import MODELS, mostly_nightly
from ..helpers import loopback
from ..helpers.chats import chat
from ..helpers.refusals import Refusal
from ..helpers.served_drafters import qwen3

TARGET = MODELS / "tiny-deepseek-v4"
EOS = "<｜end▁of▁sentence｜>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
DENSE = pytest.mark.parametrize("ending_target", ["dense"], indirect=True, scope="module")
ENDS = {"V4": ["Ġof", "(", "Ġ"], "dense": range(0, 2048, 8)}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module", params=ENDS)
def ending_target(request, tmp_path_factory):
    """A target most of whose answers end within a few tokens, so that conversations go on. One takes no padding, the
    other's prompts of several lengths share batches."""
    directory = tmp_path_factory.mktemp("target")
    if request.param == "dense":
        torch.manual_seed(0)
        qwen3(vocab_size=2048).save_pretrained(directory)
    for file in TARGET.iterdir():
        if file.name != "generation_config.json" and not (directory / file.name).exists():
            (directory / file.name).symlink_to(file)
    vocabulary = AutoTokenizer.from_pretrained(TARGET).get_vocab()
    ends = [vocabulary.get(token, token) for token in (EOS, *ENDS[request.param])]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends, "pad_token_id": 2}))
    return directory


@pytest.fixture
def answer(ending_target, tmp_path):
    """Run the command over eight different prompts, two that are there twice, and a row that asks nothing."""
    questions = [f"Tom has {n} apples and buys 4. How many?" for n in (3, 5, 7, 3)] + ["Write a Python function."]
    rows = [{"messages": chat(question, "x")} for question in questions]
    rows += [{"messages": chat(question, "x", "Why?", "y")} for question in questions[1:]]
    rows[-1]["messages"].insert(0, {"role": "system", "content": "Be brief."})
    rows += [{"messages": [{"role": "assistant", "content": "Hi"}]}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def run(output, *options):
        arguments = ["--target", ending_target, "--data", tmp_path / "data.jsonl", "--output", tmp_path / output]
        arguments += ["--max-new-tokens", 5, "--batch-size", 2, "--dtype", "float32", *options]
        app(["answers", *map(str, arguments)], standalone_mode=False)
        return (tmp_path / output).read_text().splitlines()

    return run


def test_answers_are_the_targets(answer, ending_target, tokenizer):
    rows = [json.loads(line) for line in answer("answers.jsonl")]
    assert len(rows) == 8
    target = AutoModelForCausalLM.from_pretrained(ending_target, dtype=torch.float32).eval()
    kinds = set()
    for row in rows:
        for i, message in enumerate(row["messages"]):
            if message["role"] == "assistant":
                ids = encode_prompts(tokenizer, [{"messages": row["messages"][: i + 1]}])[0]
                answer = target.generate(ids, do_sample=False, max_new_tokens=5)[0, ids.shape[1] :].tolist()
                ended = answer[-1] in target.generation_config.eos_token_id
                assert message["content"] == tokenizer.decode(answer[:-1] if ended else answer)
                assert ended or message is row["messages"][-1]  # nothing follows an answer that is cut off
        assert row["truncated"] == (not ended)
        kinds.add((sum(m["role"] == "user" for m in row["messages"]), row["truncated"]))
    assert kinds >= {(1, False), (1, True), (2, True)}  # answered turns, cut off


class Engine(loopback.Engine):
    """Answers with the target itself, as vLLM would."""

    def __init__(self, folder):
        self.target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.more = {"root": str(folder)}
        super().__init__()

    def reply(self, body):
        prompt = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
        with self.lock:
            ids = self.target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=body["max_tokens"])
        answer = ids[0, len(prompt) :].tolist()
        ended = answer[-1] in self.target.generation_config.eos_token_id
        text = self.tokenizer.decode(answer, skip_special_tokens=True)
        text = text if not ended else self.tokenizer.decode(answer[:-1], skip_special_tokens=True)
        choice = {"message": {"role": "assistant", "content": text}, "finish_reason": "stop" if ended else "length"}
        return {"choices": [{**choice, "token_ids": answer}], "prompt_token_ids": prompt}


def test_a_server_of_the_target_writes_the_same_rows(answer, ending_target, tokenizer, tmp_path):
    here = [json.loads(line) for line in answer("here.jsonl")]
    with loopback.serving(Engine(ending_target)) as server:
        command = ["answers", "--endpoint", server.root, "--data", tmp_path / "data.jsonl", "--max-new-tokens", 5]
        app([*map(str, command), "--output", str(tmp_path / "there.jsonl")], standalone_mode=False)
    there = [json.loads(line) for line in (tmp_path / "there.jsonl").read_text().splitlines()]
    tokens = [(row.pop("input_ids"), row.pop("loss_mask")) for row in there]
    assert sorted(there, key=str) == sorted(here, key=str) and len(there) == 8
    for row, (ids, mask) in zip(there, tokens):
        prompt = encode_prompts(tokenizer, [row])[0][0].tolist()
        assert ids[: len(prompt)] == prompt and 0 < len(ids) - len(prompt) <= 5 and all(mask[len(prompt) :])
        if len(row["messages"]) == 2:
            assert not any(mask[: len(prompt)])
        assert row["truncated"] == (ids[-1] not in server.target.generation_config.eos_token_id)
        assert tokenizer.decode(ids[len(prompt) :]).startswith(row["messages"][-1]["content"])
    # Either way goes on with what the other began.
    for file, lines in (("here.jsonl", here), ("there.jsonl", there)):
        (tmp_path / file).write_text("\n".join(map(json.dumps, lines[:3])) + "\n")
    with loopback.serving(Engine(ending_target)) as server:
        command[2] = server.root
        app([*map(str, command), "--output", str(tmp_path / "here.jsonl")], standalone_mode=False)
    assert len((tmp_path / "here.jsonl").read_text().splitlines()) == 8 == len(answer("there.jsonl"))


@pytest.mark.parametrize(
    "options",
    mostly_nightly(
        [["--temperature", 1.0, "--top-p", 0.9], [], ["--thinking", "--chat-template", TARGET / "chat_template.jinja"]]
    ),
)
def test_a_killed_run_ends_in_the_same_answers(answer, tmp_path, options, capsys):
    whole = answer("whole.jsonl", *options)
    assert "8/8" in capsys.readouterr().err
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*whole[::3], whole[1][:30]]))
    assert sorted(answer("cut.jsonl", *options)) == sorted(whole)
    told = capsys.readouterr().err
    assert "3/8" in told and "8/8" in told  # the bar counts what was done before
    assert answer("cut.jsonl", *options) == cut.read_text().splitlines()


def test_the_bar_shows_tokens_a_second_and_its_end_by_the_mean(tmp_path, monkeypatch):
    """Of all batches, as the last one says little of the next."""
    bars, made = [], answers.tqdm
    monkeypatch.setattr(answers, "tqdm", lambda **options: bars.append(made(**options)) or bars[-1])
    monkeypatch.setattr(answers, "time", SimpleNamespace(monotonic=itertools.count().__next__))  # a second each
    settings = answers.AnswerSettings()
    conversation = answers.Conversation({"messages": chat("What?", "x")}, settings)
    conversation.ask()
    conversation.add(({"role": "assistant", "content": "This."}, False))
    conversation.new_tokens = 6
    answers.WrittenAnswers(tmp_path / "answers.jsonl", settings.written("org/target")).add(
        [conversation], [[conversation]]
    )
    assert bars[0].postfix == "6 tokens/s" and bars[0].smoothing == 0 and bars[0].n == 1


@DENSE
def test_what_a_row_says_beside_its_question_is_asked_too(answer, tmp_path):
    row = {"question": "q", "answer": "a", "system_prompt": "s", "history": [["q0", "a0"]], "messages": None}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    (written,) = map(json.loads, answer("asked.jsonl", "--question-suffix", "!", "--max-new-tokens", 40))
    said = [(m["role"], m["content"]) for m in written["messages"] if m["role"] != "assistant"]
    assert said in ([("system", "s"), ("user", "q0"), ("user", "q!")], [("system", "s"), ("user", "q0")])
    tool_less = {"messages": chat("Write a Python function.", "x"), "question": None}
    rows = [tool_less, {**tool_less, "tools": TOOLS}]  # the same question is another with tools
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = [json.loads(line) for line in answer("tools.jsonl", "--question-suffix", "!")]
    assert sorted(str(read_tools(row)) for row in found) == sorted([str(None), str(TOOLS)])
    assert all(row["messages"][0]["content"] == "Write a Python function." for row in found)


@DENSE
def test_a_file_is_gone_on_with_only_by_the_settings_that_wrote_it(answer, tmp_path, monkeypatch, capsys):
    whole = answer("answers.jsonl")
    truncated = sum(json.loads(line)["truncated"] for line in whole)
    assert truncated and f"8 rows in {tmp_path / 'answers.jsonl'}; {truncated} of them hit" in capsys.readouterr().out
    monkeypatch.setattr(loading, "load_target", lambda *args, **kwargs: pytest.fail("it was loaded"))
    assert answer("answers.jsonl") == whole
    assert "All 8 prompts" in capsys.readouterr().out
    for *option, words in (
        ("--max-new-tokens", 7, ("--max-new-tokens", "5", "7")),
        ("--question-suffix", "?", ("--question-suffix", "''", "'?'")),
        ("--temperature", 1.0, ("--temperature", "0.0", "1.0")),
    ):
        Refusal(lambda option=option: answer("answers.jsonl", *option), ("answers.jsonl", *words)).check()
    (tmp_path / "chat.jinja").write_text("é", encoding="latin-1")
    template = ["--chat-template", tmp_path / "chat.jinja"]
    Refusal(lambda: answer("answers.jsonl", *template), ("--chat-template", "chat.jinja", "UTF-8")).check()
    other = tmp_path / "other.jsonl"
    other.write_text('{"messages": [{"role": "user", "content": "q"}]}\nand no newline')
    Refusal(lambda: answer("other.jsonl"), ("other.jsonl:1", "--output")).check()
    assert other.read_text().endswith("and no newline")
    assert (tmp_path / "answers.jsonl").read_text().splitlines() == whole


@DENSE
def test_a_row_that_cannot_be_read_stops_no_run(answer, tmp_path, capsys):
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user", "content": null}]}')
    assert len(answer("answers.jsonl")) == 8
    assert "1 of 11 rows" in (said := capsys.readouterr().out) and "data.jsonl:11" in said
    assert len(answer("some.jsonl", "--limit", 2)) == 2
    (tmp_path / "data.jsonl").write_text('{"turns": [3]}')
    Refusal(lambda: answer("none.jsonl"), ("1 of 1", "data.jsonl:1")).check()


CUT_OFF = [  # generated text, whether it thinks: reasoning, content, whether it is cut off
    (f"so</think>\nyes{EOS}{EOS}", True, "so", "\nyes", False),
    ("so</think>yes", True, "so", "yes", True),
    (f"so{EOS}", True, "so", "", True),  # reasoning that has no end
    (f"yes{EOS}", False, None, "yes", False),
    ("👋", False, None, "", True),  # of which the last token is missing
]


@pytest.mark.parametrize(("text", "thinking", "reasoning", "content", "truncated"), CUT_OFF)
def test_generated_reasoning_is_kept_apart(tokenizer, text, thinking, reasoning, content, truncated):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ids = ids[:-1] if text == "👋" else ids
    message, was_cut = answers.parse_answer(tokenizer, ids, [tokenizer.eos_token_id], thinking)
    assert message.pop("role") == "assistant" and was_cut == truncated and len(ids) > 1
    assert message == {"content": content} | ({} if reasoning is None else {"reasoning_content": reasoning})
