"""The small measurements of `experiments/benchmark`, but those of the heads."""

import importlib.util
import json

import transformers

from ..helpers.scripts import EXAMPLES, ROOT, rows_of, run

LOOP = "--layers 5 --hidden-size 32 --vocab-size 64 --max-new-tokens 12 --block-size 4 --steps 2".split()


def test_batches_are_measured_beside_transformers_own(tmp_path):
    (tmp_path / "sums.jsonl").write_text(
        "".join(f'{{"turns": ["What is {i} plus {i * i}?"]}}\n' for i in (3, 14, 250))
    )
    name = EXAMPLES / "models" / "tiny-deepseek-v4"
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


def test_benchmark_of_the_loop_compares_what_writes_and_drafts_the_same():
    shown = run("experiments/benchmark", "loop", *LOOP, "--prompts", 2, "--runs", 2)
    rows = rows_of(shown)
    assert "ours" in rows and all(row[0] == "the target's" for row in rows.values()), shown
    assert len({(row[1], row[2]) for row in rows.values()}) == 1  # rounds, tau
    assert ("dflash 0.1.0" in rows) == (importlib.util.find_spec("dflash") is not None), shown
    assert ("dflash 0.1.0" in rows) != ("pip install --no-deps dflash==0.1.0" in shown)
    assert ("transformers' DFlash" in rows) == hasattr(transformers, "MuseGlimmerAssistantModel"), shown


def test_rounds_after_long_texts_cost_a_chain_and_a_tree_each(tmp_path):
    sizes = "--lengths 20 300 --room 400 --rounds 3 --runs 1 --nodes 8 --layers 1 --hidden-size 32 --vocab-size 64"
    ways = "--ways", "growing", "static"
    shown = run("experiments/benchmark", "longtext", *sizes.split(), *ways, "--output", tmp_path)
    rows = [line.split(" | ") for line in shown.splitlines() if line.startswith(("| growing", "| static"))]
    assert [row[:2] for row in rows] == [[f"| {way}", length] for way in ways[1:] for length in ("20", "300")]
    assert all(float(row[3]) / float(row[2]) > 0.1 for row in rows) and rows[0][5] == "1.00 |"
    assert len(json.loads((tmp_path / "results.json").read_text())["results"]) == 8


def test_profile_of_a_round_counts_kernels_and_waits():
    shown = run("experiments/benchmark", "rounds", *LOOP)
    rows = rows_of(shown)
    assert all(row[0] == "the target's" and float(row[2]) > 100 for row in rows.values()), shown
    assert rows["ours"][3] == "1.0" and "rounds.py" in shown.split("Where ours waits")[1].split("Where")[0]


def test_rounds_at_temperature_one_are_compared_with_those_at_zero():
    sizes = "--layers 5 --hidden-size 32 --vocab-size 64 --max-new-tokens 12 --block-size 4 --turns 2"
    rows = rows_of(run("experiments/benchmark", "temperature", *sizes.split()))
    assert rows["T = 0"][2] == "1.00 (1.00 to 1.00)" and {"T = 1, top_k=0"} < rows.keys()
    assert all(float(row[0]) >= 1 and float(row[1]) > 0 for row in rows.values())
