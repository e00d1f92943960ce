"""PowerInfer's activation counts: flat tensors are read as torch wrote them, other pickles refused."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from thermocline.errors import BadFile
from thermocline.files.torch_zip import TorchFile, read_flat_tensor

pytestmark = pytest.mark.oracle

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_state_dict_is_read_as_torch_wrote_it(dtype: str, bias: bool, tmp_path: Path) -> None:
    class Predictor(torch.nn.Module):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(24, 8, bias=bias), torch.nn.Linear(8, 40, bias=bias)

    state = Predictor().to(getattr(torch, dtype)).state_dict()
    torch.save(state, tmp_path / "a.pt")
    torch.save(dict(state), tmp_path / "plain.pt")
    for name in ("a.pt", "plain.pt"):
        with TorchFile(tmp_path / name) as found:
            assert {n: t.shape for n, t in found.tensors.items()} == {
                n: tuple(t.shape) for n, t in state.items()
            }
            for key, t in state.items():
                assert np.array_equal(found.read_rows(key, 0, len(t)), t.float().numpy())
                assert np.array_equal(found.read_rows(key, 3, 7), t[3:7].float().numpy())


def test_a_state_dict_with_more_than_matrices_is_refused(tmp_path: Path) -> None:
    x, canary = torch.ones(8, 8), tmp_path / "canary"
    others = [
        {"a": x.T}, {"a": x[::2]}, {"a": x[1:]}, {"a": x, "b": Canary(canary)}, {"a": {"b": x}}, {1: x}, [x],
        {"a": x.bool()}, {"a": x.int()}, {"a": torch.nn.Parameter(x)}, {"a": 3}, torch.nn.Linear(2, 2), x,
        {"a": torch.ones(2, 2, 2)}, {"a": x.to_sparse()},
    ]  # fmt: skip
    for i, value in enumerate(others):
        torch.save(value, tmp_path / f"{i}.pt")
        with pytest.raises(BadFile, match="torch file of named matrices") as e:
            TorchFile(tmp_path / f"{i}.pt")
        assert "\n" not in str(e.value)
    torch.save({"a": torch.full((2, 2), float("nan"))}, tmp_path / "nan.pt")
    with (
        TorchFile(tmp_path / "nan.pt") as found,
        pytest.raises(BadFile, match="'a' holds a value that is not a fi"),
    ):
        found.read_rows("a", 0, 2)
    assert not canary.exists()


def test_a_damaged_state_dict_is_refused_or_read(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.pt", random.Random(1)
    torch.save({"fc1.weight": torch.ones(8, 4), "fc2.weight": torch.ones(6, 8)}, path)
    data = path.read_bytes()
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        with contextlib.suppress(BadFile), TorchFile(path) as found:
            for name, t in found.tensors.items():
                assert found.read_stored(name, 0, t.shape[0]).shape == t.shape


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
@pytest.mark.parametrize("n", [1, 200, 11008, 70000])
def test_a_flat_tensor_is_read_as_torch_wrote_it(dtype: str, n: int, tmp_path: Path) -> None:
    x = torch.arange(n, dtype=torch.int64).to(getattr(torch, dtype))
    torch.save(x, tmp_path / "a.pt")
    assert np.array_equal(read_flat_tensor(tmp_path / "a.pt"), x.double().numpy())


class Canary:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_everything_else_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    x, canary = torch.zeros(64), tmp_path / "canary"
    others = [x.view(8, 8), x[::2], x[8:], {"a": x}, [x], x.bool(), torch.nn.Parameter(x), Canary(canary), 3]
    for i, value in enumerate(others):
        path = tmp_path / f"{i}.pt"
        torch.save(value, path)
        with pytest.raises(BadFile, match="flat tensor"):
            read_flat_tensor(path)
    torch.save(x, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "pickle.pt").write_bytes(pickle.dumps(Canary(canary)))
    squeezed = io.BytesIO()
    with zipfile.ZipFile(squeezed, "w", zipfile.ZIP_DEFLATED) as z:
        z.writestr("a/data.pkl", bytes(1 << 20))
        z.writestr("a/data/0", bytes(1 << 20))
    (tmp_path / "bomb.pt").write_bytes(squeezed.getvalue())
    for name in ("old.pt", "pickle.pt", "bomb.pt"):
        with pytest.raises(BadFile, match="flat tensor"):
            read_flat_tensor(tmp_path / name)
    assert not canary.exists()


def test_a_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.pt", random.Random(0)
    torch.save(torch.arange(100.0), path)
    data = path.read_bytes()
    for _ in range(2000):
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 4))):
            damaged[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice((len(data), len(data), rng.randrange(len(data))))])
        with contextlib.suppress(BadFile):
            assert len(read_flat_tensor(path)) == 100
