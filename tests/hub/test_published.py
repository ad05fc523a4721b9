"""Which drafters are published for a target: of the table, and of a small Hub over HTTP."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.hub.formats import FORMATS
from hf_hyperdflash.hub.published import PUBLISHED, as_text, known_drafters

from ..helpers.hub_server import HubServer, Repo
from ..helpers.processes import python
from .test_loading import written

ROOT = Path(__file__).parents[2]
TARGET = "Qwen/Qwen3-8B"


def publish(hub: HubServer, name: str, files: dict[str, bytes], base: str = "") -> None:
    repo = hub.repos.setdefault(name, Repo(name, private=False))
    card = f"---\nbase_model: {base}\n---\n" if base else "A drafter."
    repo.commit("main", "all", {"README.md": card.encode(), **files})


def test_the_table_is_that_of_the_page():
    section = (ROOT / "docs/drafters.md").read_text().partition("## Published drafters")[2].partition("\n- ")[0]
    named = re.findall(r"`([\w.-]+/[\w.-]+)`", section)
    own = {drafter.name for drafter in PUBLISHED if "own" in drafter.kind}
    assert sorted(named) == sorted({drafter.name for drafter in PUBLISHED} - own)
    loaded = re.findall(r'load_drafter\("([\w.-]+/[\w.-]+)"', (ROOT / "README.md").read_text())
    assert loaded and {*loaded} <= {drafter.name for drafter in PUBLISHED}
    for line in section.splitlines():
        kind = line.rpartition("|")[0].rpartition("|")[2].strip()
        for name in re.findall(r"`([\w.-]+/[\w.-]+)`", line):
            assert [drafter.kind for drafter in PUBLISHED if drafter.name == name] == [kind]


@pytest.mark.parametrize(
    "target",
    [TARGET, "/models/qwen3-8b", "elsewhere/Qwen3-8B", "Qwen3-8B.Q4_K_M.gguf", "org/name/qwen3-8b-f16.gguf"],
)
def test_a_target_is_known_by_the_last_part_of_its_name(target):
    names = {drafter.name for drafter in known_drafters(target)}
    assert {"z-lab/Qwen3-8B-DFlash-b16", "weijiezz/SpecBlock-Qwen3-8B"} < names
    assert not any("4B" in name for name in names)


def test_alike_names_are_other_targets():
    assert not known_drafters("Qwen/Qwen3-8B-Base") and not known_drafters("")
    (both,) = {tuple(known_drafters(f"meta-llama/{meta}Llama-3.1-8B-Instruct")) for meta in ("", "Meta-")}
    assert len(both) == 2


@pytest.fixture
def offline(monkeypatch):
    """What the command prints, and what it says beside that, without a network."""

    def ask(*arguments, **environment):
        for name, value in {"HF_HUB_OFFLINE": "", **environment}.items():
            monkeypatch.setenv(name, value)
        done = CliRunner().invoke(app, ["drafters", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout.rstrip(), done.stderr

    return ask


def test_offline_the_table_answers_and_says_so(offline):
    printed, said = offline(TARGET, HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("http://127.0.0.1:9 cannot be reached (") and "from the table of this release alone" in said
    assert printed == as_text(known_drafters(TARGET))
    assert 'drafter = load_drafter("z-lab/Qwen3-8B-DFlash-b16", target=target)' in printed
    printed, said = offline(TARGET, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in said and printed == as_text(known_drafters(TARGET))
    assert offline() == (as_text(PUBLISHED), "")
    printed, _ = offline("org/unheard-of", HF_HUB_OFFLINE="1")
    assert "No drafter is known for org/unheard-of." in printed
    assert "--drafter prompt-lookup" in printed and "hf-hyperdflash train --target org/unheard-of" in printed


# Takes seconds: a command in a process of its own.
def test_the_hub_is_asked_for_more(tmp_path):
    """By the tags of its targets, and by the names of those who publish drafters."""
    with HubServer() as hub:
        of_somebody(hub, tmp_path)
        code = f"import sys; sys.argv = ['hf-hyperdflash', 'drafters', {TARGET!r}]\n"
        code += "from hf_hyperdflash.cli.app import run; run()"
        ran = python("-c", code, env={**hub.environment(tmp_path), "PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert ran.stderr.splitlines()[-1] == "From the table of this release and from the Hub."
    entries = dict(re.findall(r"^  (\S+): (.*\n.*)$", ran.stdout, re.MULTILINE))
    assert len(entries) == len(known_drafters(TARGET)) + 6
    year = next(iter(hub.repos.values())).find("main").date[:4]
    for name in (*(f"somebody/{layout}-dflash" for layout in FORMATS[:2]), "RedHatAI/Qwen3-8B-z-lab-DFlash"):
        about, line = entries[name].split("\n")
        assert "DFlash" in about and " parameters, " in about and f", {year}-" in about, about
        assert line.strip() == f'drafter = load_drafter("{name}", target=target)'
    assert entries["z-lab/Qwen3-8B-DFlash-b16"].startswith("DFlash, z-lab, ")
    gone = entries["weijiezz/SpecBlock-Qwen3-8B"].split("\n")  # it is not there: without size and date
    assert gone[0] == "SpecBlock, its authors" and "not read: " in gone[1]
    assert "not read: " in entries["nvidia/Qwen3-8B-Eagle"]
    assert "EAGLE-1 or EAGLE-2" in entries["nvidia/Qwen3-8B-Eagle"]
    assert "has no configuration that can be loaded" in entries["nvidia/Qwen3-8B-Eagle-of-several"]
    asked = {path for method, path in hub.requests if "/resolve/" in path}
    assert all(path.endswith("config.json") for path in asked)  # no weights


def of_somebody(hub, tmp_path) -> None:
    """What there is on the Hub: drafters of the target, of another, and what is none."""
    for layout in FORMATS[:2]:
        written(layout, tmp_path / layout)
        files = {path.name: path.read_bytes() for path in (tmp_path / layout).iterdir() if path.is_file()}
        publish(hub, f"somebody/{layout}-dflash", files, TARGET)
        publish(hub, f"somebody/{layout}-dflash-of-another", files, "Qwen/Qwen3-4B")
        publish(hub, f"RedHatAI/Qwen3-8B-{layout}-DFlash", files)
    publish(hub, "RedHatAI/Qwen3-8B-FP8", {"config.json": b"{}"}, TARGET)  # no drafter by its name
    publish(hub, "z-lab/Qwen3-8B-DFlash-b16", files)
    fields = {"model_type": "llama", "architectures": ["EagleModel"]}
    publish(hub, "nvidia/Qwen3-8B-Eagle", {"config.json": json.dumps(fields).encode()})
    publish(hub, "nvidia/Qwen3-8B-Eagle-of-several", {"inner/config.json": b"{}"})
