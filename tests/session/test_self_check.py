"""A card is trusted once a child process has seen it compute a miniature of the model as the CPU does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from thermocline.convert import synthetic
from thermocline.convert.synthetic_weights import WeightStatistics
from thermocline.errors import Unsupported
from thermocline.machine import hardware
from thermocline.model.spec import check_spec
from thermocline.model.tensors import expected_tensors, optional_among
from thermocline.pack.pack import Pack
from thermocline.session import gpu
from thermocline.session.self_check import verdicts
from thermocline.session.self_check.miniature import Miniature
from thermocline.session.self_check.verdicts import CardVerdict, Setup

SETUP = Setup("NVIDIA X", "580.0", "2.11", "3.6", "0")
CARD = (0, SETUP.card, SETUP.driver)


@dataclass
class Pretended:
    """Decides which card the child has, and counts the children."""

    patch: pytest.MonkeyPatch
    log: Path

    def __call__(self, card: str) -> None:
        self.patch.setenv("CARD", card)

    @property
    def asked(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pretended:
    monkeypatch.setattr(verdicts, "WORKER", "pretended_cards")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("CARD_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Pretended(monkeypatch, tmp_path / "log")


@pytest.fixture
def pack(tiny_pack: Path) -> Pack:
    return Pack.open(tiny_pack)


def test_a_card_is_checked_anew_with_launches_that_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("THERMOCLINE_OVERLAP", raising=False)
    plain = Setup.of("NVIDIA X", "580.0")
    monkeypatch.setenv("THERMOCLINE_OVERLAP", "1")
    assert Setup.of("NVIDIA X", "580.0") != plain


# ---- the miniature


def unwritten(shape: str, format: str) -> Pack:
    _, spec, names = synthetic.read_shape(shape)
    stats, optional = WeightStatistics.of(spec, 0, None, False), optional_among(names.tensors, spec)
    model = synthetic.SyntheticModel(shape, stats, tuple(optional))
    return model.unwritten("x", *synthetic.formats_named(format, spec))


@pytest.mark.parametrize("shape", synthetic.shapes())
def test_every_shape_has_a_miniature(shape: str) -> None:
    """With a layer of each kind and all its formats, and so few weights that 2 s are enough for them."""
    pack = unwritten(shape, "q4_k_m")
    small = Miniature.of(pack)
    check_spec(small.spec, shape)
    kinds = {
        (pack.spec.mixer(i), pack.spec.window(i), pack.spec.ffn(i).active) for i in range(pack.spec.n_layers)
    }
    spec = small.spec
    assert {(spec.mixer(i), spec.window(i), spec.ffn(i).active) for i in range(spec.n_layers)} == kinds
    assert spec.n_experts <= 32 and spec.n_experts_active == pack.spec.n_experts_active
    assert sum(math.prod(t.shape) for t in expected_tensors(spec, "f16").values()) < 100e6
    assert set(small.matrix_formats) == {t.format for t in pack.tensors.values()} - {"f32"}
    assert Miniature.of(pack) == small


def test_layers_that_are_stored_otherwise_are_of_another_kind() -> None:
    assert Miniature.of(unwritten("llama-2-7b", "q8_0")).spec.n_layers == 1
    assert Miniature.of(unwritten("llama-2-7b", "q4_k_m")).spec.n_layers == 2  # down and v in q6_k or q4_k


# ---- verdicts


def test_a_card_that_agrees_is_trusted_and_remembered(card: Pretended, pack: Pack) -> None:
    card("1e-6")
    assert verdicts.why_not(pack, *CARD) is None
    assert verdicts.why_not(pack, *CARD) is None
    assert card.asked == ["1e-6 0"]


@pytest.mark.parametrize("changed", [(0, "NVIDIA Y", "580.0"), (0, "NVIDIA X", "581.0")])
def test_another_setup_is_checked_anew(
    changed: tuple[int, str, str], card: Pretended, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    card("1e-6")
    verdicts.why_not(pack, *CARD)
    verdicts.why_not(pack, *changed)
    assert len(card.asked) == 2


@pytest.mark.parametrize("name", ["_sources", "_version"])
def test_other_kernels_are_checked_anew(
    name: str, card: Pretended, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    card("1e-6")
    verdicts.why_not(pack, *CARD)
    monkeypatch.setattr(verdicts, name, lambda *_: "another")
    verdicts.why_not(pack, *CARD)
    assert len(card.asked) == 2


def test_another_format_is_checked_anew(card: Pretended) -> None:
    card("1e-6")
    for format in ("q8_0", "q4_0", "q8_0"):
        verdicts.why_not(unwritten("tinyllama-1.1b", format), *CARD)
    assert len(card.asked) == 2


@pytest.mark.parametrize(
    ("pretended", "said"),
    [
        (
            "0.3",
            "found other answers than the CPU's (NMSE of single tokens 0.3 (at most 0.0001), of a pro",
        ),
        ("crashes", "crashed (SIGSEGV; NVIDIA X, driver 580.0, "),
        ("raises", "crashed (RuntimeError: no such symbol; NVIDIA X, driver 580.0, "),
        ("hangs", "did not end (no answer within 0.5 s; NVIDIA X, driver 580.0, "),
    ],
)
def test_a_card_that_does_not_is_refused_until_its_verdict_is_removed(
    pretended: str, said: str, card: Pretended, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdicts, "LIMIT_S", 0.5 if pretended == "hangs" else 60.0)
    card(pretended)
    why = verdicts.why_not(pack, *CARD)
    assert (
        why is not None and why.startswith(f"its self-check {said}") and why == verdicts.why_not(pack, *CARD)
    )
    assert len(card.asked) == 1
    (kept,) = verdicts.directory().iterdir()
    assert why.endswith(f"; to check it again, remove {kept}")
    kept.unlink()
    card("1e-6")
    monkeypatch.setattr(verdicts, "LIMIT_S", 60.0)
    assert verdicts.why_not(pack, *CARD) is None


def test_an_error_that_may_pass_is_checked_again(card: Pretended, pack: Pack) -> None:
    card("full")
    why = verdicts.why_not(pack, *CARD)
    assert (
        why is not None
        and why.startswith("its self-check failed (its memory is full; ")
        and "remove" not in why
    )
    card("1e-6")
    assert verdicts.why_not(pack, *CARD) is None


def test_a_miniature_that_cannot_be_written_is_an_error_that_may_pass(
    card: Pretended, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Miniature, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Miniature, "write", full)
    why = verdicts.why_not(pack, *CARD)
    assert why is not None and "failed ([Errno 28] No space left on device; " in why


def test_a_cache_that_cannot_be_written_is_said_and_costs_a_check_each_time(
    card: Pretended, pack: Pack, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file is in its place")
    for pretended in ("1e-6", "0.3"):
        card(pretended)
        why = verdicts.why_not(pack, *CARD)
    assert why is not None and "found other answers" in why and "remove" not in why
    assert len(card.asked) == 2
    assert any("cannot be remembered, and runs each time: " in line for line in caplog.messages)


@pytest.mark.parametrize("damage", ["", "{", '{"outcome": "right"}', '{"outcome": "fine", "setup": {}}'])
def test_a_verdict_that_cannot_be_read_is_made_anew(damage: str, card: Pretended, pack: Pack) -> None:
    card("1e-6")
    verdicts.why_not(pack, *CARD)
    (kept,) = verdicts.directory().iterdir()
    kept.write_text(damage)
    assert verdicts.why_not(pack, *CARD) is None and len(card.asked) == 2


def test_an_unknown_outcome_is_no_verdict(card: Pretended, pack: Pack) -> None:
    card("1e-6")
    verdicts.why_not(pack, *CARD)
    (kept,) = verdicts.directory().iterdir()
    kept.write_text(kept.read_text().replace('"right"', '"fine"'))
    assert verdicts.why_not(pack, *CARD) is None and len(card.asked) == 2


# ---- who asks


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that seems fine; opening it would be an error here."""
    torch = pytest.importorskip("torch")
    board = hardware.GpuInfo(True, [SETUP.card], [1 << 34], "", SETUP.driver)
    monkeypatch.setattr(hardware, "gpu", lambda: board)
    monkeypatch.setattr(gpu, "unusable", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: SETUP.card)


@pytest.mark.oracle
@pytest.mark.usefixtures("usable")
def test_auto_leaves_it_to_the_cpu_and_a_number_is_refused(
    card: Pretended, tiny_pack: Path, thermocline: Callable[..., Any]
) -> None:
    card("crashes")
    argv = ["run", "-m", str(tiny_pack), "-c", "64", "-n", "2", "-t", "1", "Once"]
    ran = thermocline(*argv, "--gpu", "auto")
    assert ran.code == 0 and "the GPU is not used: its self-check crashed (SIGSEGV; NVIDIA X" in ran.err
    ran = thermocline(*argv, "--gpu", "0")
    assert ran.code == 6 and ran.err.startswith(
        "thermocline: --gpu 0: its self-check crashed (SIGSEGV; NVIDIA X"
    )
    assert ran.err.count("\n") == 1 and len(card.asked) == 1


@pytest.mark.oracle
@pytest.mark.usefixtures("usable")
def test_who_compares_answers_asks_for_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []
    monkeypatch.setattr(gpu, "_cuda", lambda index, vram: opened.append(index))
    gpu.find("0")
    with pytest.raises(Unsupported, match="--gpu 0: not today"):
        gpu.find("0", trust=lambda *_: "not today")
    assert opened == [0]


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that is there, and cannot be used now."""
    board = hardware.GpuInfo(True, [SETUP.card], [1 << 34], "", SETUP.driver)
    monkeypatch.setattr(hardware, "gpu", lambda: board)
    monkeypatch.setattr(gpu, "unusable", lambda *_: "torch is not installed")


@pytest.mark.usefixtures("idle")
def test_doctor_shows_what_holds_for_the_present_setup(
    card: Pretended, pack: Pack, thermocline: Callable[..., Any]
) -> None:
    card("0.3")
    verdicts.why_not(pack, *CARD)
    verdicts.why_not(pack, 0, SETUP.card, "an older driver")
    said = f"{Miniature.of(pack).label}: wrong (NMSE of single tokens 0.3 (at most "
    lines = [x for x in thermocline("doctor").out.splitlines() if x.startswith("gpu self-check")]
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.slow
@pytest.mark.usefixtures("idle")
def test_doctor_prints_verdicts_as_json(card: Pretended, pack: Pack, thermocline: Callable[..., Any]) -> None:
    assert "none yet: the first run" in thermocline("doctor").out
    card("crashes")
    verdicts.why_not(pack, *CARD)
    (check,) = json.loads(thermocline("doctor", "--json").out)["gpu_self_checks"]
    assert (check["outcome"], check["said"], check["setup"]["driver"]) == ("crashed", "SIGSEGV", SETUP.driver)


# ---- the comparison itself


def judged(pack: Pack) -> CardVerdict:
    return verdicts.check(Miniature.of(pack), SETUP, "stand-in")


@pytest.mark.oracle
@pytest.mark.parametrize("shape", ["tinyllama-1.1b", "qwen3-30b-a3b", "opt-6.7b"])
@pytest.mark.parametrize("format", ["f16", "q4_0"])
def test_the_stand_in_agrees_with_the_cpu(shape: str, format: str) -> None:
    found = judged(unwritten(shape, format))
    assert found.outcome == "right", found


@pytest.mark.oracle
@pytest.mark.slow
@pytest.mark.parametrize("format", ["f16", "q4_k_m"])
def test_the_stand_in_agrees_in_many_shapes(format: str, tmp_path: Path) -> None:
    """Every fifth: ten seconds and more. Here the process has torch already."""
    from thermocline.session.self_check import comparison

    for shape in list(synthetic.shapes())[::5]:
        small = Miniature.of(unwritten(shape, format))
        small.write(tmp_path / shape)
        found = gpu.find(gpu.STAND_IN)
        assert found is not None
        nmse = comparison.compared(Pack.open(tmp_path / shape), found)
        found.device.close()
        assert all(2 * x <= most for x, most in zip(nmse, verdicts.limits(small), strict=True)), shape


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("kernel", "format"),
    [
        *((kernel, "f16") for kernel in ("norm", "attention", "gate_up", "down")),
        *((kernel, "q4_0") for kernel in ("norm", "matmul", "gate_up", "down")),
    ],
)
def test_a_kernel_that_is_a_little_wrong_is_found(kernel: str, format: str, card: Pretended) -> None:
    """By half, in 32 columns."""
    card(kernel)
    found = judged(unwritten("opt-6.7b", format))
    assert found.outcome == "wrong", found
