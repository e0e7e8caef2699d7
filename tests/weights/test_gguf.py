"""GGUF files: storage formats, names, configuration, tokenizer; and that a damaged or hostile file is one clear line."""

import json
import struct
import tracemalloc

import gguf_files as files
import numpy as np
import pytest
from tokenizers import Tokenizer

from jaxllm.errors import UserError
from jaxllm.weights.gguf import GGUFFile, is_gguf
from jaxllm.weights.gguf_names import ARCHITECTURES, hf_name, unpair

gguf = pytest.importorskip("gguf", reason="reading GGUF files needs the extra `gguf`")

# ---- storage formats: the values by hand, from ggml's description of a block -----------------------------------------


def half(x: float) -> bytes:
    return np.float16(x).tobytes()


def q4_0(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    d, raw = 0.25, rng.integers(0, 256, 16, np.uint8)
    return half(d) + raw.tobytes(), [d * (int(x) - 8) for x in (*(raw & 15), *(raw >> 4))]


def q4_1(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    d, m, raw = 0.25, -1.5, rng.integers(0, 256, 16, np.uint8)
    return half(d) + half(m) + raw.tobytes(), [d * int(x) + m for x in (*(raw & 15), *(raw >> 4))]


def q8_0(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    d, raw = 0.125, rng.integers(-128, 128, 32).astype(np.int8)
    return half(d) + raw.tobytes(), [d * int(x) for x in raw]


def q4_k(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """Eight groups of 32, each with a 6-bit scale and a 6-bit minimum: the first four plain, the others in two parts."""
    d, dmin = 0.5, 0.25
    packed, raw = rng.integers(0, 256, 12, np.uint8), rng.integers(0, 256, 128, np.uint8)
    p = [int(x) for x in packed]
    scales = [p[j] & 63 for j in range(4)] + [(p[j + 4] & 15) | (p[j - 4] >> 6 << 4) for j in range(4, 8)]
    least = [p[j + 4] & 63 for j in range(4)] + [(p[j + 4] >> 4) | (p[j] >> 6 << 4) for j in range(4, 8)]
    values = []
    for j in range(8):
        part = raw[32 * (j // 2) :][:32]
        values += [d * scales[j] * int(x) - dmin * least[j] for x in (part >> 4 if j % 2 else part & 15)]
    return half(d) + half(dmin) + packed.tobytes() + raw.tobytes(), values


def q6_k(rng: np.random.Generator) -> tuple[bytes, list[float]]:
    """Sixteen groups of 16 with 8-bit scales; four low bits in `low`, two high ones in `high`."""
    d = 0.5
    low, high = rng.integers(0, 256, 128, np.uint8), rng.integers(0, 256, 64, np.uint8)
    scales = rng.integers(-128, 128, 16).astype(np.int8)
    values = []
    for i in range(256):
        part, quarter, lane = i // 128, i % 128 // 32, i % 32
        nibble = int(low[64 * part + 32 * (quarter % 2) + lane]) >> 4 * (quarter // 2) & 15
        bits = int(high[32 * part + lane]) >> 2 * quarter & 3
        values.append(d * int(scales[i // 16]) * ((nibble | bits << 4) - 32))
    return low.tobytes() + high.tobytes() + scales.tobytes() + half(d), values


BLOCKS = {files.Q4_0: q4_0, files.Q4_1: q4_1, files.Q8_0: q8_0, files.Q4_K: q4_k, files.Q6_K: q6_k}


@pytest.mark.parametrize("kind", BLOCKS, ids=["Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q6_K"])
def test_quantised(kind, tmp_path):
    """Every block of a tensor [2, 3 blocks], against values computed one by one."""
    rng = np.random.default_rng(kind)
    blocks = [BLOCKS[kind](rng) for _ in range(6)]
    want = np.array([v for _, values in blocks for v in values], np.float32).reshape(2, -1)
    metadata, arrays = files.llama()
    tensors = {name: files.plain(a) for name, a in arrays.items()}
    tensors["blk.0.ffn_up.weight"] = (want.shape, kind, b"".join(raw for raw, _ in blocks))
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, tensors))
    name = "model.layers.0.mlp.up_proj.weight"
    assert source.shape(name) == want.shape and source.dtype(name) == np.float32
    np.testing.assert_allclose(source.read(name), want, rtol=1e-6)


def test_plain_types_stay(tmp_path):
    """F16 and BF16 are given as stored: a loader that keeps them needs no float32 copy."""
    metadata, arrays = files.llama()
    tensors = {name: files.plain(a) for name, a in arrays.items()}
    up, down = arrays["blk.0.ffn_up.weight"], arrays["blk.0.ffn_down.weight"]
    tensors["blk.0.ffn_up.weight"] = (up.shape, files.F16, up.astype(np.float16).tobytes())
    top = (down.view(np.uint32) >> 16).astype(np.uint16)  # the upper half of a float32 is a bfloat16
    tensors["blk.0.ffn_down.weight"] = (down.shape, files.BF16, top.tobytes())
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, tensors))
    got = source.read("model.layers.0.mlp.up_proj.weight")
    assert got.dtype == np.float16 and (got == up.astype(np.float16)).all()
    got = source.read("model.layers.0.mlp.down_proj.weight")
    assert got.dtype.name == source.dtype("model.layers.0.mlp.down_proj.weight").name == "bfloat16"
    np.testing.assert_array_equal(got.astype(np.float32), (top.astype(np.uint32) << 16).view(np.float32))


def test_one_tensor_at_a_time(tmp_path):
    """Expanding a tensor of 8 MiB needs little beside its result."""
    rows, columns = 1024, 2048
    metadata, arrays = files.llama()
    tensors = {name: files.plain(a) for name, a in arrays.items()}
    block, values = q8_0(np.random.default_rng(0))
    tensors["blk.0.ffn_up.weight"] = ((rows, columns), files.Q8_0, block * (rows * columns // 32))
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, tensors))
    tracemalloc.start()
    got = source.read("model.layers.0.mlp.up_proj.weight")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    np.testing.assert_array_equal(got[-1, -32:], np.float32(values))
    assert peak < 1.6 * got.nbytes


# ---- names, rows of q and k, configuration ---------------------------------------------------------------------------


def pair_up(x: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k: channel i and i + n/2 of a head become neighbours."""
    n = x.shape[0] // heads
    order = [h * n + i + half for h in range(heads) for i in range(n // 2) for half in (0, n // 2)]
    return x[order]


def test_llama_rows_and_names(tmp_path):
    metadata, arrays = files.llama()
    q, k = arrays["blk.1.attn_q.weight"], arrays["blk.1.attn_k.weight"]
    stored = arrays | {"blk.1.attn_q.weight": pair_up(q, 4), "blk.1.attn_k.weight": pair_up(k, 2)}
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, {n: files.plain(a) for n, a in stored.items()}))
    np.testing.assert_array_equal(source.read("model.layers.1.self_attn.q_proj.weight"), q)
    np.testing.assert_array_equal(source.read("model.layers.1.self_attn.k_proj.weight"), k)
    np.testing.assert_array_equal(source.read("model.layers.1.self_attn.v_proj.weight"), arrays["blk.1.attn_v.weight"])
    assert len(source.names()) == len(arrays)
    want = {
        "model_type": "llama",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-5,  # not 9.99999974e-06, though that is what the file's 32 bits hold
        "rope_theta": 1e6,
        "max_position_embeddings": 64,
        "vocab_size": 13,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "eos_token_id": 0,
    }
    assert {key: source.config[key] for key in want} == want


def test_unpair_is_the_inverse():
    x = np.arange(48, dtype=np.float32).reshape(24, 2)
    np.testing.assert_array_equal(unpair(pair_up(x, 3), 3), x)
    bias = np.arange(24, dtype=np.float32)
    np.testing.assert_array_equal(unpair(pair_up(bias, 3), 3), bias)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_names_are_llama_cpp_s(arch):
    """The package's own table, which llama.cpp's converter uses, takes each of our names back to the GGUF name."""
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, 3)
    ours = ARCHITECTURES[arch]
    for stem in [*(f"blk.2.{part}" for part in ours.blocks), *ours.outer]:
        assert table.get_name(hf_name(ours, f"{stem}.weight"), (".weight",)) == f"{stem}.weight"


def test_gemma_norms_and_caps(tmp_path):
    metadata, arrays = files.llama("gemma2")
    metadata |= {
        "gemma2.attn_logit_softcapping": 50.0,
        "gemma2.attention.sliding_window": 8,
        "gemma2.attention.key_length": 4,
    }
    arrays |= {
        f"blk.{i}.{n}.weight": np.full(16, 1.5, np.float32)
        for i in (0, 1)
        for n in ("post_attention_norm", "post_ffw_norm")
    }
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, {n: files.plain(a) for n, a in arrays.items()}))
    assert source.config["attn_logit_softcapping"] == 50.0 and source.config["sliding_window"] == 8
    assert (source.read("model.layers.0.post_feedforward_layernorm.weight") == 0.5).all()
    got = source.read("model.layers.1.pre_feedforward_layernorm.weight")
    np.testing.assert_array_equal(got, arrays["blk.1.ffn_norm.weight"] - 1)
    q = arrays["blk.0.attn_q.weight"]  # rows as they are: Gemma's rotary form is Hugging Face's
    np.testing.assert_array_equal(source.read("model.layers.0.self_attn.q_proj.weight"), q)


def test_gpt2_is_transposed(tmp_path):
    d, f, v = 8, 32, len(files.TOKENS)
    metadata = {
        "general.architecture": "gpt2",
        "gpt2.context_length": 16,
        "gpt2.embedding_length": d,
        "gpt2.block_count": 1,
    }
    metadata |= {
        "gpt2.feed_forward_length": f,
        "gpt2.attention.head_count": 2,
        "gpt2.attention.layer_norm_epsilon": 1e-5,
    }
    shapes = {
        "token_embd.weight": (v, d),
        "position_embd.weight": (16, d),
        "output_norm.weight": (d,),
        "output_norm.bias": (d,),
    }
    shapes |= {"blk.0.attn_qkv.weight": (3 * d, d), "blk.0.attn_qkv.bias": (3 * d,), "blk.0.ffn_down.weight": (d, f)}
    arrays = {n: np.random.default_rng(1).standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    source = GGUFFile(
        files.write(tmp_path / "m.gguf", metadata | files.TOKENIZER, {n: files.plain(a) for n, a in arrays.items()})
    )
    assert source.shape("transformer.h.0.attn.c_attn.weight") == (d, 3 * d)
    np.testing.assert_array_equal(source.read("transformer.h.0.attn.c_attn.weight"), arrays["blk.0.attn_qkv.weight"].T)
    np.testing.assert_array_equal(source.read("transformer.wpe.weight"), arrays["position_embd.weight"])
    assert source.config["n_embd"] == d and source.config["layer_norm_epsilon"] == 1e-5


def test_frequency_divisors_become_factors(tmp_path):
    """Llama 3's scaling comes as divisors of the frequencies: a LongRoPE with these factors turns by the same angles."""
    metadata, arrays = files.llama()
    arrays["rope_freqs.weight"] = np.array([1.0, 8.0], np.float32)
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, {n: files.plain(a) for n, a in arrays.items()}))
    scaling = source.config["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["short_factor"] == scaling["long_factor"] == [1.0, 8.0]
    assert len(source.names()) == len(arrays) - 1


# ---- tokenizer -------------------------------------------------------------------------------------------------------


def test_tokenizer(tmp_path):
    metadata, arrays = files.llama()
    source = GGUFFile(files.write(tmp_path / "m.gguf", metadata, {n: files.plain(a) for n, a in arrays.items()}))
    got = source.tokenizer_files()
    library = Tokenizer.from_str(got["tokenizer.json"].decode())

    def ids(text):
        return library.encode(text).ids

    assert ids("hello 12") == [10, 11, 6, 7, 8, 9]  # he ll o, then each digit alone
    assert ids("<|start|>he<tool>") == [1, 10, 2]
    assert library.decode([1, 10, 2, 12]) == "he<tool> h"  # a control token is left out, one of a user is text
    settings = json.loads(got["tokenizer_config.json"])
    assert (settings["bos_token"], settings["eos_token"], settings["add_bos_token"]) == ("<|start|>", "<|end|>", False)
    assert json.loads(got["generation_config.json"]) == {"bos_token_id": 1, "eos_token_id": 0}
    assert got["chat_template.jinja"] == b"{{ messages[0]['content'] }}"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre='tekken'"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5'"),
        ({"tokenizer.ggml.merges": ["h e", "h zz"]}, "'h zz' does not join"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "2 entries for 13 tokens"),
        ({"tokenizer.ggml.eos_token_id": 13}, "eos_token_id=13: not one of 13"),
        ({"tokenizer.ggml.tokens": files.TOKENS[:-1] + ["he"]}, "a token twice"),
    ],
)
def test_tokenizer_refusals(change, says, tmp_path):
    metadata, arrays = files.llama()
    source = GGUFFile(
        files.write(tmp_path / "m.gguf", metadata | change, {n: files.plain(a) for n, a in arrays.items()})
    )
    with pytest.raises(UserError, match="m.gguf") as error:
        source.tokenizer_files()
    assert says in str(error.value) and "\n" not in str(error.value)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refuse(path, says):
    with pytest.raises(UserError) as error:
        GGUFFile(path)
    line = str(error.value)
    assert says in line and str(path) in line and "\n" not in line, line


def test_every_truncation_is_one_line(tmp_path):
    """Cut anywhere in the header, and at the last byte: refused, never read past the end, never a traceback."""
    metadata, arrays = files.llama(layers=1)
    whole = files.write(tmp_path / "whole.gguf", metadata, {n: files.plain(a) for n, a in arrays.items()}).read_bytes()
    GGUFFile(tmp_path / "whole.gguf")
    header = whole.index(b"blk.0.ffn_down.weight") + 60
    path = tmp_path / "cut.gguf"
    for size in [*range(0, header, 7), len(whole) - 1]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError) as error:
            GGUFFile(path)
        assert "\n" not in str(error.value)


def raw_header(tensors: int, keys: int, *parts: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)


HUGE = 2**62
ENTRY = files.string("general.architecture") + files.value("llama")


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"PK\3\4" + b"\0" * 60, "is not a GGUF file"),
        (b"GGUF", "too few"),
        (raw_header(0, 0, version=1), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (raw_header(HUGE, 0), f"says {HUGE} tensors"),
        (raw_header(0, HUGE), f"says {HUGE} metadata keys"),
        (raw_header(0, 1, struct.pack("<Q", HUGE), b"x" * 64), f"says {HUGE} characters"),
        (raw_header(0, 1, files.string("a"), struct.pack("<IIQ", 9, 4, HUGE), b"x" * 64), f"says {HUGE} entries"),
        (raw_header(0, 1, files.string("a"), struct.pack("<IIQ", 9, 9, 1), b"x" * 64), "array of the unknown type 9"),
        (raw_header(0, 1, files.string("a"), struct.pack("<I", 77), b"x" * 64), "unknown type 77"),
        (raw_header(0, 1, struct.pack("<Q", 2) + b"\xff\xfe", b"x" * 64), "not UTF-8"),
        (raw_header(0, 2, ENTRY, ENTRY), "twice"),
        (raw_header(1, 0, files.string("t"), struct.pack("<I", 9), b"x" * 64), "9 axes"),
        (raw_header(1, 0, files.string("t"), struct.pack("<IQIQ", 1, 32, 99, 0), b"x" * 64), "ggml type 99"),
        (raw_header(1, 0, files.string("t"), struct.pack("<IQIQ", 1, 33, 8, 0), b"x" * 64), "blocks of 32"),
        (raw_header(1, 0, files.string("t"), struct.pack("<IQIQ", 1, 0, 0, 0), b"x" * 64), "blocks of 1"),
        (raw_header(1, 0, files.string("t"), struct.pack("<I2QIQ", 2, HUGE, HUGE, 0, 0), b"x" * 64), "beyond the end"),
        (raw_header(1, 0, files.string("t"), struct.pack("<IQIQ", 1, 4, 0, HUGE), b"x" * 64), "beyond the end"),
        (raw_header(0, 1, files.string("general.alignment"), files.value(0), b"x" * 64), "general.alignment=0"),
        (raw_header(0, 1, files.string("general.architecture"), files.value("rwkv"), b"x" * 64), "'rwkv'"),
    ],
)
def test_hostile_headers(raw, says, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(raw)
    refuse(tmp_path / "bad.gguf", says)


@pytest.mark.parametrize(
    ("change", "extra", "says"),
    [
        ({"llama.expert_count": 8}, {}, "llama.expert_count=8"),
        ({"llama.attention.head_count_kv": [2, 1]}, {}, "differs from layer to layer"),
        ({"llama.block_count": 3}, {}, "says 3 layers, and holds tensors of 2"),
        ({"llama.block_count": 2**31}, {}, "says 2147483648 layers"),
        ({}, {"blk.0.ffn_gate_inp.weight": np.zeros((2, 16))}, "tensor blk.0.ffn_gate_inp.weight has no place"),
        ({}, {"v.patch_embd.weight": np.zeros((2, 16))}, "tensor v.patch_embd.weight has no place"),
    ],
)
def test_models_that_are_not_known(change, extra, says, tmp_path):
    metadata, arrays = files.llama()
    tensors = {n: files.plain(a) for n, a in (arrays | extra).items()}
    refuse(files.write(tmp_path / "m.gguf", metadata | change, tensors), says)


def test_missing_key_and_tensor(tmp_path):
    metadata, arrays = files.llama()
    del metadata["llama.embedding_length"]
    path = files.write(tmp_path / "m.gguf", metadata, {n: files.plain(a) for n, a in arrays.items()})
    refuse(path, "llama.embedding_length: missing")
    metadata, arrays = files.llama()
    source = GGUFFile(files.write(tmp_path / "n.gguf", metadata, {n: files.plain(a) for n, a in arrays.items()}))
    with pytest.raises(UserError, match="holds no tensor lm_head.weight"):
        source.read("lm_head.weight")


def test_is_gguf(tmp_path):
    metadata, arrays = files.llama()
    path = files.write(tmp_path / "weights.bin", metadata, {n: files.plain(a) for n, a in arrays.items()})
    (tmp_path / "notes.txt").write_text("hello")
    assert is_gguf(path) and not is_gguf(tmp_path) and not is_gguf(tmp_path / "notes.txt")
    assert not is_gguf(tmp_path / "missing.gguf")
