"""`hf-hyperdflash answers`: what the target answers is written, a stopped run goes on."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub import loading
from hf_hyperdflash.training.data import answers
from hf_hyperdflash.training.data.encoding import encode_prompts
from hf_hyperdflash.training.data.messages import read_tools

from ..conftest import MODELS, mostly_nightly
from ..helpers.served_drafters import qwen3

TARGET = MODELS / "tiny-deepseek-v4"
EOS = "<｜end▁of▁sentence｜>"
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ENDS = {"V4": ["Ġof", "(", "Ġ"], "dense": range(0, 2048, 8)}


def chat(*turns: str) -> list[dict]:
    return [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]


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


@pytest.mark.parametrize(
    "options",
    mostly_nightly(
        [["--temperature", 1.0, "--top-p", 0.9], [], ["--thinking", "--chat-template", TARGET / "chat_template.jinja"]]
    ),
)
def test_a_killed_run_ends_in_the_same_answers(answer, tmp_path, options):
    whole = answer("whole.jsonl", *options)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("\n".join([*whole[::3], whole[1][:30]]))
    assert sorted(answer("cut.jsonl", *options)) == sorted(whole)
    assert answer("cut.jsonl", *options) == cut.read_text().splitlines()


def test_the_bar_counts_what_was_done_and_moves_by_batches(answer, tmp_path, monkeypatch):
    bars = []

    class Recorded(answers.tqdm):
        def __init__(self, **options):
            super().__init__(**options)
            self.steps, self.options = [], options
            bars.append(self)

        def update(self, n=1):
            self.steps.append(n)
            return super().update(n)

    monkeypatch.setattr(answers, "tqdm", Recorded)
    whole = answer("answers.jsonl")
    (tmp_path / "answers.jsonl").write_text("\n".join(whole[:3]) + "\n")
    answer("answers.jsonl")
    first, second = bars
    assert (first.options["initial"], second.options["initial"]) == (0, 3) and {bar.total for bar in bars} == {8}
    assert first.n == second.n == 8 and sum(first.steps) == 8 and max(first.steps) == 2  # two in a batch
    assert first.smoothing == 0  # the mean, not the last batch


def test_questions_keep_what_their_row_says_beside_them(answer, tmp_path):
    row = {"question": "q", "answer": "a", "system_prompt": "s", "history": [["q0", "a0"]], "messages": None}
    said = [(m["role"], m["content"]) for m in answers.user_turns(row, "!")]
    assert said == [("system", "s"), ("user", "q0"), ("user", "q!")]
    assert answers.user_turns({"messages": chat("Hi", "x"), "question": None}, "!")[0]["content"] == "Hi"
    with (tmp_path / "data.jsonl").open("a") as file:  # a question that is there without tools, too
        file.write("\n" + json.dumps({"messages": chat("Write a Python function.", "x"), "tools": TOOLS}))
    rows = [json.loads(line) for line in answer("answers.jsonl")]
    assert [read_tools(row) for row in rows if "tools" in row] == [TOOLS] and len(rows) == 9
    assert sum(row["messages"][0]["content"] == "Write a Python function." for row in rows if len(row) == 3) >= 1


def test_answers_of_other_settings_are_not_mixed(answer, tmp_path, monkeypatch, capsys):
    whole = answer("answers.jsonl")
    truncated = sum(json.loads(line)["truncated"] for line in whole)
    assert truncated and f"8 rows in {tmp_path / 'answers.jsonl'}; {truncated} of them hit" in capsys.readouterr().out
    monkeypatch.setattr(loading, "load_target", lambda *args, **kwargs: pytest.fail("it was loaded"))
    assert answer("answers.jsonl") == whole
    told = capsys.readouterr().out.splitlines()
    assert told[-2] == "All 8 prompts are answered already." and told[-1].startswith("8 rows in ")
    for option, message in (
        (["--max-new-tokens", 7], "--max-new-tokens was 5 and is 7"),
        (["--question-suffix", "?"], "--question-suffix was '' and is '\\?'"),
        (["--temperature", 1.0], "--temperature was 0.0 and is 1.0"),
    ):
        with pytest.raises(ValueError, match=f"answers.jsonl has answers of other settings: {message}. Name another"):
            answer("answers.jsonl", *option)
    assert (tmp_path / "answers.jsonl").read_text().splitlines() == whole


def test_an_output_of_something_else_is_left_as_it_is(answer, tmp_path, capsys):
    other = tmp_path / "other.jsonl"
    other.write_text('{"messages": [{"role": "user", "content": "q"}]}\nand no newline')
    with pytest.raises(ValueError, match=r"other\.jsonl:1 was not written by `hf-hyperdflash answers`"):
        answer("other.jsonl")
    assert other.read_text().endswith("and no newline")
    with (tmp_path / "data.jsonl").open("a") as file:
        file.write('\n{"messages": [{"role": "user", "content": null}]}')
    capsys.readouterr()
    whole = answer("answers.jsonl")
    told = capsys.readouterr().out
    assert re.search(
        r"Skipped 1 of 11 rows cannot be used, the first of them .*data\.jsonl:11: A message by 'user'", told
    )
    assert len(whole) == 8


def test_generated_reasoning_is_kept_apart(tokenizer):
    def parsed(text, thinking=True):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        message, truncated = answers.parse_answer(tokenizer, ids, [tokenizer.eos_token_id], thinking)
        assert message.pop("role") == "assistant"
        return message, truncated

    assert parsed(f"so</think>\nyes{EOS}{EOS}") == ({"reasoning_content": "so", "content": "\nyes"}, False)
    assert parsed("so</think>yes") == ({"reasoning_content": "so", "content": "yes"}, True)
    assert parsed(f"so{EOS}") == ({"reasoning_content": "so", "content": ""}, True)  # reasoning that has no end
    assert parsed(f"yes{EOS}", thinking=False) == ({"content": "yes"}, False)
    emoji = tokenizer("👋", add_special_tokens=False)["input_ids"]
    assert len(emoji) > 1 and answers.parse_answer(tokenizer, emoji[:-1], [1], False)[0]["content"] == ""
