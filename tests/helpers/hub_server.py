"""A small Hugging Face Hub on loopback, for models: real HTTP, accounts, git-like history, LFS, and faults on demand.

It does not speak Xet, so the client must have that switched off: `HubServer.environment` does so for a subprocess.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf", ".onnx", ".parquet", ".zip")
LFS_SIZE = 10_000_000
GITATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES).encode()


class HubError(Exception):
    """An answer of the Hub that the client turns into an exception by its `X-Error-Code`."""

    def __init__(self, status: int, message: str, code: str | None = None, **headers: str):
        super().__init__(message)
        names = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = Reply(json.dumps({"error": message}).encode(), status, names | headers)


class ConnectionCut(ConnectionError):
    """The connection ends here, without an answer."""


@dataclass
class Reply:
    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Commit:
    sha: str
    parent: str | None
    title: str
    files: dict[str, bytes]
    date: str


@dataclass
class Repo:
    """Commits by hash, and full reference names ("refs/heads/main") pointing at them."""

    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)

    def commit(self, ref: str, parent: str | None, title: str, files: dict[str, bytes]) -> Commit:
        state = [self.id, parent, title, len(self.commits), {path: git_oid(files[path]) for path in sorted(files)}]
        sha = hashlib.sha1(json.dumps(state).encode()).hexdigest()
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self.commits[sha] = commit = Commit(sha, parent, title, files, date)
        self.refs[ref] = sha
        return commit

    def find(self, revision: str) -> Commit:
        for ref in (f"refs/heads/{revision}", revision):
            if ref in self.refs:
                return self.commits[self.refs[ref]]
        if revision not in self.commits:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return self.commits[revision]

    def history(self, revision: str) -> list[Commit]:
        commits = [self.find(revision)]
        while commits[-1].parent is not None:
            commits.append(self.commits[commits[-1].parent])
        return commits


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


def folder_info(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "size": 0, "oid": hashlib.sha1(path.encode()).hexdigest()}


def parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]


def described(files: Mapping[str, bytes]) -> dict[str, Any]:
    """The tags that a card's `base_model` lines give, and how many parameters the weights have."""
    card = files.get("README.md", b"").decode(errors="replace")
    bases = re.findall(r"^base_model: (\S+)$", card, re.MULTILINE)
    tags = [tag for base in bases for tag in (f"base_model:{base}", f"base_model:finetune:{base}")]
    count = 0
    for path, data in files.items():
        if path.endswith(".safetensors"):
            with contextlib.suppress(ValueError):  # some tests store other bytes under such a name
                header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
                shapes = [entry["shape"] for name, entry in header.items() if name != "__metadata__"]
                count += sum(math.prod(shape) for shape in shapes)
    return {"tags": tags, "safetensors": {"parameters": {"F32": count}, "total": count} if count else None}


def is_private(settings: Mapping[str, Any]) -> bool:
    return settings.get("visibility") == "private" or bool(settings.get("private"))


class HubServer:
    """`tokens`: token → `{"name": account, "write": bool, "orgs": [further namespaces]}`, the last two optional.

    A new repository starts with a commit of `.gitattributes`, as on the real Hub.
    """

    def __init__(self, tokens: Mapping[str, Mapping[str, Any]] | None = None):
        self.tokens = dict(tokens or {})
        self.requests: list[tuple[str, str]] = []  # method and path, without the query
        self.truncate: dict[str, int] = {}  # path in a repository → the length it is stored with
        self.fail_uploads_after: int | None = None  # bytes of an LFS upload read before the connection is cut
        self.repos: dict[str, Repo] = {}
        self.objects: dict[str, bytes] = {}  # LFS content by SHA-256
        self.lock = threading.RLock()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def environment(self, home: str | Path, token: str | None = None) -> dict[str, str]:
        """What a subprocess needs to talk to this server alone, with an empty cache under `home`."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        kept |= {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
        kept |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"}
        return kept | ({"HF_TOKEN": token} if token else {})

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        return self.stored(self.repos[repo_id].find(revision))

    def commits(self, repo_id: str, revision: str = "main") -> list[Commit]:
        """Oldest first."""
        return self.repos[repo_id].history(revision)[::-1]

    def stored(self, commit: Commit) -> dict[str, bytes]:
        return {path: data[: self.truncate.get(path)] for path, data in commit.files.items()}


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
    account: Mapping[str, Any] | None
    query: dict[str, list[str]]
    body: bytes

    def handle(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().handle()

    def _handle(self) -> None:
        url = urlsplit(self.path)
        self.hub.requests.append((self.command, url.path))
        self.query, self.body = parse_qs(url.query), self._read_body()
        try:
            with self.hub.lock:
                result = self._dispatch("GET" if self.command == "HEAD" else self.command, url.path)
        except HubError as error:
            result = error.reply
        self._send(result if isinstance(result, Reply) else Reply(json.dumps(result).encode()))

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def log_message(self, *_: object) -> None:
        pass

    def _read_body(self) -> bytes:
        length = int(self.headers.get("Content-Length", 0))
        limit = self.hub.fail_uploads_after if self.path.startswith("/lfs/") else None
        fails = limit is not None and limit < length
        body = self.rfile.read(limit if fails else length)
        if len(body) < length:
            raise ConnectionCut
        return body

    def _dispatch(self, method: str, path: str) -> Any:
        self.account = self._account()
        for allowed, pattern, function in ROUTES:
            if method == allowed and (match := pattern.fullmatch(path)):
                return function(self, **{name: unquote(value) for name, value in match.groupdict().items()})
        bare_name = re.fullmatch("/api/models/[^/]+(/(revision|tree)/.*)?|/[^/]+/resolve/.*", path)
        raise HubError(404, "Not found", "RepoNotFound" if bare_name else None)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    # --- who may do what

    def _account(self) -> Mapping[str, Any] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            raise HubError(401, "Invalid credentials in Authorization header")
        return self.hub.tokens.get(token)

    def _is_member(self, namespace: str) -> bool:
        return self.account is not None and namespace in (self.account["name"], *self.account.get("orgs", ()))

    def _writer(self) -> Mapping[str, Any]:
        if self.account is None:
            raise HubError(401, "Invalid username or password.")
        if not self.account.get("write"):
            raise HubError(403, "Forbidden: you must use a write token to upload to a repository.")
        return self.account

    def _repo(self, repo_id: str) -> Repo:
        found = self.hub.repos.get(repo_id)
        if found is None or (found.private and not self._is_member(repo_id.split("/")[0])):
            anonymous = self.account is None
            message = "Invalid username or password." if anonymous else "Repository not found"
            raise HubError(401 if anonymous else 404, message, "RepoNotFound")
        return found

    def _writable(self, repo_id: str) -> Repo:
        found = self._repo(repo_id)
        self._writer()
        if not self._is_member(repo_id.split("/")[0]):
            raise HubError(403, "Forbidden")
        return found

    # --- accounts and repositories

    def _named(self) -> str:
        fields, account = json.loads(self.body), self._writer()
        return f"{fields.get('organization') or account['name']}/{fields['name']}"

    @route("POST", "/api/repos/create")
    def create_repo(self) -> Any:
        repo_id, fields = self._named(), json.loads(self.body)
        if not self._is_member(repo_id.split("/")[0]):
            raise HubError(403, f"You don't have the rights to create a model under this namespace: {repo_id}")
        url = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id}
        if repo_id in self.hub.repos:
            message = f"You already created this model repo: {repo_id}"
            return Reply(json.dumps({"error": message, **url}).encode(), 409, {"X-Error-Message": message})
        repo = Repo(repo_id, is_private(fields))
        repo.commit("refs/heads/main", None, "initial commit", {".gitattributes": GITATTRIBUTES})
        self.hub.repos[repo_id] = repo
        return url

    @route("GET", "/api/models/{repo}")
    @route("GET", "/api/models/{repo}/revision/{rev}")
    def model_info(self, repo: str, rev: str = "main") -> Any:
        found = self._repo(repo)
        commit, siblings = found.find(rev), []
        for path, data in sorted(self.hub.stored(commit).items()):
            info = file_info(path, data)
            blob = {"size": info["size"], "blobId": info["oid"]} | ({"lfs": info["lfs"]} if "lfs" in info else {})
            siblings.append({"rfilename": path} | (blob if "blobs" in self.query else {}))
        about = {"id": repo, "modelId": repo, "author": repo.split("/")[0], "private": found.private, "gated": False}
        return about | {"sha": commit.sha, **described(self.hub.stored(commit)), "lastModified": commit.date,
                        "siblings": siblings}  # fmt: skip

    @route("GET", "/api/models")
    def list_models(self) -> Any:
        """By author, by part of the name and by tags, as the real Hub; of `expand` all, and one page."""
        author, search = (self.query.get(name, [""])[0] for name in ("author", "search"))
        listed = []
        for repo in self.hub.repos.values():
            about = self.model_info(repo.id)
            is_asked = about["author"] == author or not author
            if (
                is_asked
                and search.lower() in repo.id.lower()
                and set(self.query.get("filter", [])) <= {*about["tags"]}
            ):
                listed.append(about)
        return listed[: int(self.query.get("limit", ["1000"])[0])]

    @route("GET", "/api/models/{repo}/tree/{rev}")
    @route("GET", "/api/models/{repo}/tree/{rev}/{path}")
    def tree(self, repo: str, rev: str, path: str = "") -> Any:
        prefix = f"{path.rstrip('/')}/" if path else ""
        inside = {p: data for p, data in self.hub.stored(self._repo(repo).find(rev)).items() if p.startswith(prefix)}
        if prefix and not inside:
            raise HubError(404, f"{path} does not exist on {rev}", "EntryNotFound")
        folders = {folder for p in inside for folder in parents(p) if folder.startswith(prefix)}
        entries = [folder_info(p) for p in sorted(folders)] + [file_info(p, inside[p]) for p in sorted(inside)]
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        return [entry for entry in entries if recursive or "/" not in entry["path"][len(prefix) :]]

    # --- history

    def _create_ref(self, repo: str, ref: str, start: str) -> Any:
        found = self._writable(repo)
        target = found.find(start).sha
        if ref in found.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        found.refs[ref] = target
        return {}

    @route("POST", "/api/models/{repo}/branch/{name}")
    def create_branch(self, repo: str, name: str) -> Any:
        return self._create_ref(repo, f"refs/heads/{name}", json.loads(self.body).get("startingPoint", "main"))

    # --- upload

    @route("POST", "/api/validate-yaml")
    def validate_yaml(self) -> Any:
        return {"errors": [], "warnings": []}

    @route("POST", "/api/models/{repo}/preupload/{rev}")
    def preupload(self, repo: str, rev: str) -> Any:
        commit, modes = self._writable(repo).find(rev), []
        files = self.hub.stored(commit)
        for asked in json.loads(self.body)["files"]:
            path = asked["path"]
            mode = "lfs" if is_lfs(path, asked["size"]) else "regular"
            known = etag(path, files[path]) if path in files else None
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": known})
        return {"files": modes, "commitOid": commit.sha}

    @route("POST", "/{repo}.git/info/lfs/objects/batch")
    def lfs_batch(self, repo: str) -> Any:
        request, endpoint = json.loads(self.body), self.hub.endpoint
        self._writable(repo)
        objects = [{"oid": wanted["oid"], "size": wanted["size"]} for wanted in request["objects"]]
        for missing in [o for o in objects if o["oid"] not in self.hub.objects]:
            verify = {"href": f"{endpoint}/{repo}.git/info/lfs/objects/verify"}
            missing["actions"] = {"upload": {"href": f"{endpoint}/lfs/{missing['oid']}"}, "verify": verify}
        return {"transfer": "basic", "objects": objects}

    @route("PUT", "/lfs/{oid}")
    def lfs_upload(self, oid: str) -> Any:
        # No token: the real Hub signs the address instead.
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "The content does not match its SHA-256")
        self.hub.objects[oid] = self.body
        return {}

    @route("POST", "/{repo}.git/info/lfs/objects/verify")
    def lfs_verify(self, repo: str) -> Any:
        self._lfs_object(json.loads(self.body))
        return {}

    def _lfs_object(self, value: dict[str, Any]) -> bytes:
        if value["oid"] not in self.hub.objects:
            raise HubError(400, f"LFS pointer pointed to a file that does not exist: {value['oid']}")
        return self.hub.objects[value["oid"]]

    @route("POST", "/api/models/{repo}/commit/{rev}")
    def commit(self, repo: str, rev: str) -> Any:
        found = self._writable(repo)
        parent = found.find(rev)
        header, *operations = [json.loads(line) for line in self.body.splitlines()]
        if header["value"].get("parentCommit") not in (None, parent.sha):
            raise HubError(412, "A commit has happened since. Please refresh and try again.")
        ref = f"refs/heads/{rev}"
        if ref not in found.refs:
            raise HubError(400, f"Not a branch: {rev}")
        done = found.commit(ref, parent.sha, header["value"]["summary"], self._apply(parent, operations))
        url = f"{self.hub.endpoint}/{repo}/commit/{done.sha}"
        return {"commitUrl": url, "commitOid": done.sha, "pullRequestUrl": None}

    def _apply(self, parent: Commit, operations: list[dict[str, Any]]) -> dict[str, bytes]:
        files = dict(parent.files)
        for kind, value in ((operation["key"], operation["value"]) for operation in operations):
            path = value["path"]
            if kind == "file":
                files[path] = base64.b64decode(value["content"])
            elif kind == "lfsFile":
                files[path] = self._lfs_object(value)
            else:
                raise HubError(400, f"Unknown operation: {kind}")
        return files

    # --- download

    @route("GET", "/{repo}/resolve/{rev}/{path}")
    def resolve(self, repo: str, rev: str, path: str) -> Any:
        commit = self._repo(repo).find(rev)
        data, sha = self.hub.stored(commit).get(path), {"X-Repo-Commit": commit.sha}
        if data is None:
            raise HubError(404, "Entry not found", "EntryNotFound", **sha)
        tag = f'"{etag(path, data)}"'
        headers = {"Content-Type": "application/octet-stream", **sha, "ETag": tag}
        if is_lfs(path, len(data)):
            headers |= {"X-Linked-ETag": tag, "X-Linked-Size": str(len(data))}
        return Reply(data, 200, headers)
