"""How the indexer is trained: a warm-up beside dense attention, then both on the chosen keys; the stages of the experiment."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.compose import compose
from jaxllm.layers.dsa import DSA
from jaxllm.layers.mlp import MLP
from jaxllm.model import LanguageModel
from jaxllm.training.objectives import NextToken
from jaxllm.training.optimisers import AdamW
from jaxllm.training.schedules import Constant
from jaxllm.training.settings import StageSettings, TrainSettings
from jaxllm.training.stages import plan
from jaxllm.training.state import leaves_by_path, new_state
from jaxllm.training.step import make_train_step

VOCAB, ROWS, T, TOP = 16, 8, 48, 4
WARM, SPARSE = 120, 2


def sharp():
    """One layer with logits large enough that a few keys carry most of the attention."""
    sizes = {"num_heads": 2, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
    own = functools.partial(DSA, **sizes, scale=2.0, top_k=TOP, index_heads=16, index_head_dim=16)
    ffns = {"dense": functools.partial(MLP, d_ff=32)}
    return LanguageModel(
        vocab_size=VOCAB, d_model=32, layers="own/dense", mixers={"own": own}, ffns=ffns, embed_scale=5.6
    )


STAGES = (
    StageSettings(name="warm_up", steps=WARM, train_only=("*/mixer/index/*",), model={"mixers.own.attend": "dense"}),
    StageSettings(name="sparse", model={"mixers.own.recall_queries": 6}),
)


def batch(key):
    tokens = jax.random.randint(key, (ROWS, T), 0, VOCAB)
    at = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), tokens.shape)
    ones = jnp.ones_like(tokens)
    return {
        "tokens": tokens,
        "labels": jnp.roll(tokens, -1, 1),
        "positions": at,
        "segments": ones,
        "weights": ones * 1.0,
    }


def train(stage, state):
    """All steps of a stage in one program: the state, and the metrics of every step."""
    step = make_train_step(stage.model, stage.objectives, stage.optimiser, free=stage.free)
    keys = jax.random.split(jax.random.key(stage.index), stage.steps)
    return jax.jit(lambda s: jax.lax.scan(lambda s, key: step(s, batch(key), stage.steps), s, keys))(state)


def changed(before, after):
    """Paths of the parameters that differ."""
    a, b = leaves_by_path(before.params), leaves_by_path(after.params)
    return {path for path in a if np.any(np.asarray(a[path]) != np.asarray(b[path]))}


def test_the_warm_up_raises_recall_from_chance_to_nearly_all_and_only_the_next_stage_moves_the_trunk():
    """Recall: of the attention that the best 4 keys hold, what the 4 chosen hold. Chance: 4 keys picked blindly."""
    model, optimiser = sharp(), AdamW(lr=1e-2, schedule=Constant(), weight_decay=0.0)
    settings = TrainSettings(steps=WARM + SPARSE, batch_size=ROWS, seq_len=T)
    warm, sparse = plan(settings, STAGES, model, optimiser, {"next_token": NextToken()})
    start = new_state(model, optimiser, 0)
    middle, metrics = train(warm, start)
    recall = np.asarray(metrics["metric/g0/b0/mixer/recall"])[:, 0]
    assert recall[0] < 0.55 and recall[-20:].min() > 0.9, recall[[0, -1]]
    assert metrics["aux_indexer"][-1] < 0.5 * metrics["aux_indexer"][0]
    index = {path for path in leaves_by_path(start.params) if "/mixer/index/" in path}
    assert changed(start, middle) == index and len(index) == 5
    end, metrics = train(sparse, middle)
    assert changed(middle, end) == set(leaves_by_path(start.params))
    after = np.asarray(metrics["metric/g0/b0/mixer/recall"])[
        :, 0
    ]  # of six queries a row: before the trunk has moved, and behind it
    assert after[0] > 0.9 and after[1] > recall[0] and np.isfinite(metrics["loss"]).all()


def test_the_experiment_warms_up_the_indexer_alone_beside_dense_attention():
    cfg = compose(["+experiment=sparse_stages"])
    pretrain, warm_up, sparse = cfg.section("stages")
    model = cfg.build("model", vocab_size=32)
    stages = plan(cfg.section("train"), (pretrain, warm_up, sparse), model, AdamW(), cfg.build("objective"))
    modes = [{role: mixer.keywords.get("attend", "sparse") for role, mixer in s.model.mixers.items()} for s in stages]
    assert [set(m.values()) for m in modes] == [{"dense"}, {"dense"}, {"sparse"}]
    paths = set(leaves_by_path(stages[0].free))
    index = {path for path in paths if "/mixer/index/" in path}
    assert set(stages[0].frozen) == index and set(stages[1].frozen) == paths - index and stages[2].frozen == []
    assert stages[1].reset_optimizer and stages[2].reset_optimizer


def test_a_small_deepseek_v4_trains_and_its_indexer_with_it():
    """Window, HCA and CSA under hyper-connections, experts by hash and by sqrt(softplus): loss falls, and so does the indexer's."""
    cfg = compose(["model=deepseek_v4_tiny", "model.d_model=32", "model.mixers.csa.top_k=2", "track=none"])
    model = cfg.build("model", vocab_size=VOCAB)
    optimiser = AdamW(lr=1e-2, schedule=Constant(), weight_decay=0.0)
    stage = plan(
        TrainSettings(steps=12, batch_size=ROWS, seq_len=T), (), model, optimiser, {"next_token": NextToken()}
    )[0]
    start = new_state(model, optimiser, 0)
    step = make_train_step(stage.model, stage.objectives, stage.optimiser)
    one = batch(jax.random.key(0))
    end, metrics = jax.jit(lambda s: jax.lax.scan(lambda s, _: step(s, one, 12), s, None, length=12))(start)
    assert metrics["next_token"][-1] < 0.8 * metrics["next_token"][0]
    assert metrics["aux_indexer"][-1] < metrics["aux_indexer"][0] and np.isfinite(metrics["loss"]).all()
    still = set(leaves_by_path(start.params)) - changed(start, end)
    assert still == {"g0/b0/ffn/router/table"}  # of token ids, which no step moves
