"""Hub names: `org/name[@revision][:file or quant]`, and their files in Hugging Face's own cache.

Fetched models are found by looking into the cache, without the library and without a request. Names and a
hub's answers are untrusted: only known files are fetched, and each must match its announced size and hash.
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

TEXT_FILES = (  # the files besides weights that a reader of Hugging Face directories may need
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja"),
    *("chat_template.json", "modules.json", "config_sentence_transformers.json", "hf_quant_config.json"),
)
# What modules.json names: how hidden states become a vector, or logits a score.
_MODULE = re.compile(r"\d+_(Pooling|LogitScore)/config\.json")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
MAX_FILES = 10_000  # of a repository; further names are ignored

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_LIKE_A_NAME = re.compile(r"([^/@:\\]+/[^/@:\\]+)(?:@([^:]*))?(?::(.*))?", re.DOTALL)
_REPO = re.compile(f"{_PART}/{_PART}")
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(?:/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+ -]*(?:/[A-Za-z0-9_][A-Za-z0-9._+ -]*){0,3}")
COMMIT = re.compile(r"[0-9a-f]{40}")
SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
_QUANT = re.compile(
    r"(?:^|[-._/])((?:[IT]?Q\d\w*?|MXFP4|F16|F32|BF16|FP16)(?:_[0-9A-Z]+)*)(?=[-./]|$)", re.IGNORECASE
)
# PowerInfer's neuron counts, beside its GGUF. They are pickles, of which only the numbers are read.
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
    """Return the hub name, or None for a path: it exists here, looks like one (`./x/y`), or is a Path."""
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
    """Tell whether `file` is a relative path that stays below its directory."""
    return _FILE.fullmatch(file) is not None and not _odd(file)


def _odd(path: str) -> bool:
    return len(path) > 200 or ".." in path or path.endswith((".lock", "."))


def label(path: Path) -> str | None:
    """Return `org--name` or `org--name-file` for a path in a hub's cache, where paths end in hashes."""
    for at in path.absolute().parents:
        if at.name == "snapshots" and at.parent.name.startswith("models--"):
            inside = path.absolute().relative_to(at).parts[1:]
            name = at.parent.name.removeprefix("models--")
            return f"{name}-{Path(inside[-1]).stem}" if inside else name
    return None


# ---- the cache


def cache_root() -> Path:
    """Return the directory of Hugging Face's own cache, which is shared with other tools."""
    env = os.environ
    home = env.get("HF_HOME") or f"{env.get('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    root = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or f"{home}/hub"
    return Path(os.path.expandvars(os.path.expanduser(root))).absolute()


def offline() -> bool:
    value = os.environ.get("HF_HUB_OFFLINE") or os.environ.get("TRANSFORMERS_OFFLINE") or ""
    return value.upper() in ("1", "ON", "YES", "TRUE")


def find(name: Name) -> Path | None:
    """Return the model's path if all of it is in the cache, as far as is known. This makes no request."""
    commit = commit_of(name)
    if commit is None:
        return None
    snapshot = name.folder / "snapshots" / commit
    there = {p.relative_to(snapshot).as_posix() for p in snapshot.glob("**/*") if p.is_file()}
    try:
        files = wanted(name, listed(name, commit) or there)
        complete = set(files) <= there and (INDEX not in files or set(shards(snapshot)) <= there)
    except (BadFile, IOFailure, Unsupported, UsageError):
        return None
    return model_in(snapshot, files) if complete else None


def commit_of(name: Name) -> str | None:
    """Return the commit that a name stands for in the cache."""
    return (
        name.revision if COMMIT.fullmatch(name.revision) else _read_ref(name.folder / "refs" / name.revision)
    )


def list_of(name: Name, commit: str) -> Path:
    """Return the file that lists what a repository has. Other tools fetch a part of it, and leave no list."""
    return name.folder / ".thermocline" / commit


def listed(name: Name, commit: str) -> frozenset[str]:
    """Return the repository's files; none: nobody has asked for them."""
    try:
        return frozenset(list_of(name, commit).read_text(encoding="utf-8").splitlines())
    except (OSError, ValueError):
        return frozenset()


def _read_ref(path: Path) -> str | None:
    try:
        with open(path, encoding="ascii") as f:
            commit = f.read(41).strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


# ---- which files


def wanted(name: Name, files: Collection[str]) -> list[str]:
    """Return the `files` of a repository to fetch, small before large. INDEX then names the shards."""
    if name.choice is not None:
        return _gguf(name, files)
    text = [*(f for f in TEXT_FILES if f in files), *sorted(filter(_MODULE.fullmatch, files))]
    if SINGLE in files:  # first, as transformers does
        return [*text, SINGLE]
    if INDEX in files:
        return [*text, INDEX]
    if any(f.endswith(".gguf") for f in files):
        return _gguf(name, files)
    pickle = min((f for f in files if f.endswith(PICKLES) and "/" not in f), default=None)
    if pickle is not None:
        raise OnlyPickles(name, pickle)
    raise Unsupported(
        f"{name}: has neither {SINGLE}, {INDEX} nor a GGUF file; choose a repository that has one"
    )


class OnlyPickles(Unsupported):
    """The weights of `name` are pickles. `pull_request`: one that offers them as safetensors."""

    def __init__(self, name: Name, pickle: str, pull_request: Name | None = None) -> None:
        self.name, self.pickle = name, pickle
        todo = (
            "look for a safetensors or GGUF version, or convert it where you trust it: hf download "
            f"{name.repo}, then save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
            if pull_request is None
            else f"{pull_request} has them as safetensors, in a pull request: check who opened it, "
            "then use that name"
        )
        super().__init__(
            f"{name}: its weights are pickles ({pickle}), which can run code, and are not fetched: {todo}"
        )


def _gguf(name: Name, files: Collection[str]) -> list[str]:
    """Return all parts of the GGUF model that `name.choice` names, or of the only one."""
    models: dict[str, list[str]] = {}
    for file in sorted(f for f in files if f.endswith(".gguf") and not is_companion(f)):
        models.setdefault(SPLIT.sub(".gguf", file), []).append(file)
    fit = [m for m in models if name.choice is None or _chosen(m, models[m], name.choice)]
    if len(fit) != 1:
        quants = [quant(m) for m in models]
        short = {m: q for m, q in zip(models, quants, strict=True) if q and quants.count(q) == 1}
        listed = ", ".join(f":{short.get(m, m)}" for m in fit or models) or "none"
        asked = f"has no GGUF {name.choice!r}" if not fit else f"has {len(fit)} GGUF models"
        hint = "there is" if not fit else "choose one by its quant or file:"
        raise UsageError(f"{name}: {asked}; {hint} {listed}")
    parts = models[fit[0]]
    split = SPLIT.search(parts[0])
    if split and [m.groups() for p in parts if (m := SPLIT.search(p))] != _numbers(split[2]):
        raise BadFile(
            f"{name}: has {len(parts)} of the {int(split[2])} parts of {fit[0]}; try another revision"
        )
    counts = sorted(f for f in files if _COUNTS.fullmatch(f)) if ".powerinfer" in fit[0].lower() else []
    return [*counts, *parts]


def _numbers(count: str) -> list[tuple[str, ...]]:
    return [(f"{i:05}", count) for i in range(1, min(int(count), MAX_FILES) + 1)]


def is_companion(file: str) -> bool:
    """Tell whether a GGUF is not a language model, but a vision projector or importance matrix."""
    name = file.rpartition("/")[2].lower()
    return name.startswith("mmproj") or "imatrix" in name


def quant(file: str) -> str | None:
    """Return the quant in a file's name: `Q4_K_M` of `org-model.Q4_K_M.gguf`."""
    found = _QUANT.findall(file.rpartition("/")[2].removesuffix(".gguf"))
    return found[-1].upper() if found else None


def _chosen(model: str, parts: list[str], choice: str) -> bool:
    names = {model, *parts}
    if choice.endswith(".gguf"):
        return any(choice in (n, n.rpartition("/")[2]) for n in names)
    if quant(model) == choice.upper():
        return True
    # Unsloth's UD-Q4_K_XL: what the name ends with.
    return re.search(rf"[-._/]{re.escape(choice)}\.gguf$", model, re.IGNORECASE) is not None


def shards(snapshot: Path) -> list[str]:
    from thermocline.files.bounded import read_small
    from thermocline.files.safetensors import MAX_INDEX_BYTES, parse_index

    index = snapshot / INDEX
    return sorted(set(parse_index(read_small(index, MAX_INDEX_BYTES), str(index)).values()))


def model_in(snapshot: Path, files: list[str]) -> Path:
    """Return the path of the model: the directory, or the first part of a GGUF model."""
    return next((snapshot / f for f in files if f.endswith(".gguf")), snapshot)


# ---- the library's errors as ours


@contextlib.contextmanager
def library_errors(name: Name, endpoint: str) -> Iterator[None]:
    """Turn the library's errors into ours, without their text, which may contain signed URLs."""
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
        raise IOFailure(
            f"{name}: {endpoint}/{name.repo} has no revision {name.revision!r}; choose another"
        ) from None
    except errors.RemoteEntryNotFoundError:
        raise IOFailure(f"{name}: a file that {endpoint} lists is not there; try again") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        raise nobody from None
    except errors.HfHubHTTPError as e:
        raise _refused(name, endpoint, e.response.status_code) from None
    except httpx.HTTPError:
        raise nobody from None
    except ValueError as e:  # JSON that is not a hub's
        raise BadFile(
            f"{name}: {endpoint} does not answer like a hub ({type(e).__name__}); check HF_ENDPOINT"
        ) from None
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        what = "the disk is full" if full else e.strerror or "the download is truncated or damaged"
        raise IOFailure(f"{name}: {what} ({cache_root()}); run it again to continue") from None


def _refused(name: Name, endpoint: str, status: int) -> IOFailure:
    hint = {
        401: "HF_TOKEN is not valid there; set another",
        403: "HF_TOKEN may not read it; ask for access",
        429: "too many requests; wait a while",
    }.get(status, "try again later")
    return IOFailure(f"{name}: {endpoint} answers {status}: {hint}")
