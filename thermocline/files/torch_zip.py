"""Read one flat tensor from a `torch.save` file without pickle.

PowerInfer keeps its activation counts in such files. An archive with any other content is refused, however
harmless it is.
"""

from __future__ import annotations

import io
import re
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thermocline.errors import BadFile
from thermocline.files.bounded import read_small

MAX_BYTES = 64 << 20
_TYPES = {
    b"FloatStorage": "<f4",
    b"DoubleStorage": "<f8",
    b"HalfStorage": "<f2",
    b"IntStorage": "<i4",
    b"LongStorage": "<i8",
}
_MEMO = rb"(?:q.|r.{4})?"  # a pickle may memoise every value; none is recalled here
_NUMBER = rb"(?:K(.)|M(..)|J(.{4}))"
# The pickle of a one-dimensional torch.Tensor: a storage, offset 0, shape (n,), stride (1,), no grad.
_TENSOR = re.compile(
    _MEMO.join(
        (
            rb"\x80\x02ctorch\._utils\n_rebuild_tensor_v2\n",
            rb"\(\(X\x07\0\0\0storage",
            rb"ctorch\n(\w+Storage)\n",
            rb"X\x01\0\0\x000",
            rb"X.\0\0\0(?:cpu|cuda:\d)",
            _NUMBER + rb"t",
            rb"QK\0" + _NUMBER + rb"\x85",
            rb"K\x01\x85",
            rb"\x89ccollections\nOrderedDict\n",
            rb"\)R",
            rb"t",
            rb"R",
            rb"\.",
        )
    ),
    re.DOTALL,
)


def read_flat_tensor(path: Path) -> NDArray[np.float64]:
    """Return the numbers of a 1-D tensor. BadFile if the file holds anything else; IOFailure."""
    data = read_small(path, MAX_BYTES)
    refused = BadFile(f"{path}: is not a torch file of one flat tensor, and other pickles are not read")
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = {i.filename.partition("/")[2]: i for i in archive.infolist()}
            wanted = [infos.get("data.pkl"), infos.get("data/0")]
            if any(
                i is None or i.compress_type != zipfile.ZIP_STORED or i.file_size > len(data) for i in wanted
            ):
                raise refused
            order = archive.read(infos["byteorder"]) if "byteorder" in infos else b"little"
            pickled, stored = (archive.read(i) for i in wanted if i is not None)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, ValueError, RuntimeError, OSError):
        raise refused from None
    m = _TENSOR.fullmatch(pickled)
    if m is None or m[1] not in _TYPES or order != b"little":
        raise refused
    held, size = (_number(m.groups()[i : i + 3]) for i in (1, 4))
    dtype = np.dtype(_TYPES[m[1]])
    if held != size or len(stored) != size * dtype.itemsize:
        raise refused
    return np.frombuffer(stored, dtype).astype(np.float64)


def _number(groups: tuple[bytes | None, ...]) -> int:
    return int.from_bytes(next(g for g in groups if g is not None), "little")
