"""What a foreign checkpoint is to the rest: a configuration, named tensors that are read one at a time, tokenizer files."""

from typing import Any, Protocol

import ml_dtypes
import numpy as np

# The files that travel with a model, in both directions. Everything else in a folder is left where it is.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

# Names that safetensors headers and config.json give to the types that can be read.
DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
WEIGHT_DTYPES = ("float32", "bfloat16", "float16", "float64")
TABLE_DTYPES = ("int32", "int64")


class TensorSource(Protocol):
    """A checkpoint on disk. Names, shapes and the configuration are spelled as in a Hugging Face folder.

    where: for messages. config: the content of config.json. Nothing but headers is read until `read`, and then one tensor.
    """

    where: str
    config: dict[str, Any]

    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def dtype(self, name: str) -> np.dtype[Any]: ...

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, in memory of its own."""
        ...

    def tokenizer_files(self) -> dict[str, bytes]:
        """Those of `TOKENIZER_FILES` that are there."""
        ...


def widest_dtype(source: TensorSource) -> str:
    """The dtype that holds every tensor of a checkpoint exactly: that of all of them, or float32 where they differ."""
    kinds = {source.dtype(name).name for name in source.names()} & set(WEIGHT_DTYPES)
    if "float64" in kinds:
        return "float64"
    return kinds.pop() if len(kinds) == 1 else "float32"
