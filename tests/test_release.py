"""What goes with a release beside the wheel: the citation, the workflow, the issue forms, the changelog."""

import os
import re
from pathlib import Path

import yaml

import hf_hyperdflash

ROOT = Path(__file__).parent.parent
VERSION = re.match(r"\d+\.\d+\.\d+", hf_hyperdflash.__version__)[0]


def test_the_citation_names_this_version_and_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == VERSION and citation["license"] == "Apache-2.0"
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["references"][0]["title"] in (ROOT / "README.md").read_text()


def test_the_changelog_begins_with_this_version():
    first = re.search(r"^## (\S+)(.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert first[1] == VERSION and ("dev" in hf_hyperdflash.__version__) == ("unreleased" in first[2])


def test_the_workflows_run_what_ci_is():
    workflows = [
        yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text()) for name in ("ci.yml", "nightly.yml")
    ]
    jobs = [job for workflow in workflows for job in workflow["jobs"].values()]
    commands = " ".join(step["run"] for job in jobs for step in job["steps"] if "run" in step)
    parts = workflows[1]["jobs"]["part"]["strategy"]["matrix"]["part"]
    assert all(script in commands for script in (".ci/run", ".ci/space", ".ci/nightly"))
    nightly = (ROOT / ".ci" / "nightly").read_text()
    for part in parts:  # a part of its own, or another script
        assert f"\n{part}() {{" in nightly or os.access(ROOT / ".ci" / part, os.X_OK), part
    for script in ("run", "nightly", "wheel", "lowest", "space"):
        assert os.access(ROOT / ".ci" / script, os.X_OK), script
    run = (ROOT / ".ci" / "run").read_text()
    for step in (
        ".ci/wheel",
        "mkdocs build",
        "ruff check",
        "ruff format --check",
        "mypy",
        "pytest",
        ".ci/lowest_tests",
    ):
        assert step in run, step
    for listed in ("once", "lowest_tests"):
        paths = [line for line in (ROOT / ".ci" / listed).read_text().splitlines() if not line.startswith("#")]
        assert paths and all((ROOT / path).exists() for path in paths), listed


def test_the_forms_ask_for_what_tells_most():
    forms = {
        path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")
    }
    asked = " ".join(part["attributes"].get("label", "") for part in forms["bug"]["body"])
    assert "hf-hyperdflash doctor --target TARGET --drafter DRAFTER" in asked and "transformers env" in asked
    for name in ("bug", "feature"):
        assert {"name", "description", "body"} <= forms[name].keys()
        ids = [part["id"] for part in forms[name]["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 2


def test_the_space_needs_what_the_package_needs():
    """Its folder lies beside the app: nothing else installs what it imports."""
    lines = (ROOT / "examples" / "space" / "requirements.txt").read_text().splitlines()
    needed = {line for line in lines if not line.startswith("#")}
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.findall(r'^  "(.*)",$', re.search(r"^dependencies = \[\n(.*?)^\]", project, re.M | re.S)[1], re.M)
    assert (
        len(declared) > 5
        and needed >= set(declared)
        and needed - set(declared) == {line for line in lines if line.startswith("gradio")}
    )
