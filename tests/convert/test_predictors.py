"""Predictors that a model's makers trained come with it: from its checkpoint, or torch's files beside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kept_twins
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from thermocline.cli import main
from thermocline.convert.importer import pack
from thermocline.engine.engine import Engine, EngineSettings
from thermocline.engine.sampler import SamplingParams
from thermocline.errors import BadFile, ThermoclineError, Unsupported, UsageError
from thermocline.ops import reference
from thermocline.ops.interface import F32, FFNStats
from thermocline.pack.pack import Pack, inspect
from thermocline.pack.predictor import open_predictors
from thermocline.session import weights

EXPERTS, WIDTH, DIM, RANK = 4, 112, 64, 32


def matrices(seed: int, *names: str) -> dict[str, F32]:
    rng = np.random.default_rng(seed)
    shapes = (RANK, DIM), (WIDTH, RANK)
    return {n: rng.standard_normal(s, np.float32) for n, s in zip(names, shapes, strict=True)}


def of_expert(layer: int, expert: int) -> dict[str, F32]:
    stem = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.predictor"
    return matrices(100 * layer + expert, f"{stem}.fc1.weight", f"{stem}.fc2.weight")


@pytest.fixture
def turbosparse(tmp_path: Path) -> Path:
    """TurboSparse-Mixtral's repository, small: a predictor in every expert."""
    path = kept_twins.write("turbosparse_mixtral", tmp_path / "turbosparse_mixtral")
    own = load_file(path / "model.safetensors")
    for layer in range(3):
        for expert in range(EXPERTS):
            own |= of_expert(layer, expert)
    save_file(own, path / "model.safetensors", {"format": "pt"})
    return path


def test_every_expert_keeps_the_predictor_of_its_own(turbosparse: Path, tmp_path: Path) -> None:
    pack(turbosparse, tmp_path / "p", "f32")
    made = Pack.open(tmp_path / "p")
    assert made.predictor is not None and made.predictor.each and made.predictor.ranks == (RANK,) * 3
    assert inspect(made)["predictor"] == {"ranks": (RANK,) * 3, "threshold": 0.0, "each": True}
    found = open_predictors(made)
    assert found is not None
    for layer in range(3):
        p = found.layer(layer)
        assert p is not None and p.experts == EXPERTS
        x = np.random.default_rng(layer).standard_normal((5, DIM), np.float32)
        scores = []
        for e in range(EXPERTS):
            first, second = of_expert(layer, e).values()
            scores.append(np.maximum(x @ first.T, 0) @ second.T)
            assert (p.expert(e).predicted(x) == (scores[-1] >= 0)).mean() > 0.97  # inputs are rounded
        assert (p.predicted(x) == (np.concatenate(scores, axis=1) >= 0)).mean() > 0.97


def test_an_expert_asks_its_own_predictor(turbosparse: Path, tmp_path: Path) -> None:
    """Natively as in the reference, which reads the neurons that it names."""
    pack(turbosparse, tmp_path / "p", "f32")
    made = Pack.open(tmp_path / "p")
    with open_predictors(made) as predictors:  # type: ignore[union-attr]
        loaded = weights.load(made, threads=2, predictors=predictors)
        named = [predictors.layer(i) for i in range(3)]
    x = np.random.default_rng(7).standard_normal((1, DIM), np.float32)
    for layer, p in zip(loaded.weights.layers, named, strict=True):
        assert p is not None
        bound, stats, y = loaded.ops.bind_ffn(made.spec, layer), FFNStats(), x.copy()
        loaded.ops.ffn_add(y, x, bound, "predict", stats)
        assert layer.ffn_norm is not None and layer.router is not None
        h = reference.norm(x, layer.ffn_norm.weight, None, made.spec.norm_eps, "rms")
        logits = loaded.ops.matmul(layer.router.weight, h, None)[0]
        chosen = np.argsort(-logits)[:2]
        assert stats.predicted == sum(int(p.expert(int(e)).predicted(h).sum()) for e in chosen)
    settings = EngineSettings(context=64, sparsity="predict")
    engine = Engine(made.spec, loaded.weights, loaded.ops, settings)
    request = engine.submit([1, 2, 3], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
    while engine.step():
        pass
    share = request.completion().figures.predicted_fraction
    assert share is not None and 0.1 < share < 0.4  # about half of the two experts' of four


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    own = load_file(path / "model.safetensors")
    change(own)
    save_file(own, path / "model.safetensors", {"format": "pt"})


STEM = "model.layers.1.block_sparse_moe.experts.2.predictor"
BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "an expert without": (
        lambda t: [t.pop(f"{STEM}.{n}.weight") for n in ("fc1", "fc2")],
        "expert 2 of layer 1 has no predictor, others have",
    ),
    "half a predictor": (lambda t: t.pop(f"{STEM}.fc1.weight"), "is not two matrices"),
    "three matrices": (
        lambda t: t.update({f"{STEM}.fc3.weight": np.zeros((4, 4), np.float32)}),
        "is not two matrices",
    ),
    "a bias": (
        lambda t: t.update({f"{STEM}.fc2.bias": np.zeros(WIDTH, np.float32)}),
        "predictor.fc2.bias' does not belong to this model",
    ),
    "another rank": (
        lambda t: t.update(
            {f"{STEM}.fc1.weight": np.zeros((8, DIM), np.float32)}
            | {f"{STEM}.fc2.weight": np.zeros((WIDTH, 8), np.float32)}
        ),
        r"layer 1 have ranks \[8, 32\]",
    ),
    "ranks that differ": (
        lambda t: t.update({f"{STEM}.fc1.weight": np.zeros((8, DIM), np.float32)}),
        r"layer 1 have ranks \[8, 32\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_predictors_that_are_not_understood_are_refused(case: str, turbosparse: Path, tmp_path: Path) -> None:
    change, said = BAD[case]
    changed(turbosparse, change)
    with pytest.raises((BadFile, Unsupported), match=said) as e:
        pack(turbosparse, tmp_path / "p", "f32")
    assert "\n" not in str(e.value)


# ---- files of torch


oracle = pytest.mark.oracle


def torch() -> Any:
    return pytest.importorskip("torch")


def torch_files(directory: Path, layers: int = 3, **config: Any) -> Path:
    directory.mkdir()
    for i in range(layers):
        own = matrices(i, "fc1.weight", "fc2.weight")
        state = {name: torch().from_numpy(x).half() for name, x in own.items()}
        torch().save(state, directory / f"model_{i}.pt")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@oracle
@pytest.mark.parametrize("name", ["llama_relu_tied", "bamboo"])
@pytest.mark.parametrize("format", ["f32", "q8_0", "q5_0"])
def test_files_of_predictors_are_packed_with_their_model(name: str, format: str, tmp_path: Path) -> None:
    path, files = (
        kept_twins.write(name, tmp_path / name),
        torch_files(tmp_path / "files", sparse_threshold=0.5),
    )
    argv = ["pack", path, "-o", tmp_path / "p", "--format", format, "--predictors", files, "-q"]
    assert main.main([str(a) for a in argv]) == 0
    made = Pack.open(tmp_path / "p")
    assert made.predictor is not None and (made.predictor.threshold, made.predictor.each) == (0.5, False)
    found = open_predictors(made)
    p = None if found is None else found.layer(2)
    assert p is not None and p.first is not None and p.second is not None
    own = matrices(2, "fc1.weight", "fc2.weight")
    for ours, theirs in ((p.first, own["fc1.weight"]), (p.second, own["fc2.weight"])):
        error = float(((ours - theirs) ** 2).mean())
        assert error < {"f32": 1e-6, "q8_0": 1e-3, "q5_0": 1e-2}[format]


def three(change: Callable[[Path], Any]) -> Callable[[Path], Path]:
    def make(where: Path) -> Path:
        change(torch_files(where / "files"))
        return where / "files"

    return make


def saved(at: Path, **tensors: Any) -> None:
    torch().save({name.replace("_", "."): x for name, x in tensors.items()}, at / "model_1.pt")


BAD_FILES: dict[str, tuple[Callable[[Path], Path], type[ThermoclineError], str]] = {
    "no directory": (lambda w: w / "files", UsageError, "is not a directory of predictors"),
    "a layer too few": (three(lambda d: (d / "model_2.pt").unlink()), BadFile, "has 2 files model_N.pt"),
    "a layer too many": (
        three(lambda d: (d / "model_3.pt").write_bytes(b"")), BadFile, "has 4 files model_N.pt",
    ),
    "a pickle": (
        three(lambda d: (d / "model_1.pt").write_bytes(b"\x80\x02}.")), BadFile, "other pickles are not read",
    ),
    "other names": (
        three(lambda d: saved(d, up_weight=torch().ones(2, 2))), Unsupported, "not fc1.weight and fc2.weight",
    ),
    "another model's": (
        three(lambda d: saved(d, fc1_weight=torch().ones(8, 60), fc2_weight=torch().ones(WIDTH, 8))),
        BadFile,
        "another model's",
    ),
    "not a number": (
        three(lambda d: saved(d, fc1_weight=torch().ones(8, 64) * np.nan, fc2_weight=torch().ones(112, 8))),
        BadFile,
        "model_1.pt: tensor 'fc1.weight' holds a value that is not a finite number",
    ),
    "threshold a text": (
        three(lambda d: (d / "config.json").write_text('{"sparse_threshold": "0"}')),
        BadFile,
        "sparse_threshold is '0', not a number",
    ),
}  # fmt: skip


@oracle
@pytest.mark.parametrize("case", BAD_FILES)
def test_files_that_are_no_predictors_are_refused(case: str, tmp_path: Path) -> None:
    make, error, said = BAD_FILES[case]
    model = kept_twins.write("bamboo", tmp_path / "bamboo")
    with pytest.raises(error, match=said) as e:
        pack(model, tmp_path / "p", "f32", predictors=make(tmp_path))
    assert "\n" not in str(e.value) and not (tmp_path / "p").exists()


@oracle
def test_predictors_in_files_are_for_what_can_have_them(turbosparse: Path, tmp_path: Path) -> None:
    files = torch_files(tmp_path / "files")
    dense = kept_twins.write("llama", tmp_path / "llama")
    for model in (dense, turbosparse):
        with pytest.raises(UsageError, match="for models with ReLU and without experts"):
            pack(model, tmp_path / "p", "f32", predictors=files)
