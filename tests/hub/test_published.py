"""Which drafters are published for a target: of the table, and on the Hub."""

import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from huggingface_hub import ModelInfo
from huggingface_hub.errors import HfHubHTTPError
from typer.testing import CliRunner

from hf_hyperdflash.cli.app import app
from hf_hyperdflash.cli.drafters import drafters
from hf_hyperdflash.hub import found
from hf_hyperdflash.hub.formats import FORMATS
from hf_hyperdflash.hub.published import (
    PUBLISHED,
    PublishedDrafter,
    as_text,
    choose,
    hub_drafters,
    known_drafters,
    own_drafter,
)

from ..conftest import tiny_config
from ..contracts.test_drafters import KINDS, TRAINED
from ..helpers import families
from ..helpers.deepseek_checkpoints import mtp_shapes, random_tensors, write
from ..helpers.gemma4_assistants import can_be_built
from ..helpers.released_layouts import LAYOUTS, saved
from .test_loading import written

ROOT = Path(__file__).parents[2]
TARGET = "Qwen/Qwen3-8B"


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


# Each publisher's kind on the page: its layouts in `released_layouts`, which are read and written in the contracts,
# or none if it is read from its target's or a publisher's checkpoint; and its row in the contracts of drafters.
OF_PAGE = {
    "DFlash": (("z-lab", "speculators"), "dflash"), "DFlash 2": (("z-lab dflash2",), "dflash2"),
    "DSpark": (("deepspec", "speculators dspark"), "dspark"), "JetSpec": (("JetSpec",), "jetspec"),
    "Domino": (("domino",), "domino"), "Muse-Glimmer's assistant": (("Muse-Glimmer's",), "muse glimmer"),
    "EAGLE-3": (("safeailab", "speculators eagle3", "deepspec eagle3"), "eagle3"),
    "P-EAGLE": (("Amazon's P-EAGLE", "speculators peagle"), "peagle"), "SpecBlock": (("specblock",), "specblock"),
    "Medusa heads": ((), "medusa"), "DeepSeek-V4's DSpark": ((), "v4 dspark"), "DeepSeek-V4's MTP": ((), "v4 mtp"),
    "MTP heads": ((), "mtp head"), "Gemma 4's assistants": ((), "gemma4 assistant"),
}  # fmt: skip


def test_what_is_done_with_each_kind_is_what_the_contracts_test():
    _, _, section = (ROOT / "docs/drafters.md").read_text().partition("## What is done with each kind")
    section = section.partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line][2:]
    assert [row[0] for row in rows] == [*OF_PAGE]
    for name, read, drafts, trains, exports in rows:
        layouts, contract = OF_PAGE[name]
        written = {each for layout in layouts for each in LAYOUTS[layout].written or ()}
        assert read == drafts == "yes" and (contract in KINDS or not can_be_built())
        assert trains == ("yes" if contract in TRAINED else "no")
        assert exports == (", ".join(sorted(written, key=FORMATS.index)) or "no"), name


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
    assert printed.startswith(as_text(known_drafters(TARGET)))
    assert 'drafter = load_drafter("z-lab/Qwen3-8B-DFlash-b16", target=target)' in printed
    printed, said = offline(TARGET, HF_HUB_OFFLINE="1")
    assert "HF_HUB_OFFLINE" in said and printed.startswith(as_text(known_drafters(TARGET)))
    assert "\n\nTry first: JetSpec/jetspec-qwen3-8b" in printed
    assert offline() == (as_text(PUBLISHED), "")
    printed, _ = offline("org/unheard-of", HF_HUB_OFFLINE="1")
    assert "No drafter is known for org/unheard-of." in printed
    assert "--drafter prompt-lookup" in printed and "hf-hyperdflash train --target org/unheard-of" in printed


PLAIN, OTHER = "Vanilla DFlash", "Qwen/Qwen3-4B"
ON_THE_HUB = {  # what there is: whose drafter it says it is, its number of parameters, and its file
    "somebody/a-dflash": (TARGET, 12_345, "z-lab"), "somebody/b-EAGLE": (TARGET, 1_000_000, "eagle"),
    "somebody/a-dflash-of-another": (OTHER, 1, "z-lab"), "somebody/no-method": (TARGET, 1, "z-lab"),
    "somebody/a-dflash-GGUF": (TARGET, 1, "z-lab"), "RedHatAI/Qwen3-8B-FP8": ("", 1, "z-lab"),
    "RedHatAI/Qwen3-8B-DFlash": ("", 1_500_000_000, "z-lab"), "RedHatAI/Qwen3-4B-DFlash": ("", 1, "z-lab"),
    "z-lab/Qwen3-8B-DFlash-b16": ("", 0, "z-lab"), "z-lab/Qwen3-8B-speculator": ("", 0, "V4"),
}  # fmt: skip
DAY = "2026-10-02"


class Hub:
    """Answers `HfApi`'s questions about these."""

    def list_models(self, author="", search="", filter="", expand=(), limit=0):
        assert {"safetensors", "lastModified", "tags"} <= {*expand} and limit >= len(ON_THE_HUB)
        infos = [self.model_info(name) for name in ON_THE_HUB]
        named = [info for info in infos if info.id.startswith(author) and search.lower() in info.id.lower()]
        return [info for info in named if not filter or filter in info.tags]

    def model_info(self, name, expand=()):
        if name not in ON_THE_HUB:
            raise HfHubHTTPError("404", response=MagicMock())
        base, count, _ = ON_THE_HUB[name]
        weights = {"safetensors": {"parameters": {"F32": count}, "total": count}} if count else {}
        tags = [f"base_model:{base}", f"base_model:finetune:{base}"] if base else []
        tags += ["base_model:quantized:a/b"] if name.endswith("no-method") else []
        return ModelInfo(id=name, tags=tags, lastModified=f"{DAY}T01:02:03.000Z", **weights)


def no_answer(*_, **options):
    raise OSError("502")


def test_the_hub_is_asked_for_more(tmp_path, monkeypatch, capsys):
    """By the tags of its targets, and by the names of those who publish drafters."""
    look = found.check_drafter
    written("z-lab", tmp_path / "z-lab")
    write(tmp_path / "V4", tiny_config(), random_tensors(mtp_shapes(tiny_config())))
    saved(tmp_path / "eagle", {"model_type": "llama", "architectures": ["EagleModel"]}, {"a": torch.zeros(1)})
    monkeypatch.setattr(found, "check_drafter", lambda name: look(tmp_path / (*ON_THE_HUB.get(name, "??"), "none")[2]))
    listed = {drafter.name: drafter for drafter in hub_drafters(TARGET, Hub())}
    others = {
        "somebody/a-dflash": (PLAIN, "12,345 parameters"), "somebody/b-EAGLE": ("", "1.0 M parameters"),
        "RedHatAI/Qwen3-8B-DFlash": (PLAIN, "1.5 B parameters"), "z-lab/Qwen3-8B-speculator": ("MTP", ""),
    }  # fmt: skip
    known = {drafter.name: drafter for drafter in known_drafters(TARGET)}
    assert listed.keys() == known.keys() | others.keys()
    for name, (kind, size) in others.items():
        drafter = listed.pop(name)
        assert drafter == PublishedDrafter(name, TARGET, kind, size, DAY, drafter.why_not_read)
        assert ("EAGLE-1 or EAGLE-2" in drafter.why_not_read) == bool(drafter.why_not_read) == (not kind)
    shown = listed.pop("z-lab/Qwen3-8B-DFlash-b16")
    assert shown == replace(known[shown.name], date=DAY) and not shown.why_not_read
    for name, drafter in listed.items():  # which the Hub does not show
        assert drafter == replace(known[name], why_not_read=drafter.why_not_read) and "gone" in drafter.why_not_read
    monkeypatch.setattr("hf_hyperdflash.cli.drafters.why_unreachable", lambda: "")
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    drafters(TARGET)
    printed, said = capsys.readouterr()
    assert printed.startswith(as_text(hub_drafters(TARGET, Hub()))) and "and from the Hub" in said
    assert f"\n\nTry first: {choose(hub_drafters(TARGET, Hub())).name}, " in printed
    monkeypatch.setattr(Hub, "list_models", no_answer)
    drafters(TARGET)
    assert capsys.readouterr().out.startswith(as_text(known_drafters(TARGET)))
    assert "somebody/a-dflash: Vanilla DFlash, 12,345 parameters, 2026-10-02\n" in printed


def test_what_does_not_fit_is_said_and_not_tried_first(tmp_path, monkeypatch):
    """By both configurations: of a target in a folder, whose name has drafters on the Hub."""
    look = found.check_drafter
    written("z-lab", tmp_path / "z-lab")
    monkeypatch.setattr(found, "check_drafter", lambda name: look(tmp_path / "z-lab"))
    wide = families.made("qwen3", **{**families.DENSE, "hidden_size": 96})
    for target, fits in ((families.qwen3(), True), (wide, False)):
        target.save_pretrained(tmp_path / "Qwen3-8B")
        listed = {drafter.name: drafter for drafter in hub_drafters(str(tmp_path / "Qwen3-8B"), Hub())}
        drafter = listed["RedHatAI/Qwen3-8B-DFlash"]
        assert bool(drafter.why_unfit) != fits and not drafter.why_not_read
        assert fits or ("96" in drafter.why_unfit and "does not fit" in str(drafter))
        first = choose(listed.values())
        assert (first is not None) == fits


def test_a_drafter_in_the_targets_own_checkpoint_is_listed(tmp_path, offline):
    write(tmp_path / "V4", tiny_config(), random_tensors(mtp_shapes(tiny_config())))
    printed, _ = offline(str(tmp_path / "V4"), HF_HUB_OFFLINE="1")
    assert own_drafter(str(tmp_path / "V4")).kind == "MTP, the target's own"
    assert (
        f'load_drafter("{tmp_path / "V4"}", target=target)' in printed and f"Try first: {tmp_path / 'V4'}" in printed
    )
    families.qwen3().save_pretrained(tmp_path / "none")
    assert own_drafter(str(tmp_path / "none")) is None and own_drafter("org/unheard-of") is None


def test_the_fastest_method_that_fits_is_tried_first_and_of_one_method_the_newest():
    given = [
        PublishedDrafter("a/mtp", TARGET, "MTP, the target's own", date="2026-11-02"),
        PublishedDrafter("a/old", TARGET, "DFlash 2, z-lab", date="2026-09-02"),
        PublishedDrafter("a/new", TARGET, "DFlash 2, z-lab", date="2026-10-02"),
        PublishedDrafter("a/unfit", TARGET, "DSpark, DeepSpec", why_unfit="hidden_size"),
        PublishedDrafter("a/unread", TARGET, "DSpark, DeepSpec", why_not_read="quantized"),
    ]
    assert choose(given).name == "a/new" and choose(given[:1]).name == "a/mtp" and choose(given[3:]) is None
