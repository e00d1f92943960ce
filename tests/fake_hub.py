"""A stand-in for the hub: what `huggingface_hub` asks of one, and the misbehaviour a test wants."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


class Repo:
    """One model. `files` may be replaced: the commit is theirs."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.gated = False
        self.pull_requests: dict[int, Repo] = {}
        self.listed: list[dict[str, Any]] | None = None  # instead of the truth

    @property
    def commit(self) -> str:
        return hashlib.sha1(repr(sorted(self.files.items())).encode()).hexdigest()

    def at(self, revision: str | None) -> Repo | None:
        """The files of a branch, a commit or a pull request."""
        if revision in (None, "main", self.commit):
            return self
        offered = self.pull_requests.items()
        return next((r for n, r in offered if revision in (f"refs/pr/{n}", r.commit)), None)

    def refs(self) -> dict[str, Any]:
        def ref(name: str, commit: str) -> dict[str, str]:
            return {"name": name.rpartition("/")[2], "ref": name, "targetCommit": commit}

        pulls = [ref(f"refs/pr/{n}", r.commit) for n, r in self.pull_requests.items()]
        branches = [ref("refs/heads/main", self.commit)]
        return {"branches": branches, "converts": [], "tags": [], "pullRequests": pulls}

    def siblings(self) -> list[dict[str, Any]]:
        return [sibling(name, data) for name, data in self.files.items()] + (self.listed or [])


def sibling(name: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    out: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": blob}
    if is_large(name):
        out["lfs"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    return out


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".gguf", ".bin"))


class Hub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []  # method, path, Range
        self.tokens: set[str | None] = set()
        self.drops: list[int] = []  # the next transfers of large files end after so many bytes
        self.corrupt = False
        self.status: int | None = None  # instead of any answer
        self.endpoint = ""

    def sent(self) -> list[str]:
        return [path.rpartition("/")[2] for method, path, _ in self.requests if method == "GET"]


@contextmanager
def serving() -> Iterator[Hub]:
    hub = Hub()

    class Answer(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            token = self.headers.get("Authorization")
            if "agent-harnesses" not in path:  # the library's own errand
                hub.requests.append((self.command, path, self.headers.get("Range")))
                hub.tokens.add(token)
            if hub.status is not None:
                return self._send(hub.status, b"", {})
            refs = re.fullmatch(r"/api/models/([^/]+/[^/]+)/refs", path)
            if refs and refs[1] in hub.repos:
                return self._send(200, json.dumps(hub.repos[refs[1]].refs()).encode(), {})
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = api or file
            repo = hub.repos.get(found[1]) if found else None
            if found is None or repo is None:
                return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            repo = repo.at(None if found[2] is None else unquote(found[2]))
            if repo is None:
                return self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            if api:
                about = {"id": found[1], "sha": repo.commit, "siblings": repo.siblings()}
                return self._send(200, json.dumps(about).encode(), {})
            if repo.gated and token is None:
                return self._send(401, b"", {"X-Error-Code": "GatedRepo"})
            if found[3] not in repo.files:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
            self._send_file(repo, found[3], body)

        def _send_file(self, repo: Repo, name: str, body: bool) -> None:
            data, start = repo.files[name], 0
            tag = sibling(name, data)
            etag = tag["lfs"]["sha256"] if "lfs" in tag else tag["blobId"]
            if hub.corrupt and is_large(name):
                data = bytes(len(data))
            headers = {"ETag": f'"{etag}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
            if asked := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
                start = int(asked[1])
                headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            cut = hub.drops.pop(0) if body and is_large(name) and hub.drops else None
            self._send(206 if asked else 200, data[start:], headers, body=body, cut=cut)

        def _send(
            self,
            status: int,
            data: bytes,
            headers: dict[str, str],
            *,
            body: bool = True,
            cut: int | None = None,
        ) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(key, value)
            self.end_headers()
            if body and self.command != "HEAD":
                self.wfile.write(data[:cut])
            if cut is not None:
                self.wfile.flush()
                self.close_connection = True

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
