"""The seven prompt suites of the paper (section 3.2), from local files or the Hub."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
_HUMANEVAL = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
)
_LIVECODEBENCH = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question}\n\n### Format: {format}\n```python\n{starter}\n```\n\n### Answer: "
    "(use the provided format with backticks)"
)
_STARTED = (
    "You will use the following starter code to write the solution to the problem and enclose your code within "
    "delimiters."
)
_NOT_STARTED = "Write your code in the following format:"


class Suite(NamedTuple):
    """A suite of prompts."""

    title: str  # as the paper's tables name it
    group: str  # MATH, CODE or CHAT
    source: str  # Hub name, with its configuration after a colon where it has one, or a file there (`hf://`)
    split: str
    turns: Callable[[Mapping[str, Any]], list[str]]  # the user's turns of a row


def _livecodebench(row: Mapping[str, Any]) -> list[str]:
    code = row.get("starter_code")
    format_text, starter = (_STARTED, code) if code else (_NOT_STARTED, "# YOUR CODE HERE")
    return [_LIVECODEBENCH.format(question=row["question_content"], format=format_text, starter=starter)]


SUITES = {
    "gsm8k": Suite("GSM8K", "MATH", "openai/gsm8k:main", "test", lambda row: [row["question"] + _BOXED]),
    "math500": Suite("MATH-500", "MATH", "HuggingFaceH4/MATH-500", "test", lambda row: [row["problem"] + _BOXED]),
    "aime25": Suite("AIME25", "MATH", "MathArena/aime_2025", "train", lambda row: [row["problem"] + _BOXED]),
    "humaneval": Suite(
        "HumanEval", "CODE", "openai/openai_humaneval", "test", lambda row: [_HUMANEVAL.format(prompt=row["prompt"])]
    ),
    "mbpp": Suite("MBPP", "CODE", "google-research-datasets/mbpp:sanitized", "test", lambda row: [row["prompt"]]),
    "livecodebench": Suite(
        "LCB", "CODE", "hf://datasets/livecodebench/code_generation_lite/test.jsonl", "train", _livecodebench
    ),
    "mt-bench": Suite("MT-Bench", "CHAT", "HuggingFaceH4/mt_bench_prompts", "train", lambda row: list(row["prompt"])),
}


def suite_title(name: str) -> str:
    """Return the name of a suite in tables."""
    return SUITES[name].title if name in SUITES else name


def in_order(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return each name once: known ones in their order, then others in order of appearance."""
    once, known = dict.fromkeys(names), list(known)
    return [name for name in known if name in once] + [name for name in once if name not in known]


def load_suite(name: str, folder: str | Path | None = None, limit: int | None = None) -> list[list[str]]:
    """Load the first prompts of a suite from `<name>.jsonl` in a folder or from the Hub, each a list of turns."""
    if limit is not None and limit < 1:
        raise ValueError(f"`limit` is {limit}, expected at least 1, or None for all prompts.")
    prompts = _from_folder(name, Path(folder), limit) if folder else _from_hub(name, limit)
    if not prompts:
        position = f"in {Path(folder) / name}.jsonl" if folder else "on the Hub"
        raise ValueError(
            f'The suite {name!r} has no prompts {position}: expected {{"turns": ["..."]}}, one a line. Add some, or '
            "leave the suite out."
        )
    return prompts


def suites_in(folder: str | Path) -> list[str]:
    """Return the names of the suites in a folder, `<name>.jsonl` each: the paper's in its order, then others."""
    names = _names_in(Path(folder))
    if not names:
        raise ValueError(f"No suites in {folder}: expected files <suite>.jsonl, for example gsm8k.jsonl.")
    return in_order(names, SUITES)


def _names_in(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder} with suites: expected one with files <suite>.jsonl.")
    return sorted(path.stem for path in folder.glob("*.jsonl"))


def _from_folder(name: str, folder: Path, limit: int | None) -> list[list[str]]:
    path, names = folder / f"{name}.jsonl", _names_in(folder)
    if name not in names:
        raise ValueError(f"No suite {name!r} in {folder}: expected the file {path.name}; there are {names}.")
    prompts: list[list[str]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip() and (limit is None or len(prompts) < limit):
            prompts.append(_turns(line, f"{path}, line {number}"))
    return prompts


def _turns(line: bytes, position: str) -> list[str]:
    try:
        row = json.loads(line)
    except ValueError as error:  # half a character is one too
        raise ValueError(
            f'{position}: not JSON ({error}). Expected {{"turns": ["..."]}}; mend or remove the line.'
        ) from error
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        found = f"`turns` is {turns!r:.60}" if isinstance(row, dict) and "turns" in row else "no `turns`"
        raise ValueError(f'{position}: {found}, expected a list of the user\'s turns, {{"turns": ["..."]}}.')
    if any("\ud800" <= letter <= "\udfff" for letter in "".join(turns)):
        raise ValueError(f"{position}: a turn has half a character, as JSON can: correct or remove the line.")
    return turns


def _from_hub(name: str, limit: int | None) -> list[list[str]]:
    if name not in SUITES:
        raise ValueError(f"No suite {name!r}: expected one of {list(SUITES)}, or a folder with {name}.jsonl.")
    from datasets import load_dataset  # an extra

    suite = SUITES[name]
    hub_name, _, config = suite.source.partition(":") if "://" not in suite.source else (suite.source, "", "")
    try:
        if "://" in hub_name:
            rows = load_dataset("json", data_files=hub_name, split=suite.split)
        else:
            rows = load_dataset(hub_name, config or None, split=suite.split)
    except (ConnectionError, FileNotFoundError) as error:
        raise ValueError(
            f"The suite {name!r} ({hub_name}) could not be loaded from the Hub ({error}). Check the network and "
            f"`HF_HUB_OFFLINE`, or give a folder with {name}.jsonl."
        ) from error
    return [suite.turns(row) for row in rows.select(range(min(limit or len(rows), len(rows))))]
