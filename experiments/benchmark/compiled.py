"""What a user would pick, side by side: plain decoding eager and compiled, transformers' prompt lookup, our rounds
eager and compiled, and PyPI's `dflash` 0.1.0 and `economize` 0.3.2.

Each way has a copy of one target, and they take turns in random order over the same prompts, so that the machine's
drift hits them alike. What compiles has been compiled before. Seconds are the processor's on a CPU. "Packed" is with
the weights in the layout that the CPU's products read (`torch._inductor.config.freezing`); plain decoding has no such
way, as transformers' own writes wrong text then: its graph keeps the first prompt's cache.

    pip install --no-deps dflash==0.1.0 economize==0.3.2
    python experiments/benchmark compiled  # a random Qwen3, and a drafter that knows its texts
    python experiments/benchmark compiled --target SMOLLM2 --drafter DRAFTER --prompt-files FOLDER \
        --temperatures 0 1 --packed --untrained --output experiments/results/smollm2-135m/compiled  # in bfloat16
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.util
import itertools
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch._inductor import config as inductor
from transformers import CompileConfig, PreTrainedModel

from hf_hyperdflash import Drafter, PromptLookupDrafter, load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark import runner
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.hub.formats import export_dflash

from .loop import clock, loop_of_dflash, random_target, trained_drafter

Way = Callable[[torch.Tensor, float], torch.Tensor]  # a prompt `[1, seq]` and the temperature to the text
COMPILED, PACKED = "compiled plain", ", packed"
DFLASH, ECONOMIZE = "dflash 0.1.0", "economize 0.3.2, lookup"  # both at temperature 0 alone


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="a folder or a name; a random Qwen3 by default")
    parser.add_argument("--drafter", help="the target's, a folder or a name")
    parser.add_argument("--prompts", type=int, default=4, help="random ones, or of each suite")
    parser.add_argument("--suites", nargs="+", default=["gsm8k", "mbpp", "mt-bench"])
    parser.add_argument("--prompt-files", type=Path, help="folder of SUITE.jsonl with lines of `prompt` or `turns`")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    parser.add_argument("--tree-budgets", type=int, nargs="*", default=[8, 16])
    parser.add_argument("--runs", type=int, default=3, help="over all prompts, after one that is not counted")
    parser.add_argument("--packed", action="store_true", help="also compiled with packed weights")
    parser.add_argument("--untrained", action="store_true", help='also "auto" with a drafter of random weights')
    parser.add_argument("--ways", nargs="+", help="some of the ways, by name; all by default")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default=None, choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="a folder for report.md and results.json")
    arguments = parser.parse_args()
    if arguments.target and not (arguments.drafter and arguments.prompt_files):
        parser.error("`--target` needs its `--drafter`, and `--prompt-files` with a file for each suite.")
    # Of the random target, as `loop` has it.
    arguments.dtype = arguments.dtype or ("bfloat16" if arguments.target else "float32")
    vars(arguments).update(layers=6, hidden_size=256, vocab_size=4096, block_size=8, steps=170)
    return arguments


def compile_config() -> CompileConfig:
    """transformers' own, on a CPU too."""
    config = CompileConfig() if torch.cuda.is_available() else CompileConfig(mode=None)
    config._compile_all_devices = True
    return config


def ways_of(
    target: PreTrainedModel, drafter: Drafter, folder: Path | None, longest: int, arguments: argparse.Namespace
) -> dict[str, tuple[PreTrainedModel, Way, Drafter | None]]:
    """Return each way with the copy of the target that it runs on, and the drafter whose rounds can be counted."""
    options = dict(max_new_tokens=arguments.max_new_tokens, pad_token_id=0)
    compiled = dict(cache_implementation="static", max_cache_len=longest, compile_config=compile_config())
    settings: dict[str, dict[str, Any]] = {"plain": {}, COMPILED: compiled}
    # It verifies what is found past the end of the text, too.
    static = dict(cache_implementation="static", max_cache_len=longest + 8, prompt_lookup_num_tokens=7)
    settings["transformers' lookup, static"] = static
    drafts: dict[str, dict[str, Any]] = {"chain": {}, "auto": dict(num_assistant_tokens="auto")}
    drafts |= {f"{budget} nodes": dict(tree_budget=budget) for budget in arguments.tree_budgets}
    for name, asked in drafts.items():
        settings[f"ours, {name}"] = dict(assistant_model=drafter, **asked)
        settings[f"ours compiled, {name}"] = dict(assistant_model=drafter, **asked, **compiled)
    settings["our lookup"] = dict(assistant_model=PromptLookupDrafter)
    if arguments.untrained:
        auto = dict(assistant_model=untrained(drafter), num_assistant_tokens="auto")
        settings["ours compiled, untrained, auto"] = {**auto, **compiled}
    if arguments.packed:
        for name in ("ours compiled, chain", "ours compiled, auto"):
            settings[f"{name}{PACKED}"] = settings[name]
    ways: dict[str, tuple[PreTrainedModel, Way, Drafter | None]] = {}
    for name, asked in settings.items():
        if arguments.ways and name not in arguments.ways:
            continue
        own, its = copy.deepcopy(target), asked.get("assistant_model")
        if its is not None:
            its = PromptLookupDrafter(own) if its is PromptLookupDrafter else its
            its.bind(own)
            asked = {**asked, "assistant_model": its}
        ways[name] = own, _way(own, {**options, **asked}, name.endswith(PACKED)), its
    if folder is not None and DFLASH in (arguments.ways or [DFLASH]) and importlib.util.find_spec("dflash"):
        own = copy.deepcopy(target)
        loop = loop_of_dflash(own, folder)
        ways[DFLASH] = own, lambda ids, _: loop(ids, arguments.max_new_tokens), None
    if ECONOMIZE in (arguments.ways or [ECONOMIZE]) and importlib.util.find_spec("economize"):
        own = copy.deepcopy(target)
        ways[ECONOMIZE] = own, _economize(own, arguments.max_new_tokens), None
    return ways


def _way(target: PreTrainedModel, options: dict[str, Any], is_packed: bool) -> Way:
    def way(ids: torch.Tensor, temperature: float) -> torch.Tensor:
        sampled = dict(do_sample=True, temperature=temperature) if temperature else dict(do_sample=False)
        with inductor.patch(freezing=is_packed):
            return target.generate(ids, **options, **sampled)

    return way


def untrained(drafter: Drafter) -> Drafter:
    """Return a copy of a drafter with random weights, which is next to never right."""
    own: Any = copy.deepcopy(drafter)
    torch.manual_seed(0)
    for parameter in own.parameters():
        if parameter.ndim > 1:
            parameter.data.normal_(std=0.02)
    return own


def _economize(target: PreTrainedModel, count: int) -> Way:
    import economize
    from economize.techniques.lookup import LookupConfig

    model = economize.apply(target, LookupConfig())
    decoding = economize.DecodeConfig(cycle_length=8)

    def way(ids: torch.Tensor, _: float) -> torch.Tensor:
        written = torch.as_tensor(model.decode(ids[0], count, decoding=decoding).tokens).to(ids.device)
        return torch.cat([ids[0], written])[None] if len(written) == count else written[None]

    return way


def prompts_of(arguments: argparse.Namespace, tokenizer: Any) -> list[torch.Tensor]:
    """Return the prompts `[1, seq]`: random ones, or the first of each suite."""
    if arguments.target is None:
        torch.manual_seed(0)
        return [torch.randint(2, arguments.vocab_size, (1, 16 * (i + 1))) for i in range(arguments.prompts)]
    texts = []
    for suite in arguments.suites:
        lines = (arguments.prompt_files / f"{suite}.jsonl").read_text().splitlines()[: arguments.prompts]
        for line in map(json.loads, lines):
            texts.append(line["turns"][0] if "turns" in line else line["prompt"])
    chats = [[{"role": "user", "content": text}] for text in texts]
    asked = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return [tokenizer.apply_chat_template(chat, **asked)["input_ids"] for chat in chats]


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    with TemporaryDirectory() as folder, torch.no_grad():
        if arguments.target is None:
            target, tokenizer = random_target(arguments), None
            prompts = prompts_of(arguments, tokenizer)
            with torch.enable_grad():
                trained = trained_drafter(target, prompts, arguments)
            dtype = getattr(torch, arguments.dtype)
            export_dflash(trained.to(dtype), folder)
            target, drafter = (
                target.to(arguments.device, dtype),
                load_drafter(Path(folder)).to(arguments.device, dtype),
            )
        else:
            dtype = getattr(torch, arguments.dtype)
            target = load_target(arguments.target, dtype=dtype).to(arguments.device)
            tokenizer = load_tokenizer(arguments.target)
            prompts = prompts_of(arguments, tokenizer)
            drafter = load_drafter(arguments.drafter, dtype=dtype).to(arguments.device)
        prompts = [prompt.to(arguments.device) for prompt in prompts]
        longest = max(prompt.shape[1] for prompt in prompts) + arguments.max_new_tokens
        own = Path(folder) if arguments.target is None else None
        ways = ways_of(target, drafter, own, longest, arguments)
        results = measure(ways, prompts, arguments)
    tables = "\n\n".join(table(results, temperature, prompts, arguments) for temperature in arguments.temperatures)
    report = f"{machine(arguments)}\n\n{tables}"
    print(report)
    save_report(f"# Compiled rounds\n\n{report}\n", arguments, **results)


def measure(
    ways: dict[str, tuple[PreTrainedModel, Way, Drafter | None]], prompts: list[torch.Tensor], arguments: Any
) -> dict[str, Any]:
    """Return the machine, and of each way its seconds a run, its tokens, and of its rounds what they took."""
    results: dict[str, Any] = {"machine": machine(arguments)}
    results["ways"] = {name: {"calls": [], "texts": []} for name in ways}
    order = random.Random(0)
    expected: list[list[int]] = []  # at temperature 0
    turns = itertools.product(range(-1, arguments.runs), arguments.temperatures, enumerate(prompts))
    for run, temperature, (index, prompt) in turns:
        for name in order.sample(list(ways), len(ways)):
            if temperature and name in (DFLASH, ECONOMIZE):
                continue
            _, way, drafter = ways[name]
            torch.manual_seed(index)
            began = clock(prompt)
            text = way(prompt, temperature)
            seconds = clock(prompt) - began
            own = results["ways"][name]
            if run < 0:
                if not temperature:
                    own["texts"].append(text[0].tolist())
                    expected += [text[0].tolist()] if name == "plain" else []
                continue
            stats = None if drafter is None else drafter.last_stats
            call = {"run": run, "temperature": temperature, "prompt": index, "seconds": seconds}
            call["tokens"] = text.shape[1] - prompt.shape[1]
            if stats is not None:
                names = "rounds", "verify_seconds", "draft_seconds", "loop_seconds"
                call |= {each: getattr(stats, each) for each in names}
            own["calls"].append(call)
    for own in results["ways"].values():
        texts = own.pop("texts")
        own["same_texts"] = sum(text == plain for text, plain in zip(texts, expected)) if expected else None
    return results


def hardware(arguments: Any) -> str:
    """Return on what was measured, in one sentence."""
    return (
        f"{datetime.date.today()}, {runner.hardware(arguments.device)}, {arguments.threads} thread(s), torch "
        f"{torch.__version__}, transformers {transformers.__version__}."
    )


def name_of_target(arguments: Any) -> str:
    return Path(arguments.target).name if arguments.target else "A random Qwen3 (6 layers, width 256)"


def machine(arguments: Any) -> str:
    """Return what was measured, and on what, in two sentences."""
    seconds = "" if arguments.device.startswith("cuda") else ", CPU seconds"
    texts = f"{arguments.prompts} prompts" + (f" of each of {', '.join(arguments.suites)}" if arguments.target else "")
    return (
        f"{hardware(arguments)} {name_of_target(arguments)}, {arguments.dtype}, {texts}, "
        f"{arguments.max_new_tokens} new tokens, the median of {arguments.runs} runs by turns{seconds}."
    )


def table(results: dict[str, Any], temperature: float, prompts: list[torch.Tensor], arguments: Any) -> str:
    """Return the table of a temperature: of each way the tokens a second of its median run, beside the two plain
    ways, and beside compiled plain decoding for each suite."""
    suites = arguments.suites if arguments.target else []
    calls_of = {
        name: [call for call in own["calls"] if call["temperature"] == temperature]
        for name, own in results["ways"].items()
    }
    speeds = {name: _speed(calls, arguments.runs) for name, calls in calls_of.items() if calls}
    heads = [f"way, T = {temperature:g}", "tokens/s", "x plain", "x compiled plain", *suites]
    heads += ["tau", "round ms", "verify", "draft", *["same texts"] * (not temperature)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, own in results["ways"].items():
        if name not in speeds:
            continue
        calls, cells = calls_of[name], [name, f"{speeds[name]:.1f}"]
        cells += [f"{speeds[name] / speeds[base]:.2f}" if base in speeds else "" for base in ("plain", COMPILED)]
        for at in range(len(suites)):
            of_suite = [
                _speed([call for call in calls_of[each] if call["prompt"] // arguments.prompts == at], arguments.runs)
                for each in (name, COMPILED)
                if each in calls_of
            ]
            cells.append(f"{of_suite[0] / of_suite[1]:.2f}" if len(of_suite) > 1 else "")
        rounds = sum(call.get("rounds", 0) for call in calls)
        if rounds:
            cells.append(f"{sum(call['tokens'] - 1 for call in calls) / rounds:.2f}")
            parts = ("loop_seconds", "verify_seconds", "draft_seconds")
            cells += [f"{1e3 * sum(call[part] for call in calls) / rounds:.1f}" for part in parts]
        else:
            cells += [""] * 4
        if not temperature:
            cells.append(f"{own['same_texts']} of {len(prompts)}" if own["same_texts"] is not None else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _speed(calls: list[dict[str, Any]], runs: int) -> float:
    by_run = [[call for call in calls if call["run"] == run] for run in range(runs)]
    return statistics.median(sum(c["tokens"] for c in run) / sum(c["seconds"] for c in run) for run in by_run)
