"""Weights of four bits, as gpt-oss was released: a `TensorSource` that gives them in full.

MXFP4 (Open Compute Project, Microscaling Formats, v1.0): 32 neighbours share one scale, a power of two kept as its exponent plus 127;
each is one of sixteen numbers, two to a byte, the first in the low half.

    w[e, n, 32 g + 2 j + h] = 2^(scales[e, n, g] - 127) VALUES[nibble h of blocks[e, n, g, j]]

A file holds `NAME_blocks` uint8 `[e n g 16]` and `NAME_scales` uint8 `[e n g]` where the class has `NAME [e, 32 g, n]`: the shared scales
run along the inputs, which come first there. Two bits of mantissa fit into bfloat16's eight, so nothing is rounded.
"""

from typing import Any

import ml_dtypes
import numpy as np

from jaxllm.errors import UserError
from jaxllm.weights.tensors import TensorSource

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
VALUES = np.concatenate([VALUES, -VALUES])
NO_NUMBER = 255  # the exponent that stands for NaN


class MXFP4:
    """`source` with every pair of blocks and scales as one tensor of bfloat16; everything else as it is."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self.where = source.where
        self.config: dict[str, Any] = {k: v for k, v in source.config.items() if k != "quantization_config"}
        there = set(source.names())
        self._packed = {name.removesuffix(BLOCKS) for name in there if name.endswith(BLOCKS)}
        for name in self._packed:
            self._check(name, there)

    def _check(self, name: str, there: set[str]) -> None:
        blocks, scales = name + BLOCKS, name + SCALES
        if scales not in there:
            raise UserError(f"{self.where}: tensor {scales} is missing; {blocks} means nothing without it")
        for part in (blocks, scales):
            if self._source.dtype(part) != np.uint8:
                raise UserError(f"{self.where}: tensor {part}: expected uint8, found {self._source.dtype(part).name}")
        found, wanted = self._source.shape(blocks), (*self._source.shape(scales), 16)
        if found != wanted or len(wanted) != 4:
            raise UserError(
                f"{self.where}: tensor {blocks}: expected shape [e n g 16], one g a scale of {scales}"
                f" {list(wanted[:-1])}, found {list(found)}"
            )

    def names(self) -> list[str]:
        parts = {name + end for name in self._packed for end in (BLOCKS, SCALES)}
        return [*(name for name in self._source.names() if name not in parts), *sorted(self._packed)]

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._source.shape(name)
        e, n, g = self._source.shape(name + SCALES)
        return e, 32 * g, n

    def dtype(self, name: str) -> np.dtype[Any]:
        return np.dtype(ml_dtypes.bfloat16) if name in self._packed else self._source.dtype(name)

    def read(self, name: str) -> np.ndarray:
        if name not in self._packed:
            return self._source.read(name)
        blocks, scales = self._source.read(name + BLOCKS), self._source.read(name + SCALES)
        if (scales == NO_NUMBER).any():
            raise UserError(
                f"{self.where}: tensor {name}{SCALES} holds scales that are no number; fetch the folder again"
            )
        out = np.empty(self.shape(name), ml_dtypes.bfloat16)
        for expert, packed, exponents in zip(out, blocks, scales, strict=True):  # float32 of one expert at a time
            expert[...] = expand(packed, exponents).T
        return out

    def tokenizer_files(self) -> dict[str, bytes]:
        return self._source.tokenizer_files()


def expand(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 `[n g 16]` and uint8 `[n g]` -> float32 `[n, 32 g]`."""
    pairs = np.stack([blocks & 15, blocks >> 4], axis=-1)  # [n g 16 2]
    values = VALUES[pairs].reshape(*scales.shape, 32)
    return np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(len(scales), -1)
