"""A target is fine-tuned, and its drafter learns while it serves."""

import json

from ..helpers.scripts import DRAFTER, EXAMPLES, run


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
    # Nothing is known at first, so the bandit tries its cheapest arm; whether it pays is a matter of time.
    assert updates["never"] == 0 and updates["always"] == 2 and updates["bandit"] in (1, 2)
    assert [line["arm"] for line in found["always"]] == [*[None] * 7, "all"] * 2
    assert [line["arm"] for line in found["bandit"][:8]] == [*[None] * 7, "heads"]
    assert "| served from request | promised by it |" in printed
    assert [line["part"] for line in found["never"]] == ["mbpp"] * 2 + ["gsm8k"] * 6 + ["tuned:gsm8k"] * 8
    assert (output / "stream.png").stat().st_size > 5000
