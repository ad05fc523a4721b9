"""`experiments/serve_deepseek_v4.py` from its start to its exit status, with vLLM on a CPU and a dense pair.

What it says of the paths needs DeepSeek-V4 on GPUs. Nothing here asserts which of two servers is faster.
"""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ..conftest import MODELS

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/vllm makes an environment that has it")

EXPERIMENTS = MODELS.parents[1] / "experiments"
LINE = re.compile(r"^(pass|FAIL)  ([^:]+): (.+)$", re.MULTILINE)


@pytest.fixture
def script(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(EXPERIMENTS)
    import serve_deepseek_v4

    return serve_deepseek_v4


@pytest.fixture
def started(tmp_path, dense_pair):
    """Starts the script with a drafter and further options."""
    for suite in ("gsm8k", "humaneval", "mt-bench"):
        rows = [{"turns": [f"What is {number} plus 4, in {suite}?"]} for number in (3, 12)]
        (tmp_path / f"{suite}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    running = []

    def start(drafter: Path, **options: Any) -> subprocess.Popen:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        given = {
            "target": dense_pair[0], "drafter": drafter, "data": tmp_path, "output": tmp_path / "out",
            "port": port, "max-model-len": 512, "server-options": "--enforce-eager --dtype float32",
            "max-new-tokens": 40, "expected-tau": 2.0, **options,
        }  # fmt: skip
        words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        command = [sys.executable, EXPERIMENTS / "serve_deepseek_v4.py", *words]
        running.append(subprocess.Popen(command, **pipes))
        return running[-1]

    yield start
    for process in running:
        for one in [process, *descendants(process)]:
            one.kill()
        process.wait()


def descendants(process: subprocess.Popen) -> list[Any]:
    import psutil  # which vLLM brings

    return psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []


def told(script: Any, printed: str, folder: Path) -> dict[str, tuple[bool, str]]:
    """Of each claim whether it holds and why, as printed, which is as it is kept."""
    lines = {title: (word == "pass", why) for word, title, why in LINE.findall(printed)}
    assert len(lines) == len(printed.splitlines()) == len(script.TITLES)
    kept = json.loads((folder / "results.json").read_text())["claims"]
    assert [title for title, *_ in kept] == list(script.TITLES)
    assert {title: (holds, why) for title, holds, why in kept} == lines
    return lines


def test_every_claim_is_tried_and_told(script, started, tmp_path, dense_pair):
    from serve_vllm import our_own, prompts_of

    process = started(dense_pair[1])
    printed, complaints = process.communicate()
    assert "Traceback" not in complaints, complaints
    lines = told(script, printed, tmp_path / "out")
    assert all(lines[title][0] for title in (script.STARTS, script.ACCEPTED, script.STAY, script.EQUAL)), printed
    assert lines[script.STAY][1] == "4 answers of 6 clients" and lines[script.EQUAL][1].startswith("6 of 6 equal")
    kept = json.loads((tmp_path / "out" / "results.json").read_text())
    rates = kept["tokens_per_second"]
    for count, title in script.FASTER.items():
        drafted, alone = rates["drafter"][str(count)], rates["alone"][str(count)]
        assert lines[title] == (drafted > alone, f"{drafted / alone:.2f} times, {drafted:.0f} tokens/s")
    assert process.returncode == (0 if all(holds for holds, _ in lines.values()) else 1)
    given = Namespace(
        target=dense_pair[0], drafter=dense_pair[1], data=tmp_path, limit=20, max_new_tokens=40
    )  # fmt: skip
    _, _, ids = prompts_of(given, script.SUITES)
    _, stats = our_own(given, ids)
    assert kept["tau"] == pytest.approx(stats.tau, rel=0.1)  # vLLM counts drafts past a text's end, too
    assert len(kept["acceptance"]) == 6 and kept["tau"] == pytest.approx(1 + sum(kept["acceptance"]))
