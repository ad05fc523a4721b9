"""huggingface_hub and transformers against the Hub of `hub_server.py`: it answers as their clients expect."""

import os
import time
import urllib.error
import urllib.request

import huggingface_hub.constants
import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    snapshot_download,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ..helpers.hub_server import GITATTRIBUTES, HubServer
from ..helpers.processes import python

TOKENS = {
    "hf_writer": {"name": "alice", "write": True, "orgs": ["org"]},
    "hf_reader": {"name": "org", "write": False},
    "hf_stranger": {"name": "eve", "write": True},
}
WEIGHTS = os.urandom(100_000)
FILES = {"config.json": b"{}", "README.md": b"# Model\n", "model.safetensors": WEIGHTS, "sub/dir/empty.txt": b""}


@pytest.fixture
def hub(monkeypatch):
    for name, value in {"HF_HUB_DISABLE_XET": True, "HF_HUB_OFFLINE": False}.items():
        monkeypatch.setattr(huggingface_hub.constants, name, value)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between the client's retries
    with HubServer(TOKENS) as server:
        yield server


def client(hub, token="hf_writer") -> HfApi:
    return HfApi(endpoint=hub.endpoint, token=token)


def pushed(hub, tmp_path, **options) -> HfApi:
    for path, data in FILES.items():
        (tmp_path / "folder" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "folder" / path).write_bytes(data)
    api = client(hub)
    api.create_repo("org/model", **options)
    api.upload_folder(repo_id="org/model", folder_path=tmp_path / "folder")
    return api


def contents(folder) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def downloaded(hub, tmp_path, **options) -> dict[str, bytes]:
    options = {"cache_dir": tmp_path / "cache", "endpoint": hub.endpoint, "token": "hf_writer", **options}
    folder = type(tmp_path)(snapshot_download("org/model", **options))
    found = contents(folder)
    found.pop(".gitattributes", None)
    return found


def status_of(error) -> int:
    return error.value.response.status_code


def test_a_folder_comes_back_byte_for_byte(hub, tmp_path):
    api = pushed(hub, tmp_path)
    assert downloaded(hub, tmp_path) == FILES
    assert hub.files("org/model") == {**FILES, ".gitattributes": GITATTRIBUTES}
    titles = [commit.title for commit in hub.commits("org/model")]
    assert titles == ["initial commit", "Upload folder using huggingface_hub"]
    assert [method for method, path in hub.requests if path.startswith("/lfs/")] == ["PUT"]
    assert api.file_exists("org/model", "sub/dir/empty.txt") and not api.file_exists("org/model", "no.txt")
    assert not any("xet" in path for _, path in hub.requests)

    info = api.model_info("org/model", files_metadata=True)
    assert info.sha == hub.commits("org/model")[-1].sha and info.private is False
    sizes = {sibling.rfilename: (sibling.size, sibling.lfs is not None) for sibling in info.siblings}
    assert sizes["model.safetensors"] == (len(WEIGHTS), True) and sizes["config.json"] == (2, False)
    assert set(api.list_repo_files("org/model")) == {*FILES, ".gitattributes"}
    top = {entry.path for entry in api.list_repo_tree("org/model")}
    assert top == {"config.json", "README.md", "model.safetensors", "sub", ".gitattributes"}
    assert [entry.path for entry in api.list_repo_tree("org/model", "sub")] == ["sub/dir"]


def test_commits_add_delete_and_skip_what_is_unchanged(hub, tmp_path):
    api = pushed(hub, tmp_path)
    first = hub.commits("org/model")[-1].sha
    assert api.upload_folder(repo_id="org/model", folder_path=tmp_path / "folder").oid == first  # nothing changed
    operations = [CommitOperationAdd("copy.safetensors", WEIGHTS), CommitOperationDelete("sub/")]
    done = api.create_commit("org/model", operations, commit_message="Second", parent_commit=first)
    assert sum(path.startswith("/lfs/") for _, path in hub.requests) == 1  # the content was known
    kept = {**FILES, "copy.safetensors": WEIGHTS, ".gitattributes": GITATTRIBUTES}
    assert hub.files("org/model") == {path: data for path, data in kept.items() if not path.startswith("sub/")}
    assert [commit.commit_id for commit in api.list_repo_commits("org/model")][:2] == [done.oid, first]

    missing = [CommitOperationAdd("new.txt", b"new"), CommitOperationDelete("no.txt")]
    with pytest.raises(EntryNotFoundError):
        api.create_commit("org/model", missing, commit_message="Half")
    with pytest.raises(HfHubHTTPError) as error:
        api.create_commit("org/model", missing[:1], commit_message="Late", parent_commit=first)
    assert status_of(error) == 412
    assert len(hub.commits("org/model")) == 3 and "new.txt" not in hub.files("org/model")


def test_branches_tags_hashes_and_pull_requests(hub, tmp_path):
    api = pushed(hub, tmp_path)
    base = hub.commits("org/model")[-1].sha
    api.create_tag("org/model", tag="v1")
    api.create_branch("org/model", branch="exp/two", revision="v1")
    api.create_branch("org/model", branch="exp/two", exist_ok=True)
    api.upload_file(repo_id="org/model", path_or_fileobj=b"[]", path_in_repo="config.json", revision="exp/two")

    refs = api.list_repo_refs("org/model")
    assert [ref.name for ref in refs.branches] == ["main", "exp/two"]
    assert [(tag.name, tag.target_commit) for tag in refs.tags] == [("v1", base)]
    for revision, expected in {"main": b"{}", "v1": b"{}", base: b"{}", "exp/two": b"[]"}.items():
        assert downloaded(hub, tmp_path, revision=revision)["config.json"] == expected
    assert api.model_info("org/model", revision="v1").sha == base
    assert api.model_info("org/model", revision="exp/two").sha == refs.branches[1].target_commit

    change = {"repo_id": "org/model", "path_or_fileobj": WEIGHTS[:9], "path_in_repo": "model.safetensors"}
    pull = client(hub, "hf_stranger").upload_file(**change, create_pr=True)
    assert pull.pr_revision == "refs/pr/1" and hub.files("org/model")["model.safetensors"] == WEIGHTS
    assert downloaded(hub, tmp_path, revision="refs/pr/1")["model.safetensors"] == WEIGHTS[:9]


def test_what_is_missing_raises_its_own_error(hub, tmp_path):
    api = pushed(hub, tmp_path)
    where = {"endpoint": hub.endpoint, "token": "hf_writer", "cache_dir": tmp_path / "cache"}
    with pytest.raises(RepositoryNotFoundError):
        api.model_info("org/none")
    with pytest.raises(RepositoryNotFoundError):
        hf_hub_download("org/none", "config.json", **where)
    with pytest.raises(RepositoryNotFoundError):
        api.upload_file(repo_id="org/none", path_or_fileobj=b"", path_in_repo="a.txt")
    for revision in ("none", "0" * 40):
        with pytest.raises(RevisionNotFoundError):
            hf_hub_download("org/model", "config.json", revision=revision, **where)
        with pytest.raises(RevisionNotFoundError):
            snapshot_download("org/model", revision=revision, **where)
    with pytest.raises(EntryNotFoundError):
        hf_hub_download("org/model", "none.json", **where)
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree("org/model", "none"))
    assert not api.repo_exists("org/none") and not api.revision_exists("org/model", "none")


def test_creating_and_deleting(hub):
    api = client(hub)
    assert api.create_repo("org/model").repo_id == "org/model"
    assert api.create_repo("mine").repo_id == "alice/mine"
    assert api.create_repo("org/model", exist_ok=True).repo_id == "org/model"
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo("org/model")
    assert status_of(error) == 409
    with pytest.raises(HfHubHTTPError) as error:
        api.create_repo("else/model")
    assert status_of(error) == 403
    api.delete_repo("org/model")
    api.delete_repo("org/model", missing_ok=True)
    assert not api.repo_exists("org/model")


def test_private_is_for_members(hub, tmp_path):
    api = pushed(hub, tmp_path, private=True)
    assert api.model_info("org/model").private is True
    assert downloaded(hub, tmp_path, token="hf_reader") == FILES
    for token, status in {False: 401, "hf_stranger": 404}.items():
        with pytest.raises(RepositoryNotFoundError) as error:
            client(hub, token).model_info("org/model")
        assert status_of(error) == status
        with pytest.raises(RepositoryNotFoundError):
            downloaded(hub, tmp_path, token=token, cache_dir=tmp_path / "other")
    api.update_repo_settings("org/model", private=False)
    assert downloaded(hub, tmp_path, token=False, cache_dir=tmp_path / "other") == FILES


def test_tokens(hub, tmp_path):
    pushed(hub, tmp_path)
    who = client(hub).whoami()
    assert (who["name"], [org["name"] for org in who["orgs"]]) == ("alice", ["org"])
    assert client(hub, "hf_reader").whoami()["auth"]["accessToken"]["role"] == "read"
    change = {"repo_id": "org/model", "path_or_fileobj": WEIGHTS[:5], "path_in_repo": "model.safetensors"}
    for token, status in {"hf_wrong": 401, "hf_reader": 403, "hf_stranger": 403, False: 401}.items():
        with pytest.raises(HfHubHTTPError) as error:
            client(hub, token).upload_file(**change)
        assert status_of(error) == status
    for call in ("whoami", "model_info"):  # a wrong token fails on a public repository too
        with pytest.raises(HfHubHTTPError) as error:
            getattr(client(hub, "hf_wrong"), call)(*(["org/model"] if call == "model_info" else []))
        assert status_of(error) == 401 and not isinstance(error.value, RepositoryNotFoundError)
    with pytest.raises(HfHubHTTPError) as error:
        client(hub, "hf_reader").create_repo("org/other")
    assert status_of(error) == 403
    assert len(hub.commits("org/model")) == 2


def test_a_dropped_upload_leaves_no_commit(hub, tmp_path):
    hub.fail_uploads_after = 30_000
    with pytest.raises(Exception, match=r"model\.safetensors"):
        pushed(hub, tmp_path)
    assert len(hub.commits("org/model")) == 1 and not hub.objects
    hub.drops_left = 1  # the client's next try gets through
    client(hub).upload_folder(repo_id="org/model", folder_path=tmp_path / "folder")
    assert downloaded(hub, tmp_path) == FILES


def test_a_cut_download_is_resumed(hub, tmp_path, monkeypatch):
    pushed(hub, tmp_path)
    hub.drop_downloads_after = 40_000
    with pytest.raises(Exception, match="peer closed connection"):
        downloaded(hub, tmp_path)
    assert not any(path.endswith("model.safetensors") for path in contents(tmp_path / "cache"))
    hub.requests.clear()
    monkeypatch.setattr(huggingface_hub.constants, "DOWNLOAD_CHUNK_SIZE", 10_000)  # what is kept of a cut answer
    assert downloaded(hub, tmp_path) == FILES
    gets = [path for method, path in hub.requests if method == "GET" and path.endswith("/model.safetensors")]
    assert len(gets) == 3


def test_a_truncated_file_is_served_as_if_it_were_whole(hub, tmp_path):
    pushed(hub, tmp_path)
    hub.truncate = {"model.safetensors": 1234}
    assert downloaded(hub, tmp_path)["model.safetensors"] == WEIGHTS[:1234]
    assert hub.files("org/model")["model.safetensors"] == WEIGHTS[:1234]


def test_only_uploads_need_xet_switched_off(hub, tmp_path, monkeypatch):
    api = pushed(hub, tmp_path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", False)
    assert downloaded(hub, tmp_path) == FILES
    with (tmp_path / "folder/model.safetensors").open("rb") as file:  # an open file is uploaded without Xet too
        api.upload_file(repo_id="org/model", path_or_fileobj=file, path_in_repo="model-2.safetensors")
    assert hub.files("org/model")["model-2.safetensors"] == WEIGHTS


def test_ranges_and_headers(hub, tmp_path):
    api = pushed(hub, tmp_path)
    url = hf_hub_url("org/model", "model.safetensors", endpoint=hub.endpoint)
    metadata = get_hf_file_metadata(url, token=False)
    assert (metadata.size, metadata.commit_hash) == (len(WEIGHTS), api.model_info("org/model").sha)
    assert metadata.xet_file_data is None
    for asked, expected in {"5-9": WEIGHTS[5:10], "99990-": WEIGHTS[-10:], "-7": WEIGHTS[-7:]}.items():
        request = urllib.request.Request(url, headers={"Range": f"bytes={asked}"})
        with urllib.request.urlopen(request) as answer:
            assert (answer.status, answer.read()) == (206, expected)
    with pytest.raises(urllib.error.HTTPError, match="416"):
        urllib.request.urlopen(urllib.request.Request(url, headers={"Range": "bytes=100000-"}))


# Takes seconds: a process imports transformers.
def test_transformers_in_a_subprocess(hub, tmp_path):
    code = """
from transformers import AutoConfig, BertConfig
BertConfig(hidden_size=24).push_to_hub("org/bert", private=True, revision="exp")
print(AutoConfig.from_pretrained("org/bert", revision="exp").hidden_size)
"""
    result = python("-c", code, env=hub.environment(tmp_path, "hf_writer"))
    assert result.stdout.strip() == "24", result.stderr
    assert hub.repos["org/bert"].private and set(hub.files("org/bert", "exp")) >= {"config.json", "README.md"}
