"""One task of lm-eval, with and without a drafter: the same scores, the same answers, in less time.

    python examples/evaluate_with_lm_eval.py --target examples/models/tiny-deepseek-v4 \
        --drafter examples/models/tiny-deepseek-v4-hyperdflash --data gsm8k.jsonl --output evaluated

`--data` has one `{"question": ..., "answer": ...}` a line, as GSM8K has them: worked answers that end in `#### 72`.
Asked are the last `--limit` of them. Two metrics: exact match of the number in `\\boxed{}`, which a small target
hardly ever gets right, and chrF of the whole answer against the worked one, which moves when any answer changes.

lm-eval's `hf` model takes a target that is loaded, and calls its `generate`; a drafter that is bound as the target's
default drafts there. Nothing of lm-eval is changed: `DraftedLM` measures.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import sys
import time
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import datasets
import torch

from hf_hyperdflash import load_drafter, load_target, load_tokenizer
from hf_hyperdflash.benchmark.results import save_report
from hf_hyperdflash.benchmark.runner import hardware
from hf_hyperdflash.decoding.stats import SpeculationStats

try:
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
except ImportError as error:
    raise SystemExit(f"Error: {error}: pip install lm-eval.") from None

TASK = "worked_answers"
ASKED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
METRICS = {"exact_match": "exact match of the boxed number", "chrf": "chrF of the answer"}


class DraftedLM(HFLM):
    """lm-eval's `hf` model, measured.

    Attributes:
        stats: Of every `generate` with the drafter.
        seconds: In `generate`; on a CPU the process's own, as what else runs on the machine does not count.
    """

    def __init__(self, target: Any, drafter: Any, **options: Any) -> None:
        super().__init__(pretrained=target, **options)
        self.drafter, self.stats, self.seconds = drafter, SpeculationStats(), 0.0
        self.now = time.process_time if target.device.type == "cpu" else time.perf_counter

    def _model_generate(self, *arguments: Any, **options: Any) -> torch.Tensor:
        began = self.now()
        written = super()._model_generate(*arguments, **options)
        self.seconds += self.now() - began
        if self.drafter is not None:
            self.stats += self.drafter.last_stats
        return written


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="path or Hub id")
    parser.add_argument("--drafter", required=True, help="path or Hub id")
    parser.add_argument("--data", required=True, help="JSON lines with `question` and `answer`")
    parser.add_argument("--limit", type=int, default=100, help="questions, the last ones of the file")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1])
    parser.add_argument("--drafts", type=int, help="a round; the drafter's own number if left out")
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--runs", type=int, default=3, help="of each way, in turn; the median counts")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", help="a folder for results.json and report.md")
    return parser.parse_args()


def questions_of(path: str, limit: int) -> list[dict[str, str]]:
    """The last `limit` lines, each with the number that its answer ends in."""
    found = []
    with open(path, encoding="utf-8-sig") as file:
        lines = list(file)
    for number, line in list(enumerate(lines, 1))[-limit:]:
        entry = json.loads(line)
        if not {"question", "answer"} <= entry.keys() or "####" not in entry["answer"]:
            raise SystemExit(
                f"{path}, line {number}: {sorted(entry)}, expected `question` and `answer`, which ends in '#### 72'."
            )
        worked, _, boxed = re.sub(r"<<.*?>>", "", entry["answer"]).rpartition("####")
        found.append({"question": entry["question"], "worked": worked.strip(), "boxed": boxed.strip()})
    return found


def scores_of_one(question: dict[str, str], answers: list[str]) -> dict[str, Any]:
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", answers[0])
    is_right = bool(boxed) and boxed[-1].replace(",", "") == question["boxed"].replace(",", "")
    return {"exact_match": float(is_right), "chrf": (question["worked"], answers[0])}


def task_over(path: Path, max_new_tokens: int) -> dict[str, Any]:
    """The task, in the words of lm-eval's YAML files."""
    return {
        "task": TASK,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}" + ASKED,
        "doc_to_target": "{{boxed}}",
        "process_results": scores_of_one,
        "generation_kwargs": {"do_sample": False, "max_gen_toks": max_new_tokens, "until": ["<｜User｜>"]},
        "metric_list": [
            {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True},
            {"metric": "chrf", "aggregation": "chrf", "higher_is_better": True},
        ],
    }


def evaluate(target: Any, drafter: Any, tokenizer: Any, task: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Scores, answers and seconds of one way; without a drafter the target is as it was loaded."""
    if drafter is not None:
        drafter.bind(target, as_default=True)
    model = DraftedLM(target, drafter, tokenizer=tokenizer, batch_size=batch_size)
    told = simple_evaluate(model, tasks=[task], apply_chat_template=True, bootstrap_iters=1000)
    if drafter is not None:
        drafter.unbind(target)
    scores = told["results"][TASK]
    samples = sorted(told["samples"][TASK], key=lambda sample: sample["doc_id"])
    return {
        "scores": {name: [scores[f"{name},none"], scores[f"{name}_stderr,none"]] for name in METRICS},
        "answers": [sample["resps"][0][0] for sample in samples],
        "seconds": model.seconds,
        "tau": model.stats.tau if drafter is not None else None,
    }


def measure(target: Any, drafter: Any, tokenizer: Any, task: dict[str, Any], size: int, runs: int) -> dict[str, Any]:
    """Both ways in turn, the first of each run the last of the next, so that the machine's drift hits them alike."""
    ways = {"alone": None, "drafted": drafter}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found: dict[str, Any] = {}
    for run in range(runs):
        for way in list(ways)[:: -1 if run % 2 else 1]:
            found[way] = evaluate(target, ways[way], tokenizer, task, size)
            seconds[way].append(found[way].pop("seconds"))
            print(f"batches of {size}, {way}: {seconds[way][-1]:.1f} s, {found[way]['scores']}", flush=True)
    answers = [found[way].pop("answers") for way in ways]
    return {
        "batch": size,
        "questions": len(answers[0]),
        "identical": sum(one == other for one, other in zip(*answers)),
        **{way: {**found[way], "seconds": seconds[way]} for way in ways},
        "speedup": statistics.median(seconds["alone"]) / statistics.median(seconds["drafted"]),
    }


def table(results: list[dict[str, Any]]) -> str:
    lines = [
        f"| batches of | | {METRICS['exact_match']} | {METRICS['chrf']} | seconds | tau | same answers |",
        "|---:|---|---:|---:|---:|---:|---:|",
    ]
    for of in results:
        for way, title in (("alone", "target alone"), ("drafted", "with the drafter")):
            exact, chrf = (of[way]["scores"][name] for name in METRICS)
            is_drafted = way == "drafted"
            cells = [
                str(of["batch"]), title, f"{exact[0]:.3f} ± {exact[1]:.3f}", f"{chrf[0]:.2f} ± {chrf[1]:.2f}",
                f"{statistics.median(of[way]['seconds']):.1f}" + (f" ({of['speedup']:.2f}×)" if is_drafted else ""),
                f"{of[way]['tau']:.2f}" if is_drafted else "",
                f"{of['identical']} of {of['questions']}" if is_drafted else "",
            ]  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    datasets.disable_progress_bars()
    questions = questions_of(arguments.data, arguments.limit)
    target = load_target(arguments.target, dtype=getattr(torch, arguments.dtype))
    drafter = load_drafter(arguments.drafter, target=target)
    if arguments.drafts is not None:
        drafter.num_draft_tokens = arguments.drafts
    tokenizer = load_tokenizer(arguments.target)
    with TemporaryDirectory() as folder:
        data = Path(folder) / "questions.jsonl"
        data.write_text("".join(json.dumps(question) + "\n" for question in questions), encoding="utf-8")
        task = task_over(data, arguments.max_new_tokens)
        results = [measure(target, drafter, tokenizer, task, size, arguments.runs) for size in arguments.batch_sizes]
    versions = ", ".join(f"{name} {version(name)}" for name in ("lm-eval", "torch", "transformers"))
    head = (
        f"{datetime.date.today()}, {hardware(target.device)}, {arguments.threads} thread(s), {versions}, "
        f"{arguments.dtype}, the last {len(questions)} questions of {Path(arguments.data).name}, at most "
        f"{arguments.max_new_tokens} new tokens, greedy, {drafter.num_draft_tokens} drafts a round, seconds "
        f"{'of the processor ' if target.device.type == 'cpu' else ''}in `generate`, median of {arguments.runs} runs, "
        f"{Path(arguments.target).name} with {Path(arguments.drafter).name}"
    )
    report = f"# lm-eval\n\n{head}\n\n{table(results)}\n"
    print(report)
    save_report(report, arguments, results=results)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # what it writes may have letters that the terminal lacks
    try:
        main()
    except (ValueError, OSError) as error:  # what the user can mend
        raise SystemExit(f"Error: {' '.join(str(error).split())}") from None
