"""The GPU script, on a CPU with toys: a part that is there is not run again, one that failed is, and one that does not
fit is not begun."""

import json
from pathlib import Path

import pytest
import torch

from ..helpers.processes import python

SCRIPT = Path(__file__).parents[2] / "experiments" / "gpu.py"


def test_parts_are_written_and_resumed(tmp_path):
    def run(*arguments: object) -> str:
        done = python(SCRIPT, tmp_path, "--tiny", "--device", "cpu", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    said = run("--only", "machine", "text", "smollm2", "--target", "nowhere", "--drafter", "a", "--prompts", "b")
    machine, text, failed = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("machine", "text", "smollm2")
    )
    assert machine["bandwidth"]["copy"] > 0 and "machine: " in said
    assert text["texts"] > 12 and text["differing"] == [] and text["failed"] == {}
    assert "nowhere" in failed["error"]
    assert "machine: is there" in run("--only", "machine", "smollm2")
    assert json.loads((tmp_path / "smollm2.json").read_text())["skipped"].startswith("no --target")
    assert "deepseek-v4: not begun, 1 s are left" in run("--only", "deepseek-v4", "--seconds", 1)
    assert not (tmp_path / "deepseek-v4.json").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
@pytest.mark.parametrize("device", [["--device", "cuda"], ["--device=cuda:0"]])
def test_a_machine_without_a_gpu_is_told_before_any_work(device, tmp_path):
    for command in ([SCRIPT, tmp_path / "results"], [SCRIPT.parent / "benchmark", "loop"]):
        done = python(*command, *device)
        assert done.returncode and "finds no GPU here" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "results").exists()
