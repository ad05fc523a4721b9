"""Runs quantized targets: is drafted text the quantized target's own, do its forwards depend on their width, how fast?

    pip install torchao bitsandbytes hqq optimum-quanto
    python experiments/quantized_targets.py --target TARGET --gguf FILE.gguf --output quantized [--cpu_time]

Greedy text is written alone and with prompt lookup, which every target has, and a small drafter takes two steps of
training against each. A method that does not install or run here says why in its line. Each line is written when it is
done, and a run goes on where an earlier one was killed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset

from hf_hyperdflash import (
    HyperDFlashDrafter,
    HyperDFlashTrainer,
    HyperDFlashTrainingArguments,
    PromptLookupDrafter,
    load_target,
    load_tokenizer,
)
from hf_hyperdflash.benchmark.doctor.ablations import encode
from hf_hyperdflash.benchmark.doctor.examine import PROMPTS
from hf_hyperdflash.benchmark.doctor.fit import logit_gap
from hf_hyperdflash.benchmark.runner import hardware


def plain(dtype: str) -> Callable[[argparse.Namespace], Any]:
    return lambda args: load_target(args.target, dtype=dtype)


def gguf(args: argparse.Namespace) -> Any:
    return load_target(args.gguf, dtype="float32")


def by_config(kind: str, **options: Any) -> Callable[[argparse.Namespace], Any]:
    """A method that transformers has a configuration of."""

    def load(args: argparse.Namespace) -> Any:
        config = getattr(transformers, kind)(**options)
        return load_target(args.target, dtype="float32", quantization_config=config)

    return load


def torchao(kind: str, **options: Any) -> Callable[[argparse.Namespace], Any]:
    """A method of torchao's, applied to the loaded target."""

    def load(args: argparse.Namespace) -> Any:
        import torchao.quantization

        target = load_target(args.target, dtype="bfloat16" if "Int4" in kind else "float32")
        torchao.quantization.quantize_(target, getattr(torchao.quantization, kind)(**options))
        return target

    return load


METHODS: dict[str, tuple[str, Callable[[argparse.Namespace], Any]]] = {
    "float32": ("torch", plain("float32")),
    "bfloat16": ("torch", plain("bfloat16")),
    "GGUF, dequantized": ("gguf", gguf),
    "torchao int8, weights": ("torchao", torchao("Int8WeightOnlyConfig")),
    "torchao int8, weights and activations": ("torchao", torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao int4, weights": ("torchao", torchao("Int4WeightOnlyConfig")),
    "torchao FP8, weights": ("torchao", torchao("Float8WeightOnlyConfig")),
    "bitsandbytes, 8 bits": ("bitsandbytes", by_config("BitsAndBytesConfig", load_in_8bit=True)),
    "bitsandbytes, 4 bits": (
        "bitsandbytes",
        by_config("BitsAndBytesConfig", load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32),
    ),
    "HQQ, 4 bits": ("hqq", by_config("HqqConfig", nbits=4, group_size=64)),
    "quanto int8": ("optimum-quanto", by_config("QuantoConfig", weights="int8")),
    "quanto int4": ("optimum-quanto", by_config("QuantoConfig", weights="int4")),
    "FP8, fine-grained": ("torch", by_config("FineGrainedFP8Config")),
}


def run(name: str, args: argparse.Namespace) -> dict[str, Any]:
    package, load = METHODS[name]
    line: dict[str, Any] = {"method": name}
    try:
        line["version"] = f"{package} {version(package)}"
        target = load(args)
        line |= measure(target, encode(load_tokenizer(args.target), [[text] for text in PROMPTS]), args)
    except Exception as error:  # whatever a package says of this machine
        line["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]
    return line


def measure(target: Any, prompts: list[torch.Tensor], args: argparse.Namespace) -> dict[str, Any]:
    drafter = PromptLookupDrafter(target)
    drafter.bind(target)
    same, seconds, tokens = 0, [0.0, 0.0], 0
    for ids in prompts[: args.prompts]:
        texts = []
        for index, assistant in enumerate(({}, {"assistant_model": drafter})):
            began = time.perf_counter()
            texts.append(target.generate(ids, do_sample=False, max_new_tokens=args.max_new_tokens, **assistant))
            seconds[index] += time.perf_counter() - began
        same += torch.equal(*texts)
        tokens += texts[0].shape[1] - ids.shape[1]
    gap, spread, _ = logit_gap(target, texts[0])
    return {
        "same": same, "of": args.prompts, "depends": gap / spread, "tokens_per_second": tokens / seconds[0],
        "with_lookup": seconds[0] / seconds[1], "trains": trains(target, texts[0]),
    }  # fmt: skip


def trains(target: Any, text: torch.Tensor) -> str:
    """Return whether two steps of training a small drafter against a target lower its loss, or what prevents it."""
    torch.manual_seed(0)
    drafter = HyperDFlashDrafter.from_target(
        target, mask_token_id=3, num_hidden_layers=1, target_layer_ids=[1], intermediate_size=64, dtype=torch.float32
    )
    row = {"input_ids": text[0].tolist(), "loss_mask": [True] * text.shape[1]}
    try:
        with tempfile.TemporaryDirectory() as folder:
            args = HyperDFlashTrainingArguments(
                folder, max_steps=2, per_device_train_batch_size=1, num_anchors=4, learning_rate=1e-3, report_to=[],
                use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=1, warmup_steps=0,
            )  # fmt: skip
            trainer = HyperDFlashTrainer(drafter, target, args, train_dataset=Dataset.from_list([row]))
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    except Exception as error:  # whatever a package says of training
        return f"no: {type(error).__name__}"
    return "yes" if losses[1] < losses[0] else f"no: a loss of {losses[0]:.2f}, then {losses[1]:.2f}"


def report(lines: list[dict[str, Any]], args: argparse.Namespace) -> str:
    seconds = "its CPU" if args.cpu_time else "the clock"
    table = [
        "# Quantized targets",
        "",
        f"{date.today()}, {hardware('cpu')}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"{args.prompts} prompts of {args.max_new_tokens} tokens, seconds of {seconds}"
        ". Same texts: greedy texts with prompt lookup that are the target's own. "
        "Differ by: the logits of one forward over 8 tokens from those of 8 forwards over one, at most, in parts of "
        "their spread. Trains: whether two steps of training against it lower a small drafter's loss.",
        "",
        "| target | version | same texts | differ by | times plain bfloat16 | with lookup | trains |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    usual = next(line["tokens_per_second"] for line in lines if line["method"] == "bfloat16")
    for line in lines:
        cells = [line["method"], line.get("version", "–")]
        if "failed" in line:
            cells += [f"does not run: {line['failed']}", *["–"] * 4]
        else:
            cells += [f"{line['same']} of {line['of']}", f"{100 * line['depends']:.2g} %"]
            cells += [f"{line['tokens_per_second'] / usual:.2f}", f"{line['with_lookup']:.2f}", line["trains"]]
        table.append(f"| {' | '.join(cells)} |")
    return "\n".join([*table, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True)
    parser.add_argument("--gguf", required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max_new_tokens", type=int, default=48)
    parser.add_argument("--cpu_time", action="store_true", help="Seconds of the CPU, not of the clock.")
    args = parser.parse_args()
    if args.cpu_time:
        time.perf_counter = time.process_time
    args.output.mkdir(parents=True, exist_ok=True)
    file = args.output / "methods.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    for name in args.only:
        if name not in {line["method"] for line in lines}:
            lines.append(run(name, args))
            print(lines[-1], flush=True)
            with file.open("a") as opened:
                opened.write(json.dumps(lines[-1]) + "\n")
    (args.output / "report.md").write_text(report(lines, args))


if __name__ == "__main__":
    main()
