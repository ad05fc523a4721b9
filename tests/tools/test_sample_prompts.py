"""Prompts that a target writes itself."""

import json
import subprocess
import sys
from pathlib import Path

from ..helpers.processes import python
from ..helpers.scripts import EXAMPLES, ROOT


def sampled(output: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/sample_prompts.py", "--target", EXAMPLES / "models" / "tiny-deepseek-v4"]
    command += ["--output", output, "--count", 12, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)


def test_prompts_are_sampled_past_a_batch_without_a_new_one(tmp_path):
    """Its seed follows from how many there are: the same batch came again and again."""
    result = sampled(tmp_path / "prompts.jsonl", "--count", 6, "--batch-size", 1, "--temperature", 0.3)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines) == 6
    result = sampled(tmp_path / "new" / "none.jsonl", "--batch-size", 2, "--max-new-tokens", 1)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "20 batches in a row of 2 prompts with at most 1 tokens have no new one that ends; 0 are" in result.stderr


def test_where_prompts_go_is_looked_at_before_the_target_is(tmp_path):
    (tmp_path / "file").write_text("")
    result = python(
        ROOT / "tools/sample_prompts.py", "--target", "nowhere", "--output", tmp_path / "file" / "rows.jsonl"
    )
    told = f"Error: {tmp_path / 'file'} cannot be made, because {tmp_path / 'file'} is a file. Choose another folder."
    assert result.returncode == 1 and result.stderr.strip() == told


def test_sampling_goes_on_after_an_unfinished_line(tmp_path):
    output, whole = tmp_path / "prompts.jsonl", '{"messages": [{"role": "user", "content": "What is 3 + 4?"}]}'
    output.write_text(f'{whole}\n{{"messages": [{{"role": "us')
    result = sampled(output, "--batch-size", 16)
    assert result.returncode == 0, result.stderr
    lines = output.read_text().splitlines()
    assert lines[0] == whole and len(list(map(json.loads, lines))) == 12
