"""GGUF files for tests, written from the format's description, so that reader and writer share no code."""

import struct
from pathlib import Path
from typing import Any

import numpy as np

F32, F16, Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, BF16 = 0, 1, 2, 3, 8, 12, 14, 30
STRING, ARRAY = 8, 9


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type and value; numbers are stored as llama.cpp's converter stores them."""
    if isinstance(item, bool):
        return struct.pack("<I?", 7, item)
    if isinstance(item, int):
        return struct.pack("<II", 4, item)
    if isinstance(item, float):
        return struct.pack("<If", 6, item)
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    if isinstance(item[0], str):
        return struct.pack("<IIQ", ARRAY, STRING, len(item)) + b"".join(map(string, item))
    return struct.pack(f"<IIQ{len(item)}i", ARRAY, 5, len(item), *item)


def write(path: Path, metadata: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]]) -> Path:
    """tensors: name -> (shape, slowest axis first; ggml type; bytes)."""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    head += b"".join(string(key) + value(item) for key, item in metadata.items())
    data = b""
    for name, (shape, kind, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        head += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], kind, len(data))
        data += raw
    path.write_bytes(head + b"\0" * (-len(head) % 32) + data)
    return path


def plain(array: np.ndarray) -> tuple[tuple[int, ...], int, bytes]:
    return array.shape, F32, array.astype("<f4").tobytes()


TOKENS = ["<|end|>", "<|start|>", "<tool>", "h", "e", "l", "o", "\u0120", "1", "2", "he", "ll", "\u0120h"]
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(TOKENS) - 3),
    "tokenizer.ggml.merges": ["h e", "l l", "\u0120 h"],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.chat_template": "{{ messages[0]['content'] }}",
}


def llama(
    arch: str = "llama", *, d: int = 16, f: int = 24, heads: int = 4, kv: int = 2, layers: int = 2, seed: int = 0
):
    """(metadata, tensors as arrays in the file's spelling) of a small model of llama's shape."""
    metadata = {
        "general.architecture": arch,
        f"{arch}.context_length": 64,
        f"{arch}.embedding_length": d,
        f"{arch}.block_count": layers,
        f"{arch}.feed_forward_length": f,
        f"{arch}.attention.head_count": heads,
        f"{arch}.attention.head_count_kv": kv,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.rope.freq_base": 1e6,
        f"{arch}.rope.dimension_count": d // heads,
        f"{arch}.vocab_size": len(TOKENS),
    }
    narrow = kv * d // heads
    shapes = {"token_embd": (len(TOKENS), d), "output_norm": (d,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_norm": (d,), f"blk.{i}.ffn_norm": (d,)}
        shapes |= {f"blk.{i}.attn_q": (d, d), f"blk.{i}.attn_k": (narrow, d), f"blk.{i}.attn_v": (narrow, d)}
        shapes |= {f"blk.{i}.attn_output": (d, d)}
        shapes |= {f"blk.{i}.ffn_gate": (f, d), f"blk.{i}.ffn_up": (f, d), f"blk.{i}.ffn_down": (d, f)}
    rng = np.random.default_rng(seed)
    arrays = {f"{name}.weight": rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return metadata | TOKENIZER, arrays
