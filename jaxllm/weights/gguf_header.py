"""The header of a GGUF file, read with bounds: metadata, and where each tensor lies.

    magic "GGUF" | version | tensors n | keys m | m x (name, type, value) | n x (name, shape, type, offset) | padding | data

(github.com/ggml-org/ggml, docs/gguf.md.) The file may be anybody's, so nothing it says is believed before it is compared with the bytes
that are there: a count, a length or an offset that the file cannot hold is refused before memory is asked for. The `gguf` package has a
reader too; it takes seconds for a vocabulary, because it makes an array of every string, and checks no length.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.errors import UserError

MAX_HEADER = 512 * 2**20  # bytes of names, vocabulary and merges; the largest published ones have 20 MB
MAX_DIMS = 4
STRING, ARRAY = 8, 9
# Value types 0..7 and 10..12, little-endian; 8 and 9 are above.
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
BOOL = 7


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. shape: slowest axis first, as numpy and PyTorch write it (the file has it reversed).

    kind: ggml's number of the storage type. offset: of its first byte in the file. bytes: as stored.
    """

    shape: tuple[int, ...]
    kind: int
    offset: int
    bytes: int


@dataclass(frozen=True)
class Header:
    """metadata: key -> str, int, float, bool, list of str, or numpy array. tensors: in the order of the file."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path, block_sizes: dict[int, tuple[int, int]]) -> Header:
    """Read and check everything before the data.

    Args:
        block_sizes: storage type -> (elements of a block, bytes of a block), of the types that can be read.

    Raises:
        UserError: not a GGUF file, of another version or byte order, damaged, cut short, or of an unknown storage type.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            if size < 24:
                raise UserError(f"{path}: {size} bytes are too few for a GGUF file")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Reader(path, view, size).header(block_sizes)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from None


class _Reader:
    """A cursor over the mapped file that never passes its end."""

    def __init__(self, path: Path, view: Any, size: int) -> None:
        self.path, self.view, self.size, self.at = path, view, size, 0

    def fail(self, what: str) -> UserError:
        return UserError(f"{self.path}: {what} (byte {self.at} of {self.size}); the file is damaged or cut short")

    def number(self, code: str, what: str) -> Any:
        length = struct.calcsize(code)
        if self.at + length > self.size:
            raise self.fail(f"ends inside {what}")
        (value,) = struct.unpack_from(code, self.view, self.at)
        self.at += length
        return value

    def count(self, what: str, smallest: int) -> int:
        """A number of things of at least `smallest` bytes each, which must fit what is left of the file."""
        n = int(self.number("<Q", what))
        if n * smallest > self.size - self.at:
            raise self.fail(f"says {n} {what}, more than it can hold")
        return n

    def string(self, what: str) -> str:
        length = self.count(f"characters of {what}", 1)
        raw = self.view[self.at : self.at + length]
        self.at += length
        if self.at > MAX_HEADER:
            raise UserError(f"{self.path}: the header is larger than {MAX_HEADER >> 20} MiB")
        try:
            return str(raw, "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, key: str) -> Any:
        kind = self.number("<I", f"the type of {key}")
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self.array(key)
        if kind not in SCALARS:
            raise self.fail(f"{key} has the unknown type {kind}")
        value = self.numbers(SCALARS[kind], 1, key)[0].item()
        return bool(value) if kind == BOOL else value

    def array(self, key: str) -> Any:
        kind = self.number("<I", f"the type of {key}")
        if kind == STRING:
            return [self.string(key) for _ in range(self.count(f"entries of {key}", 8))]
        if kind not in SCALARS:
            raise self.fail(f"{key} is an array of the unknown type {kind}")
        return self.numbers(SCALARS[kind], self.count(f"entries of {key}", np.dtype(SCALARS[kind]).itemsize), key)

    def numbers(self, dtype: str, n: int, key: str) -> np.ndarray:
        length = n * np.dtype(dtype).itemsize
        if self.at + length > min(self.size, MAX_HEADER):
            raise self.fail(f"ends inside {key}")
        values = np.frombuffer(self.view[self.at : self.at + length], dtype)
        self.at += length
        return values

    def header(self, block_sizes: dict[int, tuple[int, int]]) -> Header:
        if self.view[:4] != b"GGUF":
            raise UserError(f"{self.path}: is not a GGUF file (it does not begin with GGUF)")
        self.at = 4
        version = self.number("<I", "the version")
        if version not in (2, 3):
            odd = "big-endian or " if version > 0xFFFF else ""
            raise UserError(f"{self.path}: GGUF of {odd}version {version} is not read; convert it to version 3")
        tensors = self.count("tensors", 32)
        keys = self.count("metadata keys", 13)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self.string("a metadata key")
            if key in metadata:
                raise self.fail(f"holds {key} twice")
            metadata[key] = self.value(key)
        raw = [self.tensor(block_sizes) for _ in range(tensors)]
        return Header(metadata, self.placed(raw, metadata.get("general.alignment", 32)))

    def tensor(self, block_sizes: dict[int, tuple[int, int]]) -> tuple[str, tuple[int, ...], int, int, int]:
        """(name, shape, type, bytes, offset from the start of the data) of the next tensor."""
        name = self.string("a tensor name")
        dims = self.number("<I", f"the rank of {name}")
        if not 1 <= dims <= MAX_DIMS:
            raise self.fail(f"tensor {name} has {dims} axes")
        shape = tuple(int(self.number("<Q", f"the shape of {name}")) for _ in range(dims))[::-1]
        kind = self.number("<I", f"the type of {name}")
        offset = self.number("<Q", f"the offset of {name}")
        if kind not in block_sizes:
            raise UserError(f"{self.path}: tensor {name} is stored as ggml type {kind}, which is not read")
        elements, length = block_sizes[kind]
        if min(shape) < 1 or shape[-1] % elements:
            raise self.fail(f"tensor {name} of shape {shape} is not made of blocks of {elements}")
        blocks = shape[-1] // elements
        for axis in shape[:-1]:
            blocks *= axis
        return name, shape, kind, blocks * length, offset

    def placed(self, raw: list[tuple[str, tuple[int, ...], int, int, int]], alignment: Any) -> dict[str, TensorInfo]:
        """The tensors with offsets from the start of the file, all inside it."""
        if not isinstance(alignment, int) or not 0 < alignment <= 2**16 or alignment & (alignment - 1):
            raise self.fail(f"general.alignment={alignment} is not a power of two up to 65536")
        data = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for name, shape, kind, length, offset in raw:
            if name in tensors:
                raise self.fail(f"holds tensor {name} twice")
            if data + offset + length > self.size:
                raise self.fail(f"tensor {name} of {length} bytes lies beyond the end")
            tensors[name] = TensorInfo(shape, kind, data + offset, length)
        return tensors
