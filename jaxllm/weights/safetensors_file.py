"""Writing a safetensors file tensor by tensor, so that a file of any size needs the memory of its largest tensor.

The package's own `save_file` wants all tensors of the file at once, a second copy of the model. The format (huggingface/safetensors,
"Format"): 8 bytes, little-endian, the length of the header; the header, JSON padded by spaces so that data begin at a multiple of 8:
`{name: {"dtype", "shape", "data_offsets": [begin, end]}}`, offsets from the end of the header; then the data, without gaps.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxllm.weights.tensors import DTYPES

NAMES = {kind: name for name, kind in DTYPES.items()}


def write_safetensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: np.dtype[Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    others: Mapping[str, np.dtype[Any]] | None = None,
) -> None:
    """Write `tensors`, which come as (name, array) in the order of `shapes`; `others`: dtypes of those that are not of `dtype`.

    Raises ValueError for a tensor that comes out of turn, or of another shape or dtype.
    """
    kinds = {name: (others or {}).get(name, dtype) for name in shapes}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * kinds[name].itemsize
        header[name] = {"dtype": NAMES[kinds[name]], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        left = iter(shapes.items())
        for name, array in tensors:
            if (name, array.shape) != next(left, None) or array.dtype != kinds[name]:
                raise ValueError(f"{path}: {name} {array.dtype}{list(array.shape)} is not the tensor that comes next")
            file.write(np.ascontiguousarray(array).view(np.uint8).data)
        if (missing := next(left, None)) is not None:
            raise ValueError(f"{path}: {missing[0]} never came")
