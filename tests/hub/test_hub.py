"""Hub names, from a stand-in of the hub: what is fetched, continued, found again offline, refused."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_hub import Hub, Repo, serving, sibling

import thermocline as package
from thermocline.errors import BadFile, IOFailure, ThermoclineError, Unsupported, UsageError
from thermocline.hub import cache as shelf
from thermocline.hub import download, names

Run = Callable[..., Any]
GGUF = b"GGUF" + bytes(3000)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub, an empty cache, and a library that read its constants from this environment."""
    with serving() as made:
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_ENDPOINT", made.endpoint)
        monkeypatch.delenv("HF_HUB_OFFLINE")
        constants = importlib.import_module("huggingface_hub.constants")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
        monkeypatch.chdir(tmp_path)
        yield made


def model(tiny_hf: Path, **more: bytes) -> Repo:
    files = {p.name: p.read_bytes() for p in sorted(tiny_hf.iterdir())}
    return Repo({**files, "README.md": b"# a model", "pytorch_model.bin": b"\x80\x04.", **more})


def pull(text: str) -> Path:
    name = names.parse(text)
    assert name is not None
    return download.pull(name)


def ranges(hub: Hub) -> list[str]:
    return [r for _, _, r in hub.requests if r is not None]


# ---- names


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", names.Name("org/name")),
        ("org/name@v1.0", names.Name("org/name", "v1.0")),
        ("org/name@refs/pr/3", names.Name("org/name", "refs/pr/3")),
        ("org/name:Q4_K_M", names.Name("org/name", choice="Q4_K_M")),
        ("org/name@main:sub/m.gguf", names.Name("org/name", "main", "sub/m.gguf")),
    ],
)
def test_a_name_has_a_revision_and_a_choice(text: str, name: names.Name) -> None:
    assert names.parse(text) == name


@pytest.mark.parametrize(
    "text", ["./x/y", "../x/y", "/x/y", "~/x/y", "x", "x/y/z", "x/y.gguf", "x/", "a\\b/c"]
)
def test_a_path_is_never_a_name(text: str) -> None:
    assert names.parse(text) is None


def test_a_path_that_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert download.locate("org/name") == Path("org/name")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "org/na--me",
            "org/na..me",
            "-org/name",
            "org/name.git",
            "org/na me",
            "org/\u202ename",
            "org/name\n",
        ),
        *(
            "org/name@",
            "org/name@../../x",
            "org/name@/etc",
            "org/name@a//b",
            "org/name@x.lock",
            "org/name@a b",
        ),
        *(
            "org/name:",
            "org/name:../x.gguf",
            "org/name:/etc/x.gguf",
            "org/name:a/./b.gguf",
            "org/" + "n" * 97,
        ),
    ],
)
def test_a_name_that_is_none_is_refused_before_any_request(text: str, hub: Hub) -> None:
    with pytest.raises(UsageError, match="neither a path that exists nor a hub name"):
        download.locate(text)
    assert hub.requests == []


# ---- fetching


def test_a_run_fetches_what_it_needs_once_and_packs_it_once(
    hub: Hub, tiny_hf: Path, thermocline: Run
) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    argv = ["run", "-m", "org/name", "-n", "3", "--temp", "0", "--ignore-eos", "-q", "Once"]
    first = thermocline(*argv)
    assert (first.code, first.err) == (0, "")
    assert sorted({f for f in hub.sent() if "." in f}) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    hub.requests.clear()
    assert thermocline(*argv).out == first.out == thermocline(*argv[:2], str(tiny_hf), *argv[3:]).out
    assert hub.requests == []
    os.environ["HF_HUB_OFFLINE"] = "1"
    assert thermocline(*argv).out == first.out
    packs = [p.name for p in (Path(os.environ["XDG_CACHE_HOME"]) / "thermocline").iterdir()]
    assert sorted(p.split("-q8_0-")[0] for p in packs) == ["hf", "org--name"]


def test_a_quantised_repository_is_refused_by_the_file_that_says_so(
    hub: Hub, tiny_hf: Path, thermocline: Run
) -> None:
    about = b'{"quantization": {"quant_algo": "NVFP4"}}'
    hub.repos["org/name"] = model(tiny_hf, **{"hf_quant_config.json": about})
    ran = thermocline("run", "-m", "org/name", "-n", "3", "Once")
    assert ran.code == 6 and "hf_quant_config.json: weights that ModelOpt quantised to 'NVFP4'" in ran.err


def test_pull_refreshes_and_run_does_not(hub: Hub, tiny_hf: Path) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    old = pull("org/name")
    repo.files = {**repo.files, "generation_config.json": b"{}"}
    assert download.locate("org/name") == old
    hub.requests.clear()
    new = pull("org/name")
    assert new != old and download.locate("org/name") == new
    assert [f for f in hub.sent() if "." in f] == ["generation_config.json"]  # the rest is the same blobs
    assert (new / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    assert download.locate(f"org/name@{old.name}") == old


def test_a_dropped_connection_continues_where_it_was(
    hub: Hub, tiny_hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    hub.drops = [5000]
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # what is kept is whole chunks
    got = pull("org/name")
    assert (got / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    assert ranges(hub) == ["bytes=5000-"]


def test_the_next_pull_continues_where_one_was_killed(hub: Hub, tiny_hf: Path) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    data = repo.files["model.safetensors"]
    digest = sibling("model.safetensors", data)["lfs"]["sha256"]
    blobs = names.Name("org/name").folder / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.incomplete").write_bytes(data[:7000])
    got = pull("org/name")
    assert (got / "model.safetensors").read_bytes() == data
    assert ranges(hub) == ["bytes=7000-"]
    assert not list(blobs.glob("*.incomplete"))


@pytest.mark.parametrize("left", [b"other bytes" * 100, bytes(10**7)], ids=["foreign", "too long"])
def test_a_partial_file_that_is_wrong_is_never_used(hub: Hub, tiny_hf: Path, left: bytes) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    data = repo.files["model.safetensors"]
    digest = sibling("model.safetensors", data)["lfs"]["sha256"]
    blobs = names.Name("org/name").folder / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{digest}.incomplete").write_bytes(left)
    if len(left) < len(data):
        with pytest.raises(IOFailure, match=r"model\.safetensors is damaged"):
            pull("org/name")
        assert names.find(names.Name("org/name")) is None
    assert (pull("org/name") / "model.safetensors").read_bytes() == data


def test_damage_on_the_way_is_noticed(hub: Hub, tiny_hf: Path) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    hub.corrupt = True
    with pytest.raises(IOFailure, match="damaged"):
        pull("org/name")
    assert names.find(names.Name("org/name")) is None


def test_shards_are_those_of_the_index(hub: Hub) -> None:
    parts = {f"model-0000{i}-of-00002.safetensors": bytes(i) for i in (1, 2)}
    index = json.dumps({"weight_map": dict(zip("ab", parts, strict=True))}).encode()
    files = {"config.json": b"{}", names.INDEX: index, **parts, "model-extra.safetensors": b"x"}
    hub.repos["org/name"] = Repo(files)
    got = pull("org/name")
    assert {p.name for p in got.iterdir()} == {"config.json", names.INDEX, *parts}
    (got / "model-00002-of-00002.safetensors").unlink()
    assert names.find(names.Name("org/name")) is None
    assert pull("org/name") == got == names.find(names.Name("org/name"))


def as_another_tool_left_it(path: Path) -> None:
    """Transformers' AutoModel alone fetches no tokenizer, nor what says how an embedder pools."""
    (path / "tokenizer.json").unlink()
    shutil.rmtree(path.parents[1] / ".thermocline")


def test_what_another_tool_fetched_in_part_is_completed_once(
    hub: Hub, tiny_hf: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    got = pull("org/name")
    as_another_tool_left_it(got)
    hub.requests.clear()
    assert download.locate("org/name") == got and (got / "tokenizer.json").exists()
    assert "model.safetensors" not in hub.sent()
    hub.requests.clear()
    assert download.locate("org/name") == got and hub.requests == []
    as_another_tool_left_it(got)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert download.locate("org/name") == got and "may not be all" in caplog.text
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert download.locate("org/name") == got


def test_a_newer_version_is_not_fetched_for_what_another_tool_left_out(hub: Hub, tiny_hf: Path) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    got = pull("org/name")
    as_another_tool_left_it(got)
    hub.repos["org/name"] = Repo({**repo.files, "model.safetensors": b"newer"})
    with pytest.raises(IOFailure):  # this stand-in keeps no older version
        pull(f"org/name@{repo.commit}")
    assert download.locate("org/name") == got and not hub.sent().count("model.safetensors") > 1


def test_two_pulls_at_once_fetch_each_file_once(hub: Hub, tiny_hf: Path, tmp_path: Path) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    command = [sys.executable, "-P", "-m", "thermocline", "pull", "org/name"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(package.__file__).parents[1]), *sys.path])}
    running = [
        subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    said = [p.communicate(timeout=60) for p in running]
    assert [p.returncode for p in running] == [0, 0], said
    assert said[0][0] == said[1][0] and said[0][1] == said[1][1] == b""
    assert hub.sent().count("model.safetensors") == 1
    got = Path(said[0][0].decode().strip())
    assert (got / "model.safetensors").read_bytes() == repo.files["model.safetensors"]


# ---- pull requests


@pytest.fixture
def pickles(hub: Hub, tiny_hf: Path) -> Repo:
    """OPT has pickles, and a pull request of the hub's converter among others."""
    offered = model(tiny_hf)
    files = {n: data for n, data in offered.files.items() if n != "model.safetensors"}
    repo = hub.repos["org/name"] = Repo(files)
    other = Repo({**files, "README.md": b"corrected"})
    repo.pull_requests = {1: other, 7: offered, 12: other}
    return repo


def test_a_pull_request_with_the_only_safetensors_is_named_and_works(
    pickles: Repo, hub: Hub, thermocline: Run
) -> None:
    refused = thermocline("run", "-m", "org/name", "hello")
    assert (refused.code, refused.out, refused.err.count("\n")) == (6, "", 1)
    assert "pytorch_model.bin" in refused.err and "org/name@refs/pr/7 has them as safetensors" in refused.err
    pulled = thermocline("pull", "org/name@refs/pr/7", "-q")
    assert pulled.code == 0 and (Path(pulled.out.strip()) / "model.safetensors").exists()
    hub.requests.clear()
    ran = thermocline("run", "-m", "org/name@refs/pr/7", "-n", "1", "-q", "hi")
    assert ran.code == 0 and hub.requests == []
    assert not [f for f in hub.sent() if f.endswith(".bin")]
    shown = json.loads(thermocline("ls", "--json").out)["models"]
    assert [(m["name"], m["format"]) for m in shown if m["kind"] == "hub"] == [("org/name", "safetensors")]
    said = thermocline("rm", "org/name@refs/pr/7", "-y")
    assert said.code == 2 and "`thermocline rm org/name` removes" in said.err
    assert thermocline("rm", "org/name", "-y").code == 0
    assert names.find(names.Name("org/name", "refs/pr/7")) is None


@pytest.mark.parametrize("count", [0, 5, 400])
def test_pull_requests_are_looked_through_within_a_bound(count: int, pickles: Repo, hub: Hub) -> None:
    offered = pickles.pull_requests[1]
    pickles.pull_requests = {n: offered for n in range(1, count + 1)}
    with pytest.raises(Unsupported, match="look for a safetensors or GGUF version"):
        pull("org/name")
    assert len(hub.requests) <= 2 + min(count, download.PULL_REQUESTS)


@pytest.mark.parametrize("refs", [{}, {"branches": 3}, {"pullRequests": [{"ref": 7}]}, []])
def test_a_hub_that_does_not_tell_pull_requests_changes_nothing(
    refs: Any, pickles: Repo, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Repo, "refs", lambda self: refs)
    with pytest.raises(Unsupported, match="look for a safetensors or GGUF version"):
        pull("org/name")


# ---- GGUF


QUANTS = ["m.Q4_K_M.gguf", "m.Q4_K_S.gguf", "m.Q8_0.gguf", "mmproj-m.gguf"]
UNSLOTH = ["m-UD-Q4_K_XL.gguf", "m-UD-TQ1_0.gguf", "m-mxfp4.gguf", "m-MXFP4_MOE.gguf"]
SPLIT = [f"big/m-BF16-0000{i}-of-00002.gguf" for i in (1, 2)]


@pytest.mark.parametrize(
    ("choice", "fetched"),
    [
        *(("Q4_K_M", QUANTS[:1]), ("q8_0", QUANTS[2:3]), ("m.Q4_K_S.gguf", QUANTS[1:2])),
        *(("BF16", SPLIT), (SPLIT[0], SPLIT), ("big/m-BF16.gguf", SPLIT)),
        *(("UD-Q4_K_XL", UNSLOTH[:1]), ("q4_k_xl", UNSLOTH[:1]), ("UD-TQ1_0", UNSLOTH[1:2])),
        *(("TQ1_0", UNSLOTH[1:2]), ("MXFP4", UNSLOTH[2:3]), ("mxfp4_moe", UNSLOTH[3:])),
    ],
)
def test_a_quant_or_file_is_all_that_is_fetched(choice: str, fetched: list[str], hub: Hub) -> None:
    files = [*QUANTS, *SPLIT, *UNSLOTH, "config.json"]
    hub.repos["org/name"] = Repo({f: GGUF + f.encode() for f in files})
    got = download.locate(f"org/name:{choice}")
    assert got.as_posix().endswith(fetched[0])
    snapshot = names.Name("org/name").folder / "snapshots" / hub.repos["org/name"].commit
    assert sorted(p.relative_to(snapshot).as_posix() for p in snapshot.rglob("*.gguf")) == fetched
    hub.requests.clear()
    assert download.locate(f"org/name:{choice}") == got and hub.requests == []


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("", "has 4 GGUF models; choose one"),
        (":Q2_K", "has no GGUF 'Q2_K'; there is"),
        (":x.gguf", "has no GGUF"),
    ],
)
def test_without_a_clear_choice_the_choices_are_listed(choice: str, said: str, hub: Hub) -> None:
    hub.repos["org/name"] = Repo({f: GGUF for f in [*QUANTS, *SPLIT]})
    with pytest.raises(UsageError, match=said) as e:
        download.locate(f"org/name{choice}")
    assert all(f":{q}" in str(e.value) for q in ("Q4_K_M", "Q4_K_S", "Q8_0", "BF16"))


def test_a_quant_that_is_there_twice_is_listed_by_file(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({f: GGUF for f in ("a.Q8_0.gguf", "b.Q8_0.gguf", "c.Q4_0.gguf")})
    with pytest.raises(UsageError, match=r"has 2 GGUF models; .*: :a\.Q8_0\.gguf, :b\.Q8_0\.gguf$"):
        download.locate("org/name:Q8_0")


def test_a_missing_part_of_a_split_is_said(hub: Hub) -> None:
    hub.repos["org/name"] = Repo({SPLIT[1]: GGUF})
    with pytest.raises(BadFile, match="1 of the 2 parts"):
        download.locate("org/name")


def test_powerinfers_counts_come_with_its_gguf(hub: Hub) -> None:
    counts = "activation/activation_0.pt"
    hub.repos["org/name"] = Repo({"m.powerinfer.gguf": GGUF, counts: b"x", "activation/evil.pt": b"y"})
    got = pull("org/name")
    assert {p.name for p in got.parent.rglob("*.*")} == {"m.powerinfer.gguf", "activation_0.pt"}


# ---- refusals: one line, the right code, nothing on stdout


def gated(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"].gated = True


def missing(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.repos.clear()


def only_pickles(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    del hub.repos["org/name"].files["model.safetensors"]


def full_disk(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6 - 9, 9))


def no_space(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr("huggingface_hub.file_download.http_get", fails)


def forbidden_to_ask(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_HUB_OFFLINE", "1")


def no_network(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def broken_server(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.status = 503


def token_refused(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.status = 403


def token_of_two_words(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_secret hf_other")


def no_hub_at_all(hub: Hub, patch: pytest.MonkeyPatch) -> None:
    hub.status = 200


REFUSED = {
    gated: (4, "accept its licence"),
    missing: (4, "no such directory here, and no such model"),
    only_pickles: (6, "pytorch_model.bin"),
    full_disk: (4, "GiB are free"),
    no_space: (4, "the disk is full"),
    forbidden_to_ask: (4, "HF_HUB_OFFLINE"),
    no_network: (4, "cannot be reached"),
    broken_server: (4, "answers 503"),
    token_refused: (4, "answers 403"),
    token_of_two_words: (2, "HF_TOKEN"),
    no_hub_at_all: (3, "does not answer like a hub"),
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda f: f.__name__)
def test_a_refusal_is_one_line_and_its_code(
    make: Callable[..., None], hub: Hub, tiny_hf: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    make(hub, monkeypatch)
    code, said = REFUSED[make]
    ran = thermocline("run", "-m", "org/name", "hello")
    assert (ran.code, ran.out, ran.err.count("\n")) == (code, "", 1), ran.err
    assert (said in ran.err and "org/name" in ran.err) or make is token_of_two_words
    assert "hf_secret" not in ran.err
    assert not [f for f in hub.sent() if f.endswith(".bin")]


def test_a_gated_model_opens_with_a_token(hub: Hub, tiny_hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    hub.repos["org/name"].gated = True
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (pull("org/name") / "model.safetensors").exists()
    assert hub.tokens == {"Bearer hf_secret"}


def test_an_unknown_revision_is_named(hub: Hub, tiny_hf: Path) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    with pytest.raises(IOFailure, match="no revision 'v9'"):
        download.locate("org/name@v9")


@pytest.mark.parametrize("rest", [{}, {"files": 3}, {"sha": "../x", "siblings": []}, {"sha": None}])
def test_a_listing_that_is_none_is_refused(
    rest: dict[str, Any], hub: Hub, tiny_hf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo = hub.repos["org/name"] = model(tiny_hf)
    monkeypatch.setattr(Repo, "siblings", lambda self: [rest])
    monkeypatch.setattr(Repo, "commit", rest.get("sha", "a" * 40))
    with pytest.raises(ThermoclineError):
        pull("org/name")
    assert repo.files and not (names.Name("org/name").folder / "snapshots").exists()


EVIL = [
    "../../evil.gguf",
    "/tmp/evil.gguf",
    "a/../../evil.gguf",
    "..\\evil.gguf",
    "C:evil.gguf",
    ".hidden.gguf",
]


@pytest.mark.parametrize("file", EVIL)
def test_a_listed_name_that_leads_elsewhere_does_not_exist(file: str, hub: Hub, tmp_path: Path) -> None:
    repo = hub.repos["org/name"] = Repo({"m.gguf": GGUF})
    repo.listed = [sibling(file, GGUF), {**sibling("b.gguf", GGUF), "lfs": None, "blobId": "../../evil"}]
    assert download.locate("org/name").name == "m.gguf"
    assert not list(tmp_path.rglob("*evil*"))


def test_a_file_larger_than_announced_is_cut_off(hub: Hub, tmp_path: Path) -> None:
    repo = hub.repos["org/name"] = Repo({"m.gguf": bytes(10**6)})
    small = {**sibling("m.gguf", bytes(10**6)), "size": 1000}
    repo.siblings = lambda: [small]  # type: ignore[method-assign]
    with pytest.raises(BadFile, match="larger than the announced 1000 bytes"):
        pull("org/name")
    assert sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()) < 10**4


# ---- ls, rm


def test_ls_shows_both_caches_and_rm_takes_one_thing_out(
    hub: Hub, tiny_hf: Path, tmp_path: Path, thermocline: Run
) -> None:
    hub.repos["org/name"] = model(tiny_hf)
    hub.repos["org/names"] = Repo({"m.gguf": GGUF})
    assert thermocline("pull", "org/names", "-q").code == 0
    assert thermocline("run", "-m", "org/name", "-n", "1", "-q", "hi").code == 0
    shown = json.loads(thermocline("ls", "--json").out)["models"]
    assert [(m["name"].split("-q8")[0], m["kind"], m["format"]) for m in shown] == [
        ("org/name", "hub", "safetensors"),
        ("org/names", "hub", "gguf"),
        ("org--name", "pack", "q8_0"),
    ]
    assert all(m["bytes"] > 2000 and m["last_used"] > 1e9 and Path(m["path"]).is_dir() for m in shown)
    table = thermocline("ls").out.splitlines()
    assert len(table) == 4 and "org/names" in table[2] and "gguf" in table[2]

    said = thermocline("rm", "org/")
    assert (said.code, "may mean org/name, org/names" in said.err) == (2, True)
    said = thermocline("rm", "org/name")
    assert (said.code, "-y confirms" in said.err, shown[0]["path"] in said.err) == (2, True, True)
    assert Path(shown[0]["path"]).exists()
    assert thermocline("rm", "org/name", "-y").code == 0
    assert thermocline("rm", "org--n", "-y").code == 0
    left = json.loads(thermocline("ls", "--json").out)["models"]
    assert [m["name"] for m in left] == ["org/names"]
    assert thermocline("rm", "nothing", "-y").code == 2


@pytest.mark.parametrize("answer", ["y\n", "n\n", ""])
def test_rm_asks(
    answer: str, tiny_pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    shutil.copytree(tiny_pack, tmp_path / "cache" / "mine")
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    ran = thermocline("rm", "mine", "--cache-dir", tmp_path / "cache")
    assert (ran.code, "f32, " in ran.err) == (0, True)
    assert (tmp_path / "cache" / "mine").exists() == (answer != "y\n")


def test_rm_leaves_alone_what_is_not_in_a_cache(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(tiny_pack, tmp_path / "elsewhere")
    (cache / "notes").mkdir(parents=True)
    (cache / "link").symlink_to(tmp_path / "elsewhere")
    assert shelf.items(cache) == []
    for name in ("link", "notes", "../elsewhere", str(tmp_path / "elsewhere"), ".", ""):
        assert thermocline("rm", name, "-y", "--cache-dir", cache).code == 2
    item = shelf.Item("x", "pack", "f32", 1, 0.0, cache / ".." / "elsewhere")
    with pytest.raises(UsageError, match="not in the cache"):
        shelf.remove(item, cache)
    assert (tmp_path / "elsewhere" / "pack.json").exists()


def test_a_damaged_pack_is_listed_and_can_go(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> None:
    cache = tmp_path / "cache"
    (cache / "broken").mkdir(parents=True)
    (cache / "broken" / "pack.json").write_text("{}")
    assert [i.format for i in shelf.items(cache)] == ["damaged"]
    assert thermocline("rm", "broken", "-y", "--cache-dir", cache).code == 0
    assert not (cache / "broken").exists()


# ---- cost


def test_the_library_is_imported_only_to_fetch(tiny_pack: Path, tmp_path: Path) -> None:
    code = f"""
import sys, thermocline, thermocline.cli.main
thermocline.LLM
assert thermocline.cli.main.main(["run", "-m", {str(tiny_pack)!r}, "-n", "1", "-q", "x"]) == 0
assert thermocline.cli.main.main(["ls"]) == 0
print(sorted(m for m in sys.modules if m.startswith(("huggingface_hub", "httpx"))))"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1:] == ["[]"], done.stderr
