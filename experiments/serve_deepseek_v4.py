"""Serve DeepSeek-V4 with a drafter that reads its residual streams, on eight GPUs: pass or fail for each claim.

    python experiments/serve_deepseek_v4.py --target deepseek-ai/DeepSeek-V4-Flash --drafter my-drafter --data suites \
        --expected-tau 3.7 --output out

`--expected-tau` is the drafter's own, by `hf-hyperdflash benchmark` in transformers on the same prompts: a drafter
that is served wrongly still writes the target's text, and only accepts less. The server with the drafter comes first:
if it does not start, nobody waits for the other one. Exits with 1 if a claim fails, or could not be tried. No GPU has
run this script yet; a CPU has, with the small Qwen3 (tests/serving/test_serve_deepseek_v4.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_vllm import CLIENTS, NAME, Server, ServerEnded, many_clients, prompts_of

from hf_hyperdflash.benchmark import server as endpoint
from hf_hyperdflash.benchmark.server import measure
from hf_hyperdflash.serving.vllm.plugin import STREAMS_VARIABLE
from hf_hyperdflash.training.data.endpoint import fetch

SUITES = ["gsm8k", "humaneval", "mt-bench"]
NEARLY = 0.2  # nats between the two best tokens, below which another order of additions may choose the other
DIES_WITHIN = 20.0  # seconds that a server has to end once it no longer answers
STARTS = "the server starts with a drafter that reads the paths"
ACCEPTED = "as many drafts are accepted as in transformers, within a twentieth"
STAY = f"{CLIENTS} clients, some of whom leave"
EQUAL = "greedy texts are the target's, or part at a near tie"
FASTER = {count: f"faster than alone, {count} at a time" for count in (1, CLIENTS)}
TITLES = (STARTS, ACCEPTED, STAY, EQUAL, *FASTER.values())


class Claims:
    """Which claims hold, printed one by one as it is known."""

    def __init__(self) -> None:
        self.told: dict[str, tuple[bool, str]] = {}

    def tell(self, title: str, holds: bool, detail: str) -> None:
        self.told[title] = holds, detail
        print(f"{'pass' if holds else 'FAIL'}  {title}: {detail}", flush=True)

    @contextmanager
    def failing(self, *titles: str, server: Server | None = None) -> Iterator[None]:
        """What of these claims is not told yet fails if the block does, whatever it is that keeps it from being tried.

        Args:
            titles: The claims.
            server: That the block asks: if it has ended, that is the reason.
        """
        try:
            yield
        except (Exception, ServerEnded) as error:
            for title in titles:
                if title not in self.told:
                    self.tell(title, False, reason(error, server))

    def all(self) -> list[tuple[str, bool, str]]:
        """Every claim, in order; those that nothing was said of are told to have failed."""
        for title in TITLES:
            if title not in self.told:
                self.tell(title, False, "not tried, as the server with the drafter did not get so far")
        return [(title, *self.told[title]) for title in TITLES]


def reason(error: BaseException, server: Server | None) -> str:
    """Why a block broke off, in one line."""
    ended = str(error) if isinstance(error, ServerEnded) else server and server.ended(DIES_WITHIN)
    if ended:
        return ended
    known = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return " ".join(f"{known}{error}".split()) + (f" See {server.log.name}." if server else "")


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


@dataclass
class Asked:
    """What both servers are asked."""

    endpoint: endpoint.Server
    prompts: list[list[str]]
    chats: list[Any]
    ids: list[list[int]]
    count: int

    def rates(self) -> dict[int, float]:
        """Tokens per second, by how many prompts are asked at a time."""
        asked = self.endpoint, self.prompts, 0.0
        return {n: measure(*asked, n, self.count)["tokens_per_second"] for n in FASTER}


@dataclass
class Drafted:
    """What the server with the drafter did, as far as it got."""

    texts: list[list[int]] | None = None
    tau: float | None = None
    acceptance: list[float] = field(default_factory=list)
    rates: dict[int, float] = field(default_factory=dict)


def with_drafter(args: argparse.Namespace, asked: Asked, claims: Claims) -> Drafted:
    """Ask the server with the drafter, and tell what needs no other."""
    found = Drafted()
    with claims.failing(STARTS), Server(args, args.drafter) as server:
        claims.tell(STARTS, True, Path(args.drafter).name)
        with claims.failing(ACCEPTED, EQUAL, server=server):
            found.texts, counted = server.counted(asked.ids, asked.count)
            found.tau, found.acceptance = counted.tau, counted.acceptance
            tau = counted.tau or 0.0
            told = f"tau {tau:.2f}, expected {args.expected_tau:.2f}; {[round(p, 3) for p in counted.acceptance]}"
            claims.tell(ACCEPTED, tau >= 0.95 * args.expected_tau, told)
        with claims.failing(STAY, server=server):
            answers = asyncio.run(many_clients(server.root, asked.chats, asked.count, leave=True))
            stayed = [answer for answer in answers if answer is not None]
            holds = bool(stayed) and all(stayed)
            claims.tell(STAY, holds, f"{len(stayed)} answers of {len(answers)} clients")
        with claims.failing(*FASTER.values(), server=server):
            found.rates = asked.rates()
    return found


def against_the_target(args: argparse.Namespace, asked: Asked, drafted: Drafted, claims: Claims) -> dict[int, float]:
    """Ask the server without a drafter, and tell what compares the two; tokens per second of it."""
    rates: dict[int, float] = {}
    with claims.failing(EQUAL, *FASTER.values()), Server(args, None) as server:
        if drafted.texts is not None:
            with claims.failing(EQUAL, server=server):
                claims.tell(EQUAL, *same_texts(server, asked, drafted.texts))
        if drafted.rates:
            with claims.failing(*FASTER.values(), server=server):
                rates = asked.rates()
                for count, title in FASTER.items():
                    ratio = drafted.rates[count] / rates[count]
                    claims.tell(title, ratio > 1, f"{ratio:.2f} times, {drafted.rates[count]:.0f} tokens/s")
    return rates


def same_texts(server: Server, asked: Asked, drafted: list[list[int]]) -> tuple[bool, str]:
    """Whether the target alone writes what was drafted, but for near ties, and how often."""
    alone, _ = server.counted(asked.ids, asked.count)
    behind = [gaps(server, ids, asked.count) for ids in asked.ids]
    tied = sum(map(parted_at_a_tie, alone, drafted, behind))
    equal = sum(a == b for a, b in zip(alone, drafted))
    return tied == len(asked.ids), f"{equal} of {len(asked.ids)} equal, {tied - equal} part at one"


def check(args: argparse.Namespace) -> None:
    """Raise a `ValueError` for what would only show after a server has started."""
    config = Path(args.drafter) / "config.json"
    if not config.is_file():
        raise ValueError(f"`--drafter` is {args.drafter}, expected the folder of a saved drafter, with a config.json.")
    reducer = json.loads(config.read_text(encoding="utf-8")).get("reducer")
    if reducer not in ("hc_gate", "hybrid"):
        raise ValueError(
            f"The `reducer` of {args.drafter} is {reducer!r}, expected a gate, 'hc_gate' or 'hybrid': this is about "
            "drafters that read the residual streams, `vllm serve` takes others, too."
        )
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended, too
        try:
            free.bind(("127.0.0.1", args.port))
        except (OSError, OverflowError) as error:
            raise ValueError(f"`--port` is {args.port}, which cannot be had ({error}): give a free one.") from error
    command = Path(sys.executable).with_name("vllm")
    if not command.is_file():
        raise ValueError(f"There is no {command}: install vLLM in this environment (docs/serving.md).")


def asked_by(args: argparse.Namespace) -> Asked:
    """What the options say, checked."""
    prompts, chats, ids = prompts_of(args, SUITES)
    check(args)
    Path(args.output).mkdir(parents=True, exist_ok=True)
    served = endpoint.Server(f"http://127.0.0.1:{args.port}", NAME)
    return Asked(served, prompts, chats, ids, args.max_new_tokens)


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
    os.environ[STREAMS_VARIABLE] = "1"
    try:
        asked = asked_by(args)
    except (ValueError, OSError) as error:
        sys.exit(f"Error: {' '.join(str(error).split())}")
    claims = Claims()
    drafted, alone = with_drafter(args, asked, claims), {}
    if drafted.texts is not None or drafted.rates:
        alone = against_the_target(args, asked, drafted, claims)
    told = claims.all()
    rates = {"alone": alone, "drafter": drafted.rates}
    results = {"claims": told, "tau": drafted.tau, "acceptance": drafted.acceptance, "tokens_per_second": rates}
    (Path(args.output) / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sys.exit(0 if all(holds for _, holds, _ in told) else 1)


if __name__ == "__main__":
    main()
