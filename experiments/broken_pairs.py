"""Breaks pairs on purpose, one cause each: does the doctor name it, and how well does it know the speed?

    python experiments/broken_pairs.py --rows ROWS.jsonl.gz --output FOLDER [--cpu_time]
    python experiments/broken_pairs.py --rows ROWS.jsonl.gz --output FOLDER --target SMOLLM2 --drafter ITS_DRAFTER \
        --name SmolLM2 --dtype bfloat16 --only "wrong layer" "thinking flipped" "int8 target"

The pair that is well is the shipped DeepSeek-V4. Three are made of SmolLM2: the small V4's drafter reads the last
layer above all, accepts as much where it thinks, and has weights that torchao's int8 cannot view. ROWS are
conversations (`{"messages": [...]}` a line), from which a target is fine-tuned. Each pair is made, examined, and
measured by `benchmark` on the doctor's own prompts. Its line in `pairs.jsonl` is written when it is done, and a run
goes on where an earlier one was killed. `report.md` has the table. With `--cpu_time` seconds are those of this
process's CPU, which other programs of a shared machine do not take.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import pad

from hf_hyperdflash import (
    PromptLookupDrafter,
    load_drafter,
    load_target,
    load_tokenizer,
)
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS, examine
from hf_hyperdflash.benchmark.results import load, pool
from hf_hyperdflash.benchmark.runner import BenchmarkSettings, hardware, run_benchmark
from hf_hyperdflash.training.trials import Local

MODELS = Path(__file__).parents[1] / "examples" / "models"
STEPS, POSITIONS, CONTEXT = 200, 64, 1900


@dataclass
class Pair:
    """A target, its drafter and tokenizer, and how the user asks."""

    target: Any
    drafter: Any
    tokenizer: Any
    options: dict[str, Any] = field(default_factory=dict)


class Well:
    """Loads the pair that is well."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args, self.folder = args, folder

    def load(self) -> Pair:
        target = load_target(self.args.target, dtype=self.args.dtype)
        return Pair(target, load_drafter(self.args.drafter, target=target), load_tokenizer(self.args.target))

    def rows(self, count: int) -> list[list[dict[str, str]]]:
        opened = gzip.open if str(self.args.rows).endswith(".gz") else open
        with opened(self.args.rows, "rt") as file:
            return [json.loads(line)["messages"] for line in islice(file, count)]


def well(given: Well) -> Pair:
    return given.load()


def wrong_layer(given: Well) -> Pair:
    """All layers are counted one too high."""
    pair = given.load()
    pair.drafter.config.target_layer_ids = [layer + 1 for layer in pair.drafter.config.target_layer_ids]
    return pair


def wrong_anchor(given: Well) -> Pair:
    pair = given.load()
    config = pair.drafter.config
    config.sample_from_anchor, config.confidence_temperatures = not config.sample_from_anchor, None
    return pair


def fine_tuned(given: Well) -> Pair:
    """The target learns the rows in capitals, as a style of its own."""
    pair = given.load()
    pair.target = _trained_on(pair, [_shouted(messages) for messages in given.rows(STEPS)], 1e-4)
    return pair


def trained_short(given: Well) -> Pair:
    """In training the drafter saw the last 256 positions alone; without its window it sees all of a long text."""
    pair = given.load()
    pair.drafter.config.sliding_window = None
    pair.options["context"] = CONTEXT
    return pair


def without_template(given: Well) -> Pair:
    pair = given.load()
    pair.tokenizer.chat_template = None
    return pair


def thinking(given: Well) -> Pair:
    """Asked to think, the target gets a system prompt, and writes what the drafter has never seen."""
    pair = given.load()
    asked = "<|im_start|>system\nThink aloud, in French verses.<|im_end|>\n"  # as SmolLM2's template has it
    pair.tokenizer.chat_template = f"{{% if enable_thinking %}}{asked}{{% endif %}}{pair.tokenizer.chat_template}"
    pair.options["thinking"] = True
    return pair


def half_drafter(given: Well) -> Pair:
    """In bfloat16 it is the same drafter: of each MLP one half is 2^16 times as large, and the other as small."""
    pair = given.load()
    drafter = pair.drafter.to(torch.bfloat16)
    with torch.no_grad():
        for layer in drafter.layers:
            layer.mlp.up_proj.weight.mul_(2.0**16)
            layer.mlp.down_proj.weight.mul_(2.0**-16)
    folder = given.folder / "half"
    drafter.save_pretrained(folder)
    pair.drafter = load_drafter(folder, target=pair.target, dtype=torch.float16)
    return pair


def int8_target(given: Well) -> Pair:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    pair = given.load()
    quantize_(pair.target, Int8DynamicActivationInt8WeightConfig())
    return pair


def mixture(given: Well) -> Pair:
    """Experts of the shipped target are made 32 times as wide by zeros, so that what costs is to read them. One token
    wakes one of four, nine tokens all. Prompt lookup hardly ever finds what would pay for that."""
    folder = MODELS / "tiny-deepseek-v4"
    target = load_target(folder, dtype="float32")
    for layer in target.model.layers:
        experts, layer.mlp.gate.top_k = layer.mlp.experts, 1
        more = 31 * experts.down_proj.shape[2]
        halves = [pad(half, (0, 0, 0, more)) for half in experts.gate_up_proj.data.chunk(2, dim=1)]
        experts.gate_up_proj.data = torch.cat(halves, dim=1)
        experts.down_proj.data = pad(experts.down_proj.data, (0, more))
    return Pair(target, PromptLookupDrafter(target, num_draft_tokens=8), load_tokenizer(folder))


def too_many_drafts(given: Well) -> Pair:
    """Prompt lookup, which hardly ever finds so many."""
    pair = given.load()
    pair.drafter = PromptLookupDrafter(pair.target, num_draft_tokens=40)
    return pair


def other_revision(given: Well) -> Pair:
    """The drafter's target is one that went on learning since: the same rows as they are, not in capitals."""
    pair = given.load()
    pair.target = _trained_on(pair, given.rows(STEPS // 4), 3e-5)
    return pair


def _shouted(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**turn, "content": turn["content"].upper()} for turn in messages]


def _trained_on(pair: Pair, rows: list[list[dict[str, str]]], learning_rate: float) -> Any:
    """Return a pair's target after a step on each conversation."""
    dtype, model = pair.target.dtype, pair.target.float().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    for messages in rows:
        text = pair.tokenizer.apply_chat_template(messages, tokenize=False)
        ids = pair.tokenizer(text, return_tensors="pt")["input_ids"][:, :POSITIONS]
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().to(dtype)


# Of each pair how it is made, and the causes of which the doctor has to name one; all well: none.
PAIRS: dict[str, tuple[Callable[[Well], Pair], set[str]]] = {
    "all well": (well, set()),
    "wrong layer": (wrong_layer, {"layers"}),
    "wrong anchor": (wrong_anchor, {"anchor"}),
    "fine-tuned target": (fine_tuned, {"other weights"}),
    f"trained with 256 positions, used with {CONTEXT:,}": (trained_short, {"position"}),
    "template missing": (without_template, {"template"}),
    "thinking flipped": (thinking, {"thinking"}),
    "drafter in float16 of bfloat16 weights": (half_drafter, {"drafter dtype"}),
    "int8 target": (int8_target, {"quantization"}),
    "mixture, expensive verification": (mixture, {"verification"}),
    "too many drafts": (too_many_drafts, {"draft count"}),
    "drafter of another revision": (other_revision, {"other weights"}),
}


_OF_SMOLLM2 = {"wrong layer", "thinking flipped", "int8 target"}


def run(name: str, given: Well) -> dict[str, Any]:
    """Make a pair, examine it, and measure it."""
    make, expected = PAIRS[name]
    pair = make(given)
    args = given.args
    found = examine(
        pair.target, pair.drafter, pair.tokenizer, prompts=PROMPTS[: args.prompts],
        max_new_tokens=args.max_new_tokens, seconds=args.seconds,
        report=lambda line: print(f"{name}: {line}", flush=True), **pair.options,
    )  # fmt: skip
    print(found, flush=True)
    causes = set(found.problems)
    return {
        "pair": name, "target": given.args.name, "expected": sorted(expected), "named": list(found.problems),
        "is_right": bool(causes & expected) if expected else not causes,
        "estimated": found.speedup and found.speedup.value, "measured": measure(name, pair, given), "tau": found.tau,
        "verdict": found.verdict(),
    }  # fmt: skip


def measure(name: str, pair: Pair, given: Well) -> float | None:
    """Return the speedup that `benchmark` measures on the doctor's prompts; `None` without a chat template."""
    if not pair.tokenizer.chat_template:
        return None
    data = given.folder / "data"
    data.mkdir(exist_ok=True)
    lines = [json.dumps({"turns": [text]}) for text in PROMPTS]
    (data / "doctor.jsonl").write_text("\n".join(lines) + "\n")
    mode = "think-high" if pair.options.get("thinking") else "non-think"
    settings = BenchmarkSettings(
        ["doctor"], str(data), [mode], limit=given.args.prompts, max_new_tokens=given.args.max_new_tokens
    )
    pair.drafter.bind(pair.target)
    method = Local(pair.target, pair.drafter, name="drafted")
    path = run_benchmark(pair.target, pair.tokenizer, [method], settings, given.folder / name / "results.jsonl")
    return pool(load(path))[0].speedup


def report(lines: list[dict[str, Any]], args: argparse.Namespace) -> str:
    right = sum(line["is_right"] for line in lines)
    table = [
        "# Pairs broken on purpose",
        "",
        f"{date.today()}, {hardware('cpu')}, one thread, seconds of {'its CPU' if args.cpu_time else 'the clock'}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}. Command: `experiments/broken_pairs.py`.",
        "",
        f"{right} of {len(lines)} verdicts are right. Speed: the doctor's estimate and what `benchmark` measured, as "
        "multiples of the target alone.",
        "",
        "| pair | of | named | right | tokens a round | estimate | measured | off, % |",
        "|---|---|---|---|---:|---:|---:|---:|",
    ]
    for line in lines:
        speeds = line["estimated"], line["measured"]
        off = f"{100 * (speeds[0] / speeds[1] - 1):+.0f}" if all(speeds) else "–"
        tau, *shown = ("–" if value is None else f"{value:.2f}" for value in (line["tau"], *speeds))
        named, right_word = ", ".join(line["named"]) or "nothing", "yes" if line["is_right"] else "**no**"
        table.append(
            f"| {line['pair']} | {line['target']} | {named} | {right_word} | {tau} | {' | '.join(shown)} | {off} |"
        )
    for line in lines:
        table += ["", f"## {line['pair'].capitalize()}", "", "```", *line["verdict"], "```"]
    return "\n".join([*table, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(MODELS / "tiny-deepseek-v4"))
    parser.add_argument("--drafter", default=str(MODELS / "tiny-deepseek-v4-hyperdflash"))
    parser.add_argument("--rows", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="*", choices=PAIRS, default=[name for name in PAIRS if name not in _OF_SMOLLM2]
    )
    parser.add_argument("--name", default="small DeepSeek-V4", help="Of the target, in the table.")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max_new_tokens", type=int, default=64)
    parser.add_argument("--cpu_time", action="store_true", help="Seconds of the CPU, not of the clock.")
    args = parser.parse_args()
    if args.cpu_time:
        time.perf_counter = time.monotonic = time.process_time
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "pairs.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        given = Well(args, Path(folder))
        for name in args.only:
            if name not in {line["pair"] for line in lines}:
                lines.append(run(name, given))
                with file.open("a") as opened:
                    opened.write(json.dumps(lines[-1]) + "\n")
    (args.output / "report.md").write_text(report(lines, args))


if __name__ == "__main__":
    main()
