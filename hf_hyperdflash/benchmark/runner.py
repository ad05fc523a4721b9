"""Runs methods side by side: every method generates from every prompt, one right after the other."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator, Sequence
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
from transformers.generation.streamers import BaseStreamer

from ..decoding.request import check_tree_budget
from ..decoding.stats import clock, exact_timing
from ..training.data.encoding import encode_prompts
from ..training.features.fingerprint import module_fingerprint, short_fingerprint, target_fingerprint
from ..training.features.locking import only_writer
from ..version import __version__
from .results import MODES, ROUND_FIELDS, TARGET_ONLY, Generation, Key, generation_key, read_lines
from .suites import SUITES, load_suite

_WARM_UP_TOKENS = 16
_VARIABLE_FACTS = ("date", "command")  # facts that may differ when a run is continued
_ELSEWHERE = "Choose another output folder (`--output`), or repeat the run as it was to continue it."


@dataclass(frozen=True)
class Method:
    """A way to generate.

    Attributes:
        name: Its name in the report, for example `"HyperDFlash (6)"`.
        drafter: The `assistant_model` of the call; `None` for the target alone.
        num_draft_tokens: Tokens drafted one after the other per round, or `"auto"`; `None` for the drafter's own
            number.
        tree_budget: The most nodes of a draft tree, or `"auto"`; `None` for chains.
        is_adaptive: Whether the drafter learns while it serves. No other method may use it then.

    Raises:
        ValueError: If the drafter cannot draft that many tokens, or no tree can have that many nodes.
    """

    name: str
    drafter: Any = None
    num_draft_tokens: int | str | None = None
    tree_budget: int | str | None = None
    is_adaptive: bool = False

    def __post_init__(self) -> None:
        if self.num_draft_tokens is not None:
            self.drafter.check_num_draft_tokens(self.num_draft_tokens)
        check_tree_budget(self.tree_budget)


@dataclass
class BenchmarkSettings:
    """The settings of a run. A run continues an earlier one with equal settings.

    Args:
        suites: Names of suites, see [`load_suite`].
        data: Folder with `<suite>.jsonl` files; `None` for the Hub.
        modes: `"non-think"` and `"think-high"`, passed to the chat template.
        temperatures: 0 is greedy; others sample from the whole distribution.
        limit: Prompts of each suite; `None` for all.
        max_new_tokens: Most new tokens per turn.
        seed: Seed of sampling; every method starts each prompt from the same state.

    Raises:
        ValueError: If a field is out of range.
    """

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
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"`limit` is {self.limit}, expected at least 1, or None for all prompts.")
        if self.max_new_tokens < 3:
            raise ValueError(f"`max_new_tokens` is {self.max_new_tokens}, expected at least 3: less has no round.")

    def prompts(self) -> dict[str, list[list[str]]]:
        """Load the prompts of each suite with [`load_suite`].

        Raises:
            ValueError: If one cannot be loaded.
        """
        return {name: load_suite(name, self.data, self.limit) for name in self.suites}


def run_benchmark(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    settings: BenchmarkSettings,
    results: str | os.PathLike[str],
) -> Path:
    """Generate from every prompt with every method and append a JSON line per generation.

    Methods take turns prompt by prompt, so that drift of the machine affects all alike. The first one changes with the
    prompt. The target alone is always among them. Greedy output is compared with the target's own. A killed run
    continues if it is called again with the same weights, prompts, settings, versions and machine; a drafter that
    learns then starts from its first weights. `report.write_report` makes tables of the file.

    Args:
        target: The target, bound if a method drafts.
        tokenizer: Its tokenizer, with a chat template.
        methods: At least one. Their names must differ. [`TARGET_ONLY`] is added.
        settings: Suites, temperatures and limits.
        results: The file to append to.

    Returns:
        The file.

    Raises:
        ValueError: If there is nothing to compare, the file holds another run's results or is being written by another
            process, or suites cannot be loaded.
    """
    if not methods:
        raise ValueError("No method is given: expected at least one drafter to compare with the target alone.")
    methods = [Method(TARGET_ONLY), *methods]
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
    with only_writer(path), ExitStack() as learning:
        done = _open_results(path, _run_facts(target, tokenizer, methods, settings, suites))
        if len(done) < total:
            first = {"role": "user", "content": next(iter(suites.values()))[0][0]}
            ids = encode_prompts(tokenizer, [{"messages": [first]}])[0].to(target.device)
            for method in methods:
                generate_once(target, method, ids, 0.0, _WARM_UP_TOKENS)
                if method.is_adaptive:
                    learning.enter_context(method.drafter.adapt(target))
        with path.open("a") as file, tqdm(total=total, initial=len(done), unit="text", desc="benchmark") as progress:
            if done:
                progress.write(f"{len(done)} of {total} generations are there already, in {path}.", file=sys.stderr)
            for mode, temperature, suite in product(settings.modes, settings.temperatures, suites):
                for number, turns in enumerate(suites[suite]):
                    cell = {"suite": suite, "mode": mode, "temperature": temperature, "prompt": number}
                    for record in _conversation(target, tokenizer, methods, settings, cell, turns, done, progress):
                        file.write(json.dumps(record) + "\n")
                        file.flush()
                        progress.update()
    return path


def _conversation(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    methods: Sequence[Method],
    settings: BenchmarkSettings,
    cell: dict[str, Any],
    turns: list[str],
    done: dict[Key, Generation],
    progress: tqdm,
) -> Iterator[Generation]:
    """Yield the generations of one prompt that are not done yet, each as soon as the target's own text is known.

    Every method continues from the target's own earlier answers.
    """
    messages: list[dict[str, str]] = []
    for turn, text in enumerate(turns):
        messages.append({"role": "user", "content": text})
        ids = encode_prompts(tokenizer, [{"messages": messages}], thinking=cell["mode"] == "think-high")[0]
        ids, turn_key = ids.to(target.device), {**cell, "turn": turn}
        target_output = done.get(generation_key({**turn_key, "method": TARGET_ONLY}), {}).get("output_ids")
        pending: list[tuple[Generation, list[int]]] = []
        shift = (cell["prompt"] + turn) % len(methods)
        for method in [*methods[shift:], *methods[:shift]]:
            record = {**turn_key, "method": method.name}
            if generation_key(record) in done:
                continue
            progress.set_postfix_str(
                f"{cell['suite']} {cell['prompt'] + 1} {cell['mode']} T={cell['temperature']:g}: {method.name}"
            )
            torch.manual_seed(zlib.crc32(f"{settings.seed},{sorted(turn_key.items())}".encode()))
            figures, output = generate_once(target, method, ids, cell["temperature"], settings.max_new_tokens)
            pending.append(({**record, **figures}, output))
            target_output = output if method.name == TARGET_ONLY else target_output
            while pending and target_output is not None:
                yield _with_comparison(*pending.pop(0), target_output)
        answer = str(tokenizer.decode(target_output or [], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": answer.rpartition("</think>")[2]})


def _with_comparison(record: Generation, output: list[int], target_output: list[int]) -> Generation:
    """Add whether a greedy text equals the target's own, and the first difference; sampled texts may differ."""
    is_target = record["method"] == TARGET_ONLY
    same = None if is_target or record["temperature"] else output == target_output
    parted = (i for i, (a, b) in enumerate(zip(output, target_output)) if a != b)
    first = next(parted, min(len(output), len(target_output))) if same is False else None
    return {**record, "identical": same, "first_difference": first, **({"output_ids": output} if is_target else {})}


class _Clock(BaseStreamer):
    """Records the times of the prompt and of each new token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def generate_once(
    target: PreTrainedModel, method: Method, ids: torch.Tensor, temperature: float, max_new_tokens: int
) -> tuple[Generation, list[int]]:
    """Generate once, and return its figures and its new tokens."""
    streamer, drafter = _Clock(), method.drafter
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": temperature > 0, "streamer": streamer}
    if temperature > 0:
        options |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    if drafter is not None:
        options["assistant_model"] = drafter
        options["num_assistant_tokens"] = method.num_draft_tokens or drafter.num_draft_tokens
        options["tree_budget"] = method.tree_budget
    _reset_peak_memory(target.device)
    with exact_timing():
        now = clock(target.device)
        began = now()
        output = target.generate(ids, attention_mask=torch.ones_like(ids), **options)  # type: ignore[operator]
        ended = now()
    new = output[0, ids.shape[1] :].tolist()
    figures = {
        "prompt_tokens": ids.shape[1],
        "new_tokens": len(new),
        "seconds": ended - began,
        "decode_seconds": ended - streamer.times[1],
        **{name: None if drafter is None else getattr(drafter.last_stats, name) for name in ROUND_FIELDS},
        "peak_memory": _peak_memory(target.device),
    }
    return figures, new


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
    methods: Sequence[Method],
    settings: BenchmarkSettings,
    suites: dict[str, list[list[str]]],
) -> dict[str, object]:
    return {
        **environment(target),
        "methods": {method.name: _describe(method) for method in methods},
        **asdict(settings),
        "data": settings.data and Path(settings.data).name,
        "weights_digest": {method.name: _weights_digest(target, method) for method in methods},
        "prompts_digest": _prompts_digest(tokenizer, settings.modes, suites),
    }


def environment(target: PreTrainedModel) -> dict[str, object]:
    """Return the date, command, hardware and versions for a report, without this machine's folders."""
    return {
        "date": date.today().isoformat(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
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


def _weights_digest(target: PreTrainedModel, method: Method) -> str | None:
    if method.drafter is None:
        return short_fingerprint(target_fingerprint(target))
    return module_fingerprint(method.drafter)[:32] if isinstance(method.drafter, nn.Module) else None


def _prompts_digest(
    tokenizer: PreTrainedTokenizerBase, modes: Sequence[str], suites: dict[str, list[list[str]]]
) -> str:
    """Return one digest over prompts and tokenizer: every turn's tokens as a first turn, and the chat template."""
    digest = hashlib.sha256(json.dumps([suites, tokenizer.chat_template]).encode())
    for prompts, mode in product(suites.values(), modes):
        conversations = [{"messages": [{"role": "user", "content": turn}]} for turns in prompts for turn in turns]
        for ids in encode_prompts(tokenizer, conversations, thinking=mode == "think-high"):
            digest.update(ids.numpy().tobytes())
    return digest.hexdigest()[:32]


def _describe(method: Method) -> str:
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
