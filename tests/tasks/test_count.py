"""`task=count` says what is really allocated, without allocating it."""

import jax
import pytest

from jaxllm.cache import cache_bytes
from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.mesh import build_mesh
from jaxllm.params import declare, init_params, is_declared
from jaxllm.tasks import TaskIO, count, count_memory
from jaxllm.training.state import new_state
from jaxllm.weights.choose import choose

SMALL = ["+experiment=smoke", "model.vocab_size=96"]


def run(*overrides, lines=None):
    io = TaskIO()
    io.log = lambda text, level="info": lines.append(text) if lines is not None else None  # type: ignore[method-assign]
    cfg = compose([*SMALL, "task=count", *overrides])
    return cfg, count.run(cfg, io)


def total(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_equals_what_is_allocated():
    cfg, result = run("count.context=40", "count.batch=3")
    model = cfg.build("model")
    params = init_params(model, jax.random.key(0))
    assert result["params_total"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert result["cache_bytes_total"] == cache_bytes(model.init_cache(3, 40))
    state = new_state(model, cfg.build("optim"), 0)
    parts = result["train_bytes_parts"]
    assert parts["params"] == total(params) == parts["grads"]
    assert parts["optimiser"] == total(state.opt_state)
    assert "activations" not in parts and result["train_bytes"] is None  # of a decode step there are none
    training = run("count.phase=train")[1]
    held = dict(training["train_bytes_parts"])
    assert held.pop("activations") > 0 and held == parts
    assert training["train_bytes"] == sum(training["train_bytes_parts"].values())


def test_layer_by_layer_and_how_long_a_chip_needs():
    lines = []
    cfg, result = run("count.context=40", "count.batch=3", "chip=l4", lines=lines)
    model, rows = cfg.build("model"), {row["layer"]: row for row in result["layers"]}
    assert list(rows) == ["global", "dense", "head"] and rows["global"]["number"] == 2
    assert sum(row["number"] * row["flops"] for row in rows.values()) == model.cost(3, 1, 40).flops
    assert rows["global"]["number"] * rows["global"]["cache_bytes"] == result["cache_bytes_total"]
    assert rows["dense"]["param_bytes"] == total(init_params(model, jax.random.key(0))["g0"]["b0"]["ffn"]) / 2
    moved = 4 * model.cost(1, 1, 1).params + 2 * rows["global"]["cache_read"]  # weights and cache, of an L4 at 300 GB/s
    assert result["limit"] == "memory" and result["predicted_ms"] == pytest.approx(moved / 300e6, rel=0.05)
    assert any("on one L4 (memory binds)" in line for line in lines)
    _, unknown = run()
    assert (unknown["chip"], unknown["predicted_ms"], unknown["limit"]) == ("cpu", "n/a", "n/a")
    _, trained = run("count.phase=train", "chip=l4")
    assert trained["predicted_ms"] > 3 * result["predicted_ms"]


def test_a_share_of_a_mesh_that_is_not_here():
    _, whole = run("count.phase=train")
    cfg, split = run("count.phase=train", "mesh.axes={data: 2, fsdp: 2, tensor: 2}")
    mesh = build_mesh(cfg.section("mesh").axes)
    params = init_params(cfg.build("model"), jax.random.key(0), mesh=mesh)
    share = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(params))
    assert split["train_bytes_parts"]["params"] == share < whole["train_bytes_parts"]["params"]
    _, pod = run("model.mixers.global.num_kv_heads=8", "mesh.axes={data: 512, fsdp: 1, tensor: 8}")
    assert pod["mesh"] == {"data": 512, "fsdp": 1, "expert": 1, "context": 1, "tensor": 8}


def test_flops_by_phase():
    _, decode = run("count.context=64")
    _, prefill = run("count.context=64", "count.phase=prefill")
    _, train = run("count.context=64", "count.phase=train")
    assert train["flops_per_token"] == pytest.approx(3 * prefill["flops_per_token"])
    assert decode["flops_per_token"] - prefill["flops_per_token"] == pytest.approx(
        2 * 4 * 64 * (64 - 32.5)
    )  # 2 layers x 4 d (s - mean s)


def test_remat_and_accumulation_lower_the_activations():
    keep = run("count.phase=train", "model.layers=6* global/dense")[1]["train_bytes_parts"]["activations"]
    remat = run("count.phase=train", "model.layers=6* global/dense", "model.remat=full")[1]["train_bytes_parts"][
        "activations"
    ]
    half = run("count.phase=train", "model.layers=6* global/dense", "train.accumulate=2")[1]["train_bytes_parts"][
        "activations"
    ]
    assert remat < keep / 3
    assert half == pytest.approx(keep / 2, rel=0.02)


# name, overrides: residuals that are read and not carried, layers that hand on a choice, a convolution, several groups of one kind.
BY_KIND = {
    "groups": ("model.layers=2* global/dense | global/dense | 2* global/wide", "+ffn@model.ffns.wide=gelu"),
    "attention residuals": ("model=kimi_k3_tiny", "model.layers=3* linear/dense | 2* linear/dense"),
    "shared choice": ("model=sparse_tiny",),
}


@pytest.mark.parametrize("name", BY_KIND)
def test_what_a_backward_keeps_is_counted_by_kind_of_layer_and_equals_the_whole_program(name, monkeypatch):
    parts = []
    real = count_memory._of_loss
    monkeypatch.setattr(count_memory, "_of_loss", lambda *a: (parts.append(a), real(*a))[1])
    cfg, result = run("count.phase=train", *BY_KIND[name])
    model = cfg.build("model")
    (_, looked_at, *_), *rest = parts
    assert not rest and looked_at.layers == "empty/empty"  # never the whole of it
    params = count_memory._shapes(declare(model))
    whole = real(cfg, model, params, result["train_rows"], result["train_seq_len"])
    assert result["train_bytes_parts"]["activations"] == pytest.approx(whole, rel=1e-6)


def test_the_table_names_every_parameter():
    lines = []
    cfg, result = run(lines=lines)
    text = "\n".join(lines)
    for name in ("embed", "g0/b0/mixer/q_proj", "g0/b0/ffn/down_proj", "final_norm/scale"):
        assert name in text
    assert f"{result['params_total']:,}" in text and "layers embed heads head" in text


def test_a_large_model_costs_nothing_to_count():
    before = len(jax.live_arrays())
    wide = [
        "model.d_model=8192",
        "model.layers=80* global/dense",
        "model.mixers.global.num_heads=64",
        "model.vocab_size=128000",
    ]
    _, result = run(*wide)
    assert result["params_total"] > 50e9  # 200 GB of parameters: allocating them would not pass unnoticed here
    assert len(jax.live_arrays()) <= before + 8


# Published: parameters, those of them that a token uses, and whether the publisher counts the table that is only looked up.
RELEASED = {
    "deepseek_v2": (236e9, 21e9, False, "DeepseekV2ForCausalLM"),
    "deepseek_v3": (671e9, 36.7e9, False, "DeepseekV3ForCausalLM"),
    "gpt_oss_120b": (116.83e9, 5.13e9, False, "GptOssForCausalLM"),
    "mimo_v2_flash": (309e9, 15e9, False, "MiMoV2FlashForCausalLM"),
    "mixtral_8x7b": (46.7e9, 12.9e9, True, "MixtralForCausalLM"),
    "qwen3_30b_a3b": (30.5e9, 3.35e9, True, "Qwen3MoeForCausalLM"),
    "qwen3_next_80b_a3b": (79.7e9, 3.87e9, True, "Qwen3NextForCausalLM"),
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_models_of_experts_are_counted_and_never_allocated(name):
    """All experts in the total, the chosen ones in what a token uses; the class that transformers has for the model holds it."""
    total, active, table, architecture = RELEASED[name]
    before = len(jax.live_arrays())
    model = compose([f"model={name}", "track=none"]).build("model")
    cost, held = model.cost(1, 1, 1024), sum(b.value.size for b in jax.tree.leaves(declare(model), is_leaf=is_declared))
    assert held == pytest.approx(total, rel=0.002)
    used = held - (cost.params - cost.params_active) + (count.tables(model, declare(model)) if table else 0)
    rounding = 0.5e9 if active % 1e9 == 0 else 0.0  # whole billions
    assert used == pytest.approx(active, rel=0.01, abs=rounding)
    assert choose(model).family.architectures[0] == architecture
    assert len(jax.live_arrays()) <= before + 8


def test_a_released_model_through_the_task():
    """Compute by the chosen experts, memory by all: a decode step multiplies a twentieth of what it holds."""
    io, before = TaskIO(), len(jax.live_arrays())
    io.log = lambda text, level="info": None  # type: ignore[method-assign]
    result = count.run(compose(["model=deepseek_v3", "task=count", "track=none"]), io)
    assert result["params_total"] == 671_026_419_200  # as the released files' index has it, without the draft layer
    assert result["params_active"] == 36_625_618_432 and round(result["params_active"] / 1e9) == 37  # as published
    assert result["params_active_with_embedding"] == result["params_active"] + 129_280 * 7168
    assert result["params_total"] - result["params_trained"] == 58 * 256  # the biases that only choose
    assert result["cache_bytes_per_token"] == 61 * 576 * 2
    attention = 61 * 2 * 1024 * 128 * (2 * 512 + 64)  # absorbed: scores over latents and keys, outputs over latents
    norms = result["params_active"] - (result["flops_per_token"] - attention) / 2
    assert 0 < norms < 0.0001 * result["params_active"]
    assert len(jax.live_arrays()) <= before + 8


def test_both_counts_of_what_a_token_uses():
    """Mixtral's publishers count the table too; GPT-2's positions are a table; a tied embedding is the head."""
    io, lines = TaskIO(), []
    io.log = lambda text, level="info": lines.append(text)  # type: ignore[method-assign]
    result = count.run(compose(["model=mixtral_8x7b", "task=count", "track=none"]), io)
    assert result["params_total"] == pytest.approx(46.7e9, rel=0.01)
    assert result["params_active_with_embedding"] == pytest.approx(12.9e9, rel=0.01)
    assert result["params_active"] == result["params_active_with_embedding"] - 32_000 * 4096
    assert f"{result['params_active']:,} used by one token" in "\n".join(lines)
    _, tied = run()
    assert tied["params_active"] == tied["params_active_with_embedding"] == tied["params_total"]
    _, placed = run("model.learned_positions=32", "count.context=8", "model.tie_embeddings=false")
    assert placed["params_active_with_embedding"] - placed["params_active"] == (96 + 32) * 64


def test_mistakes():
    with pytest.raises(UserError, match="count.context"):
        run("count.context=0")
    with pytest.raises(UserError, match="max_seq_len"):
        run("model.max_seq_len=16", "count.context=17")


def test_equal_shapes_that_are_split_differently_keep_their_own_share():
    """up_proj and down_proj are both [64, 64] here, split over opposite axes; moments lie as their parameters do."""
    parts = run(
        "count.phase=train",
        "model.ffns.dense.d_ff=64",
        "mesh.axes.tensor=2",
        "mesh.axes.fsdp=4",
        "mesh.rules.embed=null",
    )[1]["train_bytes_parts"]
    assert parts["optimiser"] == 2 * parts["params"] + 4  # two moments and a count


def test_users_zero_stages_and_speculation(tmp_path):
    """The questions of `count.*`, from this model's own bytes; nothing is answered unasked."""
    page = tmp_path / "tools.html"
    asked = [
        "count.context=1000",
        "count.memory_gb=0.01",
        "count.devices=4",
        "count.accept=0.5",
        "count.draft=1",
        f"count.tools={page}",
    ]
    _, result = run(*asked, "mesh=single", "model.dtype=float32")
    row = result["cache_bytes_total"]
    assert result["users"] == (10_000_000 - 4 * result["params_total"]) // row > 0
    parts, by_zero = result["train_bytes_parts"], result["train_bytes_by_zero"]
    assert by_zero["0"] == result["train_bytes"]
    assert by_zero["3"] == round((parts["params"] + parts["grads"] + parts["optimiser"]) / 4 + parts["activations"])
    assert result["speculative"] == {"tokens_per_step": 1.5, "speedup": 1.5}
    assert "Calculators" in page.read_text()


@pytest.mark.parametrize("setting", ["memory_gb=0", "accept=1.5", "draft=-1", "devices=0"])
def test_questions_without_sense_are_refused(setting):
    with pytest.raises(UserError, match=setting.split("=")[0]):
        compose([*SMALL, "task=count", f"count.{setting}"])
