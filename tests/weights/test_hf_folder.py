"""Hugging Face folders: both spellings of config.json, and one clear line for everything that can be wrong or hostile."""

import json
import shutil
import struct

import ml_dtypes
import numpy as np
import pytest
from golden_models import GOLDEN
from safetensors.numpy import load_file, save_file

from jaxllm.errors import UserError
from jaxllm.weights.choose import choose
from jaxllm.weights.export import write_folder
from jaxllm.weights.family import leaves
from jaxllm.weights.hf_folder import HFFolder, is_hf_folder
from jaxllm.weights.layer_string import layer_string
from jaxllm.weights.load import build, read_model, read_node
from jaxllm.weights.open import is_foreign, open_tensors
from jaxllm.weights.tensors import widest_dtype


@pytest.fixture
def copy(tmp_path):
    """A function: the folder of a golden model to spoil, with keys of its config.json changed (None removes one)."""

    def make(name="llama", **keys):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        shutil.copy(GOLDEN / name / "model.safetensors", folder)
        config = json.loads((GOLDEN / name / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
        return folder

    return make


def refused(folder):
    """The line that reading the model gives."""
    with pytest.raises(UserError) as caught:
        read_model(open_tensors(folder))
    line = str(caught.value)
    assert "\n" not in line and str(folder) in line
    return line


def spoil(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


# ---- tensors ------------------------------------------------------------------------------------------------------------------------


def test_missing_extra_and_mis_shaped_tensors_are_named(copy):
    folder = copy()
    name = "model.layers.1.mlp.up_proj.weight"
    spoil(folder, lambda t: t.pop(name))
    assert f"tensor {name} is missing; expected one of shape [48, 32]" in refused(folder)
    spoil(folder, lambda t: t.update({name: np.zeros((32, 48), np.float32)}))
    assert f"tensor {name}: expected shape [48, 32], found [32, 48]" in refused(folder)
    spoil(folder, lambda t: t.update({name: np.zeros((48, 32), np.int32)}))
    assert f"tensor {name} is of type int32" in refused(folder)
    extra = {name: np.zeros((48, 32), np.float32), "model.layers.2.mlp.up_proj.weight": np.zeros((48, 32), np.float32)}
    spoil(folder, lambda t: t.update(extra))
    assert "tensor model.layers.2.mlp.up_proj.weight of shape [48, 32] belongs to no parameter" in refused(folder)


def test_tables_of_angles_are_no_parameters_and_a_bare_backbone_has_shorter_names(copy):
    folder = copy("gpt2")
    before = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): array for name, array in before.items()}
    save_file({**bare, "h.0.attn.bias": np.ones((1, 1, 4, 4), np.float32)}, folder / "model.safetensors")
    _, params = read_model(open_tensors(folder))
    np.testing.assert_array_equal(params["embed"], before["transformer.wte.weight"])
    np.testing.assert_array_equal(params["g0"]["b0"]["ffn"]["up_proj"][1], before["transformer.h.1.mlp.c_fc.weight"])


def test_a_tied_head_may_be_there_once_more_but_not_differ(copy):
    folder = copy("qwen3")
    spoil(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    read_model(open_tensors(folder))
    spoil(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"] + 1}))
    assert "differs from model.embed_tokens.weight, though config.json ties them" in refused(folder)


def test_half_precision_is_read_exactly_and_its_dtype_remembered(copy):
    folder = copy()
    before = load_file(folder / "model.safetensors")
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in before.items()}
    save_file(half, folder / "model.safetensors")
    source = open_tensors(folder)
    assert widest_dtype(source) == "bfloat16"
    _, params = read_model(source)
    assert params["embed"].dtype == np.float32
    np.testing.assert_array_equal(params["embed"], half["model.embed_tokens.weight"].astype(np.float32))
    save_file({**half, "model.norm.weight": before["model.norm.weight"]}, folder / "model.safetensors")
    assert widest_dtype(open_tensors(folder)) == "float32"


# ---- experts ------------------------------------------------------------------------------------------------------------------------


def fuse(tensors, gate, up, down, stem):
    """One tensor an expert to all experts in two: gate rows, then up rows."""
    where = sorted({name.split(f".{stem}.experts.")[0] for name in tensors if f".{stem}.experts." in name})
    for layer in where:
        numbers = range(sum(name.startswith(f"{layer}.{stem}.experts.") for name in tensors) // 3)

        def take(which, layer=layer, numbers=numbers):
            return np.stack([tensors.pop(f"{layer}.{stem}.experts.{e}.{which}.weight") for e in numbers])

        tensors[f"{layer}.mlp.experts.gate_up_proj"] = np.concatenate([take(gate), take(up)], axis=1)
        tensors[f"{layer}.mlp.experts.down_proj"] = take(down)
        if stem != "mlp":
            tensors[f"{layer}.mlp.gate.weight"] = tensors.pop(f"{layer}.{stem}.gate.weight")


@pytest.mark.parametrize(
    "name, names",
    [
        ("deepseek_v3", ("gate_proj", "up_proj", "down_proj", "mlp")),
        ("mixtral", ("w1", "w3", "w2", "block_sparse_moe")),
    ],
)
def test_experts_one_by_one_or_all_in_one_tensor(copy, name, names):
    """As released, and as the classes' own parameters are: the same numbers."""
    folder = copy(name)
    _, one = read_model(open_tensors(folder))
    spoil(folder, lambda tensors: fuse(tensors, *names))
    assert "model.layers.1.mlp.experts.gate_up_proj" in open_tensors(folder).names()
    _, all_in_one = read_model(open_tensors(folder))
    one, all_in_one = leaves(one), leaves(all_in_one)
    assert one.keys() == all_in_one.keys()
    assert all(np.array_equal(one[key], all_in_one[key]) for key in one)
    spoil(folder, lambda tensors: tensors.update({"model.layers.1.mlp.experts.down_proj": np.zeros((4, 32, 9))}))
    assert "tensor model.layers.1.mlp.experts.down_proj: expected shape" in refused(folder)


def test_an_expert_that_is_missing_is_named(copy):
    folder, name = copy("mixtral"), "model.layers.1.block_sparse_moe.experts.3.w3.weight"
    spoil(folder, lambda tensors: tensors.pop(name))
    assert f"tensor {name} is missing; expected one of shape [16, 32]" in refused(folder)


def drafting(tensors):
    """A draft layer behind the last, as DeepSeek-V3 is released: a whole layer, the join, copies of embedding and head."""
    rng = np.random.default_rng(3)
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        shape = tensors[name].shape
        tensors[name.replace(".1.", ".2.", 1)] = rng.standard_normal(shape).astype(np.float32)
    for name, shape in {"enorm": (32,), "hnorm": (32,), "shared_head.norm": (32,), "eh_proj": (32, 64)}.items():
        tensors[f"model.layers.2.{name}.weight"] = rng.standard_normal(shape).astype(np.float32)
    tensors["model.layers.2.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.2.shared_head.head.weight"] = tensors["lm_head.weight"]


def test_draft_layers_become_modules_and_go_back(copy, tmp_path):
    folder = copy("deepseek_v3", num_nextn_predict_layers=1)
    _, plain = read_model(open_tensors(folder))  # announced, but not there, as transformers saves it
    assert "mtp" not in plain
    spoil(folder, drafting)
    source = open_tensors(folder)
    node, params = read_model(source)
    assert node["mtp"]["ffn"] == "moe" and node["mtp"]["hidden"] == "post_norm"
    join = source.read("model.layers.2.eh_proj.weight")  # [out, in], in = the embedding's half, then the hidden state's
    np.testing.assert_array_equal(params["mtp"]["d1"]["eh_proj"], np.stack([join[:, :32].T, join[:, 32:].T]))
    np.testing.assert_array_equal(
        params["mtp"]["d1"]["norm"]["scale"], source.read("model.layers.2.shared_head.norm.weight")
    )
    choice = choose(build(node), source.config)
    (tmp_path / "out").mkdir()
    write_folder(tmp_path / "out", choice, params, dtype="float32", shard_bytes=10**9, files={})
    again = open_tensors(tmp_path / "out")
    copies = {"model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"}
    assert set(again.names()) == set(source.names()) - copies and again.config["num_nextn_predict_layers"] == 1
    assert all(np.array_equal(again.read(name), source.read(name)) for name in again.names())
    spoil(folder, lambda tensors: tensors.pop("model.layers.2.hnorm.weight"))
    assert "tensor model.layers.2.hnorm.weight is missing; expected one of shape [32]" in refused(folder)
    spoil(folder, lambda tensors: tensors.update({"model.layers.3.eh_proj.weight": np.zeros((32, 64), np.float32)}))
    spoil(folder, lambda tensors: tensors.update({"model.layers.2.hnorm.weight": np.zeros(32, np.float32)}))
    assert "model.layers.3.eh_proj.weight of shape [32, 64] belongs to no parameter" in refused(folder)
    spoil(folder, lambda tensors: [tensors.pop(f"model.layers.{n}.eh_proj.weight") for n in (2, 3)])
    assert "model.layers.2.enorm.weight of shape [32] belongs to no parameter" in refused(folder)


def test_the_number_of_draft_layers_goes_by_two_names(copy):
    warnings = []
    node, _ = read_model(
        open_tensors(copy("deepseek_v3", num_nextn_predict_layers=1, num_mtp_layers=1)), warn=warnings.append
    )
    assert "mtp" not in node and not warnings
    folder = copy("deepseek_v3", num_nextn_predict_layers=1, num_mtp_layers=2)
    assert "num_mtp_layers=2 and num_nextn_predict_layers=1 contradict each other" in refused(folder)
    assert "num_mtp_layers='x': expected a whole number" in refused(copy("deepseek_v3", num_mtp_layers="x"))


# ---- files --------------------------------------------------------------------------------------------------------------------------


def test_pickles_are_not_opened(copy):
    folder = copy()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pytorch_model.bin only; pickled files can run code" in refused(folder)
    (folder / "pytorch_model.bin").unlink()
    assert "holds no weights" in refused(folder)


def index(folder, table):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "sub/a.safetensors", "..", "a\\..\\b.safetensors", ""]
)
def test_an_index_names_only_plain_files(copy, name):
    folder = copy()
    (folder.parent / "a.safetensors").write_bytes(b"")
    index(folder, {"model.norm.weight": name})
    assert "only plain file names of the same folder are opened" in refused(folder)


def test_shards_that_are_missing_or_lie(copy):
    folder = copy()
    names = list(load_file(folder / "model.safetensors"))
    index(folder, {name: "model-1.safetensors" for name in names})
    assert "model.safetensors.index.json names model-1.safetensors, which is not there" in refused(folder)
    index(folder, {**dict.fromkeys(names, "model.safetensors"), "model.more": "model.safetensors"})
    assert "tensor model.more is missing, though model.safetensors.index.json says it is here" in refused(folder)
    shutil.copy(folder / "model.safetensors", folder / "twice.safetensors")
    index(folder, {**dict.fromkeys(names, "model.safetensors"), names[0]: "twice.safetensors"})
    assert "is in model.safetensors too" in refused(folder)
    (folder / "model.bin").write_bytes(b"")
    index(folder, {names[0]: "model.bin"})
    assert "'model.bin', which is not a .safetensors file" in refused(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "must hold a JSON object" in refused(folder)


def test_links_out_of_the_folder_are_refused_but_those_of_the_hub_cache_are_not(copy, tmp_path):
    folder = copy()
    outside = tmp_path / "outside.safetensors"
    shutil.move(folder / "model.safetensors", outside)
    (folder / "model.safetensors").symlink_to(outside)
    assert "is a link to" in refused(folder) and "outside the folder" in refused(folder)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "123"
    (tmp_path / "models--a--b" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file, target in ((outside, "model.safetensors"), (folder / "config.json", "config.json")):
        blob = tmp_path / "models--a--b" / "blobs" / target[:5]
        shutil.copy(file, blob)
        (snapshot / target).symlink_to(blob)
    assert len(HFFolder(snapshot).names()) == 21


def test_broken_headers(copy):
    folder = copy()
    whole = (folder / "model.safetensors").read_bytes()
    size = struct.unpack("<Q", whole[:8])[0]
    for content in (
        whole[:-4],  # cut short
        struct.pack("<Q", 2**40) + whole[8:],  # a header of a terabyte
        struct.pack("<Q", size + 10**6) + whole[8:],  # longer than the file
        whole[:8] + b"[" * size + whole[8 + size :],  # no JSON
        whole[:8].replace(whole[:8], struct.pack("<Q", 3)) + b"{}x",
        b"",
    ):
        (folder / "model.safetensors").write_bytes(content)
        assert "is not a whole safetensors file" in refused(folder)


# ---- config.json --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys, line",
    [
        ({"model_type": "lama"}, "model_type='lama' is not known; did you mean 'llama'?"),
        ({"model_type": ...}, "model_type=None is not known"),
        (
            {"architectures": ["MyForCausalLM"], "auto_map": {"AutoModel": "m.M"}},
            "'MyForCausalLM', which is code in the folder",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "the weights are quantised (gptq)"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not available"),
        ({"rope_parameters": {"rope_type": "mrope"}}, "rope_type='mrope' is not available"),
        ({"rope_parameters": {"rope_type": "linear"}}, "rope_type='linear' needs factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mystery": 1}}, "keys that are not known: mystery"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True changes what the model computes"),
        ({"pretraining_tp": 2}, "pretraining_tp=2 changes what the model computes"),
        ({"hidden_size": "32"}, "hidden_size='32': expected a whole number"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected a whole number of at least 1"),
        ({"attention_bias": "no"}, "attention_bias='no': expected true or false"),
    ],
)
def test_what_is_not_modelled_is_refused(copy, keys, line):
    assert line in refused(copy(**keys))


@pytest.mark.parametrize(
    "name, keys, line",
    [
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not available; only 'sigmoid' is"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not available: the class ignores it"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not available"),
        ("deepseek_v2", {"first_k_dense_replace": "one"}, "first_k_dense_replace='one': expected a whole number"),
        ("mimo_v2_flash", {"mlp_layer_types": ["dense"]}, "mlp_layer_types=['dense']: expected 2 entries"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers=1: expected a list of layers"),
        ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not available"),
        ("mixtral", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than there are experts, 4"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act='gelu' is not available for experts"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True changes"),
        (
            "qwen2",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types: 'linear_attention' is not available",
        ),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types: expected 2 entries"),
        ("nanochat", {"attention_bias": True}, "attention_bias=True is not available"),
    ],
)
def test_families_refuse_what_they_do_not_model(copy, name, keys, line):
    assert line in refused(copy(name, **keys))


def test_unknown_keys_are_said_and_known_ones_are_not(copy):
    said = []
    read_node(open_tensors(copy(brand_new="x", torch_dtype="float32", nothing=None)), said.append)
    assert len(said) == 1 and said[0].endswith("have no effect: brand_new")


def test_code_in_the_folder_is_not_needed_for_a_known_architecture(copy):
    folder = copy(auto_map={"AutoModelForCausalLM": "modeling.Evil"})
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    assert build(read_node(open_tensors(folder))).num_layers == 2


V4 = {"rope_parameters": ..., "rope_theta": 500.0}


@pytest.mark.parametrize(
    "old, new",
    [
        ({"rope_scaling": None}, {"rope_type": "default", "rope_theta": 500.0}),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "original_max_position_embeddings": 16},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": 16}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 500.0},
        ),
    ],
)
def test_both_spellings_of_rotary_settings_mean_the_same(copy, tmp_path, old, new):
    first = read_node(open_tensors(copy(**V4, **old)))
    shutil.rmtree(tmp_path / "llama")
    assert first == read_node(open_tensors(copy(rope_parameters=new)))
    assert first["mixers"]["global"]["rope"]["theta"] == 500.0


def test_layers_become_the_shortest_string_to_compile():
    a, b, c = ("global", "dense"), ("nope", "dense"), ("local", "dense")
    assert layer_string([a] * 4) == "4* global/dense"
    assert layer_string(([a] * 3 + [b]) * 9) == "9* global/dense*3 nope/dense"
    assert layer_string([c, a] * 13) == "13* local/dense global/dense"
    assert layer_string([a] + [c] * 2 + [a]) == "global/dense | 2* local/dense | global/dense"
    assert layer_string([a]) == "global/dense"


def test_what_is_no_checkpoint(tmp_path):
    assert not is_hf_folder(tmp_path) and not is_foreign(tmp_path)
    with pytest.raises(UserError, match="neither a Hugging Face folder"):
        open_tensors(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="is not valid JSON"):
        open_tensors(tmp_path)
