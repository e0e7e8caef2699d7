"""The contract every mixer and ffn must keep, as plain functions over a small model. `tests/test_contract.py` runs them.

Everything is compared with the full forward of whole sequences. Splits are fed as rows of one batch, right-padded to one traced
shape, so that "every split" costs two compiled shapes instead of dozens.
"""

import functools
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.cache import cache_bytes
from jaxllm.layers.base import Context
from jaxllm.layers.mlp import MLP
from jaxllm.mesh import build_mesh, param_shardings, use_mesh
from jaxllm.model import LanguageModel
from jaxllm.ops import linear
from jaxllm.pages import PAGES, Pages
from jaxllm.params import declare, init_params, is_declared, unstack

VOCAB, D, T = 61, 32, 12
ROWS, LENGTH = 12, 40  # every whole call has ROWS x T tokens, every cache ROWS x LENGTH: few shapes, few compilations
TOLERANCE = 2e-5  # fp32, logits of order 1 after two layers
MOST = 1e-4  # where rounding is blown up: see `Subject.allowed`


def model_of(mixers: dict[str, Any], layers: str, ffns: dict[str, Any] | None = None, **kwargs: Any) -> LanguageModel:
    ffns = ffns or {"dense": functools.partial(MLP, d_ff=48)}
    kwargs = {"vocab_size": VOCAB, "vocab_multiple": 8, "d_model": D, "dtype": "float32"} | kwargs
    return LanguageModel(layers=layers, mixers=mixers, ffns=ffns, **kwargs)


def randomised(model: LanguageModel, seed: int = 0) -> Any:
    """Parameters in which norms, biases and gates matter too: constants of the initialiser would hide a fault."""
    params = init_params(model, jax.random.key(seed))
    rng = np.random.default_rng(seed)

    def moved(a: jax.Array) -> jax.Array:
        return jax.device_put(np.asarray(a) + (0.1 * rng.standard_normal(a.shape)).astype(a.dtype))

    return jax.tree.map(moved, params)


def padded(x: np.ndarray) -> np.ndarray:
    """`x [b ..]` with rows of zeros up to `ROWS`."""
    return np.concatenate([x, np.zeros((ROWS - len(x), *x.shape[1:]), x.dtype)])


class Subject:
    """A model with parameters in both layouts and its compiled calls, which pad the batch to `ROWS` rows of padding.

    Inputs are numpy's, and contexts are made inside the compiled calls: an operation outside them is one more program to compile.
    """

    def __init__(self, model: LanguageModel, seed: int = 0) -> None:
        self.model, self.decoder = model, model.unrolled()
        self.params = randomised(model, seed)
        self._moved: Any = None

        def both(params: Any) -> tuple[Any, Any]:
            flat = unstack(model, params)
            return flat, self.decoder.prepare(flat)

        self.flat, self.prepared = jax.jit(both)(self.params)
        self._full = jax.jit(lambda p, *args: self.model.apply({"params": p}, Context.whole(*args))[1].logits)
        self._step = jax.jit(self._step_of)
        self._cache = jax.jit(
            lambda draft: self.decoder.init_cache(ROWS, LENGTH, "float32", draft=draft), static_argnums=0
        )

    def full(self, tokens: np.ndarray, segments: np.ndarray | None = None) -> np.ndarray:
        segments = np.ones_like(tokens) if segments is None else np.asarray(segments, np.int32)
        return np.asarray(self._full(self.params, padded(tokens), padded(segments)))[: len(tokens)]

    def allowed(self, tokens: np.ndarray) -> np.ndarray:
        """By how much logits of two orders of summation may differ, `[b t 1]`: TOLERANCE, or where that is more, four times what they
        change by when a quarter of the parameters, drawn at random, move by a unit in their last place.

        A head whose output is nearly zero is blown up by its norm (KDA, GDN), and its rounding with it. That is so at few tokens, and the
        most that is allowed is what the house allows beside other implementations.
        """
        if self._moved is None:
            rng = np.random.default_rng(0)

            def moved(a: Any) -> jax.Array:
                a = np.asarray(a)
                if not np.issubdtype(a.dtype, np.floating):
                    return jax.device_put(a)
                unit = np.where(rng.random(a.shape) < 0.25, rng.choice([-1, 1], a.shape), 0) * np.spacing(np.abs(a))
                return jax.device_put(a + unit.astype(a.dtype))

            self._moved = jax.tree.map(moved, self.params)
        args = padded(tokens), padded(np.ones_like(tokens))
        change = np.abs(np.asarray(self._full(self._moved, *args)) - np.asarray(self._full(self.params, *args)))
        allowed = np.clip(4 * change.max(-1, keepdims=True), TOLERANCE, MOST)[: len(tokens)]
        assert np.mean(allowed > TOLERANCE) < 0.25
        return allowed

    def cache(self, draft: int = 0) -> Any:
        return self._cache(draft)

    def _step_of(self, params: Any, cache: Any, tokens: Any, rows: dict[str, Any]) -> tuple[Any, jax.Array]:
        cache, out = self.decoder.apply({"params": params}, Context.step(tokens, **rows), cache)
        return cache, out.logits

    def step(
        self, cache: Any, tokens: np.ndarray, lengths: Any, new: Any = None, **rows: Any
    ) -> tuple[Any, np.ndarray]:
        """The cache and the logits after a call: the arguments of `Context.step`, one row each; rows of padding are new with nothing."""
        b, t = tokens.shape
        zeros = np.zeros(b, np.int32)
        rows = {
            "lengths": lengths,
            "new": np.full(b, t) if new is None else new,
            "tentative": zeros,
            "accepted": zeros,
        } | rows
        slots, tables = rows.pop("slots", None), rows.pop("tables", None)
        rows = {name: padded(np.asarray(value, np.int32)) for name, value in rows.items()}
        rows |= {} if slots is None else {"slots": slots, "tables": tables}
        cache, logits = self._step(self.prepared, cache, padded(np.asarray(tokens, np.int32)), rows)
        return cache, np.asarray(logits)[:b]

    def tokens(self, b: int = 2, t: int = T, seed: int = 1) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, VOCAB, (b, t)).astype(np.int32)


def close(a: Any, b: Any, tolerance: Any = TOLERANCE) -> None:
    """`tolerance` broadcasts to `a` and `b`."""
    difference = np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32))
    worst = np.unravel_index(np.argmax(difference - tolerance), difference.shape)
    assert np.shape(a) == np.shape(b)
    assert np.all(difference <= tolerance), f"{difference[worst]} at {worst} of {difference.shape}"


def check_causal(s: Subject) -> None:
    tokens = s.tokens(1)
    rows = np.tile(tokens, (T, 1))
    changed = (rows + np.eye(T, dtype=np.int32)) % VOCAB  # row i differs at position i only
    a, b = s.full(rows), s.full(changed)
    for i in range(T):
        np.testing.assert_array_equal(a[i, :i], b[i, :i])
        assert np.abs(a[i, i:] - b[i, i:]).max() > 1e-4, f"token {i} changes nothing"


def check_packed(s: Subject) -> None:
    """Three documents in a row, with padding at the end, equal each alone; and the first cannot reach the second."""
    tokens = s.tokens(1)
    segments = np.array([[1] * 4 + [2] * 5 + [3] * 2 + [0]])
    packed = s.full(tokens, segments)
    for a, b in ((0, 4), (4, 9), (9, 11)):
        alone = np.zeros_like(tokens)
        alone[:, : b - a] = tokens[:, a:b]
        mask = (np.arange(T) < b - a)[None]
        close(packed[:, a:b], s.full(alone, mask)[:, : b - a])
    other = tokens.copy()
    other[0, 3] = (other[0, 3] + 1) % VOCAB
    leaked = s.full(other, segments)
    np.testing.assert_array_equal(packed[:, 4:], leaked[:, 4:])


def check_padding(s: Subject) -> None:
    """Right-padded and left-padded whole rows equal the row alone; an all-padding row is finite."""
    tokens = s.tokens(1)
    want = s.full(tokens)[:, :7]
    right = np.arange(T) < 7
    left_tokens = np.zeros_like(tokens)
    left_tokens[:, T - 7 :] = tokens[:, :7]
    batch = np.concatenate([tokens, left_tokens, tokens])
    got = s.full(batch, np.stack([right, right[::-1], np.zeros(T, bool)]))
    close(got[:1, :7], want)
    close(got[1:2, T - 7 :], want)
    assert np.isfinite(got).all()


def check_splits(s: Subject) -> None:
    """prefill(i) + prefill(T - i) for every i, and chunks of 1 and of 2, equal the full forward."""
    tokens = s.tokens(1)
    full, allowed = s.full(tokens), s.allowed(tokens)
    first = np.arange(1, T)
    rows = np.tile(tokens, (T - 1, 1))
    cache, one = s.step(s.cache(), rows, np.zeros(T - 1), first)
    rest = np.stack([np.roll(tokens[0], -i) for i in first])
    cache, two = s.step(cache, rest, first, T - first)
    for r, i in enumerate(range(1, T)):
        close(one[r, :i], full[0, :i], allowed[0, :i])
        close(two[r, : T - i], full[0, i:], allowed[0, i:])
    cache = s.cache()
    for i in range(T):
        cache, logits = s.step(cache, tokens[:, i : i + 1], [i])
        close(logits, full[:, i : i + 1], allowed[:, i : i + 1])
    cache = s.cache()
    for i in range(0, T, 2):
        chunk = np.pad(tokens[:, i : i + 2], ((0, 0), (0, T - 2)))
        cache, logits = s.step(cache, chunk, [i], [2])
        close(logits[:, :2], full[:, i : i + 2], allowed[:, i : i + 2])


def _compressed(s: Subject) -> list[int]:
    """Tokens of one entry, of each layer that compresses them."""
    roles = dict.fromkeys(mixer for group in s.model.groups for mixer, _ in group.period)
    return [m for role in roles if (m := getattr(s.model.mixer(role), "compress_rate", None))]


def check_paged(s: Subject) -> None:
    """Drafts, verified and accepted at random, in pools: each row's pages lie anywhere, slots are in no order, and others hold garbage."""
    page = 6 if any(n % 4 for n in _compressed(s)) else 4
    each, rng = -(-LENGTH // page), np.random.default_rng(1)
    tables = 1 + rng.permutation(ROWS * each).astype(np.int32).reshape(ROWS, each)
    places = {"slots": 1 + rng.permutation(ROWS).astype(np.int32), "tables": {PAGES: tables}}
    pools = Pages(1 + ROWS * each, page)
    cache = jax.jit(lambda: s.decoder.init_cache(ROWS + 1, LENGTH, "float32", draft=3, pages=pools))()
    before = jax.tree.map(lambda x: np.asarray(x)[0], cache)
    cache = check_draft_verify(s, cache=cache, **places)
    for path, old in jax.tree_util.tree_leaves_with_path(before):  # page 0 and slot 0 belong to nobody
        new = functools.reduce(
            lambda node, key: getattr(node, key.name) if hasattr(key, "name") else node[key.key], path, cache
        )
        np.testing.assert_array_equal(np.asarray(new)[0], old)


def check_draft_verify(s: Subject, draft: int = 3, cache: Any = None, **places: Any) -> Any:
    """Draft, verify, accept a random number per row, go on: every committed token's logits equal the full forward."""
    b, rng = ROWS, np.random.default_rng(0)
    truth = s.tokens(b, seed=3)
    full, allowed = s.full(truth), s.allowed(truth)
    prompt = rng.integers(1, draft + 2, b).astype(np.int32)
    cache = s.cache(draft) if cache is None else cache
    cache, logits = s.step(cache, truth[:, : 1 + draft], np.zeros(b), prompt, **places)
    for r in range(b):
        close(logits[r, : prompt[r]], full[r, : prompt[r]], allowed[r, : prompt[r]])
    lengths, accepted, rounds = prompt.copy(), np.zeros(b, np.int32), 0
    while (lengths + accepted + 1 + draft <= T).any():
        lengths = lengths + accepted
        live = lengths + 1 + draft <= T  # a finished row rides along as padding
        feed = np.stack(
            [truth[r, lengths[r] : lengths[r] + 1 + draft] if live[r] else np.zeros(1 + draft, int) for r in range(b)]
        )
        good = np.where(live, rng.integers(0, draft + 1, b), 0).astype(
            np.int32
        )  # so many drafts are right, the next one is wrong
        for r in range(b):
            if live[r] and good[r] < draft:
                feed[r, 1 + good[r]] = (feed[r, 1 + good[r]] + 1) % VOCAB
        new, tentative = live * (1 + draft), live * draft
        cache, logits = s.step(cache, feed, lengths, new, tentative=tentative, accepted=accepted, **places)
        for r in np.flatnonzero(live):
            at = slice(lengths[r], lengths[r] + 1 + good[r])
            close(logits[r, : 1 + good[r]], full[r, at], allowed[r, at])
        lengths, accepted, rounds = lengths + live, good, rounds + 1
    assert rounds >= 3
    return cache


def check_batch_mates(s: Subject) -> None:
    """A row's logits do not depend on the other rows, whole or decoding."""
    tokens = s.tokens(3)
    others = np.concatenate([tokens[:1], (tokens[1:] + 7) % VOCAB])
    np.testing.assert_array_equal(s.full(tokens)[0], s.full(others)[0])
    outs = []
    for batch, new in ((tokens, [4, 6, 2]), (others, [4, 1, 3])):
        cache, _ = s.step(s.cache(), batch, np.zeros(3), new)
        outs.append(s.step(cache, batch[:, 4:5], new)[1][0])
    np.testing.assert_array_equal(outs[0], outs[1])


def check_bf16_gradients(s: Subject) -> None:
    """bf16 compute: loss and every gradient are finite, and each trainable parameter has one."""
    model = s.model.clone(dtype="bfloat16")
    trainable = jax.tree.map(lambda box: box.trainable, declare(model), is_leaf=is_declared)
    tokens, segments = s.tokens(), np.array([[1] * T, [1] * 5 + [2] * 4 + [0] * 3])

    def loss(part: Any) -> jax.Array:
        params = jax.tree.map(lambda a, p: p if a is None else a, part, s.params, is_leaf=lambda a: a is None)
        ctx = Context.whole(tokens, segments, train=True)
        out = model.apply({"params": params}, ctx)[1]
        return -jnp.mean(jax.nn.log_softmax(out.logits)[..., 0]) + sum(
            v for k, v in out.aux.items() if k.startswith("loss/")
        )

    part = jax.tree.map(lambda free, a: a if free else None, trainable, s.params)
    value, grads = jax.jit(jax.value_and_grad(loss))(part)
    assert np.isfinite(float(value))
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(g, np.float32)).all(), name
        assert np.abs(np.asarray(g, np.float32)).max() > 0, f"no gradient reaches {name}"


def check_sharded(s: Subject) -> None:
    """2 x 2 x 2 devices give the logits of one."""
    tokens = s.tokens(4)
    want = s.full(tokens)
    mesh = build_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    params = jax.device_put(s.params, param_shardings(declare(s.model), mesh))
    with use_mesh(mesh):
        got = jax.jit(lambda p, tokens: s.model.apply({"params": p}, Context.whole(tokens))[1].logits)(params, tokens)
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
    """A decode step's matmul FLOPs are what the jaxpr multiplies, none of its products being written as a sum (`times_transposed`)."""
    cache = jax.eval_shape(lambda: s.decoder.init_cache(b, length, "float32"))

    def call(params: Any, cache: Any) -> Any:
        return s.decoder.apply({"params": params}, Context.step(np.zeros((b, t)), np.zeros(b)), cache)

    with mock.patch.object(linear, "FEW_ROWS", 1):
        jaxpr = jax.make_jaxpr(call)(s.prepared, cache)
    assert s.model.cost(b, t, length, "float32").flops == dot_flops(jaxpr.jaxpr)


def check_no_copy(s: Subject, length: int = 2048) -> None:
    """The copy test: a donated cache is updated in place, whatever the rows and the tokens of the call.

    Heads are made wide, so that a cache leaf outweighs a row of scores; one layer of each kind is enough.
    """
    kinds = dict.fromkeys(pair for group in s.model.groups for pair in group.period)
    model = s.model.clone(d_model=1024, layers=" | ".join("/".join(pair) for pair in kinds))
    decoder = model.unrolled()
    shapes = jax.tree.map(lambda box: box.value, declare(model), is_leaf=is_declared)
    params = jax.eval_shape(lambda p: decoder.prepare(unstack(model, p)), shapes)
    for b, t in ((1, 1), (4, 1), (1, 4)):
        cache = jax.eval_shape(lambda b=b: decoder.init_cache(b, length, "float32", draft=3))
        ctx = jax.eval_shape(lambda b=b, t=t: Context.step(np.zeros((b, t)), np.zeros(b), tentative=np.full(b, t - 1)))
        call = jax.jit(lambda p, ctx, c: decoder.apply({"params": p}, ctx, c), donate_argnums=2)
        compiled = call.lower(params, ctx, cache).compile()
        largest = max((leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)), default=0)
        assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes(cache)
        if largest < 2**20:
            continue  # a state of constant size is smaller than the call's activations: sizes say nothing about it
        temp = compiled.memory_analysis().temp_size_in_bytes
        assert temp < largest, f"b={b} t={t}: {temp} bytes of scratch, the largest cache leaf has {largest}"
        sizes = {leaf.size for leaf in jax.tree.leaves(cache) if leaf.size * leaf.dtype.itemsize == largest}
        for dims, line in re.findall(r"\w+\[([\d,]+)\]\S* ((?:copy|transpose)\(.*)", compiled.as_text()):
            assert int(np.prod([int(n) for n in dims.split(",")])) not in sizes, f"b={b} t={t}: [{dims}] {line}"
