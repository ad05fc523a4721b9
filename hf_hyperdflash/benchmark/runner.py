"""Runs methods side by side: every method generates from every prompt, one right after the other."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..decoding.stats import exact_timing
from ..training.data.encoding import encode_prompts
from ..training.features.fingerprint import module_fingerprint, short_fingerprint, target_fingerprint
from ..training.features.locking import only_writer
from ..training.trials import Local, run
from ..version import __version__
from .results import MODES, ROUND_FIELDS, TARGET_ONLY, Generation, Key, generation_key, read_lines
from .suites import SUITES, load_suite

_WARM_UP_TOKENS = 16
_VARIABLE_FACTS = ("date", "command")  # facts that may differ when a run is continued
_ELSEWHERE = "Choose another output folder (`--output`), or repeat the run as it was to continue it."


@dataclass
class BenchmarkSettings:
    """The settings of a run. A run continues an earlier one with equal settings."""

    suites: list[str] = field(default_factory=lambda: list(SUITES))
    data: str | None = None
    modes: list[str] = field(default_factory=lambda: ["non-think"])
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    limit: int | None = None
    max_new_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("suites", "modes", "temperatures"):
            if not getattr(self, name):
                raise ValueError(f"`{name}` is empty: expected at least one.")
        if unknown := set(self.modes) - set(MODES):
            raise ValueError(f"`modes` has {sorted(unknown)}, expected some of {tuple(MODES)}.")
        if min(self.temperatures) < 0:
            raise ValueError(f"`temperatures` has {min(self.temperatures)}, expected at least 0.")
        if self.max_new_tokens < 3:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens}, expected at least 3: less has no round.")

    def prompts(self) -> dict[str, list[list[str]]]:
        """Load the prompts of each suite with [`load_suite`]."""
        return {name: load_suite(name, self.data, self.limit) for name in self.suites}


def run_benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Local],
    settings: BenchmarkSettings,
    results: str | os.PathLike[str],
) -> Path:
    """Generate from every prompt with every method and append a JSON line per generation.

    Methods take turns prompt by prompt, and at being the first. The target alone is always among them. Greedy output
    is compared with the target's own. A killed run continues if it is called again with the same weights, prompts,
    settings, versions and machine; a drafter that learns then starts from its first weights. `report.write_report`
    makes tables of the file.
    """
    if not methods:
        raise ValueError("No method is given: expected at least one drafter to compare with the target alone.")
    methods = [Local(target, name=TARGET_ONLY), *methods]
    names = [method.name for method in methods]
    if len(set(names)) < len(names):
        raise ValueError(
            f"Methods have the names {names}: expected each once. Name a drafter yourself with `--drafter NAME=PATH`, "
            "or leave one out."
        )
    path, suites = Path(results), settings.prompts()
    path.parent.mkdir(parents=True, exist_ok=True)
    turns_of_all = sum(len(turns) for prompts in suites.values() for turns in prompts)
    total = len(settings.modes) * len(settings.temperatures) * turns_of_all * len(methods)
    with only_writer(path), exact_timing(), ExitStack() as learning:
        done = _open_results(path, _run_facts(target, tokenizer, methods, settings, suites))
        if len(done) < total:
            first = {"role": "user", "content": next(iter(suites.values()))[0][0]}
            list(run(methods, encode_prompts(tokenizer, [{"messages": [first]}]), _WARM_UP_TOKENS))
            for method in methods:
                if method.is_adaptive:
                    learning.enter_context(method.drafter.adapt(target))
        with path.open("a") as file, tqdm(total=total, initial=len(done), unit="text", desc="benchmark") as progress:
            if done:
                progress.write(f"{len(done)} of {total} generations are there already, in {path}.", file=sys.stderr)
            for mode, temperature, suite in product(settings.modes, settings.temperatures, suites):
                for number, turns in enumerate(suites[suite]):
                    cell = {"suite": suite, "mode": mode, "temperature": temperature, "prompt": number}
                    place = f"{suite} {number + 1} {mode} T={temperature:g}: "

                    def announce(method: Local, place: str = place) -> None:
                        progress.set_postfix_str(place + method.name)

                    for line in _conversation(tokenizer, methods, settings, cell, turns, done, announce):
                        file.write(json.dumps(line) + "\n")
                        file.flush()
                        progress.update()
    return path


def _conversation(
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Local],
    settings: BenchmarkSettings,
    cell: dict[str, Any],
    turns: list[str],
    done: dict[Key, Generation],
    announce: Callable[[Local], object],
) -> Iterator[Generation]:
    """Yield the generations of one prompt that are not done yet, each as soon as the target's own text is known."""
    messages: list[dict[str, str]] = []
    device = methods[0].target.device
    for turn, text in enumerate(turns):
        messages.append({"role": "user", "content": text})
        (ids,) = encode_prompts(tokenizer, [{"messages": messages}], thinking=cell["mode"] == "think-high")
        key = {**cell, "turn": turn}
        target_output = done.get(generation_key({**key, "method": TARGET_ONLY}), {}).get("output_ids")
        first = (cell["prompt"] + turn) % len(methods)
        missing = [
            method
            for method in [*methods[first:], *methods[:first]]
            if generation_key({**key, "method": method.name}) not in done
        ]
        seed = zlib.crc32(f"{settings.seed},{sorted(key.items())}".encode())
        pending: list[tuple[Generation, list[int]]] = []
        _reset_peak_memory(device)
        trials = run(
            missing, [ids] if missing else [], settings.max_new_tokens, temperature=cell["temperature"], seed=seed,
            announce=announce,
        )  # fmt: skip
        for _, index, record in trials:
            name = missing[index].name
            figures = {
                "prompt_tokens": record.prompt_tokens,
                "new_tokens": record.new_tokens,
                "seconds": record.seconds,
                "decode_seconds": record.seconds - record.first_seconds,
                **{each: None if record.stats is None else getattr(record.stats, each) for each in ROUND_FIELDS},
                "peak_memory": _peak_memory(device),
            }
            pending.append(({**key, "method": name, **figures}, record.output))
            target_output = record.output if name == TARGET_ONLY else target_output
            while pending and target_output is not None:
                yield _compared(*pending.pop(0), target_output)
            _reset_peak_memory(device)
        # Every method goes on from the target's own answer.
        answer = str(tokenizer.decode(target_output or [], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answer.rpartition("</think>")[2]})


def _compared(line: Generation, output: list[int], target_output: list[int]) -> Generation:
    """Add whether a greedy text equals the target's own, and the first difference; sampled texts may differ."""
    if line["method"] == TARGET_ONLY:
        return {**line, "identical": None, "first_difference": None, "output_ids": output}
    if line["temperature"] or output == target_output:
        return {**line, "identical": None if line["temperature"] else True, "first_difference": None}
    parted = (i for i, (a, b) in enumerate(zip(output, target_output)) if a != b)
    return {**line, "identical": False, "first_difference": next(parted, min(len(output), len(target_output)))}


# Peak memory: the allocator's on an accelerator, the resident set's on Linux


def _reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif os.path.exists("/proc/self/clear_refs"):
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:  # not ours to reset (some containers): the peak since the start is reported then
            pass


def _peak_memory(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


# The results file


def _run_facts(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Local],
    settings: BenchmarkSettings,
    suites: dict[str, list[list[str]]],
) -> dict[str, object]:
    weights: dict[str, str | None] = {}
    for method in methods:
        drafter, weights[method.name] = method.drafter, None
        if drafter is None:
            weights[method.name] = short_fingerprint(target_fingerprint(target))
        elif isinstance(drafter, nn.Module):
            weights[method.name] = module_fingerprint(drafter)[:32]
    # One digest over prompts and tokenizer: every turn's tokens as a first turn, and the chat template.
    digest = hashlib.sha256(json.dumps([suites, tokenizer.chat_template]).encode())
    for prompts, mode in product(suites.values(), settings.modes):
        conversations = [{"messages": [{"role": "user", "content": turn}]} for turns in prompts for turn in turns]
        for ids in encode_prompts(tokenizer, conversations, thinking=mode == "think-high"):
            digest.update(ids.numpy().tobytes())
    return {
        **environment(target),
        "methods": {method.name: _describe(method) for method in methods},
        **asdict(settings),
        "data": settings.data and Path(settings.data).name,
        "weights_digest": weights,
        "prompts_digest": digest.hexdigest()[:32],
    }


def started() -> dict[str, str]:
    """Return the date and the command for a report."""
    return {
        "date": date.today().isoformat(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def environment(target: PreTrainedModel) -> dict[str, object]:
    """Return the date, command, hardware and versions for a report, without this machine's folders."""
    return {
        **started(),
        "commit": commit(),
        "hardware": hardware(target.device),
        "threads": torch.get_num_threads(),
        "versions": {
            "hf_hyperdflash": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "dtype": str(target.dtype).removeprefix("torch."),
        "target": Path(target.config._name_or_path).name,
    }


def _describe(method: Local) -> str:
    if method.drafter is None:
        return "one token per forward"
    drafter, facts = method.drafter, [type(method.drafter).__name__]
    if hasattr(drafter.config, "reducer"):
        ids = "1, n / 2 - 1, n - 4" if getattr(drafter.config, "usual_layers", False) else drafter.target_layer_ids
        facts.append(f"{drafter.config.reducer} over layers {ids}")
    if hasattr(drafter, "num_parameters"):
        facts.append(f"{drafter.num_parameters():,} parameters")  # rivals of unequal size are easily overlooked
    if method.is_adaptive:
        facts.append("learns while it serves")
    return ", ".join(facts)


def commit() -> str | None:
    """Return the commit of the package's checkout, marked if files differ from it; `None` without a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return None
    return result.stdout.strip() or None


def hardware(device: torch.device | str) -> str:
    """Return the name of the accelerator, or of the processor with its number of cores."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        names = [line for line in lines if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return f"{model}, {os.cpu_count()} cores"


def _open_results(path: Path, run: dict[str, Any]) -> dict[Key, Generation]:
    """Write the run's facts, and return the generations of earlier runs with the same facts."""
    path.touch()
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # a kill may have left the last line unfinished
    done, facts = {}, _named(json.loads(json.dumps(run)))
    for number, line in read_lines(path):
        if "run" not in line:
            done[generation_key(line)] = line
            continue
        earlier_methods, methods = (", ".join(sorted(of.get("methods", ()))) for of in (line["run"], run))
        if earlier_methods != methods:
            raise ValueError(
                f"{path}, line {number}: the run there has the methods {earlier_methods}; this one has {methods}. "
                f"{_ELSEWHERE}"
            )
        earlier = _named(line["run"])
        for fact in dict.fromkeys([*facts, *earlier]):
            if fact not in _VARIABLE_FACTS and earlier.get(fact) != facts.get(fact):
                earlier_value, value_now = earlier.get(fact, "no value"), facts.get(fact, "no value")
                raise ValueError(
                    f"{path}, line {number}: the run there has `{fact}` {earlier_value}, this one has {value_now}. "
                    f"{_ELSEWHERE}"
                )
    with path.open("a") as file:
        file.write(json.dumps({"run": run}) + "\n")
    return done


def _named(run: dict[str, object]) -> dict[str, object]:
    """Flatten the facts of a run: the parts of a fact get entries of their own."""
    parts = {
        f"{fact} of {name}": v for fact, value in run.items() if isinstance(value, dict) for name, v in value.items()
    }
    return {fact: value for fact, value in run.items() if not isinstance(value, dict)} | parts
