"""Which kind of foreign checkpoint a path is."""

from pathlib import Path

from jaxllm.errors import UserError
from jaxllm.weights.gguf import GGUFFile, is_gguf
from jaxllm.weights.hf_folder import HFFolder, is_hf_folder
from jaxllm.weights.mxfp4 import MXFP4
from jaxllm.weights.tensors import TensorSource


def is_foreign(path: Path) -> bool:
    """Whether a path is a Hugging Face folder or a GGUF file; a run folder is neither."""
    return is_gguf(path) or is_hf_folder(path)


def open_tensors(path: Path) -> TensorSource:
    """The checkpoint at `path`; nothing but its headers is read."""
    if is_gguf(path):
        return GGUFFile(path)
    if is_hf_folder(path):
        folder = HFFolder(path)
        return MXFP4(folder) if folder.quantised == "mxfp4" else folder
    raise UserError(f"{path}: is neither a Hugging Face folder (it has no config.json) nor a GGUF file")
