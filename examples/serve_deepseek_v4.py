"""Serve DeepSeek-V4 with a drafter that reads its residual paths, on eight GPUs: pass or fail for each claim.

    python examples/serve_deepseek_v4.py --target deepseek-ai/DeepSeek-V4-Flash --drafter my-drafter --data suites \
        --expected-tau 3.7 --output out

`--expected-tau` is the drafter's own, by `hf-hyperdflash benchmark` in transformers on the same prompts: a drafter
that is served wrongly still writes the target's text, and only accepts less. No GPU has run this script yet; its parts
are those of serve_vllm.py, which has run on a CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from serve_vllm import CLIENTS, NAME, Server, many_clients, prompts_of

from hf_hyperdflash.benchmark.endpoint import EndpointSettings, fetch, measure
from hf_hyperdflash.serving.vllm import PATHS

NEARLY = 0.2  # nats between the two best tokens, below which another order of additions may choose the other


def gaps(server: Server, ids: list[int], count: int) -> list[float]:
    """How far the server's second best token is behind its best, for each token that it writes."""
    body = {"model": NAME, "prompt": ids, "max_tokens": count, "temperature": 0, "logprobs": 2}
    told = json.loads(fetch(f"{server.root}/v1/completions", body))["choices"][0]["logprobs"]["top_logprobs"]
    best = [sorted(of.values(), reverse=True) for of in told]
    return [two[0] - two[1] if len(two) > 1 else float("inf") for two in best]


def parted_at_a_tie(text: list[int], other: list[int], gap: list[float]) -> bool:
    """Whether two texts are equal, or part where the best two tokens nearly tie."""
    if text == other:
        return True
    first = next((i for i, (a, b) in enumerate(zip(text, other)) if a != b), min(len(text), len(other)))
    return first < len(gap) and gap[first] < NEARLY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="folder of a saved drafter, its reducer a gate")
    parser.add_argument("--data", required=True, help="folder with <suite>.jsonl files")
    parser.add_argument("--limit", type=int, default=20, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--expected-tau", type=float, required=True, help="of the drafter in transformers")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--server-options", default="--tensor-parallel-size 8 --trust-remote-code")
    parser.add_argument("--output", required=True, help="folder, of the servers' logs and results.json")
    args = parser.parse_args()
    args.dtype = "auto"
    os.environ[PATHS] = "1"
    suites = ["gsm8k", "humaneval", "mt-bench"]
    Path(args.output).mkdir(parents=True, exist_ok=True)
    prompts, chats, ids = prompts_of(args, suites)
    settings = EndpointSettings(
        f"http://127.0.0.1:{args.port}", NAME, suites, args.data, max_new_tokens=args.max_new_tokens
    )
    claims: list[tuple[str, bool, str]] = []

    def claim(title: str, holds: bool, detail: str) -> None:
        claims.append((title, holds, detail))
        print(f"{'pass' if holds else 'FAIL'}  {title}: {detail}", flush=True)

    rates: dict[str, dict[int, Any]] = {}
    with Server(args, None) as server:
        alone, _ = server.counted(settings, ids, args.max_new_tokens)
        behind = [gaps(server, prompt, args.max_new_tokens) for prompt in ids]
        rates["alone"] = {n: measure(settings, prompts, 0.0, n)["tokens_per_second"] for n in (1, CLIENTS)}
    with Server(args, args.drafter) as server:
        claim("the server starts with a drafter that reads the paths", True, Path(args.drafter).name)
        drafted, counted = server.counted(settings, ids, args.max_new_tokens)
        tied = sum(map(parted_at_a_tie, alone, drafted, behind))
        equal = sum(a == b for a, b in zip(alone, drafted))
        claim("greedy texts are the target's, or part at a near tie", tied == len(ids), f"{equal} equal, {tied} so")
        tau = counted.tau or 0.0
        told = f"tau {tau:.2f}, expected {args.expected_tau:.2f}; {[round(p, 3) for p in counted.acceptance]}"
        claim(
            "as many drafts are accepted as in transformers, within a twentieth", tau >= 0.95 * args.expected_tau, told
        )
        answers = asyncio.run(many_clients(server.root, chats, args.max_new_tokens, leave=True))
        stayed = [answer for answer in answers if answer is not None]
        claim(
            f"{CLIENTS} clients, some of whom leave", all(stayed), f"{len(stayed)} answers of {len(answers)} clients"
        )
        rates["drafter"] = {n: measure(settings, prompts, 0.0, n)["tokens_per_second"] for n in (1, CLIENTS)}
    for count in (1, CLIENTS):
        ratio = rates["drafter"][count] / rates["alone"][count]
        claim(
            f"faster than alone, {count} at a time",
            ratio > 1,
            f"{ratio:.2f} times, {rates['drafter'][count]:.0f} tokens/s",
        )
    results = {"claims": claims, "tau": counted.tau, "acceptance": counted.acceptance, "tokens_per_second": rates}
    (Path(args.output) / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(holds for _, holds, _ in claims) else 1)


if __name__ == "__main__":
    main()
