"""Errors of the augmented space linear model are those of an independent one."""

import json
import runpy

import pytest

from ..helpers.oracle_aslm import Oracle
from ..helpers.scripts import ROOT, run


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
