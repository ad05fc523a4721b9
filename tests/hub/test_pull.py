"""Targets and drafters of private repositories, revisions and folders of them: from `hub_server.py`, over HTTP."""

import json
from pathlib import Path

import pytest

from ..conftest import mostly_nightly
from ..helpers.hub_server import HubServer, Repo
from ..helpers.processes import python
from .test_loading import KINDS, UNROLLED, written

TOKENS = {"hf_reader": {"name": "org", "write": False}}
SETUP = """
import json, sys
from hf_hyperdflash import load_drafter, load_target
told = {}
def failure(call, *args, **options):
    try:
        call(*args, **options)
    except (OSError, ValueError) as error:
        return type(error).__name__ + ": " + str(error)
"""


@pytest.fixture
def hub():
    with HubServer(TOKENS) as server:
        yield server


def of_folder(folder: Path, inside: str = "") -> dict[str, bytes]:
    return {f"{inside}{path.name}": path.read_bytes() for path in folder.iterdir() if path.is_file()}


def private(hub, files: dict[str, bytes], ref: str = "refs/heads/main") -> None:
    repo = hub.repos.setdefault("org/name", Repo("org/name", private=True))
    first = repo.commit("refs/heads/main", None, "nothing", {"README.md": b"Nothing here."})
    repo.commit(ref, first.sha, "all", files)


def run(hub, home: Path, code: str) -> dict:
    environment = {**hub.environment(home), "PYTHONPATH": str(Path(__file__).parents[2])}
    result = python("-c", SETUP + code + "\nprint('\\n' + json.dumps(told))", env=environment, cwd=home)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def downloaded(hub) -> set[str]:
    """Files of which the content was asked for, not only their names."""
    paths = [path.split("/resolve/")[-1] for method, path in hub.requests if method == "GET" and "/resolve/" in path]
    return {path.partition("/")[2] for path in paths}


def test_a_target_is_read_where_it_is_said_to_be(hub, tmp_path):
    """All of it: whether it is a target, its configuration and its weights."""
    target, _ = written("z-lab", tmp_path / "drafter")
    target.save_pretrained(tmp_path / "target")
    private(hub, of_folder(tmp_path / "target", "inner/"), "refs/heads/v2")
    told = run(hub, tmp_path, """
place = dict(token="hf_reader", revision="v2", subfolder="inner", cache_dir="elsewhere")
for option in ("token", "revision", "subfolder"):
    told[option] = failure(load_target, "org/name", **{k: v for k, v in place.items() if k != option})
loaded = load_target("org/name", **place)
told["loaded"] = [type(loaded).__name__, sum(p.double().sum().item() for p in loaded.parameters())]
told["again"] = type(load_target("org/name", **place | {"local_files_only": True})).__name__
told["cache_dir"] = failure(load_target, "org/name", **place | {"cache_dir": "nowhere", "local_files_only": True})
""")  # fmt: skip
    total = sum(parameter.double().sum().item() for parameter in target.parameters())
    assert told["loaded"] == ["Qwen3ForCausalLM", pytest.approx(total)] and told["again"] == "Qwen3ForCausalLM"
    assert not list((tmp_path / "hub").glob("models--*/snapshots"))  # the cache that was not named
    for option in ("token", "revision", "subfolder", "cache_dir"):
        assert told[option].startswith("OSError: The folder org/name does not exist, and as a Hub id")
        assert "\n" not in told[option]
    assert "from here (`revision` 'v2', `subfolder` 'inner'): no target" in told["token"]


@pytest.mark.parametrize("kind", mostly_nightly([*KINDS, *UNROLLED], kept=2))
def test_of_a_repository_of_drafters_the_one_that_is_asked_for_is_downloaded(hub, tmp_path, kind):
    saved, files = {}, {}
    for folder, one in (("", "z-lab"), ("full/", kind), ("full/old/", kind), ("other/", "speculators")):
        _, saved[folder] = written(one, tmp_path / "saved" / folder)
        files |= of_folder(tmp_path / "saved" / folder, folder)
    private(hub, files)
    expected = saved["full/"]
    told = run(hub, tmp_path, """
loaded = load_drafter("org/name", subfolder="full", token="hf_reader", dtype="float32")
told["loaded"] = [type(loaded).__name__, sum(p.double().sum().item() for p in loaded.parameters())]
told["wrong"] = failure(load_drafter, "org/name", subfolder="fall", token="hf_reader")
""")  # fmt: skip
    total = sum(parameter.double().sum().item() for parameter in expected.parameters())
    assert told["loaded"] == [type(expected).__name__, pytest.approx(total)]
    assert {path for path in downloaded(hub) if path.endswith((".safetensors", ".bin"))} == {"full/model.safetensors"}
    assert "`subfolder` 'fall'" in told["wrong"] and "\n" not in told["wrong"]


def test_of_a_repository_with_folders_the_drafter_outside_them_is_downloaded_alone(hub, tmp_path):
    written("z-lab", tmp_path / "saved")
    written("z-lab", tmp_path / "saved" / "full")
    private(hub, of_folder(tmp_path / "saved") | of_folder(tmp_path / "saved" / "full", "full/"))
    run(hub, tmp_path, "load_drafter('org/name', token='hf_reader')")
    assert {path for path in downloaded(hub) if path.endswith(".safetensors")} == {"model.safetensors"}
