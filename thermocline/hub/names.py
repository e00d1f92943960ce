"""Hub names: `org/name[@revision][:file or quant]` -> files in Hugging Face's own cache.

What has been fetched is found by looking at the cache, without the library and without a request. Names, and
whatever a hub answers, are untrusted: only known files are fetched, each held to its announced size and hash.
Must not know packs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from thermocline.errors import BadFile, IOFailure, Unsupported, UsageError

TEXT_FILES = (  # all that a reader of Hugging Face directories may want besides weights
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
)
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_FILES = 10_000  # of a repository; listed names of more are not looked at

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_LIKE_A_NAME = re.compile(r"([^/@:\\]+/[^/@:\\]+)(?:@([^:]*))?(?::(.*))?", re.DOTALL)
_REPO = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*(?:/[A-Za-z0-9_][A-Za-z0-9._+ -]*){0,3}")
COMMIT = re.compile(r"[0-9a-f]{40}")
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_QUANT = re.compile(r"(?:^|[-._/])((?:I?Q\d\w*?|F16|F32|BF16|FP16)(?:_[0-9A-Z]+)*)(?=[-./]|$)", re.IGNORECASE)
# PowerInfer's neuron counts, beside its GGUF. Named like pickles; their reader takes the numbers out.
_COUNTS = re.compile(r"activation/activation_\d{1,4}\.pt")


# ---- names


@dataclass(frozen=True)
class Name:
    repo: str
    revision: str = "main"
    choice: str | None = None  # a GGUF file, or a quant

    def __str__(self) -> str:
        at = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{at}" + (f":{self.choice}" if self.choice is not None else "")

    @property
    def folder(self) -> Path:
        return cache_root() / ("models--" + self.repo.replace("/", "--"))


def parse(model: str | os.PathLike[str]) -> Name | None:
    """None: a path. That is whatever exists here, looks like a path (`./x/y`), or is no text but a Path."""
    if not isinstance(model, str) or os.path.lexists(model) or model.startswith((".", "~")):
        return None
    found = _LIKE_A_NAME.fullmatch(model)
    if found is None or (found[3] is None and model.endswith((".gguf", ".safetensors", ".json"))):
        return None
    repo, revision, choice = found[1], found[2], found[3]
    wrong = None
    if not _REPO.fullmatch(repo) or ".." in repo or "--" in repo or repo.endswith(".git"):
        wrong = repo
    elif revision is not None and (not _REVISION.fullmatch(revision) or _odd(revision)):
        wrong = revision
    elif choice is not None and not safe(choice):
        wrong = choice
    if wrong is not None:
        raise UsageError(
            f"{model!r} is neither a path that exists nor a hub name: {wrong!r} cannot be in "
            "org/name[@revision][:file or quant]"
        )
    return Name(repo, "main" if revision is None else revision, choice)


def safe(file: str) -> bool:
    """A relative path that stays below where it is put."""
    return _FILE.fullmatch(file) is not None and not _odd(file)


def _odd(path: str) -> bool:
    return len(path) > 200 or ".." in path or path.endswith((".lock", "."))


def label(path: Path) -> str | None:
    """`org--name` or `org--name-file` for what lies in a hub's cache, where paths end in hashes."""
    for at in path.absolute().parents:
        if at.name == "snapshots" and at.parent.name.startswith("models--"):
            inside = path.absolute().relative_to(at).parts[1:]
            name = at.parent.name.removeprefix("models--")
            return f"{name}-{Path(inside[-1]).stem}" if inside else name
    return None


# ---- what there is


def cache_root() -> Path:
    """Where Hugging Face's library keeps its cache, so that it is shared with other tools."""
    env = os.environ
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    root = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(os.path.expanduser(root))).absolute()


def offline() -> bool:
    said = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return said.upper() in ("1", "ON", "YES", "TRUE")


def find(name: Name) -> Path | None:
    """The model, if all of it was fetched before. Asks nobody."""
    commit: str | None = name.revision
    if not COMMIT.fullmatch(name.revision):
        commit = _read_ref(name.folder / "refs" / name.revision)
    if commit is None:
        return None
    snapshot = name.folder / "snapshots" / commit
    there = {p.relative_to(snapshot).as_posix() for p in snapshot.glob("**/*") if p.is_file()}
    try:
        files = wanted(name, there)
        complete = INDEX not in files or set(shards(snapshot)) <= there
    except (BadFile, IOFailure, Unsupported, UsageError):
        return None
    return model_in(snapshot, files) if complete else None


def _read_ref(path: Path) -> str | None:
    try:
        with open(path, encoding="ascii") as f:
            commit = f.read(41).strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


# ---- which files


def wanted(name: Name, files: Collection[str]) -> list[str]:
    """What to fetch of a repository's `files`, small before large; its shards follow from INDEX."""
    if name.choice is not None:
        return _gguf(name, files)
    text = [f for f in TEXT_FILES if f in files]
    if SINGLE in files:  # first, as transformers does
        return [*text, SINGLE]
    if INDEX in files:
        return [*text, INDEX]
    if any(f.endswith(".gguf") for f in files):
        return _gguf(name, files)
    pickle = min((f for f in files if f.endswith(PICKLES) and "/" not in f), default=None)
    if pickle is not None:
        raise OnlyPickles(name, pickle)
    raise Unsupported(f"{name}: has neither {SINGLE}, {INDEX} nor a GGUF file")


class OnlyPickles(Unsupported):
    """`name` has weights, as pickles. `pull_request`: what of its kind has safetensors."""

    def __init__(self, name: Name, pickle: str, pull_request: Name | None = None) -> None:
        self.name, self.pickle = name, pickle
        todo = (
            "look for a safetensors or GGUF version, or convert it where you trust it: hf download "
            f"{name.repo}, then save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
            if pull_request is None
            else f"{pull_request} has them as safetensors, offered in a pull request: see who opened it, "
            "then use that name"
        )
        super().__init__(
            f"{name}: its weights are pickles ({pickle}), which can run code, and are not fetched: {todo}"
        )


def _gguf(name: Name, files: Collection[str]) -> list[str]:
    """All parts of the one GGUF model that `name.choice` says, or that there is."""
    models: dict[str, list[str]] = {}
    for file in sorted(f for f in files if f.endswith(".gguf") and not _companion(f)):
        models.setdefault(_SPLIT.sub(".gguf", file), []).append(file)
    fit = [m for m in models if name.choice is None or _chosen(m, models[m], name.choice)]
    if len(fit) != 1:
        quants = [quant(m) for m in models]
        short = {m: q for m, q in zip(models, quants, strict=True) if q and quants.count(q) == 1}
        listed = ", ".join(f":{short.get(m, m)}" for m in fit or models) or "none"
        asked = f"has no GGUF {name.choice!r}" if not fit else f"has {len(fit)} GGUF models"
        hint = "there is" if not fit else "choose one by its quant or file:"
        raise UsageError(f"{name}: {asked}; {hint} {listed}")
    parts = models[fit[0]]
    split = _SPLIT.search(parts[0])
    if split and [m.groups() for p in parts if (m := _SPLIT.search(p))] != _numbers(split[2]):
        raise BadFile(f"{name}: {len(parts)} of the {int(split[2])} parts of {fit[0]} are there")
    counts = sorted(f for f in files if _COUNTS.fullmatch(f)) if ".powerinfer" in fit[0].lower() else []
    return [*counts, *parts]


def _numbers(count: str) -> list[tuple[str, ...]]:
    return [(f"{i:05}", count) for i in range(1, min(int(count), MAX_FILES) + 1)]


def _companion(file: str) -> bool:
    """A GGUF that is no language model: a vision projector, an importance matrix."""
    name = file.rpartition("/")[2].lower()
    return name.startswith("mmproj") or "imatrix" in name


def quant(file: str) -> str | None:
    """`Q4_K_M` of `org-model.Q4_K_M.gguf`."""
    found = _QUANT.findall(file.rpartition("/")[2].removesuffix(".gguf"))
    return found[-1].upper() if found else None


def _chosen(model: str, parts: list[str], choice: str) -> bool:
    names = {model, *parts}
    if choice.endswith(".gguf"):
        return any(choice in (n, n.rpartition("/")[2]) for n in names)
    return quant(model) == choice.upper()


def shards(snapshot: Path) -> list[str]:
    from thermocline.files.bounded import read_small
    from thermocline.files.safetensors import MAX_INDEX_BYTES, parse_index

    index = snapshot / INDEX
    return sorted(set(parse_index(read_small(index, MAX_INDEX_BYTES), str(index)).values()))


def model_in(snapshot: Path, files: list[str]) -> Path:
    """What to hand on: the directory, or the first part of a GGUF model."""
    return next((snapshot / f for f in files if f.endswith(".gguf")), snapshot)


# ---- errors of the library, as ours


@contextlib.contextmanager
def speaking(name: Name, endpoint: str) -> Iterator[None]:
    """One line for whatever may go wrong. No text of the library's is repeated: it may hold signed URLs."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    nobody = IOFailure(
        f"{name}: not in the cache ({cache_root()}), and {endpoint} cannot be reached; check the network"
    )
    try:
        yield
    except errors.GatedRepoError:
        raise IOFailure(
            f"{name}: gated: accept its licence at {endpoint}/{name.repo} and set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise IOFailure(
            f"{name}: no such directory here, and no such model at {endpoint}"
            " (or it is private: set HF_TOKEN to a token that may read it)"
        ) from None
    except errors.RevisionNotFoundError:
        raise IOFailure(f"{name}: {endpoint}/{name.repo} has no revision {name.revision!r}") from None
    except errors.RemoteEntryNotFoundError:
        raise IOFailure(f"{name}: a file that {endpoint} lists is not there; try again") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise nobody from None
    except errors.HfHubHTTPError as e:
        raise _refused(name, endpoint, e.response.status_code) from None
    except httpx.HTTPError:
        raise nobody from None
    except ValueError as e:  # JSON of another shape than a hub's
        raise BadFile(f"{name}: {endpoint} does not answer like a hub ({type(e).__name__})") from None
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else e.strerror or "what came is cut short or damaged"
        raise IOFailure(f"{name}: {what} ({cache_root()}); run it again to continue") from None


def _refused(name: Name, endpoint: str, status: int) -> IOFailure:
    hint = {
        401: "HF_TOKEN is not valid there",
        403: "HF_TOKEN may not read it",
        429: "too many requests; wait a while",
    }.get(status, "try again later")
    return IOFailure(f"{name}: {endpoint} answers {status}: {hint}")
