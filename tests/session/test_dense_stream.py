"""FFNs whose rows come from disk in a stream give the bits of memory: whatever is held, late, read ahead."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bad_reads
import numpy as np
import pytest
from numpy.typing import NDArray

from thermocline import _native
from thermocline.errors import BadFile, IOFailure
from thermocline.model import block_layout, quant
from thermocline.model.modes import SPARSITIES
from thermocline.model.spec import ACTIVATIONS
from thermocline.ops.cpu import disk_error

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
LAYERS = 3
PIECE, ROWS = 65536, 32
PARTS = ("gate", "up", "down")


def state(path: Path) -> tuple[str, tuple[int, int, int, int]]:
    s = os.stat(path)
    return str(path), (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


@dataclass(frozen=True)
class Stored:
    """One matrix: planar rows, and where they begin in the file that has them."""

    format: str
    planar: U8  # [rows, bytes]
    columns: int
    part: int
    at: int

    @property
    def rows(self) -> int:
        return int(self.planar.shape[0])

    @property
    def stride(self) -> int:
        return int(self.planar.shape[1])


@dataclass(frozen=True)
class Model:
    """Random FFNs, as a GGUF (of perhaps two parts) has them, or as a pack has them."""

    layers: tuple[tuple[Stored, ...], ...]  # gate, perhaps up, down
    files: tuple[Path, ...]
    dim: int
    neurons: int
    packed: bool
    bias: bool
    sub_norm: bool


def model(
    directory: Path,
    formats: Sequence[str] = ("q4_0", "q4_0", "q4_0"),
    *,
    dim: int = 256,
    neurons: int = 512,
    parts: int = 1,
    packed: bool = False,
    gated: bool = True,
    bias: bool = False,
    sub_norm: bool = False,
) -> Model:
    rng = np.random.default_rng(5)
    shapes = ((neurons, dim), (neurons, dim), (dim, neurons))
    chosen = [(f, s) for i, (f, s) in enumerate(zip(formats, shapes, strict=True)) if gated or i != 1]
    contents = [bytearray(rng.bytes(77)) for _ in range(parts)]  # matrices begin anywhere
    layers = []
    for i in range(LAYERS):
        part, matrices = i % parts, []
        for fmt, (rows, columns) in chosen:
            values = rng.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)
            planar = quant.encode(fmt, values)
            stored = planar if packed else block_layout.to_gguf(fmt, planar)
            matrices.append(Stored(fmt, planar.reshape(rows, -1), columns, part, len(contents[part])))
            contents[part] += stored.tobytes()
        layers.append(tuple(matrices))
    files = []
    for i, content in enumerate(contents):  # the file ends with a matrix, at no multiple of anything
        files.append(directory / f"model-{i}.gguf")
        files[-1].write_bytes(content)
    return Model(tuple(layers), tuple(files), dim, neurons, packed, bias, sub_norm)


@dataclass
class Bound:
    """All layers in memory, or the first rows of them."""

    ffns: list[_native.FFN]
    context: _native.Context
    stream: _native.DenseStream | None = None

    def run(self, h: F32, record: bool = False) -> bytes:
        """One step: every layer adds to the stream."""
        x, found = h.copy(), b""
        for f in self.ffns:
            neurons = np.zeros((len(h), f.neurons), np.float32) if record else None
            counts = self.context.ffn_add(x, x, f, SPARSITIES["exact"], neurons)
            found += x.tobytes() + (b"" if neurons is None else neurons.tobytes()) + str(counts).encode()
        return found

    def stats(self) -> dict[str, int]:
        assert self.stream is not None
        return self.stream.stats()


def ffn(m: Model, layer: int, each: Sequence[_native.Matrix], stream: _native.StreamedLayer | None) -> Any:
    rng = np.random.default_rng(layer)

    def floats(n: int) -> F32:
        return rng.standard_normal(n, np.float32)

    biases = [floats(m.neurons), floats(m.neurons), floats(m.dim)] if m.bias else [None] * 3
    up = each[1] if len(each) == 3 else None
    return _native.FFN(
        norm=_native.Norm(1 + floats(m.dim) / np.float32(8), None, 1e-5, False),
        gate=_native.Linear(each[0], biases[0] if stream is None else None),
        up=up,
        down=each[-1],
        down_bias=biases[2],
        activation=ACTIVATIONS.index("silu"),
        threshold=0.0,
        up_relu=False,
        bundles=False,
        sub_norm=_native.Norm(1 + floats(m.neurons), None, 1e-5, False) if m.sub_norm else None,
        join=_native.Join(None, 1.0),
        gate_bias=None if stream is None else biases[0],
        up_bias=biases[1] if up is not None else None,
        stream=stream,
    )


def held_matrix(s: Stored, rows: int, native: _native.Context, *, groups: bool) -> _native.Matrix:
    """Return the first rows of a matrix in memory."""
    arena = _native.Arena(rows * s.stride)
    arena.write(0, s.planar[:rows].ravel())
    planar = _native.Matrix(arena, 0, quant.FORMATS[s.format].id, rows, s.columns, s.stride)
    return native.interleaved(arena, planar) if groups else planar


def grouped(m: Model, native: _native.Context) -> bool:
    every = [s for layer in m.layers for s in layer]
    return all(s.rows % native.group == 0 and quant.FORMATS[s.format].block > 1 for s in every)


def in_memory(m: Model, *, threads: int = 2, isa: str = "", groups: bool = False) -> Bound:
    native = _native.Context(threads, isa)
    return Bound(
        [
            ffn(m, i, [held_matrix(s, s.rows, native, groups=groups) for s in layer], None)
            for i, layer in enumerate(m.layers)
        ],
        native,
    )


def on_disk(
    m: Model,
    held: tuple[int, int] = (ROWS, ROWS),
    buffers: int = 6,
    *,
    threads: int = 2,
    isa: str = "",
    groups: bool = False,
    files: _native.ExpertFiles | None = None,
    method: str = "",
    rows: int = ROWS,
    piece: int = PIECE,
) -> Bound:
    """`held`: rows of gate and up, and of down, in memory. `rows`: of a record."""
    native = _native.Context(threads, isa)
    files = files or _native.ExpertFiles(
        list(map(state, m.files)), depth=buffers, piece_bytes=piece, method=method
    )
    held_rows = [min(held[s is layer[-1]], s.rows) for layer in m.layers for s in layer]
    each = iter(held_rows)
    ffns: list[Any] = []
    matrices: list[list[_native.Matrix]] = []
    for i, layer in enumerate(m.layers):
        streamed = []
        matrices.append([])
        for name, s in zip(PARTS if len(layer) == 3 else PARTS[::2], layer, strict=True):
            n = next(each)
            group = native.group if groups else 1
            run = (s.format, s.columns, s.part, s.at, s.rows, 0, s.stride, None, group, 0)
            streamed.append((run, n, f"blk.{i}.ffn_{name}.weight"))
            matrices[-1].append(held_matrix(s, n, native, groups=groups))
        ffns.append((streamed[:-1], rows, streamed[-1], rows))
    stream = _native.DenseStream(files, ffns, threads, planar=m.packed)
    made = [ffn(m, i, each_of, stream.layer(i)) for i, each_of in enumerate(matrices)]
    return Bound(made, native, stream)


def calls(dim: int, tokens: Sequence[int] = (1, 1, 3, 40, 1, 70, 8), seed: int = 0) -> Iterator[F32]:
    rng = np.random.default_rng(seed)
    for n in tokens:
        yield rng.standard_normal((n, dim)).astype(np.float32)


def assert_bits_of_memory(m: Model, memory: Bound, disk: Bound, tokens: Sequence[int] = ()) -> None:
    for i, h in enumerate(calls(m.dim, tokens) if tokens else calls(m.dim)):
        assert disk.run(h) == memory.run(h), (i, len(h))


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_whatever_is_held_gives_the_bits_of_memory(tmp_path: Path, threads: int) -> None:
    """Rings of two records, of a few, and of more than there are; matrices of which all rows are held."""
    m = model(tmp_path)
    memory = in_memory(m)
    for held, buffers in (((32, 32), 2), ((32, 32), 5), ((480, 64), 2), ((512, 32), 3), ((64, 256), 90)):
        assert_bits_of_memory(m, memory, on_disk(m, held, buffers, threads=threads))


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("format", list(quant.FORMATS))
def test_every_format_gives_the_bits_of_memory(
    tmp_path: Path, format: str, packed: bool, groups: bool
) -> None:
    m = model(tmp_path, (format,) * 3, neurons=256, packed=packed)
    if groups and not grouped(m, _native.Context(1)):
        pytest.skip("rows of this format are never in groups")
    memory, disk = in_memory(m, groups=groups), on_disk(m, groups=groups, piece=2 * (ROWS * 1024 + 8192))
    assert_bits_of_memory(m, memory, disk, (1, 3, 40))


KINDS = {
    "formats of its own for each matrix": ({"formats": ("q4_k", "q5_k", "q6_k")}, True),
    "floats beside blocks": ({"formats": ("f16", "q8_0", "q4_0")}, False),
    "biases": ({"bias": True}, True),
    "ungated": ({"gated": False, "bias": True}, False),
    "two parts": ({"parts": 2}, True),
    "a norm before down": ({"sub_norm": True, "bias": True}, True),
    "a pack": ({"packed": True, "bias": True}, True),
    "a last record of less": ({"neurons": 544, "dim": 160}, False),
}


@pytest.mark.parametrize("isa", _native.isa_levels())
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_ffn_gives_the_bits_of_memory(tmp_path: Path, name: str, isa: str) -> None:
    options, can_group = KINDS[name]
    m = model(tmp_path, **options)  # type: ignore[arg-type]
    for groups in {False, can_group and grouped(m, _native.Context(1, isa))}:
        memory = in_memory(m, isa=isa, groups=groups)
        disk = on_disk(m, (128, 64), isa=isa, groups=groups, rows=64, piece=2 * PIECE)
        assert_bits_of_memory(m, memory, disk, (1, 4, 33, 1))


@pytest.mark.parametrize("method", ["threads", "io_uring"])
def test_either_way_of_reading_gives_the_bits_of_memory(tmp_path: Path, method: str) -> None:
    m = model(tmp_path)
    assert_bits_of_memory(m, in_memory(m), on_disk(m, method=method))


def test_a_recorded_call_gives_the_neurons_of_memory(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m)
    for h in calls(m.dim, (1, 9, 30)):
        assert disk.run(h, record=True) == memory.run(h, record=True)


def test_layers_may_come_in_any_order_and_calls_of_several_passes(tmp_path: Path) -> None:
    """Reading then begins elsewhere, and what was read for the expected layer is not taken for another."""
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m, buffers=12)
    rng = np.random.default_rng(3)
    for n, layer in [(300, 0), *((2, int(i)) for i in rng.integers(0, LAYERS, 25))]:
        (h,) = calls(m.dim, (n,), n + layer)
        found = []
        for bound in (memory, disk):
            x = h.copy()
            bound.context.ffn_add(x, x, bound.ffns[layer], SPARSITIES["exact"], None)
            found.append(x.tobytes())
        assert found[0] == found[1], (n, layer)


# ---- what is counted


def test_a_step_reads_what_is_not_held_once_however_many_tokens_it_has(tmp_path: Path) -> None:
    m = model(tmp_path)
    disk, buffers = on_disk(m, (256, 128), 6), 6
    records = LAYERS * ((512 - 256) + (256 - 128)) // ROWS
    record_bytes = 2 * ROWS * max(s.stride for s in m.layers[0])
    left = sum(
        s.stride * (s.rows - (256 if s is not layer[-1] else 128)) for layer in m.layers for s in layer
    )
    for steps, h in enumerate(calls(m.dim, (1, 1, 200, 3)), 1):
        disk.run(h)
        now = disk.stats()
        assert now["missed"] == steps * records and now["needed"] == 2 * steps * records
        assert steps * left <= now["bytes"]
        assert now["bytes"] <= steps * (left + 2 * records * 8192) + buffers * (record_bytes + 2 * 8192)


# ---- what goes wrong


def failed(disk: Bound, h: F32) -> BadFile | IOFailure:
    with pytest.raises(_native.DiskError) as e:
        disk.run(h)
    return disk_error(e.value)


def damaged(m: Model, layer: int, part: int, at: int, data: bytes) -> bytes:
    """Bytes of a matrix, overwritten; the file keeps its time. Returns what was there."""
    s = m.layers[layer][part]
    path = m.files[s.part]
    before = os.stat(path)
    with path.open("r+b") as f:
        f.seek(s.at + at)
        was = f.read(len(data))
        f.seek(s.at + at)
        f.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return was


def test_other_bytes_than_at_first_are_told_and_the_stream_lives_on(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m, buffers=2)
    (h,) = calls(m.dim, (1,))
    wanted = memory.run(h)
    assert disk.run(h) == wanted
    at = m.layers[2][2].stride * 200 + 10
    was = damaged(m, 2, 2, at, b"\x55\xaa\x00\x01")
    for _ in range(2):
        error = failed(disk, h)
        assert isinstance(error, BadFile)
        assert f"{m.files[0]}: blk.2.ffn_down.weight: checksum mismatch" in str(error)
    damaged(m, 2, 2, at, was)
    assert disk.run(h) == wanted


@pytest.mark.parametrize("packed", [False, True])
def test_a_scale_that_is_no_number_is_told(tmp_path: Path, packed: bool) -> None:
    m = model(tmp_path, packed=packed)
    stride = m.layers[1][1].stride
    damaged(m, 1, 1, 100 * stride + (stride - 2 if packed else 0), b"\x00\x7e")
    error = failed(on_disk(m), next(calls(m.dim, (1,))))
    assert isinstance(error, BadFile)
    assert "blk.1.ffn_up.weight: a scale is not a finite number" in str(error)


def test_a_file_that_was_changed_is_told_at_the_first_read_of_a_record(tmp_path: Path) -> None:
    """No checksum is known yet: only the file's time says that its bytes may be others."""
    m = model(tmp_path)
    disk = on_disk(m, buffers=2)
    os.utime(m.files[0], ns=(1, 1))
    error = failed(disk, next(calls(m.dim, (1,))))
    assert isinstance(error, IOFailure) and "has changed since it was opened" in str(error)


def test_a_file_that_ends_early_is_told(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m)
    (h,) = calls(m.dim, (1,))
    assert disk.run(h) == memory.run(h)
    whole, before = m.files[0].read_bytes(), os.stat(m.files[0])
    os.truncate(m.files[0], m.layers[1][2].at)
    disk_says = str(failed(disk, h))
    assert "the file ends early" in disk_says and "has changed since it was opened" in disk_says
    with m.files[0].open("r+b") as f:
        f.write(whole)
    os.utime(m.files[0], ns=(before.st_atime_ns, before.st_mtime_ns))
    assert disk.run(h) == memory.run(h)


@pytest.mark.parametrize("method", ["threads", "io_uring"])
def test_a_read_beyond_a_call_that_fails_does_not_end_it(tmp_path: Path, method: str) -> None:
    """The rows of the second layer are gone, and a read of nothing ends before those of the first."""
    m = model(tmp_path, parts=2)
    memory, disk = in_memory(m), on_disk(m, buffers=90, method=method)
    os.truncate(m.files[1], 0)
    for h in calls(m.dim, (1,) * 40):
        found = []
        for bound in (memory, disk):
            x = h.copy()
            bound.context.ffn_add(x, x, bound.ffns[0], SPARSITIES["exact"], None)
            found.append(x.tobytes())
        assert found[0] == found[1]
    assert "blk.1" in str(failed(disk, h))


FAULTS = """
import ctypes, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_dense_stream import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
bad(b"none")
method = sys.argv[3]
m = model(Path(sys.argv[2]), parts=2, neurons=256)
memory = in_memory(m)
inputs = list(calls(m.dim, (1, 9, 1, 2)))
wanted = [memory.run(h) for h in inputs]
disk = on_disk(m, (64, 64), 5, method=method)
errors = 0
each = [b"%s %d" % (kind, n) for n in range(1, 200, STEP) for kind in (b"eio", b"end")]
for how in (b"short", b"interrupted", b"busy", *each):
    bad(how)
    try:
        assert [disk.run(h) for h in inputs] == wanted, how
    except _native.DiskError as e:
        errors += 1
        assert how[:3] in (b"eio", b"end"), (how, e)
        error, name, *rest = e.args
        assert error == (5 if how[:3] == b"eio" else -1) and rest == [-1, False], (how, e)
        assert str(m.files[0])[:-6] in name and ".ffn_" in name, name
    bad(b"none")
    assert [disk.run(h) for h in inputs] == wanted, how
print(errors)
"""


def in_a_process(code: str, directory: Path, what: str, *arguments: str) -> str:
    run = subprocess.run(
        [sys.executable, "-P", "-c", code, os.pathsep.join(sys.path), str(directory), *arguments],
        env={**os.environ, **bad_reads.environment(bad_reads.library(directory), what)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("step", [29, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("method", ["io_uring", "threads"])
def test_whichever_read_fails_there_are_the_same_bits_or_an_error(
    tmp_path: Path, method: str, step: int
) -> None:
    """Every `step`th read of some calls, in a process of its own; afterwards all is well again."""
    assert int(in_a_process(FAULTS.replace("STEP", str(step)), tmp_path, "none", method)) > 100 // step


LATE = """
import ctypes, os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_dense_stream import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
bad(b"none")
m = model(Path(sys.argv[2]), dim=128, neurons=2048)
(h,) = calls(m.dim, (2,))
behind = np.zeros((2048 // m.dim, m.dim), np.float32)

def run(bound, layer):
    x = np.concatenate([h, behind])
    try:
        bound.context.ffn_add(x[:2], h, bound.ffns[layer], SPARSITIES["exact"], None)
    except _native.DiskError:
        return None
    finally:
        assert not x[2:].any(), "written behind the last token"
    return x.tobytes()

wanted = [run(in_memory(m), i) for i in range(LAYERS)]
disk = on_disk(m, (64, 64), 8, piece=2 * PIECE)
errors = 0
for n in range(1, 400, 4):
    bad(b"eio %d" % n)
    for i in range(LAYERS):
        found = run(disk, i)
        assert found in (wanted[i], None), (n, i)
        errors += found is None
print(errors)
"""


def test_rows_of_gate_that_come_after_another_read_failed_are_not_taken_for_rows_of_down(
    tmp_path: Path,
) -> None:
    """There are more of them than rows of down: what they gave was added to memory behind the last token.

    A read that fails ends sooner than those before it. One in twelve of these did so in that moment.
    """
    assert int(in_a_process(LATE, tmp_path, "none")) > 50


FORBIDDEN = """
import os, sys
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_dense_stream import *
from thermocline import _native
m = model(Path(sys.argv[2]))
files = _native.ExpertFiles(list(map(state, m.files)), depth=6, piece_bytes=PIECE)
assert "threads" in files.how and "io_uring refused: EPERM" in files.how, files.how
assert_bits_of_memory(m, in_memory(m), on_disk(m, files=files))
"""


def test_without_io_uring_threads_read(tmp_path: Path) -> None:
    in_a_process(FORBIDDEN, tmp_path, "forbidden")


def test_of_a_file_system_without_direct_reads_there_are_the_same_bits() -> None:
    import tempfile

    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        m = model(Path(directory))
        assert_bits_of_memory(m, in_memory(m), on_disk(m))


STOPPED = """
import ctypes, os, signal, sys, threading, time
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_dense_stream import *
from thermocline import _native
bad = ctypes.CDLL(None).bad_reads
m = model(Path(sys.argv[2]))
memory, disk = in_memory(m), on_disk(m, buffers=2, method="threads")
for h in calls(m.dim, (1, 9)):
    bad(b"slow 1000")
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        disk.run(h)
        raise AssertionError("not stopped")
    except KeyboardInterrupt:
        print(time.monotonic() - begin)
    bad(b"none")
    assert disk.run(h) == memory.run(h)
"""


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_slow_disk(tmp_path: Path) -> None:
    waited = in_a_process(STOPPED, tmp_path, "none").split()
    assert len(waited) == 2 and all(0.3 <= float(line) < 40 for line in waited)


HALF = """
import ctypes, os, sys, time
sys.path[:0] = sys.argv[1].split(os.pathsep)
from pathlib import Path
from test_dense_stream import *
ctypes.CDLL(None).bad_reads(b"slow 600000")
disk = on_disk(model(Path(sys.argv[2])), buffers=8, method="threads")
while disk.stats()["reads"] < 4:
    time.sleep(0.01)
time.sleep(0.2)
print(disk.stats()["reads"], flush=True)
os._exit(0)
"""


def test_half_as_many_reads_are_under_way_as_there_are_buffers(tmp_path: Path) -> None:
    """A virtual disk ends all that it found waiting at once: the other buffers give it work meanwhile."""
    assert int(in_a_process(HALF, tmp_path, "none")) == 4


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forking with threads: that is what is tried
def test_a_forked_process_is_refused(tmp_path: Path) -> None:
    m = model(tmp_path)
    memory, disk = in_memory(m), on_disk(m)
    (h,) = calls(m.dim, (3,))
    child = os.fork()
    if not child:
        signal.alarm(20)
        try:
            disk.run(h)
        except RuntimeError as e:
            del disk  # it ends without the parent's thread
            os._exit(0 if "forked" in str(e) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert disk.run(h) == memory.run(h)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    m = model(tmp_path)
    with pytest.raises(ValueError, match="all rows are in memory"):
        on_disk(m, (512, 256))
    with pytest.raises(ValueError, match="depth"):
        on_disk(m, buffers=1)
    with pytest.raises(ValueError, match="larger than a piece"):
        on_disk(m, rows=512)
    with pytest.raises(ValueError, match="a record divides a group"):
        on_disk(m, groups=True, rows=33)
    disk, other = on_disk(m, (64, 64)), on_disk(m, (32, 64))
    assert disk.stream is not None and other.stream is not None
    native = disk.context
    each = [held_matrix(s, 64, native, groups=False) for s in m.layers[0]]
    with pytest.raises(ValueError, match="the stream has another matrix"):
        ffn(m, 0, each, other.stream.layer(0))
    with pytest.raises(ValueError, match="the stream has other matrices"):
        ffn(m, 0, each[::2], disk.stream.layer(0))
    with pytest.raises(ValueError, match="no such layer"):
        disk.stream.layer(LAYERS)
    more, (h,) = _native.Context(3), calls(m.dim, (1,))
    with pytest.raises(ValueError, match="more threads"):
        more.ffn_add(h.copy(), h, disk.ffns[0], SPARSITIES["exact"], None)
