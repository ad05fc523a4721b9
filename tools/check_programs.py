"""lm-eval, TRL and transformers' server with a drafter: snippets and commands of docs/serving.md run, and write what
the programs write without one. `.ci/tools` makes an environment with these programs and runs it.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lm_eval.models.huggingface
import openai
import torch
import trl
from datasets import Dataset
from lm_eval.api.instance import Instance
from peft import LoraConfig
from transformers import AutoTokenizer
from transformers.cli import serve
from transformers.cli.serving import utils

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from check_snippets import OF_PROGRAMS, PAGES, snippets  # noqa: E402

from hf_hyperdflash import load_drafter, load_target  # noqa: E402
from tests.helpers.dense_pair import save_dense_pair  # noqa: E402

NAME = str(ROOT / "examples" / "models" / "tiny-deepseek-v4")
FILLED_IN = {"TARGET": NAME, "DRAFTER": f"{NAME}-hyperdflash", "python": sys.executable}
PAGE = ROOT / "docs" / "serving.md"
QUESTIONS = ["Tom has 12 marbles and gives 5 to his sister. How many are left?", "Write a function that adds."]
CHATS = [[{"role": "user", "content": text}] for text in ("What is 2 + 3?", "Name a prime number.", QUESTIONS[1])]


def snippet(begins: str) -> str:
    (found,) = [code for code in snippets(PAGE) if code.startswith(begins)]
    return found


def command(begins: str, **names: str) -> list[str]:
    """The page's one command that begins so, with what is filled in for words in capitals."""
    (words,) = [
        shlex.split(line) for line in "\n".join(snippets(PAGE, "bash")).splitlines() if line.startswith(begins)
    ]
    words = [{**FILLED_IN, **names}.get(word, word) for word in words]
    return [str(ROOT / word) if word.startswith("examples/") else word for word in words]


def given(name: str = NAME) -> dict[str, Any]:
    target, tokenizer = load_target(name, dtype="float32"), AutoTokenizer.from_pretrained(name)
    return {"target": target, "tokenizer": tokenizer, "drafter": load_drafter(f"{name}-hyperdflash", target=target)}


def check_commands() -> None:
    """Of two programs, with what makes them small."""
    rows = [{"question": f"What is {i} plus {i}?", "answer": f"{2 * i}\n#### {2 * i}"} for i in range(4)]
    Path("gsm8k.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = "--limit 4 --runs 1 --max-new-tokens 24 --batch-sizes 1 3 --output evaluated"
    subprocess.run([*command("python examples/evaluate_with_lm_eval.py"), *small.split()], check=True)
    for found in json.loads(Path("evaluated/results.json").read_text())["results"]:
        assert found["identical"] == found["questions"] == 4, found
        assert found["alone"]["scores"] == found["drafted"]["scores"] and found["drafted"]["tau"] > 1.5, found
    small = "--steps 2 --rollouts 2 --max-new-tokens 8 --adapt --output grpo"
    subprocess.run([*command("python examples/grpo_with_drafter.py"), *small.split()], check=True)
    runs = json.loads(Path("grpo/results.json").read_text())["runs"]
    assert [run["way"] for run in runs] == ["alone", "drafted", "adapted"] and all(all(run["same"]) for run in runs)
    assert all((step["tau"] is None) == (run["way"] == "alone") for run in runs for step in run["steps"])


def check_lm_eval() -> None:
    """Its snippet; and its own model, whose criterion for stop strings looks up each row of a batch by number."""
    task = {
        "task": "sums", "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "gsm8k.jsonl"}},
        "test_split": "test", "output_type": "generate_until", "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}", "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12},
        "metric_list": [{"metric": "exact_match"}],
    }  # fmt: skip
    exec(snippet("from lm_eval"), names := {**given(), "tasks": [task]})
    assert 0 <= names["scores"]["results"]["sums"]["exact_match,none"] <= 1 and names["drafter"].last_stats.tau > 1
    pair = given()
    made = functools.partial(lm_eval.models.huggingface.HFLM, pretrained=pair["target"], tokenizer=pair["tokenizer"])
    texts = [pair["tokenizer"].apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    options = {"until": ["."], "max_gen_toks": 24}
    requests = [Instance("generate_until", {}, (text, options), i) for i, text in enumerate(texts)]
    expected = made(batch_size=1).generate_until(requests)
    pair["drafter"].bind(pair["target"], as_default=True)
    for size in (1, 3):
        assert made(batch_size=size).generate_until(requests) == expected and all(expected)
        assert pair["drafter"].last_stats.rounds


def check_trl(dense: Path) -> None:
    """Its snippet; and rollouts are drafted while the target changes, whole or by LoRA, whose wrapper hands `generate`
    on to the target that is bound."""
    config = functools.partial(
        trl.GRPOConfig, use_cpu=True, bf16=False, report_to="none", save_strategy="no", disable_tqdm=True,
        router_aux_loss_coef=0.0,  # TRL's loss of a mixture's router reads a field that DeepSeek-V4 does not have
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": CHATS})
    reward = lambda completions, **_: [-float(len(each[0]["content"])) for each in completions]  # noqa: E731
    own, trl.GRPOConfig = trl.GRPOConfig, config
    exec(snippet("from trl"), names := {**given(), "prompts": prompts.select([0]), "reward": reward})
    trl.GRPOConfig = own
    assert len(names["drafter"].last_stats.rows) == 4 and names["drafter"].last_stats.draft_positions == 3
    for name, adapter in ((NAME, None), (str(dense), None), (str(dense), LoraConfig(target_modules=["q_proj"]))):
        pair = given(name)
        target, drafter = pair["target"], pair["drafter"]
        drafter.bind(target, as_default=True)
        before = {key: value.clone() for key, value in target.state_dict().items()}
        asked = config(
            "rollouts", max_steps=2, per_device_train_batch_size=3, num_generations=3, max_completion_length=12,
            learning_rate=1e-3, generation_kwargs={"num_assistant_tokens": 2},
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            target, reward, asked, prompts, processing_class=pair["tokenizer"], peft_config=adapter
        )
        trainer.train()
        stats = drafter.last_stats
        assert len(stats.rows) == 3 and stats.rounds and stats.draft_positions == 2
        if adapter is None:
            assert any(not torch.equal(value, before[key]) for key, value in target.state_dict().items())
            inputs = pair["tokenizer"].apply_chat_template(
                CHATS[0], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            options = {"do_sample": False, "max_new_tokens": 16}
            texts = [target.eval().generate(**inputs, assistant_model=one, **options) for one in (None, drafter)]
            assert torch.equal(*texts)


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """A server's address on loopback, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--host", "127.0.0.1", "--port", str(port), "--device", "cpu", "--dtype", "float32"]
    with open("server.log", "w+") as log:
        process = subprocess.Popen([sys.executable, *arguments, *options], stdout=log, stderr=subprocess.STDOUT)
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
            is_drafted = any("serve_with_drafter" in word for word in arguments)
            while not answers(url) or (is_drafted and " drafts with " not in Path("server.log").read_text()):
                assert process.poll() is None and time.monotonic() < deadline, Path("server.log").read_text()
                time.sleep(0.2)
            yield url
        finally:
            process.kill()
            process.wait()


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health").status == 200
    except OSError:
        return False


def asked_of(url: str, question: str, **options: Any) -> Any:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    message = {"role": "user", "content": question}
    return client.chat.completions.create(model=NAME, messages=[message], max_tokens=40, **options)


def talked(url: str) -> list[str]:
    """The answers of two conversations, whose requests come in turn."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chats: list[list[Any]] = [[], []]
    for number in range(3):
        for chat, question in zip(chats, QUESTIONS):
            chat.append({"role": "user", "content": question if not number else f"And then, {number}?"})
            answer = client.chat.completions.create(model=NAME, messages=chat, max_tokens=40, temperature=0)
            chat.append({"role": "assistant", "content": answer.choices[0].message.content})
    return [message["content"] for chat in chats for message in chat]


def texts_of(url: str) -> list[tuple[str, int]]:
    """Each answer whole and streamed, with its number of tokens."""
    found = []
    for question in QUESTIONS:
        whole = asked_of(url, question, temperature=0)
        chunks = asked_of(url, question, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
        found.append((whole.choices[0].message.content, whole.usage.completion_tokens))
    return found


def check_server() -> None:
    """The page's command and snippet; transformers' own hands no assistant to `generate`, which is why they draft with
    none."""
    assert "assistant" not in inspect.getsource(utils.GenerateManager)
    assert "assistant_model" not in inspect.signature(serve.Serve.__init__).parameters
    plain = ["-c", "from transformers.cli.transformers import main; main()"]
    with serving(*plain, "serve", NAME) as url:
        expected, said = texts_of(url), talked(url)
    with serving(*command("python examples/serve_with_drafter.py")[1:]) as url:
        assert texts_of(url) == expected and expected[1][1] == 40
        assert talked(url) == said
        kept = re.findall(r"(\d+) of (\d+) prompt tokens", Path("server.log").read_text())[-4:]
        assert all(int(cached) > int(tokens) / 2 for cached, tokens in kept) and len(kept) == 4, kept
        assert asked_of(url, QUESTIONS[0], temperature=1).choices[0].message.content
        schema = {"type": "object", "properties": {"left": {"enum": [7, 8]}}, "required": ["left"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "marbles", "schema": schema}}
        told = asked_of(url, QUESTIONS[0], temperature=0, response_format=wanted).choices[0].message.content
        assert json.loads(told)["left"] in (7, 8), told
        environment = {**os.environ, "HF_HUB_OFFLINE": "0"}  # with 1 its client asks nobody, not even this machine
        _, *asked = command("transformers chat", **{"http://localhost:8000": url})
        chat = subprocess.run(
            [sys.executable, *plain, *asked, "max_new_tokens=40", "do_sample=False"], env=environment, check=True,
            input=f"{QUESTIONS[1]}\nn\n!exit\n", capture_output=True, text=True,  # n: not on after the limit
        )  # fmt: skip
        assert f"{expected[1][1]} tokens in " in chat.stdout, chat.stdout
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    names = {"name": NAME, "drafter_name": f"{NAME}-hyperdflash", "port": port}
    exec(snippet("from transformers.cli"), names)
    heard, remember = [], names["drafter"].remember
    names["drafter"].remember = lambda stats: (heard.append(stats), remember(stats))  # in the server's thread
    try:
        while not answers(f"http://localhost:{port}"):
            time.sleep(0.2)
        assert asked_of(f"http://localhost:{port}", QUESTIONS[0], temperature=0).choices[0].message.content
        assert heard and heard[-1].rounds and heard[-1].tau > 1
    finally:
        names["server"].kill_server()


def main() -> None:
    elsewhere = [code for page in PAGES for code in snippets(page) if OF_PROGRAMS.search(code)]
    assert len(elsewhere) == 3 and all(code in PAGE.read_text() for code in elsewhere)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        dense, _ = save_dense_pair(Path(folder))
        for check in (check_commands, check_lm_eval, functools.partial(check_trl, dense), check_server):
            began = time.perf_counter()
            check()
            name = getattr(check, "__name__", "check_trl")
            print(f"{time.perf_counter() - began:6.1f} s  {name.removeprefix('check_')}", flush=True)


if __name__ == "__main__":
    main()
