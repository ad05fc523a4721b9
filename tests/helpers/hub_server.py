"""A small Hugging Face Hub on loopback, for models: real HTTP, private repositories, commits, and LFS. A token may
read and write everything.

It does not speak Xet, so the client must have that switched off: `HubServer.environment` does so for a subprocess.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".onnx", ".parquet", ".zip")
LFS_SIZE = 10_000_000
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class HubError(Exception):
    """An answer of the Hub that the client turns into an exception by its `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        names = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = Reply(json.dumps({"error": message}).encode(), status, names | headers)


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    sha: str
    title: str
    files: dict[str, bytes]


@dataclass
class Repo:
    """The commits of each branch, oldest first."""

    id: str
    private: bool
    branches: dict[str, list[Commit]] = field(default_factory=dict)

    def commit(self, branch: str, title: str, files: dict[str, bytes]) -> Commit:
        made = sum(map(len, self.branches.values()))
        sha = hashlib.sha1(f"{self.id} {branch} {made}".encode()).hexdigest()
        self.branches.setdefault(branch, []).append(Commit(sha, title, files))
        return self.branches[branch][-1]

    def find(self, revision: str) -> Commit:
        if revision in self.branches:
            return self.branches[revision][-1]
        for commit in (commit for commits in self.branches.values() for commit in commits):
            if commit.sha == revision:
                return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(path: str, size: int) -> bool:
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > LFS_SIZE)  # the client sends empty files as regular


def etag(path: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if is_lfs(path, len(data)) else git_oid(data)


def file_info(path: str, data: bytes) -> dict[str, Any]:
    info = {"type": "file", "path": path, "size": len(data), "oid": git_oid(data)}
    if is_lfs(path, len(data)):
        sha256 = etag(path, data)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(data)}\n".encode()
        lfs = {"oid": sha256, "sha256": sha256, "size": len(data), "pointerSize": len(pointer)}
        info |= {"oid": git_oid(pointer), "lfs": lfs}
    return info


class HubServer:
    """A new repository starts with a commit of `.gitattributes`, as on the real Hub."""

    def __init__(self, tokens: Collection[str] = ()):
        self.tokens = tokens
        self.requests: list[tuple[str, str]] = []  # method and path, without the query
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # LFS content by SHA-256
        self.lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self, home: str | Path, token: str | None = None) -> dict[str, str]:
        """What a subprocess needs to talk to this server alone, with an empty cache under `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        kept |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        kept |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        return kept | ({"HF_TOKEN": token} if token else {})

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return self.repos[repo_id].find(revision).files


ROUTES: list[tuple[str, re.Pattern[str], Callable[..., Any]]] = []


def route(method: str, path: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    pattern = path.replace("{repo}", r"(?P<repo>[^/]+/[^/]+)").replace("{path}", "(?P<path>.+)")
    pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        ROUTES.append((method, re.compile(pattern), function))
        return function

    return register


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    hub: HubServer
    is_known: bool  # whether the request has a token
    body: bytes

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _handle(self) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append((self.command, url.path))
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            with self.hub.lock:
                result = self._dispatch("GET" if self.command == "HEAD" else self.command, url.path)
        except HubError as error:
            result = error.reply
        self._send(result if isinstance(result, Reply) else Reply(json.dumps(result).encode()))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *_: object) -> None:
        pass

    def _dispatch(self, method: str, path: str) -> Any:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        self.is_known = token in self.hub.tokens
        for allowed, pattern, function in ROUTES:
            if method == allowed and (match := pattern.fullmatch(path)):
                return function(self, **{name: unquote(value) for name, value in match.groupdict().items()})
        raise HubError(404, "Not found")

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def _repo(self, repo_id: str) -> Repo:
        found = self.hub.repos.get(repo_id)
        if found is None or (found.private and not self.is_known):
            status, message = (
                (404, "Repository not found") if self.is_known else (401, "Invalid username or password.")
            )
            raise HubError(status, message, "RepoNotFound")
        return found

    # --- repositories

    @route("POST", "/api/repos/create")
    def create_repo(self) -> Any:
        fields = json.loads(self.body)
        if not self.is_known:
            raise HubError(401, "Invalid username or password.")
        repo_id = f"{fields['organization']}/{fields['name']}"
        url = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            message = f"You already created this model repo: {repo_id}"
            return Reply(json.dumps({"error": message, **url}).encode(), 409, {"X-Error-Message": message})
        repo = Repo(repo_id, fields.get("visibility") == "private" or bool(fields.get("private")))
        repo.commit("main", "initial commit", {".gitattributes": GITATTRIBUTES})
        self.hub.repos[repo_id] = repo
        return url

    @route("GET", "/api/models/{repo}")
    @route("GET", "/api/models/{repo}/revision/{rev}")
    def model_info(self, repo: str, rev: str = "main") -> Any:
        found = self._repo(repo)
        commit = found.find(rev)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        return {"id": repo, "private": found.private, "sha": commit.sha, "siblings": siblings}

    @route("GET", "/api/models/{repo}/tree/{rev}")
    def tree(self, repo: str, rev: str) -> Any:
        return [file_info(path, data) for path, data in sorted(self._repo(repo).find(rev).files.items())]

    @route("POST", "/api/models/{repo}/branch/{name}")
    def create_branch(self, repo: str, name: str) -> Any:
        branches = self._repo(repo).branches
        if name in branches:
            raise HubError(409, f"Reference already exists: {name}")
        branches[name] = list(branches["main"])
        return {}

    # --- upload

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Any:
        return {"errors": [], "warnings": []}

    @route("POST", "/api/models/{repo}/preupload/{rev}")
    def preupload(self, repo: str, rev: str) -> Any:
        commit, modes = self._repo(repo).find(rev), []
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if is_lfs(path, asked["size"]) else "regular"
            known = etag(path, commit.files[path]) if path in commit.files else None
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known})
        return {"files": modes, "commitOid": commit.sha}

    @route("POST", "/{repo}.git/info/lfs/objects/batch")
    def lfs_batch(self, repo: str) -> Any:
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in json.loads(self.body)["objects"]]
        for missing in [each for each in objects if each["oid"] not in self.hub.objects]:
            missing["actions"] = {"upload": {"href": f"{self.hub.endpoint}/lfs/{missing['oid']}"}}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/lfs/{oid}")
    def lfs_upload(self, oid: str) -> Any:  # without a token: the real Hub signs the address instead
        self.hub.objects[oid] = self.body
        return {}

    @route("POST", "/api/models/{repo}/commit/{rev}")
    def commit(self, repo: str, rev: str) -> Any:
        found = self._repo(repo)
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        files = dict(found.find(rev).files)
        for kind, value in ((operation["key"], operation["value"]) for operation in operations):
            is_inline = kind == "file"
            files[value["path"]] = base64.b64decode(value["content"]) if is_inline else self.hub.objects[value["oid"]]
        done = found.commit(rev, header["value"]["summary"], files)
        url = f"{self.hub.endpoint}/{repo}/commit/{done.sha}"
        return {"commitUrl": url, "commitOid": done.sha, "pullRequestUrl": None}

    # --- download

    @route("GET", "/{repo}/resolve/{rev}/{path}")
    def resolve(self, repo: str, rev: str, path: str) -> Any:
        commit = self._repo(repo).find(rev)
        data, sha = commit.files.get(path), {"X-Repo-Commit": commit.sha}
        if data is None:
            raise HubError(404, "Entry not found", "EntryNotFound", **sha)
        tag = f'"{etag(path, data)}"'
        headers = {"Content-Type": "application/octet-stream", **sha, "ETag": tag}
        if is_lfs(path, len(data)):
            headers |= {"X-Linked-ETag": tag, "X-Linked-Size": str(len(data))}
        return Reply(data, 200, headers)
