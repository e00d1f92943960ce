"""Download from a hub, continuing interrupted files. No other module makes requests.

A blob is written to `blobs/HASH.incomplete`, under the library's own lock, and gets its name once its hash is
right. The reference that `names.find` reads is written last. So it always finds a complete model, and an
interrupted update leaves the previous version in use.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from thermocline.errors import BadFile, IOFailure, UsageError
from thermocline.hub import names

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]  # ("downloading", bytes done, bytes in all)
GIB = 2**30
STEP_BYTES = 1 << 20
TIMEOUT_S = 30.0
PULL_REQUESTS = 12  # searched for safetensors, one request each
_PULL_REQUEST = re.compile(r"refs/pr/(\d{1,6})")
PLAIN_BYTES = 50 * 10**9  # hubs do not send larger files in one piece; the library fetches these in chunks


@dataclass(frozen=True)
class Remote:
    """A file as the hub lists it: its size, and its hash, which is its name in the cache."""

    size: int
    digest: str


def locate(model: str | os.PathLike[str], progress: Progress | None = None) -> Path:
    """Return the directory or GGUF file of `-m`: a path unchanged, or a hub name's, fetched if missing."""
    name = names.parse(model)
    if name is None:
        return Path(model)
    found, commit = names.find(name), names.commit_of(name)
    if found is None or commit is None:
        return pull(name, progress)
    if names.listed(name, commit) or names.offline():
        return found
    # Another tool fetched it, perhaps in part: transformers leaves out tokenizers and poolings unless asked.
    try:
        return pull(replace(name, revision=commit), progress)
    except IOFailure as e:
        log.warning(f"{e}; what is in the cache is used, and may not be all")
        return found


def pull(name: names.Name, progress: Progress | None = None) -> Path:
    """Fetch the files missing of the newest version of `name`; return its path."""
    if names.offline():
        raise IOFailure(
            f"{name}: not in the cache ({names.cache_root()}), and HF_HUB_OFFLINE forbids downloads; "
            "unset it, or give a path"
        )
    _check_token()
    endpoint = (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")
    with names.library_errors(name, endpoint):
        return _Pull(name, endpoint, progress or (lambda what, done, total: None)).run()


def _check_token() -> None:
    token = os.environ.get("HF_TOKEN", "").strip()
    if not token.isascii() or not token.isprintable() or " " in token:
        raise UsageError("HF_TOKEN contains characters that no token has; copy it again")


class _Pull:
    """The download of one version of one repository into the cache."""

    def __init__(self, name: names.Name, endpoint: str, progress: Progress) -> None:
        from huggingface_hub.utils import build_hf_headers, logging

        if "HF_HUB_VERBOSITY" not in os.environ and "HF_DEBUG" not in os.environ:
            logging.set_verbosity_error()  # its warnings of retries contain signed URLs
        self._name, self._endpoint, self._progress = name, endpoint, progress
        self._blobs = name.folder / "blobs"
        self._headers = build_hf_headers(library_name="thermocline")
        self._commit, self._files = self._listed()
        self._snapshot = name.folder / "snapshots" / self._commit
        self._done = self._total = 0

    def _listed(self) -> tuple[str, dict[str, Remote]]:
        from huggingface_hub import HfApi

        try:
            about = HfApi(endpoint=self._endpoint).model_info(
                self._name.repo, revision=self._name.revision, files_metadata=True, timeout=TIMEOUT_S
            )
        except (AttributeError, KeyError, TypeError) as e:
            raise ValueError("JSON of another shape") from e
        if not isinstance(about.sha, str) or not names.COMMIT.fullmatch(about.sha):
            raise ValueError("no commit")
        out: dict[str, Remote] = {}
        for s in (about.siblings or [])[: names.MAX_FILES]:
            digest = s.lfs.sha256 if s.lfs is not None else s.blob_id
            if (
                isinstance(s.rfilename, str)
                and names.safe(s.rfilename)
                and _is_size(s.size)
                and _is_digest(digest)
            ):
                out[s.rfilename] = Remote(int(s.size or 0), str(digest))
        return about.sha, out

    def run(self) -> Path:
        try:
            files = names.wanted(self._name, self._files)
        except names.OnlyPickles as e:
            raise names.OnlyPickles(e.name, e.pickle, self._pull_request()) from None
        self._fetch(files)
        if names.INDEX in files:
            parts = names.shards(self._snapshot)
            missing = [p for p in parts if p not in self._files]
            if missing:
                raise BadFile(
                    f"{self._name}: {names.INDEX} names {missing[0]}, which is not in the repository; "
                    "try another revision"
                )
            self._fetch(parts)
        self._list()
        self._refer()
        return names.model_in(self._snapshot, files)

    def _pull_request(self) -> names.Name | None:
        """Return the newest pull request with safetensors, among the last `PULL_REQUESTS`.

        The hub's own converter opens such pull requests. A hub that lists none is no error: this is advice.
        """
        from huggingface_hub import HfApi, errors
        from huggingface_hub.utils import httpx

        api, repo = HfApi(endpoint=self._endpoint), self._name.repo
        try:
            refs = api.list_repo_refs(repo, include_pull_requests=True).pull_requests or []
            numbers = sorted((int(m[1]) for r in refs if (m := _PULL_REQUEST.fullmatch(r.ref))), reverse=True)
            for number in numbers[:PULL_REQUESTS]:
                about = api.model_info(repo, revision=f"refs/pr/{number}", timeout=TIMEOUT_S)
                if {names.SINGLE, names.INDEX} & {s.rfilename for s in about.siblings or []}:
                    return names.Name(repo, f"refs/pr/{number}")
        except (errors.HfHubHTTPError, httpx.HTTPError, AttributeError, KeyError, TypeError, ValueError):
            return None
        return None

    def _fetch(self, files: Iterable[str]) -> None:
        todo = [f for f in files if not (self._snapshot / f).is_file()]
        blobs = {self._files[f].digest: self._files[f].size for f in todo}
        sizes = {d: n for d, n in blobs.items() if not (self._blobs / d).exists()}
        there = {d: min(_size(self._partial(d)), n) for d, n in sizes.items()}
        self._total, self._done = sum(sizes.values()), sum(there.values())
        self._check_space(self._total - self._done)
        for file in todo:
            self._fetch_file(file, self._files[file])

    def _check_space(self, need: int) -> None:
        at = self._name.folder
        while not at.exists():
            at = at.parent
        free = shutil.disk_usage(at).free
        if need > free:
            raise IOFailure(
                f"{self._name}: needs {need / GIB:.3g} GiB of disk, but {free / GIB:.3g} GiB are free at "
                f"{names.cache_root()}; free some, or set HF_HOME to another disk"
            )

    def _fetch_file(self, file: str, about: Remote) -> None:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import WeakFileLock

        blob = self._blobs / about.digest
        if about.size <= PLAIN_BYTES:
            locks = names.cache_root() / ".locks" / self._name.folder.name
            locks.mkdir(parents=True, exist_ok=True)
            self._blobs.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(locks / f"{about.digest}.lock"):  # another process may have fetched it by now
                if not blob.exists():
                    self._fetch_blob(file, about, blob)
        hf_hub_download(  # finds the blob and links it into the snapshot
            self._name.repo,
            file,
            revision=self._commit,
            cache_dir=names.cache_root(),
            endpoint=self._endpoint,
            tqdm_class=self._meter(about.size),
        )

    def _fetch_blob(self, file: str, about: Remote, blob: Path) -> None:
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get

        partial = self._partial(about.digest)
        if _size(partial) > about.size:
            partial.unlink()
        url = hf_hub_url(self._name.repo, file, revision=self._commit, endpoint=self._endpoint)
        with open(partial, "ab") as f:
            http_get(
                url,
                f,
                resume_size=f.tell(),
                headers=dict(self._headers),
                expected_size=about.size,
                tqdm_class=self._meter(about.size),
            )
        if _digest(partial, len(about.digest)) != about.digest:
            partial.unlink()
            raise IOFailure(
                f"{self._name}: {file} is damaged: its hash differs from the announced one; try again"
            )
        os.replace(partial, blob)

    def _partial(self, digest: str) -> Path:
        return self._blobs / f"{digest}.incomplete"

    def _meter(self, size: int) -> Any:
        """Return a class in place of the library's progress bar, which also stops a file beyond its size."""
        pull = self

        class Meter:
            def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
                self.n = initial

            def update(self, n: float | None = 1) -> None:
                self.n += int(n or 0)
                pull._done += int(n or 0)
                if self.n > size:
                    raise BadFile(f"{pull._name}: a file is larger than the announced {size} bytes")
                pull._progress("downloading", min(pull._done, pull._total), pull._total)

            def __enter__(self) -> Meter:
                return self

            def __exit__(self, *_: object) -> None: ...

            def close(self) -> None: ...

        return Meter

    def _list(self) -> None:
        _write(names.list_of(self._name, self._commit), "\n".join(sorted(self._files)))

    def _refer(self) -> None:
        if self._name.revision != self._commit:
            _write(self._name.folder / "refs" / self._name.revision, self._commit)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def _is_size(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 50


def _is_digest(text: Any) -> bool:
    """Tell whether `text` is a hash of git (SHA-1, of a header and the file) or git-lfs (SHA-256)."""
    return isinstance(text, str) and len(text) in (40, 64) and not set(text) - set("0123456789abcdef")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _digest(path: Path, digits: int) -> str:
    h = hashlib.sha256() if digits == 64 else hashlib.sha1(b"blob %d\0" % _size(path))
    with open(path, "rb") as f:
        while step := f.read(STEP_BYTES):
            h.update(step)
    return h.hexdigest()
