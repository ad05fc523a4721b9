"""What a script says where something is wrong: one line, and nothing has begun."""

import pytest

from .helpers.processes import python
from .helpers.scripts import DRAFTER, EXAMPLES, ROOT


@pytest.mark.parametrize(
    ("script", "arguments", "told"),
    [
        ("examples/draw_trees.py", ["--target", "nowhere"], "The folder nowhere does not exist, and as a Hub id"),
        (
            "examples/draw_trees.py",
            ["--drafter", EXAMPLES / "models" / "smollm2-135m-hyperdflash"],
            "was made for a target with `vocab_size` 49152",
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
