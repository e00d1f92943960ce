"""What is written is whole or not there, and what a kill left goes with the next call."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny

from thermocline.cli.console import INTERRUPTED
from thermocline.convert import to_gguf
from thermocline.errors import IOFailure
from thermocline.files import whole
from thermocline.machine import disk_speed, hardware, this_machine

Run = Callable[..., Any]


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
        return process.pid


def test_a_file_takes_the_old_ones_place_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt), whole.replacing(path) as tmp:
        tmp.write_text("ne")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["f"]
    with whole.replacing(path) as tmp:
        tmp.write_text("new")
    assert path.read_text() == "new" and os.listdir(tmp_path) == ["f"]


@pytest.mark.skipif(sys.platform == "win32", reason="there nobody can ask whether a process lives")
def test_what_dead_writers_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    dead, living = dead_pid(), os.getppid()
    stays = {f"f.tmp-{living}", f"g.tmp-{dead}", f"f.tmp-{dead}x", "f.tmp-"}
    for name in (f"f.tmp-{dead}", *stays):
        (tmp_path / name).write_text("part")
    (tmp_path / f"f.tmp-{dead}1").mkdir()
    with whole.replacing(tmp_path / "f") as tmp:
        tmp.write_text("all")
    assert set(os.listdir(tmp_path)) == {"f", f"f.tmp-{dead}1", *stays}


@pytest.mark.skipif(sys.platform == "win32", reason="has no /dev")
def test_a_device_is_never_replaced() -> None:
    with (
        pytest.raises(IOFailure, match="/dev/null: is a directory, device"),
        whole.replacing(Path("/dev/null")),
    ):
        pytest.fail("it was opened")


@pytest.mark.skipif(sys.platform == "win32", reason="there nobody can ask whether a process lives")
def test_a_killed_export_leaves_nothing_that_the_next_does_not_remove(
    tiny_pack: Path, tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF of many GiB stayed under F.gguf.tmp-PID for ever."""
    out = tmp_path / "F.gguf"
    (tmp_path / f"F.gguf.tmp-{dead_pid()}").write_bytes(b"GGUF")
    ran = thermocline("pack", tiny_pack, "-o", out, "-q")
    assert ran.code == 0, ran.err
    assert os.listdir(tmp_path) == ["F.gguf"]

    def broken(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(to_gguf, "_add", broken)
    before = out.read_bytes()
    assert thermocline("pack", tiny_pack, "-o", out, "-q", "--force").code == INTERRUPTED
    assert os.listdir(tmp_path) == ["F.gguf"] and out.read_bytes() == before


def test_doctor_replaces_its_file_whole(
    tmp_path: Path, thermocline: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It wrote in place: a full disk or a kill left half of a hardware file."""
    out = tmp_path / "here.toml"
    out.write_text("the old one")
    seen: list[list[str]] = []
    replace = os.replace

    def replaced(new: Any, path: Any) -> None:
        if Path(path) == out:
            seen.append([out.read_text(), Path(new).read_text()])
        replace(new, path)

    monkeypatch.setattr(os, "replace", replaced)
    monkeypatch.setattr(this_machine, "SECONDS", 0.01)
    monkeypatch.setattr(hardware, "read_gbs", lambda *_: 20.0)
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 1 << 20)
    for name, value in {"LIMIT": 1 << 20, "SEQUENTIAL_S": 0.01, "RANDOM_S": 0.01}.items():
        monkeypatch.setattr(disk_speed, name, value)
    ran = thermocline("doctor", "--disk", tmp_path, "-o", out)
    assert ran.code == 0, ran.err
    assert seen == [["the old one", out.read_text()]] and json.loads(out.read_text())["cpu"]


@pytest.mark.parametrize("name", ["chat_template.jinja", "chat_template.json"])
def test_a_chat_template_outside_of_the_models_directory_is_not_packed(
    name: str, tmp_path: Path, thermocline: Run
) -> None:
    """A link in a stranger's archive copied any file of this machine into the pack."""
    model, secret = tmp_path / "model", tmp_path / "secret"
    tiny.hf_directory(model)
    secret.write_text("do not copy this")
    (model / name).symlink_to(secret)
    ran = thermocline("pack", model, "-o", tmp_path / "pack", "-q")
    assert ran.code == 3 and f"{name}: is a link out of the model's directory" in ran.err
    assert not (tmp_path / "pack").exists()

    (model / name).unlink()
    (model / "own").write_text("{{ messages }}")
    (model / name).symlink_to("own")
    assert thermocline("pack", model, "-o", tmp_path / "pack", "-q").code == 0


def test_links_into_hugging_faces_cache_are_followed(tmp_path: Path, thermocline: Run) -> None:
    cache = tmp_path / "models--org--name"
    snapshot, blobs = cache / "snapshots" / ("0" * 40), cache / "blobs"
    tiny.hf_directory(snapshot)
    blobs.mkdir()
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..") / ".." / "blobs" / path.name)
    assert thermocline("pack", snapshot, "-o", tmp_path / "pack", "-q").code == 0
    assert "chat_template.jinja" in json.loads((tmp_path / "pack" / "pack.json").read_text())["files"]
