"""Out to Hugging Face folders: the right class for what a model is, bit-equal tensors, and the folder as others read it."""

import functools
import json
import re
from shutil import copytree

import jax
import numpy as np
import pytest
from golden_models import NAMES, folder, loaded
from safetensors.numpy import load_file
from toys import ToyRecurrent

from jaxllm.compose import compose
from jaxllm.data.tokenizer import BPE, Bytes, load_tokenizer
from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.mesh import build_mesh
from jaxllm.params import declare, init_params
from jaxllm.tasks.source import foreign_tokenizer
from jaxllm.weights.choose import choose
from jaxllm.weights.compare import differences
from jaxllm.weights.export import new_folder, write_folder
from jaxllm.weights.family import leaves
from jaxllm.weights.hf_folder import HFFolder
from jaxllm.weights.load import build, read_model, read_node, read_params
from jaxllm.weights.tokenizer_files import hf_files


def tensors_of(path):
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        if file.name != "reference.safetensors":
            found |= load_file(file)
    return found


def write(out, model, params, original=None, **kwargs):
    choice = choose(model, original)
    settings = {"dtype": "float32", "shard_bytes": 10**9, "files": {}} | kwargs
    with new_folder(out) as part:
        counts = write_folder(part, choice, choice.fold(model, params), **settings)
    return choice, counts


def tiny(*overrides):
    """A model of a configuration of ours."""
    return compose(["model=tiny", "model.d_model=32", "model.vocab_size=50", "track=none", *overrides]).build("model")


def small(*overrides):
    """(model, params) of a configuration of ours."""
    model = tiny(*overrides)
    return model, init_params(model, jax.random.key(3))


# Their class is chosen afresh, without the config.json that they came with; the others keep that of theirs.
FRESH = {"gpt2", "gemma2", "nanochat", "olmo2", "mimo_v2_flash", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v2_groups", "kimi_linear",
         "qwen3_next"}  # fmt: skip


# DeepSeek-V4's class saves some tensors, and the stem of all but the head, otherwise than they were released.
V4_SAVED = {"embed_tokens.weight": "embed.weight", "attn.norm.weight": "attn.kv_norm.weight", "hc_head.hc_": "hc_head_"}


def released(name, key):
    """transformers saves Kimi Linear's dense layers under the name of those with experts; released files do not."""
    if name == "deepseek_v4":
        for saved, own in V4_SAVED.items():
            key = key.replace(saved, own)
        return key.removeprefix("model.")
    return re.sub(r"block_sparse_moe\.(?=\w+_proj)", "mlp.", key) if name == "kimi_linear" else key


@pytest.mark.parametrize("name", NAMES)
def test_in_and_out_again_is_the_identity(name, tmp_path):
    """Bit for bit, and the same model, whether the first config.json is at hand or the class is chosen afresh."""
    source, model, params = loaded(name)
    before = {released(name, key): tensor for key, tensor in tensors_of(folder(name)).items()}
    original = None if name in FRESH else source.config
    choice, counts = write(tmp_path / "out", model, params, original, shard_bytes=50_000)
    assert choice.family.architectures[0] == source.config["architectures"][0]
    again = HFFolder(tmp_path / "out")
    assert differences(model, build(read_node(again))) == []
    after = tensors_of(tmp_path / "out")
    assert (
        after.keys() == before.keys() == set(again.names())
        and len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    )
    assert all(np.array_equal(after[key], before[key]) and after[key].dtype == before[key].dtype for key in before)
    assert counts == {
        "tensors": len(before),
        "params": sum(t.size for t in before.values()),
        "bytes": sum(t.nbytes for t in before.values()),
    }


def test_how_narrow_index_keys_are_is_no_part_of_what_a_model_is():
    _, model, _ = loaded("deepseek_v32")
    narrow, fewer = (
        model.clone(mixers={name: functools.partial(make, **field) for name, make in model.mixers.items()})
        for field in ({"index_dtype": "bfloat16"}, {"top_k": 3})
    )
    assert differences(narrow, model) == [] and choose(narrow).family.architectures[0] == "DeepseekV32ForCausalLM"
    assert any("top_k: 3" in line for line in differences(fewer, model))


SPARSE = "model.layers=global/dense | 2* global/moe"
NOPE = ["model.layers=2* global/dense*3 nope/dense", "+mixer@model.mixers.nope=gqa", "model.mixers.nope.rope=null"]


@pytest.mark.parametrize(
    "overrides, architecture",
    [
        ([], "LlamaForCausalLM"),
        (["model.mixers.global.qk_norm=true"], "Qwen3ForCausalLM"),
        (["model.mixers.global.qkv_bias=true"], "Qwen2ForCausalLM"),
        (["model.mixers.global.window=7"], "MistralForCausalLM"),
        ([*NOPE], "SmolLM3ForCausalLM"),
        (["model.residual.scale=0.5", "model.embed_scale=2.0"], "GraniteForCausalLM"),
        (["mixer@model.mixers.global=mla"], "DeepseekV3ForCausalLM"),
        (["model.layers=2* global/moe", "+ffn@model.ffns.moe=moe"], "MixtralForCausalLM"),
        ([SPARSE, "+ffn@model.ffns.moe=moe", "model.mixers.global.qk_norm=true"], "Qwen3MoeForCausalLM"),
        ([SPARSE, "+ffn@model.ffns.moe=moe_aux_free", "mixer@model.mixers.global=mla"], "DeepseekV3ForCausalLM"),
    ],
)  # fmt: skip
def test_the_class_is_chosen_by_what_the_model_is(overrides, architecture):
    assert choose(tiny(*overrides)).family.architectures[0] == architecture


@pytest.mark.parametrize(
    "overrides, line",
    [
        (["model.mixers.global.softcap=5.0"], "does not: .*softcap"),
        (["model.mixers.global.chunk=8"], "layer 0, mixer.chunk: 8, not null"),
        (["model.mixers.global.gate=true"], "gate: True, not False"),
        (["rope@model.mixers.global.rope=ntk"], "NTKRoPE has no rope_type"),
        ([SPARSE, "+ffn@model.ffns.moe=moe_latent", "mixer@model.mixers.global=mla"], "ffn.glu: situ, not swiglu"),
        ([SPARSE, "+ffn@model.ffns.moe=moe"], "Qwen3MoeForCausalLM, does not: layer 0, mixer.qk_norm"),
    ],
)
def test_what_stands_in_the_way_is_named(overrides, line):
    with pytest.raises(UserError, match=f"format=hf: no Hugging Face class holds this model; .*{line}"):
        choose(tiny(*overrides))


def test_layers_without_a_class_are_named():
    model = tiny()
    strange = model.clone(mixers={**model.mixers, "linear": ToyRecurrent}, layers="global/dense | 2* linear/dense")
    with pytest.raises(UserError, match=r"format=hf: no Hugging Face class has the layers linear \(ToyRecurrent\)"):
        choose(strange)


def test_factors_without_a_class_are_folded_into_the_weights(tmp_path):
    """The quickstart's shape: a scaled, tied embedding with q/k norms. Out comes an untied Qwen 3 that computes the same."""
    model, params = small("model.mixers.global.qk_norm=true", "model.embed_scale=5.7", "model.vocab_multiple=16")
    choice, _ = write(tmp_path / "out", model, params)
    assert choice.folded and choice.family.architectures[0] == "Qwen3ForCausalLM"
    node, again = read_model(HFFolder(tmp_path / "out"))
    assert (
        node["vocab_size"] == 50
        and not node["tie_embeddings"]
        and tensors_of(tmp_path / "out")["lm_head.weight"].shape == (50, 32)
    )
    tokens = np.arange(24).reshape(2, 12) % 50
    ours, theirs = (
        jax.jit(lambda p, m=m: m.apply({"params": p}, Context.whole(tokens)))(p)[1].logits
        for m, p in ((model, params), (build(node), again))
    )
    np.testing.assert_allclose(theirs, ours[..., :50], atol=1e-5, rtol=0)


def test_a_padded_vocabulary_is_filled_with_zeros_and_cut_again(tmp_path):
    source, model, _ = loaded("llama")
    wide = model.clone(vocab_multiple=48)
    params = read_params(source, wide)
    assert params["embed"].shape == (96, 32) and not np.asarray(params["embed"])[64:].any()
    write(tmp_path / "out", wide, params)
    after, before = tensors_of(tmp_path / "out"), tensors_of(folder("llama"))
    assert all(np.array_equal(after[key], before[key]) for key in before)


def test_parameters_go_straight_into_the_shardings_of_a_mesh(devices):
    """Each device gets its part, and each tensor is read once."""
    source, model, whole = loaded("llama")
    mesh = build_mesh({"fsdp": 2, "tensor": 2})
    reads = []

    class Counting:
        where, config, names, shape, dtype = source.where, source.config, source.names, source.shape, source.dtype

        def read(self, name):
            reads.append(name)
            return source.read(name)

    params = leaves(read_params(Counting(), model, mesh=mesh))
    assert sorted(reads) == sorted(source.names())
    q = params["g0/b0/mixer/q_proj"]
    assert len(q.sharding.device_set) == 4 and q.addressable_shards[0].data.shape == (2, 16, 2, 12)
    for path, leaf in leaves(whole).items():
        np.testing.assert_array_equal(np.asarray(params[path]), leaf, err_msg=path)


def test_the_folder_appears_whole_or_not_at_all(tmp_path):
    model, params = small()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="exists and is not an empty folder"):
        write(tmp_path / "full", model, params)
    with pytest.raises(UserError, match="dtype=int8"):
        write(tmp_path / "half", model, params, dtype="int8")
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", model, params, dtype="bfloat16")
    assert HFFolder(tmp_path / "empty").dtype("model.norm.weight").name == "bfloat16"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "full"]
    assert json.loads((tmp_path / "empty/config.json").read_text())["dtype"] == "bfloat16"


def test_biases_that_choose_experts_keep_their_precision(tmp_path):
    """Rounded to half precision they would choose others; transformers holds them in float32 whatever the file's dtype."""
    source, model, params = loaded("deepseek_v3")
    _, counts = write(tmp_path / "half", model, params, source.config, dtype="bfloat16")
    name, half = "model.layers.1.mlp.gate.e_score_correction_bias", HFFolder(tmp_path / "half")
    assert {half.dtype(n).name for n in half.names() if n != name} == {"bfloat16"}
    assert half.dtype(name).name == "float32" and np.array_equal(half.read(name), source.read(name))
    assert counts["bytes"] == 2 * counts["params"] + 2 * 8
    again = leaves(read_params(half, model))["g0/b1/ffn/router/bias"]
    np.testing.assert_array_equal(again, leaves(params)["g0/b1/ffn/router/bias"])


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
def test_tokenizers_of_ours_give_others_the_same_ids(kind, tmp_path):
    tokenizer = Bytes() if kind == "bytes" else BPE(vocab_size=300).fit(["hello, hello world\n" * 50], tmp_path)
    for name, text in hf_files(tokenizer, 64).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(tmp_path / "tokenizer.json"))
    text = "hello <|eos|> \u00e9\U0001f600\n"
    assert library.encode("hello \u00e9\U0001f600\n").ids == tokenizer.prompt("hello \u00e9\U0001f600\n")
    assert library.decode(tokenizer.encode("hello \u00e9\U0001f600\n")) == "hello \u00e9\U0001f600\n"
    again = load_tokenizer(tmp_path)
    assert again.prompt(text) == tokenizer.prompt(text) and again.stop_ids == (tokenizer.eos_id,)
    assert json.loads((tmp_path / "generation_config.json").read_text()) == {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
    }


def test_a_folder_without_a_tokenizer_says_so():
    said = []
    assert foreign_tokenizer(loaded("llama")[0], said.append) is None
    assert "holds no tokenizer.json, so text cannot be read or written, only token ids" in said[0]
    assert declare(loaded("llama")[1])  # and the model is there all the same


def test_a_tokenizer_of_sentencepiece_alone_says_how_to_convert_it(tmp_path):
    copytree(folder("llama"), tmp_path / "old")
    (tmp_path / "old" / "tokenizer.model").write_bytes(b"\n\x0b")
    said = []
    assert foreign_tokenizer(HFFolder(tmp_path / "old"), said.append) is None
    (line,) = said
    assert (
        line.startswith(f"{tmp_path}/old: holds its tokenizer as tokenizer.model") and "save_pretrained(FOLDER)" in line
    )
