"""Data: sources of text, tokenizers, the token cache, packing and the resumable loader. NumPy only."""

from jaxllm.data.corpus import Corpus, Documents, Source
from jaxllm.data.hf import HF
from jaxllm.data.loader import Loader
from jaxllm.data.mix import Mix, MixLoader
from jaxllm.data.store import TokenStore
from jaxllm.data.synthetic import Synthetic
from jaxllm.data.text import Text
from jaxllm.data.tokenizer import BPE, Bytes, StreamDecoder, Tokenizer, TokenizerFile, load_tokenizer

__all__ = [
    "BPE",
    "HF",
    "Bytes",
    "Corpus",
    "Documents",
    "Loader",
    "Mix",
    "MixLoader",
    "Source",
    "StreamDecoder",
    "Synthetic",
    "Text",
    "TokenStore",
    "Tokenizer",
    "TokenizerFile",
    "load_tokenizer",
]
