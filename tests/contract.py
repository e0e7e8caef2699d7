"""The contract every mixer and ffn must keep, as plain functions over a small model. `tests/test_contract.py` runs them.

Everything is compared with the full forward of whole sequences. Splits are fed as rows of one batch, right-padded to one traced
shape, so that "every split" costs two compiled shapes instead of dozens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache import cache_bytes
from jaxllm.layers.base import Context
from jaxllm.layers.mlp import MLP
from jaxllm.mesh import build_mesh, param_shardings, use_mesh
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params, is_declared, unstack

VOCAB, D, T = 61, 32, 12
TOLERANCE = 2e-5  # fp32, logits of order 1 after three layers


def model_of(mixers: dict[str, Any], layers: str, ffns: dict[str, Any] | None = None, **kwargs: Any) -> LanguageModel:
    ffns = ffns or {"dense": functools.partial(MLP, d_ff=48)}
    kwargs = {"vocab_size": VOCAB, "vocab_multiple": 8, "d_model": D, "dtype": "float32"} | kwargs
    return LanguageModel(layers=layers, mixers=mixers, ffns=ffns, **kwargs)


def randomised(model: LanguageModel, seed: int = 0) -> Any:
    """Parameters in which norms, biases and gates matter too: constants of the initialiser would hide a fault."""
    params = init_params(model, jax.random.key(seed))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda a: a + jnp.asarray(0.1 * rng.standard_normal(a.shape), a.dtype), params)


class Subject:
    """A model with parameters in both layouts and its compiled calls."""

    def __init__(self, model: LanguageModel, seed: int = 0) -> None:
        self.model, self.decoder = model, model.unrolled()
        self.params = randomised(model, seed)
        self.flat = unstack(model, self.params)
        self.prepared = self.decoder.prepare(self.flat)
        self.full = jax.jit(lambda ctx: self.model.apply({"params": self.params}, ctx)[1].logits)
        self.step = jax.jit(lambda ctx, cache: (lambda r: (r[0], r[1].logits))(self.decoder.apply({"params": self.prepared}, ctx, cache)))

    def tokens(self, b: int = 2, t: int = T, seed: int = 1) -> jax.Array:
        return jax.random.randint(jax.random.key(seed), (b, t), 0, VOCAB)


def close(a: Any, b: Any, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0, atol=tolerance)


def check_causal(s: Subject) -> None:
    tokens = s.tokens(1)
    rows = jnp.tile(tokens, (T, 1))
    changed = rows.at[jnp.arange(T), jnp.arange(T)].add(1) % VOCAB  # row i differs at position i only
    a, b = np.asarray(s.full(Context.whole(rows))), np.asarray(s.full(Context.whole(changed)))
    for i in range(T):
        np.testing.assert_array_equal(a[i, :i], b[i, :i])
        assert np.abs(a[i, i:] - b[i, i:]).max() > 1e-4, f"token {i} changes nothing"


def check_packed(s: Subject) -> None:
    """Three documents in a row, with padding at the end, equal each alone; and the first cannot reach the second."""
    tokens = s.tokens(1)
    segments = jnp.array([[1] * 4 + [2] * 5 + [3] * 2 + [0]])
    packed = np.asarray(s.full(Context.whole(tokens, segments)))
    for a, b in ((0, 4), (4, 9), (9, 11)):
        alone = jnp.zeros((1, T), jnp.int32).at[:, : b - a].set(tokens[:, a:b])
        mask = (jnp.arange(T) < b - a).astype(jnp.int32)[None]
        close(packed[:, a:b], s.full(Context.whole(alone, mask))[:, : b - a])
    leaked = np.asarray(s.full(Context.whole(tokens.at[0, 3].add(1) % VOCAB, segments)))
    np.testing.assert_array_equal(packed[:, 4:], leaked[:, 4:])


def check_padding(s: Subject) -> None:
    """Right-padded and left-padded whole rows equal the row alone; an all-padding row is finite."""
    tokens = s.tokens(1)
    want = np.asarray(s.full(Context.whole(tokens)))[:, :7]
    right = (jnp.arange(T) < 7).astype(jnp.int32)
    left_tokens = jnp.zeros((1, T), jnp.int32).at[:, T - 7 :].set(tokens[:, :7])
    batch = jnp.concatenate([tokens, left_tokens, tokens])
    segments = jnp.stack([right, right[::-1], jnp.zeros(T, jnp.int32)])
    got = np.asarray(s.full(Context.whole(batch, segments)))
    close(got[:1, :7], want)
    close(got[1:2, T - 7 :], want)
    assert np.isfinite(got).all()


def check_splits(s: Subject) -> None:
    """prefill(i) + prefill(T - i) for every i, and chunks of 1 and of 2, equal the full forward."""
    tokens = s.tokens(1)
    full = np.asarray(s.full(Context.whole(tokens)))
    first = jnp.arange(1, T, dtype=jnp.int32)
    b = T - 1
    rows = jnp.tile(tokens, (b, 1))
    cache = s.decoder.init_cache(b, T + 1, "float32")
    cache, one = s.step(Context.step(rows, jnp.zeros(b, jnp.int32), first), cache)
    rest = jnp.stack([jnp.roll(tokens[0], -int(i)) for i in first])
    cache, two = s.step(Context.step(rest, first, T - first), cache)
    for r, i in enumerate(range(1, T)):
        close(one[r, :i], full[0, :i])
        close(two[r, : T - i], full[0, i:])
    for size in (1, 2):
        cache = s.decoder.init_cache(2, T + 1, "float32")
        for i in range(0, T, size):
            cache, logits = s.step(Context.step(jnp.tile(tokens[:, i : i + size], (2, 1)), jnp.full(2, i)), cache)
            close(logits[0], full[0, i : i + size])


def check_draft_verify(s: Subject, draft: int = 3) -> None:
    """Draft, verify, accept a random number per row, go on: every committed token's logits equal the full forward."""
    b, rng = 4, np.random.default_rng(0)
    truth = np.asarray(s.tokens(b, 4 * T, seed=3))
    full = np.asarray(s.full(Context.whole(jnp.asarray(truth))))
    cache = s.decoder.init_cache(b, 4 * T + draft + 1, "float32", draft=draft)
    prompt = np.array([1, 2, 3, 4], np.int32)[:b]
    padded = np.where(np.arange(1 + draft) < prompt[:, None], truth[:, : 1 + draft], 0)
    cache, logits = s.step(Context.step(padded, np.zeros(b), prompt), cache)
    for r in range(b):
        close(logits[r, : prompt[r]], full[r, : prompt[r]])
    lengths, accepted = prompt.copy(), np.zeros(b, np.int32)
    for _ in range(6):
        lengths = lengths + accepted
        feed = np.stack([truth[r, lengths[r] : lengths[r] + 1 + draft] for r in range(b)])
        good = rng.integers(0, draft + 1, b).astype(np.int32)  # the row's first `good` drafts are right, the next one wrong
        for r in range(b):
            if good[r] < draft:
                feed[r, 1 + good[r]] = (feed[r, 1 + good[r]] + 1) % VOCAB
        ctx = Context.step(feed, lengths, np.full(b, 1 + draft), tentative=np.full(b, draft), accepted=accepted)
        cache, logits = s.step(ctx, cache)
        for r in range(b):
            close(logits[r, : 1 + good[r]], full[r, lengths[r] : lengths[r] + 1 + good[r]])
        lengths, accepted = lengths + 1, good


def check_batch_mates(s: Subject) -> None:
    """A row's logits do not depend on the other rows, whole or decoding."""
    tokens = s.tokens(3)
    a = np.asarray(s.full(Context.whole(tokens)))
    others = tokens.at[1:].set((tokens[1:] + 7) % VOCAB)
    np.testing.assert_array_equal(a[0], np.asarray(s.full(Context.whole(others)))[0])
    outs = []
    for batch in (tokens, others):
        cache = s.decoder.init_cache(3, T, "float32")
        new = jnp.array([4, 6, 2] if batch is tokens else [4, 1, 3])
        cache, _ = s.step(Context.step(batch, jnp.zeros(3), new), cache)
        cache, logits = s.step(Context.step(batch[:, 4:5], new), cache)
        outs.append(np.asarray(logits[0]))
    np.testing.assert_array_equal(outs[0], outs[1])


def check_bf16_gradients(s: Subject) -> None:
    """bf16 compute: loss and every gradient are finite, and each trainable parameter has one."""
    model = s.model.clone(dtype="bfloat16")
    ctx = Context.whole(s.tokens(), jnp.array([[1] * T, [1] * 5 + [2] * 4 + [0] * 3]), train=True)

    def loss(params: Any) -> jax.Array:
        out = model.apply({"params": params}, ctx)[1]
        return -jnp.mean(jax.nn.log_softmax(out.logits)[..., 0]) + sum(v for k, v in out.aux.items() if k.startswith("loss/"))

    value, grads = jax.jit(jax.value_and_grad(loss))(s.params)
    assert np.isfinite(float(value))
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(g, np.float32)).all(), name
        assert np.abs(np.asarray(g, np.float32)).max() > 0, f"no gradient reaches {name}"


def check_sharded(s: Subject) -> None:
    """2 x 2 x 2 devices give the logits of one."""
    tokens = s.tokens(4)
    want = np.asarray(s.full(Context.whole(tokens)))
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    params = jax.device_put(s.params, param_shardings(declare(s.model), mesh))
    with use_mesh(mesh):
        got = jax.jit(lambda p, ctx: s.model.apply({"params": p}, ctx)[1].logits)(params, Context.whole(tokens))
    close(got, want)


def check_cost(s: Subject, sizes: tuple[int, int] = (2, 24)) -> None:
    """Parameters and cache bytes are what is really allocated."""
    batch, length = sizes
    cost = s.model.cost(batch, 1, length, "float32")
    cache = jax.eval_shape(lambda: s.decoder.init_cache(batch, length, "float32"))
    assert batch * (cost.cache_per_token * length + cost.cache_constant) == cache_bytes(cache)
    declared = declare(s.model)
    blocks = [block for name, group in declared.items() if name[0] == "g" for block in group.values()]
    counted = [declared["embed"], *(block.get(part, {}) for block in blocks for part in ("mixer", "ffn"))]
    assert cost.params == sum(box.value.size for box in jax.tree.leaves(counted, is_leaf=is_declared))


def dot_flops(jaxpr: Any) -> int:
    """2 x multiply-adds of every dot_general in a jaxpr, scan bodies times their length."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = int(np.prod([eqn.invars[0].aval.shape[i] for i in contract]))
            total += 2 * depth * int(np.prod(eqn.outvars[0].aval.shape))
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    total += times * dot_flops(inner)
    return total


def check_flops(s: Subject, b: int = 2, t: int = 1, length: int = 24) -> None:
    """A decode step's matmul FLOPs are what the jaxpr multiplies."""
    cache = s.decoder.init_cache(b, length, "float32")
    ctx = Context.step(jnp.zeros((b, t), jnp.int32), jnp.zeros(b))
    jaxpr = jax.make_jaxpr(lambda p, c: s.decoder.apply({"params": p}, ctx, c))(s.prepared, cache)
    assert s.model.cost(b, t, length, "float32").flops == dot_flops(jaxpr.jaxpr)


def check_no_copy(s: Subject, length: int = 2048) -> None:
    """The copy test: a donated cache is updated in place, whatever the rows and the tokens of the call."""
    s = Subject(s.model.clone(d_model=256))  # heads wide enough for a cache leaf to outweigh a row of scores
    for b, t in ((1, 1), (4, 1), (1, 4)):
        cache = jax.eval_shape(lambda b=b: s.decoder.init_cache(b, length, "float32", draft=3))
        ctx = Context.step(jnp.zeros((b, t), jnp.int32), jnp.zeros(b), tentative=jnp.full(b, t - 1))
        call = jax.jit(lambda p, ctx, c: s.decoder.apply({"params": p}, ctx, c), donate_argnums=2)
        compiled = call.lower(s.prepared, ctx, cache).compile()
        memory = compiled.memory_analysis()
        largest = max((leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)), default=0)
        if largest < 2**16:
            continue  # a constant-size state: smaller than one call's activations, so nothing can be told from the sizes
        assert memory.temp_size_in_bytes < largest, f"b={b} t={t}: temp {memory.temp_size_in_bytes} of a cache leaf of {largest}"
        assert memory.alias_size_in_bytes >= cache_bytes(cache)
        shapes = {",".join(map(str, leaf.shape)) for leaf in jax.tree.leaves(cache) if leaf.size * leaf.dtype.itemsize == largest}
        for line in compiled.as_text().splitlines():
            assert not any(f"[{shape}]" in line and (" copy(" in line or " transpose(" in line) for shape in shapes), line
