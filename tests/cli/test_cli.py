"""The command line as a person and as a script meet it: exit codes, streams, figures, signals, pipes."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from build_docs import difference

import thermocline as package
from thermocline import LLM
from thermocline.cli import console, main
from thermocline.machine import hardware
from thermocline.machine.disk_speed import DiskSpeed

Run = Callable[..., Any]

# The contract that other tools rely on.
RUN_KEYS = {
    *(
        "text",
        "token_ids",
        "prompt_tokens",
        "tokens",
        "tokens_per_s",
        "prompt_tokens_per_s",
        "bytes_per_token",
    ),
    *("gb_per_s", "roof_gb_per_s", "roof_share", "active_fraction", "sparsity", "isa", "threads", "load_s"),
    *("first_token_s", "peak_rss_bytes", "logits_hash", "seed", "finish_reason", "model", "rows_fraction"),
    "huge_page_bytes",
}


def start(*argv: str | Path, cwd: Path, **popen: Any) -> subprocess.Popen[bytes]:
    """The command line in a process of its own, from a directory that has no source tree in it."""
    home = str(Path(package.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "thermocline", *map(str, argv)]
    return subprocess.Popen(command, cwd=cwd, env=env, stderr=subprocess.PIPE, **popen)


def greedy(pack: Path, *more: str, n: int = 5) -> list[str]:
    return ["run", "-m", str(pack), "-n", str(n), "--temp", "0", "--ignore-eos", "-t", "1", *more]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


# ---- what is wrong with a model: one line, the right code, at once, nothing on stdout


def lfs_pointer(path: Path) -> None:
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:abc\nsize 5\n")


def html_page(path: Path) -> None:
    path.write_text("<!DOCTYPE html><html><body>404</body></html>")


def zip_file(path: Path) -> None:
    path.write_bytes(b"PK\x03\x04" + bytes(100))


def empty_file(path: Path) -> None:
    path.touch()


def empty_directory(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def gguf(path: Path) -> None:
    path.write_bytes(b"GGUF" + bytes(100))


def pickles(path: Path) -> None:
    tiny.hf_directory(path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def lfs_pointer_inside(path: Path) -> None:
    tiny.hf_directory(path)
    lfs_pointer(path / "model.safetensors")


def unknown_config_key(path: Path) -> None:
    tiny.hf_directory(path, secret_sauce=3)


def missing(path: Path) -> None:
    pass


BAD_MODELS = {
    missing: 4,
    lfs_pointer: 3,
    html_page: 3,
    zip_file: 3,
    empty_file: 3,
    empty_directory: 3,
    fifo: 3,
    gguf: 6,
    pickles: 6,
    lfs_pointer_inside: 3,
    unknown_config_key: 6,
}


@pytest.mark.parametrize("command", ["run", "pack", "inspect", "verify"])
@pytest.mark.parametrize(("make", "code"), BAD_MODELS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_a_bad_model_is_one_line_at_once(
    make: Callable[[Path], None], code: int, command: str, tmp_path: Path, thermocline: Run
) -> None:
    model = tmp_path / "model"
    make(model)
    argv = {"run": ["-m", model, "hello"], "pack": [model, "-o", tmp_path / "out"]}.get(command, [model])
    if command in ("inspect", "verify") and (model / "config.json").exists():
        code = 2  # not a pack, whatever else is wrong with it
    begin = time.process_time()
    ran = thermocline(command, *argv)
    assert time.process_time() - begin < 10
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert ran.err.startswith("thermocline: ") and ran.err.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] in ([], ["model"]), "something half-written stayed"


def test_damaged_weights_are_refused_by_run_and_verify(
    tiny_pack: Path, tmp_path: Path, thermocline: Run
) -> None:
    copy = shutil.copytree(tiny_pack, tmp_path / "pack")
    with open(copy / "weights.bin", "r+b") as f:
        f.seek(70_000)
        byte = f.read(1)
        f.seek(70_000)
        f.write(bytes([byte[0] ^ 1]))
    assert thermocline("run", "-m", copy, "hello").code == 3
    ran = thermocline("verify", copy, "--json")
    said = json.loads(ran.out)
    assert (ran.code, said["ok"], len(said["problems"])) == (3, False, 1)


# ---- what is wrong with a request


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "no prompt"),
        (["hello", "-p", "again"], "given twice"),
        (["hello", "-f", "x"], "choose one"),
        (["hello", "world"], "needs quotes"),
        (["hello", "--nonsense"], "--nonsense"),
        (["hello", "--format", "q3_x"], "q8_0"),
        (["hello", "-c", "999999"], "32768"),
        (["hello", "-c", "4"], "has 5 tokens, the context holds 4"),
        (["hello", "--sparsity", "maybe"], "exact, predict, off"),
        (["hello", "-n"], "expected one argument"),
        (["hello", "--logit-bias", "9999+1"], "9999"),
        (["hello", "--temp", "warm"], "--temp must be a number"),
    ],
)
def test_wrong_usage_is_2_and_says_why(argv: list[str], said: str, tiny_pack: Path, thermocline: Run) -> None:
    ran = thermocline("run", "-m", tiny_pack, *argv)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err and ran.err.count("\n") == 1


def test_no_command_and_an_unknown_one_are_wrong_usage(thermocline: Run) -> None:
    assert thermocline().code == 2
    assert "nonsense" in thermocline("nonsense").err


def test_a_wrong_variable_is_named_and_an_unknown_one_warned_about(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    monkeypatch.setenv("THERMOCLINE_TMEP", "1")
    assert "THERMOCLINE_TMEP is not an option" in thermocline("inspect", tiny_pack).err
    monkeypatch.setenv("THERMOCLINE_TOP_K", "many")
    ran = thermocline("run", "-m", tiny_pack, "hello")
    assert ran.code == 2 and "THERMOCLINE_TOP_K must be a whole number" in ran.err


def test_prompt_files(tiny_pack: Path, tmp_path: Path, thermocline: Run) -> None:
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    assert thermocline("run", "-m", tiny_pack, "-f", tmp_path / "absent").code == 4
    assert thermocline("run", "-m", tiny_pack, "-f", tmp_path / "latin").code == 3
    assert thermocline("run", "-m", tiny_pack, "-f", tmp_path).code == 4
    (tmp_path / "good").write_text("Once")
    assert thermocline(*greedy(tiny_pack), "-f", tmp_path / "good").out.startswith("Once")


def test_an_unwritable_place_is_an_io_error(tiny_hf: Path, tmp_path: Path, thermocline: Run) -> None:
    (tmp_path / "file").touch()
    assert thermocline("pack", tiny_hf, "-o", tmp_path / "file" / "pack").code == 4
    assert thermocline("run", "-m", tiny_hf, "--cache-dir", tmp_path / "file" / "c", "hi").code == 4


# ---- run


def test_run_json_has_the_contract_and_plausible_figures(tiny_pack: Path, thermocline: Run) -> None:
    ran = thermocline(*greedy(tiny_pack, "Once", "--json", n=20))
    assert ran.code == 0, ran.err
    figures = json.loads(ran.out)
    assert ran.out.count("\n") == 1
    assert set(figures) >= RUN_KEYS
    assert (figures["prompt_tokens"], figures["tokens"], len(figures["token_ids"])) == (4, 20, 20)
    assert figures["finish_reason"] == "length"
    assert figures["gb_per_s"] == pytest.approx(figures["bytes_per_token"] * figures["tokens_per_s"] / 1e9)
    assert 0 < figures["active_fraction"] < 1
    assert figures["from_cache"] is True and figures["roof_share"] is None
    assert figures["first_token_s"] > 0 and figures["peak_rss_bytes"] > 1 << 20
    assert re.fullmatch("[0-9a-f]{8,}", figures["logits_hash"])


def test_the_reference_lists_the_keys_of_the_json_as_they_are(tiny_pack: Path, thermocline: Run) -> None:
    reference = (Path(__file__).parents[2] / "docs/reference/json.md").read_text()
    section = reference.split("\n## `run`\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    said = {key for row in rows for key in re.findall("`(.+?)`", row)}
    assert said == set(json.loads(thermocline(*greedy(tiny_pack, "Once", "--json", "--logprobs", "1")).out))


def test_text_goes_to_stdout_and_the_figures_to_stderr(tiny_pack: Path, thermocline: Run) -> None:
    text = json.loads(thermocline(*greedy(tiny_pack, "Once", "--json")).out)["text"]
    ran = thermocline(*greedy(tiny_pack, "Once"))
    assert ran.out == f"Once{text}\n"
    for part in ("5 tokens", "tok/s", "from cache", "MB/token", "of neurons active", "exact", "1 thread"):
        assert part in ran.err
    assert ran.err.count("\n") == 1
    assert thermocline(*greedy(tiny_pack, "Once", "--no-display-prompt", "-q")).out == f"{text}\n"


def test_a_terminal_is_shown_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    console.emit("a\x1b[2J\tb\n")
    assert isinstance(sys.stdout, io.StringIO)
    assert sys.stdout.getvalue() == "a\N{SYMBOL FOR ESCAPE}[2J\tb\n"


def test_a_bar_shows_only_on_a_terminal_and_only_where_it_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(stderr: io.StringIO, seconds: float, *, quiet: bool = False) -> str:
        clock = itertools.count(0, seconds)
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        monkeypatch.setattr(sys, "stderr", stderr)
        with console.ProgressBar(quiet=quiet) as progress:
            for done in range(5):
                progress.at("packing", done, 4)
            progress.at("loading", 4, 4)
        return stderr.getvalue()

    assert "packing" in shown(Terminal(), 1) and "loading" not in shown(Terminal(), 1)
    assert shown(Terminal(), 0.01) == shown(Terminal(), 1, quiet=True) == shown(io.StringIO(), 1) == ""


def test_quiet_says_nothing_on_stderr(tiny_pack: Path, thermocline: Run) -> None:
    assert thermocline(*greedy(tiny_pack, "Once", "--quiet")).err == ""


def test_figures_beyond_the_cache_are_a_share_of_the_roof(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 1000)
    monkeypatch.setattr(LLM, "read_gbs", lambda llm: 1.0)
    ran = thermocline(*greedy(tiny_pack, "Once", "--json", n=20))
    figures = json.loads(ran.out)
    assert figures["roof_share"] == pytest.approx(figures["gb_per_s"])
    assert "% of 1 measured)" in ran.err


def test_the_roof_is_measured_on_the_weights_and_takes_no_memory(
    monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 1000)
    monkeypatch.setattr(hardware, "read_gbs", lambda *_: pytest.fail("measured on memory of its own"))
    ran = thermocline("run", "Once", "-n", "8", "--temp", "0", "-t", "1", "--json")
    figures = json.loads(ran.out)
    assert figures["roof_gb_per_s"] > 0.1
    assert figures["roof_share"] == pytest.approx(figures["gb_per_s"] / figures["roof_gb_per_s"])


def test_weights_in_the_cache_keep_nobody_waiting_for_a_roof(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    monkeypatch.setattr(hardware, "cache_bytes", lambda: 1 << 40)
    monkeypatch.setattr(LLM, "read_gbs", lambda llm: pytest.fail("measured"))
    ran = thermocline(*greedy(tiny_pack, "Once", "--json"))
    assert json.loads(ran.out)["roof_gb_per_s"] is None and "from cache" in ran.err


def test_a_run_keeps_to_its_memory_to_the_end_and_tells_its_true_peak() -> None:
    """The roof's own buffer of 512 MiB was neither in the plan nor in the peak: 633 MiB for 154 allowed."""
    code = (
        "import sys; from thermocline.machine import hardware; hardware.cache_bytes = lambda *_: 4 << 20\n"
        "from thermocline.cli.main import main; code = main(sys.argv[1:])\n"
        "print(hardware.peak_rss_bytes(), file=sys.stderr); sys.exit(code)"
    )
    asked = ["run", "Once", "-n", "8", "--temp", "0", "--json", "-q", "--ram", "0.1"]
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *asked], capture_output=True, text=True, check=True
    )
    figures, peak = json.loads(ran.stdout), int(ran.stderr)
    assert figures["roof_gb_per_s"] > 0
    assert figures["peak_rss_bytes"] == pytest.approx(peak, rel=0.02) and peak <= 0.1 * 2**30


def test_sparsity_does_not_change_the_answer(tiny_pack: Path, thermocline: Run) -> None:
    exact, off = (
        json.loads(thermocline(*greedy(tiny_pack, "Once", "--json", "--sparsity", s, n=40)).out)
        for s in ("exact", "off")
    )
    assert exact["token_ids"] == off["token_ids"] and exact["logits_hash"] == off["logits_hash"]
    assert exact["rows_fraction"] < off["rows_fraction"] == 1


def test_the_same_seed_gives_the_same_text(tiny_pack: Path, thermocline: Run) -> None:
    def text(seed: int) -> str:
        out = thermocline("run", "-m", tiny_pack, "Once", "-n", "20", "--json", "-s", str(seed)).out
        return str(json.loads(out)["text"])

    assert text(7) == text(7) != text(8)


def test_variables_reach_the_engine(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    for name, value in {"MODEL": str(tiny_pack), "N_PREDICT": "3", "IGNORE_EOS": "on", "JSON": "1"}.items():
        monkeypatch.setenv(f"THERMOCLINE_{name}", value)
    assert json.loads(thermocline("run", "Once").out)["tokens"] == 3


def test_the_prompt_may_come_from_stdin(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Zoë".encode())))
    assert thermocline(*greedy(tiny_pack, "-p", "-")).out.startswith("Zoë")


def test_the_likeliest_of_several_answers_is_one_that_its_seed_gives_alone(
    tiny_pack: Path, thermocline: Run
) -> None:
    drawn = ("run", "-m", str(tiny_pack), "Once", "-n", "12", "--temp", "1.5", "-q")
    ran = thermocline(*drawn, "--seed", "5", "--n-best", "4", "--json")
    figures = json.loads(ran.out)
    answers = figures["answers"]
    assert sorted(a["seed"] for a in answers) == [5, 6, 7, 8]
    means = [a["mean_logprob"] for a in answers]
    assert means == sorted(means, reverse=True) and len(set(means)) == 4
    assert (figures["text"], figures["seed"]) == (answers[0]["text"], answers[0]["seed"])
    assert "logprobs" not in figures
    for a in answers:
        alone = json.loads(thermocline(*drawn, "--seed", str(a["seed"]), "--json", "--logprobs", "0").out)
        assert alone["text"] == a["text"]
        each = [t["logprob"] for t in alone["logprobs"]]
        assert abs(sum(each) / len(each) - a["mean_logprob"]) < 1e-6
    assert thermocline(*drawn, "--seed", "5", "--n-best", "4").out == "Once" + answers[0]["text"] + "\n"


def test_logprobs_are_one_per_token(tiny_pack: Path, thermocline: Run) -> None:
    figures = json.loads(thermocline(*greedy(tiny_pack, "Once", "--json", "--logprobs", "2")).out)
    assert [p["token_id"] for p in figures["logprobs"]] == figures["token_ids"]
    assert all(p["logprob"] <= 0 and len(p["top"]) == 2 for p in figures["logprobs"])


def test_a_hugging_face_directory_is_packed_once(tiny_hf: Path, tmp_path: Path, thermocline: Run) -> None:
    cache = tmp_path / "cache"
    first = thermocline(*greedy(tiny_hf, "Once", "--cache-dir", str(cache)))
    (packed,) = cache.iterdir()
    inode = packed.stat().st_ino
    assert thermocline(*greedy(tiny_hf, "Once", "--cache-dir", str(cache))).out == first.out
    assert [p.stat().st_ino for p in cache.iterdir()] == [inode]


# ---- the other commands


def test_pack_inspect_verify(tiny_hf: Path, tmp_path: Path, thermocline: Run) -> None:
    out = tmp_path / "out"
    assert thermocline("pack", tiny_hf, "-o", out, "--format", "q4_0", "--json").code == 0
    assert thermocline("pack", tiny_hf, "-o", out).code == 2
    assert thermocline("pack", tiny_hf, "-o", out, "--force").code == 0
    again = thermocline("pack", out, "-o", f"{out}2", "--format", "q8_0")
    assert again.code == 2 and "is a pack already" in again.err and again.err.count("\n") == 1
    about = json.loads(thermocline("inspect", out, "--json").out)
    assert (about["weight_format"], about["spec"]["dim"]) == ("q8_0", tiny.DIM)
    assert "ffn_dim" in thermocline("inspect", out).out
    assert json.loads(thermocline("verify", "-m", out, "--json").out)["ok"] is True
    assert thermocline("verify", out).out.startswith(f"{out}: ok")


def test_doctor_tells_a_person_and_a_program(monkeypatch: pytest.MonkeyPatch, thermocline: Run) -> None:
    unmeasured = DiskSpeed("/here", 1 << 30, why="not now")
    monkeypatch.setattr(hardware, "measure_disk", lambda path, threads: unmeasured)
    told = json.loads(thermocline("doctor", "--json").out)
    assert difference("doctor", told) == []
    assert told["isa"]["chosen"] in told["isa"]["levels"]
    assert told["memory"]["read_gbs"] > 0 and told["gpu"]["why"]
    text = thermocline("doctor").out
    for word in ("kernels", "threads", "memory read", "disk", "gpu", "advice"):
        assert re.search(f"^{word} ", text, re.MULTILINE)


def test_version_and_help_are_on_stdout(tmp_path: Path) -> None:
    """They are quick, too: tests/test_house.py holds that nothing heavy is imported for them."""
    for given, said in ("--help", "run"), ("--version", f"thermocline {package.__version__}\n"):
        process = start(given, cwd=tmp_path, stdout=subprocess.PIPE)
        out = process.communicate()[0].decode()
        assert process.returncode == 0 and said in out


# ---- signals and pipes


def test_ctrl_c_ends_a_generation_cleanly(tiny_pack: Path, tmp_path: Path) -> None:
    endless = greedy(tiny_pack, "Once", "-c", "32768", n=-1)
    process = start(*endless, cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.read(4) == b"Once"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert out.endswith(b"\n")
    assert b"cancelled" in err and b"Traceback" not in err and err.count(b"\n") == 1


def test_ctrl_c_keeps_what_there_is_in_the_json(
    tiny_pack: Path, monkeypatch: pytest.MonkeyPatch, thermocline: Run
) -> None:
    from thermocline.llm import Stream

    after, original = [3], Stream.__next__

    def interrupted(self: Stream) -> Any:
        after[0] -= 1
        if after[0] == 0:
            signal.raise_signal(signal.SIGINT)
        return original(self)

    monkeypatch.setattr(Stream, "__next__", interrupted)
    ran = thermocline(*greedy(tiny_pack, "Once", "--json", n=50))
    figures = json.loads(ran.out)
    assert (ran.code, figures["finish_reason"], figures["tokens"]) == (130, "cancelled", 3)


@pytest.mark.slow
def test_the_suite_itself_may_run_with_ctrl_c_ignored(tmp_path: Path) -> None:
    """As `nohup sh -c pytest &` starts it: the two tests above then hung and failed."""
    tests = [f"{__file__}::{name}" for name in (
        "test_ctrl_c_ends_a_generation_cleanly", "test_ctrl_c_keeps_what_there_is_in_the_json",
    )]  # fmt: skip
    home = str(Path(package.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-P", "-m", "pytest", "-n0", "-p", "no:cacheprovider", *tests]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ran = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ran.returncode == 0 and "2 passed" in ran.stdout, ran.stdout


def test_a_reader_that_goes_away_ends_it_quietly(tiny_pack: Path, tmp_path: Path) -> None:
    process = start(*greedy(tiny_pack, "Once", n=2000), cwd=tmp_path, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert process.wait(timeout=20) == main.BROKEN_PIPE


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_an_io_error(tiny_pack: Path, tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        process = start("inspect", tiny_pack, cwd=tmp_path, stdout=full)
        _, err = process.communicate()
    assert process.returncode == 4
    assert b"No space left" in err and err.count(b"\n") == 1


def test_a_closed_stdout_is_an_io_error(tiny_pack: Path, tmp_path: Path) -> None:
    process = start("inspect", tiny_pack, cwd=tmp_path, preexec_fn=lambda: os.close(1))
    _, err = process.communicate()
    assert process.returncode == 4 and err.count(b"\n") == 1
