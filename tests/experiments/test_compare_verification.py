"""Two rules of verification judge the same drafts."""

import json

from ..helpers.scripts import EXAMPLES, run


def test_two_rules_of_verification_judge_the_same_drafts(tmp_path):
    (tmp_path / "sums.jsonl").write_text("".join(f'{{"turns": ["What is {i} plus {i * i}?"]}}\n' for i in (3, 14)))
    name = EXAMPLES / "models" / "tiny-deepseek-v4"
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
