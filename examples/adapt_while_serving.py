"""Learning while serving, over a stream of requests that changes: without, always, and where it pays.

    python examples/finetune_target.py --target examples/models/tiny-deepseek-v4 --dataset gsm8k.jsonl --output tuned
    python examples/adapt_while_serving.py --target examples/models/tiny-deepseek-v4 --tuned tuned \\
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --suites prompts \\
        --stream gsm8k:100 mbpp:80 tuned:gsm8k:200 --output results

A part of the stream is `suite:requests`, of prompts that no part before had, or `suite+suite:requests` for several in
turns; from one that begins with `tuned:` on, the target has the weights of `--tuned`, as after a deployment. Each
request is served by a drafter that never learns, by one that always does and by one that learns where it pays, one
after the other in turns, so that a busier machine is busier for all of them. A request's seconds are those of the
whole call, updates included.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.benchmark.suites import load_suite
from hf_hyperdflash.training.adaptation.learner import POLICIES, AdaptationConfig
from hf_hyperdflash.training.data.encoding import encode_prompts

NAMES = {"never": "no adaptation", "always": "always", "bandit": "where it pays"}
COLOURS = {"never": "#777777", "always": "#c44e52", "bandit": "#4c72b0"}
_SMOOTHED = 20  # requests


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--tuned", help="the target after a fine-tuning (examples/finetune_target.py)")
    parser.add_argument("--suites", required=True, help="folder of prompt suites, as of `hf-hyperdflash benchmark`")
    parser.add_argument("--stream", nargs="+", required=True, help="[tuned:]suite[+suite...]:requests")
    parser.add_argument("--output", required=True)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-prompt", type=int, default=400, help="tokens; longer prompts are left out")
    parser.add_argument("--num-draft-tokens", type=int, default=6)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--policies", nargs="+", default=list(NAMES)[:3], choices=POLICIES)
    parser.add_argument("--learning-rate", type=float, default=AdaptationConfig.learning_rate)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    return parser.parse_args()


def requests(args: argparse.Namespace, tokenizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each request's part of the stream and its prompt."""
    left: dict[str, Iterator[torch.Tensor]] = {}
    for part in args.stream:
        name, _, count = part.rpartition(":")
        suites = name.removeprefix("tuned:").split("+")
        for suite in suites:
            if suite not in left:
                dialogs = load_suite(suite, args.suites)
                rows = [{"messages": [{"role": "user", "content": turns[0]}]} for turns in dialogs]
                prompts = encode_prompts(tokenizer, rows)
                left[suite] = iter([ids for ids in prompts if ids.shape[1] <= args.max_prompt])
        for number in range(int(count)):
            ids = next(left[suite := suites[number % len(suites)]], None)
            if ids is None:
                raise SystemExit(f"`{part}` asks for more prompts than {suite} has left: {number}.")
            yield name, ids


def serve(args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """What became of each request, by policy."""
    tokenizer = load_tokenizer(args.target)
    target = load_target(args.target, dtype=args.dtype)
    drafter = load_drafter(args.drafter, dtype=args.dtype, target=target)
    drafter.bind(target)
    served: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    drafters = {policy: copy.deepcopy(drafter) for policy in args.policies}
    learning = {
        policy: own.adapt(target, policy=policy, learning_rate=args.learning_rate)
        for policy, own in drafters.items()
        if policy != "never"
    }
    options: dict[str, Any] = {"do_sample": False}
    if args.temperature:
        options = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0}
    is_tuned = False
    for number, (part, ids) in enumerate(requests(args, tokenizer)):
        if part.startswith("tuned:") and not is_tuned:
            target.load_state_dict(load_target(args.tuned, dtype=args.dtype).state_dict())
            is_tuned = True
        texts = []
        for turn in range(len(args.policies)):
            policy = args.policies[(number + turn) % len(args.policies)]
            own = drafters[policy]
            torch.manual_seed(number)
            began = time.perf_counter()
            text = target.generate(
                ids,
                assistant_model=own,
                num_assistant_tokens=args.num_draft_tokens,
                max_new_tokens=args.max_new_tokens,
                **options,
            )
            seconds, stats = time.perf_counter() - began, own.last_stats
            texts.append(text)
            decision = asdict(learning[policy].log[-1]) if policy in learning else {"arm": None, "cost": 0.0}
            served[policy].append(
                {"part": part, "seconds": seconds, "tokens": stats.tokens, "rounds": stats.rounds,
                 "emitted": sum(stats.emitted), "arm": decision["arm"], "cost": decision["cost"],
                 "gain": decision.get("gain")}
            )  # fmt: skip
        if not args.temperature and args.dtype == "float32" and any(not torch.equal(text, texts[0]) for text in texts):
            raise SystemExit(f"The texts of request {number} differ.")
    return served


def tau(lines: list[dict[str, Any]]) -> float:
    return sum(line["emitted"] for line in lines) / max(1, sum(line["rounds"] for line in lines))


def speed(lines: list[dict[str, Any]]) -> float:
    return sum(line["tokens"] for line in lines) / sum(line["seconds"] for line in lines)


def report(served: dict[str, list[dict[str, Any]]], facts: dict[str, Any]) -> str:
    lines = ["# Learning while serving", "", "; ".join(f"{name}: {value}" for name, value in facts.items()), ""]
    lines += [
        "| part | requests | policy | tau | tau of each fifth | tokens/s | to no adaptation | updates | their time |"
    ]
    lines += ["|---|---:|---|---:|---|---:|---:|---:|---:|"]
    parts = list(dict.fromkeys(line["part"] for line in next(iter(served.values()))))
    for part in [*parts, "all"]:
        chosen = {policy: [line for line in own if part in (line["part"], "all")] for policy, own in served.items()}
        for policy, own in chosen.items():
            updates = [line["cost"] for line in own if line["arm"]]
            ratio = f"{speed(own) / speed(chosen['never']):.3f}" if "never" in chosen else ""
            spent = f"{sum(updates):.1f} s ({sum(updates) / sum(line['seconds'] for line in own):.1%})"
            ends = [len(own) * fifth // 5 for fifth in range(6)]
            fifths = " ".join(f"{tau(own[start:end]):.2f}" for start, end in pairwise(ends))
            lines.append(
                f"| {part} | {len(own)} | {NAMES[policy]} | {tau(own):.2f} | {fifths} | {speed(own):.1f} | {ratio} | "
                f"{len(updates)} | {spent} |"
            )
    if {"never", "bandit"} <= served.keys():
        lines += ["", *promised(served["bandit"], served["never"])]
    return "\n".join([*lines, ""])


def promised(own: list[dict[str, Any]], still: list[dict[str, Any]]) -> list[str]:
    """The table of the updates that served: what their judgements promised, and tau beside that without learning in
    the requests until the next one."""
    kept = [place for place, line in enumerate(own) if (line["gain"] or 0) > 0]
    lines = [
        "| served from request | promised by it | by all so far | realized until the next |",
        "|---:|---:|---:|---:|",
    ]
    so_far = 1.0
    for place, following in zip(kept, [*kept[1:], len(own) - 1]):
        so_far *= 1 + own[place]["gain"]
        since = slice(place + 1, following + 1)
        realized = f"{tau(own[since]) / tau(still[since]) - 1:+.1%}" if own[since] else ""
        lines.append(f"| {place + 2} | {own[place]['gain']:+.1%} | {so_far - 1:+.1%} | {realized} |")
    return lines


def draw(served: dict[str, list[dict[str, Any]]], path: Path) -> None:
    figure, axes = plt.subplots(2, 1, figsize=(9, 6), sharex=True, constrained_layout=True)
    for policy, own in served.items():
        kernel = np.ones(_SMOOTHED)
        sums = {
            name: np.convolve([line[name] for line in own], kernel, "valid")
            for name in ("tokens", "seconds", "emitted", "rounds")
        }
        at = np.arange(len(sums["tokens"])) + _SMOOTHED
        axes[0].plot(at, sums["tokens"] / sums["seconds"], color=COLOURS[policy], label=NAMES[policy])
        axes[1].plot(at, sums["emitted"] / sums["rounds"], color=COLOURS[policy], label=NAMES[policy])
        updates = [place + 1 for place, line in enumerate(own) if line["arm"]]
        if policy == "bandit":
            axes[1].plot(updates, [1.0] * len(updates), "|", color=COLOURS[policy], label="an update, where it pays")
    parts = [line["part"] for line in next(iter(served.values()))]
    for place in range(len(parts)):
        if place == 0 or parts[place] != parts[place - 1]:
            for axis in axes:
                axis.axvline(place, color="black", linewidth=0.7, linestyle=":")
            axes[0].text(place + 2, 1.01, parts[place], transform=axes[0].get_xaxis_transform(), fontsize=9)
    axes[0].set_ylabel(f"tokens per second, updates included\n(mean of {_SMOOTHED} requests)")
    axes[1].set_ylabel("tokens per verification round")
    axes[1].set_xlabel("request")
    for axis in axes:
        axis.grid(alpha=0.3)
    axes[1].legend(loc="best", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    args = parse_args()
    if any(part.startswith("tuned:") for part in args.stream) and not args.tuned:
        raise SystemExit("`--stream` has a part of a tuned target: pass it as `--tuned`.")
    served = serve(args)
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    facts = {
        "target": Path(args.target).name, "drafter": Path(args.drafter).name, "temperature": args.temperature,
        "drafts": args.num_draft_tokens, "new tokens": args.max_new_tokens, "date": date.today().isoformat(),
        "hardware": hardware("cpu"), "threads": torch.get_num_threads(), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip
    (output / "results.json").write_text(json.dumps({"facts": facts, "served": served}) + "\n")
    text = report(served, facts)
    (output / "report.md").write_text(text)
    draw(served, output / "stream.png")
    print(text)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # what it writes may have letters that the terminal lacks
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
