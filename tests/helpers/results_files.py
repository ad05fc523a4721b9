"""Results files of benchmarks that never ran, line by line."""

import json
import random

PLAIN = "Target only"
METHODS = [
    "MTP (3)",
    "MTP (6)",
    "Vanilla DFlash (6)",
    "Prompt lookup (10)",
    "HyperDFlash (6)",
    "HyperDFlash hybrid (6)",
]
SUITES = ["gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench"]
NOT_OF_PLAIN = ["rounds", "draft_positions", "emitted", "accepted", "draft_seconds", "verify_seconds", "loop_seconds"]


def settings(methods=METHODS, **changes):
    run = {
        "date": "2026-11-21",
        "command": "python -m bench --limit 2 | tee log",
        "commit": None,
        "hardware": "AMD EPYC 7B13, 2 cores",
        "threads": 1,
        "versions": {"torch": "2.13.0+cpu", "python": "3.11"},
        "dtype": "float32",
        "target": "tiny-deepseek-v4",
        "methods": {name: "described" for name in methods},
        "suites": {"gsm8k": "gsm8k.jsonl"},
        "limit": 2,
        "seed": 0,
        "max_new_tokens": 128,
    }
    return {"run": {**run, **changes}}


def line(method, prompt=0, **fields):
    """Ten tokens in one second; three rounds of up to three drafts where the method is not target-only."""
    of_all = dict(
        suite="gsm8k", mode="non-think", temperature=0.0, prompt=prompt, turn=0, method=method, prompt_tokens=5,
        new_tokens=10, seconds=1.0, decode_seconds=0.9, peak_memory=None, identical=None, first_difference=None,
    )  # fmt: skip
    speculative = dict(
        rounds=3, draft_positions=3, emitted=[4, 3, 2], accepted=[3, 2, 1], draft_seconds=0.1, verify_seconds=0.6,
        loop_seconds=0.8,
    )  # fmt: skip
    return {**of_all, **(dict.fromkeys(NOT_OF_PLAIN) if method == PLAIN else speculative), **fields}


def written(path, lines, *runs, end="\n"):
    path.write_text("\n".join(json.dumps(one) for one in [*(runs or [settings()]), *lines]) + end, encoding="utf-8")
    return path


def random_line(rng, method, drafts=6, **fields):
    common = dict(seconds=rng.uniform(1, 4), new_tokens=rng.randint(2, 60), peak_memory=rng.choice([None, 5, 7, 9]))
    common |= dict(decode_seconds=rng.uniform(0.5, 1), **fields)
    if method == PLAIN:
        return line(method, **common)
    accepted = [rng.randint(0, rng.randint(0, drafts)) for _ in range(rng.randint(0, 9))]
    return line(
        method,
        **common,
        rounds=len(accepted),
        draft_positions=drafts if accepted else 0,
        accepted=accepted,
        emitted=[n + 1 for n in accepted],
        draft_seconds=rng.uniform(0.1, 0.2),
        verify_seconds=rng.uniform(0.2, 0.5),
        loop_seconds=rng.uniform(0.8, 1),
        identical=rng.choice([None, True, False]),
    )


def random_lines(seed, suites=SUITES, methods=METHODS, temperatures=(0.0, 1.0), modes=("non-think",), prompts=3):
    rng = random.Random(seed)
    drafts = {method: 3 + 7 * ("(10)" in method) + 3 * ("(6)" in method) for method in methods}
    return [
        random_line(
            rng, method, drafts.get(method, 6), suite=suite, mode=mode, temperature=temperature, prompt=prompt // 2,
            turn=prompt % 2
        )
        for mode in modes
        for temperature in temperatures
        for suite in suites
        for prompt in range(prompts)
        for method in [PLAIN, *methods]
    ]  # fmt: skip


def realistic(seed, methods=METHODS, suites=SUITES, **grid):
    """Lines whose speedups follow their tau, so that points crowd as they do in a real run."""
    rng = random.Random(seed)
    lines = random_lines(seed, methods=methods, suites=suites, **grid)
    for one in lines:
        one["seconds"] = one["new_tokens"] * rng.uniform(0.95, 1.05)
        if one["method"] == PLAIN:
            continue
        drafts = int(one["method"].split("(")[1].split(")")[0])
        share = 0.45 + 0.06 * METHODS.index(one["method"]) - 0.02 * SUITES.index(one["suite"])
        one["accepted"] = [next((n for n in range(drafts) if rng.random() > share), drafts) for _ in range(40)]
        one |= dict(emitted=[n + 1 for n in one["accepted"]], rounds=40, draft_positions=drafts)
        one["seconds"] *= (1.5 + 0.05 * drafts) / (sum(one["emitted"]) / 40)
    return lines


def tables(text):
    """The pipe tables of a Markdown text, each a list of rows of cells, without the line of dashes."""
    found, last = [], ""
    for text_line in text.splitlines():
        if text_line.startswith("|"):
            found += [] if last.startswith("|") else [[]]
            found[-1].append([cell.strip() for cell in text_line.strip("|").split(" | ")])
        last = text_line
    return [[row for row in table if not row[0].startswith("---")] for table in found]
