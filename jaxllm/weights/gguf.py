"""A GGUF file as a `TensorSource` (`tensors.py`): the weights, configuration and tokenizer of a model in one file, as llama.cpp keeps them.

Names and configuration come out in Hugging Face's spelling (`gguf_names.py`), so a GGUF file is read by the same family tables as a
folder. Tensors are read one at a time, straight from the file, and quantised ones are expanded to float32 piece by piece: nothing larger
than the tensor itself is ever held. The `gguf` package knows the storage formats; the header is read by `gguf_header.py`.
"""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import UserError
from jaxllm.weights.gguf_header import TensorInfo, read_header
from jaxllm.weights.gguf_names import ROPE_FREQUENCIES, architecture, decoder, hf_config, hf_name
from jaxllm.weights.gguf_tokenizer import tokenizer_files

F32, F16, BF16 = 0, 1, 30  # ggml's numbers of the plain types
PLAIN: dict[int, Any] = {F32: np.float32, F16: np.float16, BF16: ml_dtypes.bfloat16}
PIECE = (
    2**18
)  # elements expanded at once: 1 MiB stays in the cache of a core, and bounds what a large tensor needs beside itself


def is_gguf(path: str | Path) -> bool:
    """Whether a path is meant as a GGUF file: a file that ends in .gguf or begins with the four letters."""
    path = Path(path)
    if not path.is_file():
        return False
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


class GGUFFile:
    """One GGUF file; implements `TensorSource`. Opening it reads the header alone.

    config: as config.json would say it. metadata: everything the file says, by GGUF's own keys.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.where = str(self.path)
        self._formats = _formats()
        header = read_header(self.path, self._formats.sizes)
        self.metadata: Mapping[str, Any] = header.metadata
        try:
            self._arch = architecture(header.metadata)
            shapes = {name: info.shape for name, info in header.tensors.items()}
            divisors = header.tensors.get(ROPE_FREQUENCIES)
            self.config: dict[str, Any] = hf_config(
                header.metadata, shapes, None if divisors is None else self._load(divisors)
            )
            # Hugging Face's name -> the name in the file.
            self._names = {hf_name(self._arch, name): name for name in header.tensors if name != ROPE_FREQUENCIES}
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None
        self._tensors = header.tensors
        self._check_blocks()

    def _check_blocks(self) -> None:
        """The header's number of layers is the one that the tensors have."""
        blocks = {int(name.split(".")[1]) for name in self._tensors if name.startswith("blk.")}
        said = self.config.get("num_hidden_layers", self.config.get("n_layer"))
        if blocks != set(range(said if isinstance(said, int) and said <= len(self._tensors) else 0)):
            raise UserError(f"{self.path}: says {said} layers, and holds tensors of {len(blocks)}")

    def names(self) -> list[str]:
        """Hugging Face names of the tensors, in the order of the file."""
        return list(self._names)

    def _info(self, name: str) -> tuple[str, TensorInfo]:
        if name not in self._names:
            raise UserError(f"{self.path}: holds no tensor {name}")
        own = self._names[name]
        return own, self._tensors[own]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape as Hugging Face's file would have it."""
        own, info = self._info(name)
        turned = self._arch.transposed and len(info.shape) == 2 and decoder(self._arch, own, self.config) is not None
        return info.shape[::-1] if turned else info.shape

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of what `read` gives: as stored, float32 for a quantised tensor."""
        return np.dtype(PLAIN.get(self._info(name)[1].kind, np.float32))

    def read(self, name: str) -> np.ndarray:
        """One tensor, in the layout of Hugging Face's file."""
        own, info = self._info(name)
        values = self._load(info)
        undo = decoder(self._arch, own, self.config)
        try:
            return values if undo is None else undo(values)
        except UserError as error:
            raise UserError(f"{self.path}: tensor {own}: {error}") from None

    def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json, tokenizer_config.json, generation_config.json and, where there is one, chat_template.jinja."""
        try:
            return tokenizer_files(self.metadata, self.config)
        except UserError as error:
            raise UserError(f"{self.path}: {error}") from None

    def _load(self, info: TensorInfo) -> np.ndarray:
        """A tensor as it stands in the file, expanded to float32 if it is quantised."""
        with self.path.open("rb") as file:
            file.seek(info.offset)
            if info.kind in PLAIN:
                return _take(file, info.bytes).view(PLAIN[info.kind]).reshape(info.shape)
            elements, length = self._formats.sizes[info.kind]
            out = np.empty((info.bytes // length, elements), np.float32)
            step = max(1, PIECE // elements)
            for start in range(0, len(out), step):
                blocks = min(step, len(out) - start)
                out[start : start + blocks] = self._formats.expand(_take(file, blocks * length), info.kind).reshape(
                    -1, elements
                )
            return out.reshape(info.shape)


def _take(file: Any, size: int) -> np.ndarray:
    raw = np.fromfile(file, np.uint8, size)
    if len(raw) != size:
        raise UserError(f"{file.name}: ends inside a tensor; it was cut short while it was read")
    return raw


class _Formats:
    """The storage formats of the `gguf` package: sizes of blocks, and how they expand."""

    def __init__(self, gguf: Any) -> None:
        self._gguf = gguf
        plain = {F32: (1, 4), F16: (1, 2), BF16: (1, 2)}
        quantised = {
            int(kind): sizes
            for kind, sizes in gguf.GGML_QUANT_SIZES.items()
            if kind.name.startswith(("Q", "IQ", "TQ", "MXFP"))
        }
        self.sizes: dict[int, tuple[int, int]] = plain | quantised

    def expand(self, blocks: np.ndarray, kind: int) -> np.ndarray:
        """uint8 bytes of whole blocks -> their float32 elements. As one row, because the package loops over rows in Python."""
        named = self._gguf.GGMLQuantizationType(kind)
        try:
            return np.asarray(self._gguf.quants.dequantize(blocks[None], named))[0]
        except NotImplementedError:
            raise UserError(
                f"tensors stored as {named.name} cannot be expanded by the installed gguf package"
            ) from None


def _formats() -> _Formats:
    try:
        gguf = importlib.import_module("gguf")
        importlib.import_module("gguf.quants")  # makes it an attribute of the package
    except ImportError:
        raise UserError('source: reading GGUF files needs the package gguf; pip install "jaxllm[gguf]"') from None
    return _Formats(gguf)
