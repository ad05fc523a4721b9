"""The training scripts, end to end at toy size: target, its own answers, drafter, and the pair at work."""

import csv
import importlib.util
import json
import random
import re
import runpy
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_hyperdflash import DeepseekV4MTPDrafter, HyperDFlashDrafter, load_drafter, measure_acceptance
from hf_hyperdflash.cli.app import app
from hf_hyperdflash.decoding.stats import keep_trees
from hf_hyperdflash.drafters.blocks.configuration_hyperdflash import HyperDFlashConfig
from hf_hyperdflash.drafters.blocks.path import BlockPath
from hf_hyperdflash.targets.registry import target_of
from hf_hyperdflash.training.data.rows import encode_prompts
from hf_hyperdflash.training.script import parse

from .conftest import prompt, tiny_drafter, tiny_target
from .helpers.oracle_aslm import Oracle
from .helpers.processes import python

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
DRAFTER = str(EXAMPLES / "models" / "tiny-deepseek-v4-hyperdflash")


def run(script: str, *arguments: object) -> str:
    result = python(ROOT / script, *arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_trees_are_drawn_as_they_were(tmp_path):
    text = ["--prompt", "What is 3 plus 4?", "--rounds", 2, "--tree-budget", 9]
    said = run("examples/draw_trees.py", *text, "--output", tmp_path / "new" / "trees.png")
    assert f"{tmp_path / 'new' / 'trees.png'}: 2 rounds, " in said
    assert (tmp_path / "new" / "trees.png").stat().st_size > 5000
    drawing = runpy.run_path(str(ROOT / "examples/draw_trees.py"))
    target = AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4").eval()
    tokenizer, drafter = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4"), load_drafter(DRAFTER)
    drafter.bind(target)
    arguments = SimpleNamespace(prompt=text[1], rounds=2, tree_budget=9, temperature=0.0, seed=0)
    rounds = drawing["rounds_of"](arguments, target, tokenizer, drafter)
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text[1]}]}])[0]
    written = target.generate(ids, do_sample=False, max_new_tokens=20)[0, ids.shape[1] + 1 :].tolist()
    told = [token for kept in rounds for token in [*kept.drafts.tokens[kept.accepted].tolist(), kept.own]]
    assert told == written[: len(told)] and len(told) > 2


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("examples/draw_trees.py", ["--target", "nowhere"], "The folder nowhere does not exist, and as a Hub id"),
        (
            "examples/draw_trees.py",
            ["--drafter", DRAFTER.replace("deepseek-v4", "qwen3")],
            "was made for a target with `hc_mult` 1",
        ),
        ("examples/draw_trees.py", ["--tree-budget", 2000], "`tree_budget` is 2000, expected the most nodes"),
        (
            "experiments/benchmark",
            ["tree_cost", "--results", "nowhere"],
            "No such file or directory: 'nowhere/summary.csv'",
        ),
        ("tools/target_card.py", ["nowhere", "--template", "a", "--output", "b"], "The folder nowhere does not exist"),
        (
            "tools/target_card.py",
            [DRAFTER, "--template", "a", "--output", "b"],
            "drafter, expected the target that it drafts",
        ),
        (
            "tools/sample_prompts.py",
            ["--target", DRAFTER, "--output", "b"],
            "drafter, expected the target that it drafts for",
        ),
        ("experiments/benchmark", ["rounds", "--layers", 0], "`target_layer_ids` is [1, 0, -2], expected"),
    ],
)
def test_a_script_says_what_is_wrong_in_one_line(script, arguments, told):
    result = python(ROOT / script, *arguments)
    *_, last = result.stderr.splitlines()
    assert result.returncode == 1 and last.startswith("Error: ") and told in last, result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("script", "option", "value", "expected"),
    [
        ("examples/draw_trees.py", "--output", EXAMPLES, "a folder: expected a file, for example "),
        ("tools/sample_prompts.py", "--batch-size", 0, "expected at least 1."),
        ("tools/sample_prompts.py", "--temperature", 0, "expected above 0: greedily a target writes one prompt."),
    ],
)
def test_a_script_says_what_an_option_may_be(script, option, value, expected):
    needed = ["--target", "nowhere", *["--output", "a.jsonl"] * (script == "tools/sample_prompts.py")]
    result = python(ROOT / script, *needed, option, value)
    *_, last = result.stderr.splitlines()
    assert result.returncode == 2 and f"{option} is {value}" in last and expected in last, result.stderr


@pytest.mark.parametrize(
    ("script", "package", "told"),
    [
        ("examples/evaluate_with_lm_eval.py", "lm_eval", "pip install lm-eval."),
        ("examples/grpo_with_drafter.py", "trl", "pip install trl."),
        ("examples/serve_with_drafter.py", "transformers.cli.serve", "transformers.cli.serve"),
    ],
)
def test_a_script_names_the_package_that_it_lacks(script, package, told):
    """As it is run without that package, whether this machine has it or not."""
    lacking = f"import runpy, sys; sys.modules[{package!r}] = None; sys.path.insert(0, {str(EXAMPLES)!r}); "
    result = python("-c", lacking + f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')")
    assert result.returncode == 1 and result.stderr.startswith("Error: ") and told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_batches_are_measured_beside_transformers_own(tmp_path):
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"turns": ["What is {i} plus {i * i}?"]}}\n' for i in (3, 14, 250))
    )
    name = EXAMPLES / "models" / "tiny-qwen3"
    said = run(
        "experiments/benchmark", "batches",
        "--target", name, "--drafter", f"{name}-hyperdflash", "--data", tmp_path, "--suites",
        "sums", "--batch-sizes", 1, 3, "--drafts", 2, "--max-new-tokens", 6, "--runs", 1, "--output", tmp_path / "out",
    )  # fmt: skip
    assert "Of 6 texts with a drafter 0 differ from that of the prompt alone, of 6 of transformers' own" in said
    assert (tmp_path / "out" / "report.md").read_text().strip() in said
    told = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [result["batch"] for result in told["results"]] == [1, 1, 1, 3]
    kept = {name: told["settings"][name] for name in ("target", "drafter", "data")}
    assert kept == {"target": name.name, "drafter": f"{name.name}-hyperdflash", "data": tmp_path.name}
    assert str(tmp_path) not in str(told) and "output" not in told["settings"]


def test_two_rules_of_verification_judge_the_same_drafts(tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"turns": ["What is {i} plus {i * i}?"]}}\n' for i in (3, 14)))
    name = EXAMPLES / "models" / "tiny-qwen3"
    said = run(
        "experiments/compare_verification.py",
        "--target", name, "--drafter", f"{name}-hyperdflash", "--data", tmp_path,
        "--max-new-tokens", 24, "--drafts", 6, "--nodes", 16, "--judged", 60, "--output", tmp_path / "out",
    )  # fmt: skip
    assert (tmp_path / "out" / "report.md").read_text().strip() in said
    results = json.loads((tmp_path / "out" / "results.json").read_text())["results"]
    assert list(results) == ["chain of 6", "16 nodes"]
    for found in results.values():
        down, up = found["judged"].values()
        assert 1 < down < up and found["judged_rounds"] <= found["rounds"]["from the end"]
        assert max(found["tokens"].values()) <= 2 * 24


def test_results_in_git_stay_small():
    """What tables and pictures of the pages are made of; raw lines only where a card is made from them."""
    kept = [path for path in (ROOT / "experiments" / "results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 5e6
    assert len([path for path in kept if path.suffix == ".jsonl"]) == 2


def test_what_is_kept_names_no_folder_of_a_machine():
    """Of any result that is committed."""
    kept = [
        path
        for path in (ROOT / "experiments" / "results").rglob("*")
        if path.suffix in (".json", ".jsonl", ".md", ".csv")
    ]
    found = [
        (path.name, place)
        for path in kept
        for place in re.findall(r"""["' =](/(?:\w[\w.-]*/)+)""", path.read_text(encoding="utf-8"))
    ]
    assert len(kept) > 20 and found == []


def test_a_dense_target_reads_as_much_for_any_tree_and_experts_more_for_every_node():
    said = run(
        "experiments/benchmark",
        "tree_cost",
        "--results",
        ROOT / "experiments" / "results" / "tiny-deepseek-v4" / "trees",
    )
    rows = [
        line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith(("| chain of", "| 8", "| 64"))
    ]
    assert [row[0] for row in rows] == ["chain of 8", "8", "64"] * 2
    for chain, same, wide in (rows[:3], rows[3:]):
        assert chain[5] == same[5] == wide[5] and chain[3] == same[3] and float(wide[3]) > 2 * float(chain[3])
        for nodes, row in ((9, chain), (65, wide)):
            experts = 256 * (1 - (1 - 6 / 256) ** nodes) / 6  # of those that one token reads
            assert 1 < float(row[3]) < experts


def test_what_rows_cost_is_counted_from_tokens_and_operations():
    said = run("experiments/benchmark", "training_cost").splitlines()
    rows = [line for line in said if line.startswith(("| 5,000", "| 50,000", "| 500,000"))]
    assert len(rows) == 6
    # A token of Qwen3-8B is two operations a weight, all but the embedding's 0.6e9 of 8.2e9.
    (forward,) = [float(row.split(" | ")[2]) for row in rows[-1:]]
    assert abs(forward - 500_000 * 400 * 2 * 7.57e9 / 150e12 / 3600) < 0.05


def test_quickstart_limits_its_own_prompts_too(tmp_path):
    shown = run(
        "examples/quickstart.py",
        "--limit",
        1,
        "--max-new-tokens",
        3,
        "--quiet",
        "--picture",
        tmp_path / "acceptance.png",
    )
    assert "\n1 verification round, " in shown
    assert "all 1 " in shown and "A baker" not in shown and (tmp_path / "acceptance.png").is_file()


LOOP = "--layers 5 --hidden-size 32 --vocab-size 64 --max-new-tokens 12 --block-size 4 --steps 2".split()


def rows_of(table: str) -> dict[str, list[str]]:
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: rest for name, *rest in cells[1:]}


def test_benchmark_of_the_loop_compares_what_writes_and_drafts_the_same():
    shown = run("experiments/benchmark", "loop", *LOOP, "--prompts", 2, "--runs", 2)
    rows = rows_of(shown)
    assert "ours" in rows and all(row[0] == "the target's" for row in rows.values()), shown
    assert len({(row[1], row[2]) for row in rows.values()}) == 1  # rounds, tau
    assert ("dflash 0.1.0" in rows) == (importlib.util.find_spec("dflash") is not None), shown
    assert ("dflash 0.1.0" in rows) != ("pip install --no-deps dflash==0.1.0" in shown)
    assert ("transformers' DFlash" in rows) == hasattr(transformers, "MuseGlimmerAssistantModel"), shown


def test_profile_of_a_round_counts_kernels_and_waits():
    shown = run("experiments/benchmark", "rounds", *LOOP)
    rows = rows_of(shown)
    assert all(row[0] == "the target's" and float(row[2]) > 100 for row in rows.values()), shown
    assert rows["ours"][3] == "1.0" and "loop.py" in shown.split("Where ours waits")[1].split("Where")[0]


HEADS = ["--vocab-size", 300, "--hidden-size", 128, "--layers", 1, "--repeats", 1, "--context", 8]


def shown_here(monkeypatch, capsys, name, *arguments) -> str:
    """What a measurement prints, run in this process."""
    monkeypatch.setattr("sys.argv", ["experiments/benchmark", name, *map(str, arguments)])
    monkeypatch.setattr("sys.path", [*sys.path])
    runpy.run_path(str(ROOT / "experiments" / "benchmark"), run_name="__main__")
    return capsys.readouterr().out


def test_benchmark_of_heads_counts_and_times_each(monkeypatch, capsys):
    shown = shown_here(monkeypatch, capsys, "heads", *HEADS)
    counted, small, large = (rows for rows in shown.split("## ")[1:])
    lines = [line.strip("| ").split(" | ") for line in counted.splitlines() if line.startswith("| ")][2:]
    within = {(kind, candidates): cells[-1] for kind, candidates, *cells in lines}
    assert len(within) == 26 and [key for key, said in within.items() if said == "no"] == [("state", "all")]
    assert "verification 185.7 G, 29.81 GB; drafter's layers 13.5 G, 1.93 GB; LM head 6.4 G, 1.06 GB" in counted
    for timed, numbers in ((small, 5), (large, 4)):  # of candidates, fewer than the vocabulary has tokens
        assert len([line for line in timed.splitlines() if line.startswith("| ")]) == 2 + 5 * numbers


@pytest.fixture(scope="module")
def heads_script():
    return runpy.run_path(str(ROOT / "experiments" / "benchmark" / "heads.py"))


def test_operations_are_those_that_torch_counts(heads_script):
    """Of the layers but attention, which depends on the context, of the LM head, and of every head."""
    target, ids = tiny_target(), prompt(9)
    for kind, fields in heads_script["variants"]():
        rank, candidates = {"head_rank": 5} if "head_rank" in fields else {}, fields.get("head_candidates")
        if (candidates or 0) > 16:
            continue
        drafter = tiny_drafter(target, **fields | rank)
        states = torch.randn(1, 7, 32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            drafter(states, torch.arange(7)[None], drafter.new_context())
        of_operators = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
        attention = sum(count for name, count in of_operators.items() if "attention" in name or "bmm" in name)
        assert counter.get_total_flops() - attention == heads_script["block"](drafter).operations
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            path = BlockPath(drafter, target_of(target), states[:, :6])
        assert counter.get_total_flops() == heads_script["lm_head"](drafter, 6).operations
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            for k in range(6):
                path(k, ids[:, k], ids.new_zeros(1))
        assert counter.get_total_flops() == 6 * heads_script["step"](drafter).operations, (kind, candidates)


def test_a_verification_reads_the_experts_that_its_tokens_choose(heads_script):
    """DeepSeek says 13 billion active parameters of 284; experts by drawing them, layer by layer."""
    with torch.device("meta"):
        flash = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config())
    assert flash.num_parameters() == pytest.approx(284e9, rel=0.005)
    assert heads_script["verification"](flash, 1).operations / 2 == pytest.approx(13e9, rel=0.03)
    generator = torch.Generator().manual_seed(0)
    choices = torch.rand(2000, 7, 256, generator=generator).topk(6).indices.flatten(1)
    read = sum(len(set(layer)) for layer in choices.tolist()) / 2000 / 256
    routed = 43 * 256 * 3 * 4096 * 2048
    one, seven = (heads_script["verification"](flash, tokens).bytes for tokens in (1, 7))
    # Over 2,000 layers the mean of 39 experts is off by 0.1 with a chance below 1e-6.
    assert seven - one == pytest.approx((read - 6 / 256) * routed * (0.5 + 1 / 32), rel=0.005)


def test_bytes_of_a_head_are_its_weights_once_a_draft(heads_script):
    vocabulary, width, rank = 129280, 4096, 256
    config = {"vocab_size": vocabulary, "hidden_size": width, "head_rank": rank}
    for kind, own in {
        "markov": 0, "gated_markov": rank * (width + rank), "recurrent": 3 * rank * (width + 2 * rank),
        "selector": rank * width,
    }.items():  # fmt: skip
        for candidates in (0, 64):
            with torch.device("meta"):
                fields = config | {"sequential_head": kind, "head_candidates": candidates}
                drafter = HyperDFlashDrafter(HyperDFlashConfig(**fields, num_hidden_layers=1))
            weights = own + rank + rank * (candidates or vocabulary)
            found = heads_script["step"](drafter).bytes - 2 * weights
            # Rows of the vocabulary's width: a few passes, never as much as the table.
            assert vocabulary * 2 <= found <= vocabulary * 32, kind


def test_candidates_of_a_trained_head(tmp_path, monkeypatch, capsys):
    target = AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4", dtype=torch.float32)
    HyperDFlashDrafter.from_target(
        target, num_hidden_layers=1, mask_token_id=3, sequential_head="state", head_rank=8, head_candidates=5
    ).save_pretrained(tmp_path)
    shown = shown_here(
        monkeypatch, capsys, "heads", "--drafter", tmp_path, "--candidates", 0, 5, "--limit", 1,
        "--max-new-tokens", 4,
    )  # fmt: skip
    rows = rows_of(shown)
    assert list(rows) == ["---", "5 (its own)", "all"] and rows["all"][0] == rows["5 (its own)"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--drafter", "blind"], "has no sequential head"),
        (["--drafter", "nowhere"], "nowhere"),
        (["--drafter", "headed", "--candidates", "3000"], "`head_candidates` is 3000, expected at most the 2048"),
        (["--drafter", "headed", "--prompts", "torn.jsonl"], "torn.jsonl:1 is no JSON"),
        (["--target", "nowhere", "--repeats", "1"], "nowhere"),
    ],
)
def test_benchmark_of_heads_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    config = HyperDFlashConfig.from_pretrained(DRAFTER)
    for name, config.sequential_head, config.head_rank in (("blind", "none", 4), ("headed", "markov", 4)):
        HyperDFlashDrafter(config).save_pretrained(name)
    Path("torn.jsonl").write_text('{"turns"')
    with pytest.raises(SystemExit) as stopped:
        shown_here(monkeypatch, capsys, "heads", *arguments)
    assert str(stopped.value.code).startswith("Error: ") and message in str(stopped.value.code)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--limit", "0"], "'0' is not a whole number from 1 up"),
        (["--temperature", "nan"], "'nan' is not 0 or above"),
        (["--prompts", "nowhere.jsonl"], "There is no file nowhere.jsonl"),
        (["--prompts", "prompts.jsonl"], "prompts.jsonl, line 2 has no list of turns"),
        (["--prompts", "empty.jsonl"], "empty.jsonl has no prompts"),
    ],
)
def test_quickstart_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"turns": ["What is 2 plus 2?"]}\n{"turns": "What?"}\n')
    (tmp_path / "empty.jsonl").write_text("")
    monkeypatch.setattr("sys.argv", ["examples/quickstart.py", *arguments])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(ROOT / "examples/quickstart.py"), run_name="__main__")
    said = f"{stopped.value.code} {capsys.readouterr().err}"
    assert message in said and "Traceback" not in said


def test_from_text_to_a_working_pair(tmp_path):
    data, target_dir, answers = tmp_path / "data.jsonl", tmp_path / "target", tmp_path / "answers.jsonl"
    rows = [{"question": f"What is {i} plus {i}?", "answer": f"{i}+{i}={2 * i}\n#### {2 * i}"} for i in range(60)]
    data.write_text("\n".join(map(json.dumps, rows)))
    toy = ["--vocab-size", 300, "--hidden-size", 64, "--layers", 3, "--batch-size", 2, "--seq-length", 48]
    toy += ["--no-compile", "--save-every", 1]
    run("tools/train_tiny_target.py", "--data", data, "--output", target_dir, "--steps", 8, *toy)
    before = load_file(target_dir / "model.safetensors")
    assert "Going on from step 8" in run(
        "tools/train_tiny_target.py", "--data", data, "--output", target_dir, "--steps", 8, *toy
    )
    after = load_file(target_dir / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    arguments = ["--target", target_dir, "--data", data, "--output", answers, "--max-new-tokens", 12]
    for limit in (20, 24):  # the second goes on: the first 20 are there
        app(["answers", *map(str, arguments), "--limit", str(limit)], standalone_mode=False)
    rewritten = [json.loads(line)["messages"] for line in answers.read_text().splitlines()]
    assert len(rewritten) == len({messages[0]["content"] for messages in rewritten}) == 24

    first, drafter_dir, held_out = tmp_path / "stage-1", tmp_path / "drafter", tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(answers.read_text().splitlines()[:3]))
    training = ["--target", target_dir, "--dataset", answers, "--eval_dataset", held_out, "--eval_prompts", 2]
    training += ["--report_to", "none", "--save_dtype", "float32"]
    training += ["--eval_max_new_tokens", 8, "--per_device_train_batch_size", 8, "--max_length", 64, "--use_cpu"]
    run("examples/train_drafter.py", *training, "--output_dir", first, "--layers", 1, "--num_train_epochs", 2)
    second = ["--stage", 2, "--drafter", first, "--num_train_epochs", 1, "--eval_strategy", "epoch"]
    run("examples/train_drafter.py", *training, "--output_dir", drafter_dir, *second)
    facts, before = (json.loads((folder / "training.json").read_text()) for folder in (drafter_dir, first))
    assert (before["settings"]["learning_rate"], facts["settings"]["learning_rate"]) == (8e-4, 1e-4)
    assert facts["metrics"]["eval_loss"] < before["metrics"]["eval_loss"] + 0.05
    for name in (
        "eval_tau",
        "eval_teacher_forced_tau",
    ):  # at the end of the only epoch and of the run: the same weights
        assert [line[name] for line in facts["history"]] == [facts["metrics"][name]] * 2
    assert str(tmp_path) not in (drafter_dir / "config.json").read_text() + json.dumps(facts)

    def swept(grid: str, target: Path, work_dir: str, *arguments: object, flags: str = "") -> list[list[str]]:
        """The cells of the table that a sweep prints."""
        told = ["--target", target, "--answers", answers, "--eval-answers", held_out, "--max-length", 64]
        shared = f"--max_steps 2 --num_anchors 4 --use_cpu {flags}".split()
        printed = run(
            "experiments/sweep.py", grid, *told, "--work-dir", tmp_path / work_dir, *arguments, "--", *shared
        )
        lines = printed[printed.index("| drafter |") :].splitlines()[2:]
        return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]

    blind = "--layers 1 --reducer hc_gate --target_layer_ids -1 --recipe ours"
    cells = {
        "blind": blind, "headed": f"{blind} --sequential_head state --head_rank 8",
        "fc": "--layers 1 --reducer fc --target_layer_ids 1 -1 --feature_dtype float8 --eval_prompts 1",
    }  # fmt: skip
    (tmp_path / "heads.py").write_text(f"CELLS, LIKE = {cells}, 'blind'")
    rows = swept(tmp_path / "heads.py", target_dir, "heads", "--eval-sampled", held_out)
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert [row[0] for row in rows] == list(cells) and len(set(sizes)) == 3
    assert max(sizes) < 1.05 * min(sizes)  # the head is taken from the MLPs
    assert [row[2] for row in rows] == [""] * 3 and float(rows[2][5]) >= 1 and rows[1][5] == ""
    trained = json.loads((tmp_path / "heads" / "headed-seed0" / "training.json").read_text())["metrics"]
    assert rows[1][3] == f"{trained['eval_teacher_forced_tau']:.2f}"

    cells = {"weight 9": "--drafter {drafter} --recipe ours --blind_weight 9"}
    configs = {"all": {"head_candidates": 0}, "1": {"head_candidates": 1}}
    (tmp_path / "choosing.py").write_text(
        f"CELLS, CONFIGS, RATES, START = {cells}, {configs}, [0.1, 0.2], {{'head_candidates': 9}}"
    )
    rows = swept(tmp_path / "choosing.py", target_dir, "choosing", "--drafter", tmp_path / "heads" / "headed-seed0")
    assert [row[0] for row in rows] == ["weight 9, all", "weight 9, 1"] and rows[0][2:] != rows[1][2:]
    with (tmp_path / "choosing" / "cells.csv").open() as file:
        measured = [row for row in csv.DictReader(file) if row["configuration"] == "all"]
    best = max(measured, key=lambda row: float(row["tau"]))
    told = [f"{float(best['learning_rate']):g}", f"{float(best['tau']):.2f}", f"{float(best['expected_tau']):.2f}"]
    assert len(measured) == 2 and rows[0][2:5] == told
    folders = [tmp_path / "choosing" / f"weight-9-{rate}-seed0" for rate in (0.1, 0.2)]
    assert json.loads((folders[0] / "config.json").read_text())["head_candidates"] == 9
    one, other = (load_file(folder / "model.safetensors") for folder in folders)
    assert any(not torch.equal(one[name], other[name]) for name in one)

    dense = tmp_path / "dense"
    tiny = ["--tokenizer", target_dir, "--hidden-size", 64, "--steps", 3, "--batch-size", 2, "--seq-length", 48]
    run("tools/train_tiny_qwen3.py", "--data", data, "--output", dense, *tiny)
    assert "Saved to" in run("tools/train_tiny_qwen3.py", "--data", data, "--output", dense, *tiny)  # goes on
    suites = tmp_path / "suites"
    suites.mkdir()
    (suites / "sums.jsonl").write_text(json.dumps({"turns": ["What is 3 plus 4?"]}) + "\n")
    names = ["SpecBlock", "EAGLE-3", "without shift"]
    rows = swept(
        "specblock", dense, "specblock", "--cells", *names, "--parameters", 200_000, "--suites", suites,
        "--max-new-tokens", 8, flags="--target_layer_ids 1 3 4",
    )  # fmt: skip
    sizes = [int(row[1].replace(",", "")) for row in rows]
    assert [row[0] for row in rows] == names and max(sizes) < 1.05 * min(sizes)
    report = (tmp_path / "specblock" / "results" / "report.md").read_text()
    assert all(f"{name} ({drafts}, 16 nodes)" in report for name, drafts in zip(names, (8, 7, 8)))

    tuned = ["--steps", 2, "--save-steps", 1, "--steps-ahead", 2, "--max-length", 64, "--output", tmp_path / "mtp"]
    run("experiments/train_mtp.py", "--target", target_dir, "--dataset", answers, *tuned)
    assert not (tmp_path / "mtp" / "checkpoint.pt").exists()  # only a killed run leaves one
    mtp = DeepseekV4MTPDrafter.from_pretrained(tmp_path / "mtp", dtype=torch.float32)
    native = DeepseekV4MTPDrafter.from_target(target_dir, dtype=torch.float32)
    assert mtp.e_proj.weight.shape == native.e_proj.weight.shape and not torch.equal(
        mtp.e_proj.weight, native.e_proj.weight
    )

    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    drafter = HyperDFlashDrafter.from_pretrained(drafter_dir, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target_dir)
    prompts = encode_prompts(tokenizer, [{"messages": messages} for messages in rewritten[:2]])
    assert measure_acceptance(target, drafter, prompts, max_new_tokens=8)["tau"] == facts["metrics"]["eval_tau"]
    ids = tokenizer("What is 3 plus 4?", return_tensors="pt").input_ids
    expected = target.generate(ids, do_sample=False, max_new_tokens=20)
    drafter.bind(target)
    assert torch.equal(target.generate(ids, do_sample=False, max_new_tokens=20, assistant_model=drafter), expected)


def sampled(output: Path, *arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, ROOT / "tools/sample_prompts.py", "--target", EXAMPLES / "models" / "tiny-qwen3"]
    command += ["--output", output, "--count", 12, *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)


def test_prompts_are_sampled_past_a_batch_without_a_new_one(tmp_path):
    """Its seed follows from how many there are: the same batch came again and again."""
    result = sampled(tmp_path / "prompts.jsonl", "--batch-size", 1, "--temperature", 0.3)
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    assert len(set(lines)) == len(lines) == 12
    result = sampled(tmp_path / "new" / "none.jsonl", "--batch-size", 2, "--max-new-tokens", 1)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert "20 batches in a row of 2 prompts with at most 1 tokens have no new one that ends; 0 are" in result.stderr


def test_where_prompts_go_is_looked_at_before_the_target_is(tmp_path):
    (tmp_path / "file").write_text("")
    result = python(
        ROOT / "tools/sample_prompts.py", "--target", "nowhere", "--output", tmp_path / "file" / "rows.jsonl"
    )
    told = f"Error: {tmp_path / 'file'} cannot be made, because {tmp_path / 'file'} is a file. Choose another folder."
    assert result.returncode == 1 and result.stderr.strip() == told


def test_sampling_goes_on_after_an_unfinished_line(tmp_path):
    output, whole = tmp_path / "prompts.jsonl", '{"messages": [{"role": "user", "content": "What is 3 + 4?"}]}'
    output.write_text(f'{whole}\n{{"messages": [{{"role": "us')
    result = sampled(output, "--batch-size", 16)
    assert result.returncode == 0, result.stderr
    lines = output.read_text().splitlines()
    assert lines[0] == whole and len(list(map(json.loads, lines))) == 12


def test_survival_is_predicted_on_rounds_held_out(tmp_path):
    suites = tmp_path / "suites"
    suites.mkdir()
    asked = [
        "What is 3 plus 4?",
        "Write a Python function that adds two numbers.",
        "List three fruits.",
        "What is 5 + 6?",
    ]
    (suites / "gsm8k.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in asked))
    names = [
        "--target",
        EXAMPLES / "models" / "tiny-deepseek-v4",
        "--drafter",
        DRAFTER,
        "--suites",
        suites,
        "--output",
        tmp_path / "out",
    ]
    printed = run("experiments/compare_survival.py", *names, "--limit", 4, "--max-new-tokens", 40)
    assert printed.strip() == (tmp_path / "out" / "report.md").read_text().strip()
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())
    assert all(learned > 5 and judged > 5 for learned, judged in figures["rounds"].values())
    target = AutoModelForCausalLM.from_pretrained(names[1], dtype=torch.float32).eval()
    tokenizer, drafter = AutoTokenizer.from_pretrained(names[1]), load_drafter(DRAFTER, target=target)
    drafter.bind(target)
    for temperature, options in (("0", {"do_sample": False}), ("1", {"do_sample": True, "top_k": 0, "top_p": 1.0})):
        learned, judged = ([], [])
        for number, text in enumerate(asked):
            ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": text}]}])[0]
            torch.manual_seed(0)
            with keep_trees():
                target.generate(ids, assistant_model=drafter, num_assistant_tokens=8, max_new_tokens=40, **options)
            (learned, judged)[number % 2].extend(
                (len(tree.drafts), len(tree.accepted)) for tree in drafter.last_stats.trees if len(tree.drafts)
            )
        assert figures["rounds"][temperature] == [len(learned), len(judged)]
        assert len(figures["figures"][temperature]) == 9
        check_constant(figures["figures"][temperature]["constant"], learned, judged)


def check_constant(told: dict[str, float], learned: list[tuple[int, int]], judged: list[tuple[int, int]]) -> None:
    """The predictor that says the same of every draft, from rounds of so many drafts and accepted ones."""
    p = sum(accepted for _, accepted in learned) / sum(min(accepted + 1, drafts) for drafts, accepted in learned)
    outcomes = [k < accepted for drafts, accepted in judged for k in range(min(accepted + 1, drafts))]
    off = [sum(p**k for k in range(1, drafts + 1)) - accepted for drafts, accepted in judged]
    expected = {
        "calibration error": abs(p - sum(outcomes) / len(outcomes)),
        "Brier score": sum((p - outcome) ** 2 for outcome in outcomes) / len(outcomes),
        "AUC": 0.5,
        "error of the expected length": sum(map(abs, off)) / len(off),
        "bias of the expected length": sum(off) / len(off),
    }
    assert {name: told[name] for name in expected} == pytest.approx(expected)


class Exact:
    """Draws no noise."""

    def gauss(self, *_) -> float:
        return 0.0

    def random(self) -> float:
        return 1.0


@pytest.fixture(scope="module")
def auto_script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "experiments")
        return SimpleNamespace(**runpy.run_path(str(ROOT / "experiments/simulate_auto.py"), run_name="script"))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_what_is_drafted_from_everywhere_is_what_rounds_draft(auto_script, count):
    target = AutoModelForCausalLM.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4", dtype=torch.float32).eval()
    tokenizer, drafter = AutoTokenizer.from_pretrained(EXAMPLES / "models" / "tiny-deepseek-v4"), load_drafter(DRAFTER)
    ids = encode_prompts(tokenizer, [{"messages": [{"role": "user", "content": "Count from 1 to 30."}]}])[0]
    text = target.generate(ids, max_new_tokens=60, do_sample=False)
    extend, following = drafter.extend, []

    def heard(target, context, residual, positions, next_ids):
        assert residual.shape[1] == positions.shape[1] == next_ids.shape[1]
        following.extend(zip(positions[0].tolist(), next_ids[0].tolist()))
        extend(target, context, residual, positions, next_ids)

    drafter.extend = heard
    drafted = auto_script.drafted_everywhere(target, drafter, text, ids.shape[1])
    drafter.extend = extend
    assert following == list(enumerate(text[0, 1:-1].tolist()))
    assert len(drafted) == text.shape[1] - ids.shape[1] - 1 > 20
    assert all(0 < signal <= 1 for each in drafted for signal in each.signals)
    drafter.bind(target)
    with keep_trees():
        target.generate(ids, assistant_model=drafter, num_assistant_tokens=count, max_new_tokens=60, do_sample=False)
    place, spent, rounds = 0, 0.0, auto_script.Rounds(plain=10.0, start=15.0, each=1.0)
    for tree in drafter.last_stats.trees:
        here = drafted[place]
        assert len(tree.drafts) == min(count, len(here.signals))
        assert len(tree.accepted) == min(count, here.accepted)
        place, spent = place + len(tree.tokens), spent + 15 + len(tree.drafts)
    last_alone = len(drafted) - place  # with no room for a draft that is no round of the drafter's
    assert last_alone in (0, 1)
    assert auto_script.fixed(count)(drafted, rounds, Exact()) == pytest.approx(spent + 10 * last_alone)


def test_rules_are_simulated_over_what_is_drafted(auto_script):
    rounds, easy, draw = auto_script.Rounds(plain=10.0, start=15.0, each=1.0), [], random.Random(0)
    for left in range(400, -1, -1):  # from each position, what is left of the text
        easy.append(auto_script.Drafted([0.99] * min(8, left), min(left, draw.choice((0, 8, 8, 8)))))
    known = auto_script.DraftingStats()
    for _ in range(8):
        took = auto_script.auto(known)(easy, rounds, Exact())
    best = min(auto_script.fixed(count)(easy, rounds, Exact()) for count in range(1, 9))
    foreseen = auto_script.by_choice(auto_script.foreseen)(easy, rounds, Exact())
    assert foreseen < best < 5 * len(easy) and foreseen < took < 1.1 * best
    hard = [auto_script.Drafted([0.02] * 8, 0)] * 400
    assert auto_script.by_choice(auto_script.foreseen)(hard, rounds, Exact()) == 10 * len(hard)
    hopeless = auto_script.DraftingStats()
    for _ in range(4):
        took = auto_script.auto(hopeless)(hard, rounds, Exact())
    assert 10 * len(hard) <= took < 10.3 * len(hard)
    taken, take = [], rounds.take
    rounds.take = lambda drafts, draw: taken.append(drafts) or take(drafts, draw)
    auto_script.auto(auto_script.DraftingStats())(hard, rounds, Exact())
    assert {None, 0} <= set(taken)  # the drafter is not asked, or says nothing that is worth it
    rounds.take = take
    no_room = [auto_script.Drafted([], 0)]
    assert auto_script.auto(auto_script.DraftingStats())(no_room, rounds, Exact()) == 10
    speeds = auto_script.simulate({"a": [hard] * 2}, rounds, most=2, orders=1, prompts=1)
    assert speeds["2 drafts"][0]["a"] == pytest.approx(10 / 17, rel=0.03)
    noisy = [rounds.take(4, random.Random(seed)) for seed in range(2000)]
    assert 19 < sum(noisy) / len(noisy) < 19.5 and max(noisy) > 25 and min(noisy) < 18


def test_the_first_suite_of_an_order_is_shown_by_itself(auto_script):
    found = {"1 drafts": [{"b": 1.0, "a": 2.0}], "2 drafts": [{"b": 2.0, "a": 2.0}], "auto": [{"b": 1.0, "a": 3.0}]}
    found |= {auto_script.LEARNED: found["auto"], "foresight": [{"b": 4.0, "a": 4.0}]}
    rows = rows_of(auto_script.report(found, {}))
    assert [cell.split()[0] for cell in rows["auto"]] == ["2.00×", "+0.0", "-50.0", "+50.0"]
    assert [cell.split()[0] for cell in rows["foresight"]] == ["4.00×", *["+100.0"] * 3]
    assert "1 drafts" not in rows


def test_what_auto_gains_is_simulated(tmp_path):
    suites = tmp_path / "suites"
    suites.mkdir()
    for name in ("gsm8k", "mbpp"):
        asked = ["What is 3 plus 4?", "List three fruits.", "Write a function that adds two numbers."]
        (suites / f"{name}.jsonl").write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in asked))
    options = {
        "--target": EXAMPLES / "models" / "tiny-deepseek-v4", "--drafter": DRAFTER, "--suites": suites, "--skip": 1,
        "--limit": 2, "--prompts": 2, "--orders": 4, "--max-new-tokens": 40, "--plain-ms": 12, "--round-ms": 18,
        "--draft-ms": 0.6, "--output": tmp_path / "out",
    }  # fmt: skip
    printed = run("experiments/simulate_auto.py", *(part for option in options.items() for part in option))
    assert printed.strip() == (tmp_path / "out" / "report.md").read_text().strip()
    rows = rows_of(printed[printed.index("| rule") :])
    assert json.loads((tmp_path / "out" / "results.json").read_text())["settings"]["draft_ms"] == 0.6
    ahead = {name: float(cells[1].split()[0]) for name, cells in rows.items() if cells[0].endswith("×")}
    assert [*ahead][1:] == ["auto", "auto, once it has learned", "foresight"]
    assert next(iter(ahead.values())) <= 0 < ahead["foresight"] == max(ahead.values())
    for option, value, told in (
        ("--prompts", 3, "The suite gsm8k has 2 prompts from 2 to 3, expected at least 3 (`--prompts`)."),
        ("--draft-ms", 0, "`--draft-ms` is 0.0, expected more than 0."),
        ("--skip", -1, "`--skip` is -1"),
    ):
        wrong = {**options, option: value, "--output": tmp_path / "wrong"}
        result = python(ROOT / "experiments/simulate_auto.py", *(part for pair in wrong.items() for part in pair))
        assert result.returncode == 1 and result.stderr.splitlines()[-1].startswith("Error: ")
        assert told in result.stderr and "Traceback" not in result.stderr and not (tmp_path / "wrong").exists()


def test_errors_of_the_augmented_space_linear_model_are_compared(tmp_path):
    printed = run("experiments/compare_aslm.py", "--seeds", 1, "--train", 80, "--output", tmp_path)
    assert printed.strip() == (tmp_path / "report.md").read_text().strip()
    assert (tmp_path / "errors.png").stat().st_size > 5000
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    told = {(row["problem"], row["noise"], row["method"]): row["error"] for row in results}
    drawn = list(runpy.run_path(str(ROOT / "experiments/compare_aslm.py"))["problems"](80, 0))
    assert len(drawn) == 24 and len(told) == len(results) == 24 * 6
    for problem, noise, learned, (inputs, clean) in drawn:
        oracle = Oracle(penalty=0.1, neighbours=1)
        oracle.learn(*(part.tolist() for part in learned))
        spread = sum((d - clean.mean()) ** 2 for d in clean)
        for method, predict in (("ridge", oracle.linear), ("ASLM k=1", oracle.predict)):
            error = sum((predict(x) - d) ** 2 for x, d in zip(inputs.tolist(), clean)) / spread
            assert told[problem, noise, method] == pytest.approx(error, rel=1e-3), (problem, noise, method)
        cells = [f"{told[problem, noise, method]:.2g} ± 0" for method in ("ridge", "ASLM k=1")]
        assert f"| {problem} | {noise:g} | {' | '.join(cells)} |" in printed


def test_a_stream_with_a_tuned_target_is_served_by_each_policy(tmp_path):
    rows = [
        {"question": f"What is {i} plus {i}?", "answer": f"{i} + {i} = <<{i}+{i}={2 * i}>>{2 * i}\n#### {2 * i}"}
        for i in range(8)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    target = EXAMPLES / "models" / "tiny-deepseek-v4"
    tuned = ["--output", tmp_path / "tuned", "--steps", 2, "--batch-size", 2]
    printed = run("examples/finetune_target.py", "--target", target, "--dataset", tmp_path / "rows.jsonl", *tuned)
    assert f"Saved to {tmp_path / 'tuned'}: loss" in printed
    suites = tmp_path / "suites"
    suites.mkdir()
    for suite in ("gsm8k", "mbpp"):
        lines = [json.dumps({"turns": [f"What is {i} times 3?"]}) + "\n" for i in range(14)]
        (suites / f"{suite}.jsonl").write_text("".join(lines))
    output = tmp_path / "out"
    stream = ["mbpp:2", "gsm8k:6", "tuned:gsm8k:8"]
    served = ["--target", target, "--tuned", tmp_path / "tuned", "--drafter", DRAFTER, "--suites", suites]
    printed = run(
        "examples/adapt_while_serving.py", *served, "--max-new-tokens", 16, "--stream", *stream, "--output", output
    )
    assert printed.strip() == (output / "report.md").read_text().strip()
    found = json.loads((output / "results.json").read_text())["served"]
    assert found.keys() == {"never", "always", "bandit"} and all(len(lines) == 16 for lines in found.values())
    updates = {policy: sum(line["arm"] is not None for line in lines) for policy, lines in found.items()}
    # Nothing is known at first, so the bandit looks where "always" updates; whether it pays is a matter of time.
    assert updates["never"] == 0 and updates["always"] == 2 and updates["bandit"] in (1, 2)
    arms = {policy: [line["arm"] for line in lines] for policy, lines in found.items()}
    first = next(place for place, arm in enumerate(arms["always"]) if arm)
    assert arms["bandit"][: first + 1] == arms["always"][: first + 1]
    assert [line["part"] for line in found["never"]] == ["mbpp"] * 2 + ["gsm8k"] * 6 + ["tuned:gsm8k"] * 8
    assert (output / "stream.png").stat().st_size > 5000


@pytest.fixture
def serve_v4(monkeypatch):
    """`experiments/serve_deepseek_v4.py` as a module: what of it needs no server."""
    monkeypatch.syspath_prepend(ROOT / "experiments")
    monkeypatch.setenv("HYPERDFLASH_DEEPSEEK_V4_PATHS", "1")  # as it sets it itself
    import serve_deepseek_v4

    return serve_deepseek_v4


@pytest.mark.parametrize(
    ("text", "other", "is_one"),
    [
        ([5, 6, 7], [5, 6, 7], True),
        ([5, 6, 7], [5, 8, 9], True),  # what comes after the tie is another text
        ([5, 6, 7], [9, 6, 7], False),
        ([5, 6, 7], [5, 6, 8], False),
        ([5, 6, 7], [5, 8], True),
        ([5, 6, 7], [5], True),
        ([5, 6, 7], [5, 6, 7, 8], False),  # no tie is known there
        ([5, 6, 7], [], False),
    ],
)
def test_texts_of_servers_may_part_where_two_tokens_tie(serve_v4, text, other, is_one):
    assert serve_v4.parted_at_a_tie(text, other, [3.0, 0.1, 1.5]) == is_one


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--data", "nowhere", "There is no folder .*nowhere with suites"),
        ("--data", "empty", "No suite 'gsm8k' in .*empty"),
        ("--target", "nowhere", "`--target` is nowhere, whose tokenizer cannot be loaded"),
        ("--drafter", "nowhere", "`--drafter` is .*nowhere, expected the folder of a saved drafter"),
        ("--drafter", "fc", "The `reducer` of .*fc is 'fc', expected a gate"),
        ("--port", "TAKEN", r"`--port` is \d+, which cannot be had \(.*in use\): give a free one"),
        ("--output", "file", "file"),
        ("--limit", "0", "`limit` is 0, expected at least 1"),
        ("--limit", "1", "There is no .*vllm: install vLLM"),  # all is well but that
    ],
)
def test_what_cannot_be_served_is_told_before_a_server_starts(serve_v4, tmp_path, monkeypatch, option, value, told):
    for name in ("data", "empty", "fc"):
        (tmp_path / name).mkdir()
    for name in serve_v4.SUITES:
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"turns": ["one"]}\n')
    (tmp_path / "fc" / "config.json").write_text('{"reducer": "fc"}')
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ("vllm" if option == "--output" else "python")))
    if option == "--output":
        (tmp_path / "vllm").write_text("")
    with socket.socket() as taken, socket.socket() as free:
        for one in (taken, free):
            one.bind(("127.0.0.1", 0))
        taken.listen()
        given = {"--target": EXAMPLES / "models" / "tiny-qwen3", "--data": "data", "--output": "out",
                 "--drafter": EXAMPLES / "models" / "tiny-qwen3-hyperdflash", "--expected-tau": 2,
                 "--port": free.getsockname()[1]}  # fmt: skip
        given[option] = taken.getsockname()[1] if value == "TAKEN" else value
        free.close()
        monkeypatch.setattr(sys, "argv", ["script", *(str(word) for pair in given.items() for word in pair)])
        with pytest.raises(SystemExit, match=f"^Error: .*{told}") as caught:
            serve_v4.main()
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("grid", sorted((ROOT / "experiments" / "grids").glob("*.py")), ids=lambda grid: grid.stem)
def test_every_cell_of_a_grid_has_flags_that_train_takes(grid, tmp_path):
    found = runpy.run_path(str(grid))
    for flags in found["CELLS"].values():
        words = shlex.split(flags.format(drafter=DRAFTER, work_dir=tmp_path))
        parse(["--target", "target", "--output_dir", str(tmp_path), "--use_cpu", "true", *words])
    assert found.get("LIKE", next(iter(found["CELLS"]))) in found["CELLS"]
    assert found.get("METHODS", {}).keys() <= found["CELLS"].keys()
