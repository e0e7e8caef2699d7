"""What `task=time` times: compiled calls of a whole model and of one of its layers alone, with the work that each must do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.inference.generate import Generator
from jaxllm.inference.layout import laid_out
from jaxllm.inference.programs import Progress
from jaxllm.layers.base import Aux, Context
from jaxllm.measure.memory import tree_bytes
from jaxllm.measure.roofline import Phase, Work, layer_work, model_work, optimiser_bytes
from jaxllm.measure.timing import compiled, peak_bytes
from jaxllm.model import LanguageModel
from jaxllm.params import declare, init_params, is_declared
from jaxllm.training.losses import backbone, next_token
from jaxllm.training.state import fill, new_state, pick, trained
from jaxllm.training.step import compile_step, make_train_step

Params = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A call without arguments, ready to be timed. works: of its parts, for a roofline."""

    call: Callable[[], Any]
    compile_s: float
    peak_bytes: int | None
    works: list[Work]
    dtype: str


class Chain:
    """A call whose donated first argument is its own first result: caches and training states are written in place."""

    def __init__(self, program: Callable[..., Any], held: Any, rest: Callable[[Any], Any]) -> None:
        self.program, self.held, self.rest = program, held, rest

    def __call__(self) -> Any:
        self.held, *rest = self.program(self.held)
        return self.held, self.rest(rest)


def runs_in(model: LanguageModel, phase: Phase) -> LanguageModel:
    """The model as the phase computes: on CPU generation widens 16-bit models, as `Generator` does."""
    narrow = jax.default_backend() == "cpu" and model.compute_dtype.itemsize < 4
    return model.clone(dtype="float32") if narrow and phase in ("prefill", "decode") else model


# ---- the whole model ---------------------------------------------------------------------------------------------------


def batch_of(model: LanguageModel, rows: int, length: int) -> dict[str, jax.Array]:
    """Random ids in one document a row; every token is trained."""
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (rows, length + 1), np.int32)
    ones = np.ones((rows, length), np.int32)
    arrays = {"tokens": ids[:, :-1], "labels": ids[:, 1:], "segments": ones, "weights": ones.astype(np.float32)}
    arrays["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    return {name: jnp.asarray(a) for name, a in arrays.items()}


def whole_model(
    model: LanguageModel,
    params: Params,
    phase: Phase,
    rows: int,
    context: int,
    *,
    chunk: int,
    optimiser: Any,
    objectives: Any,
) -> Subject:
    """A call of the model as training or generation makes it."""
    if phase == "train":
        return _train(model, rows, context, optimiser, objectives)
    if phase in ("prefill", "decode"):
        return _cached(runs_in(model, phase), params, phase, rows, context, chunk)
    batch = batch_of(model, rows, context)

    def forward(params: Any, batch: Any) -> Any:
        result: Any = model.apply({"params": params}, _whole(batch, train=False))
        return result[1].logits

    def loss(params: Any, batch: Any) -> jax.Array:
        hidden = backbone(model, params, _whole(batch, train=True), {"dropout": jax.random.key(0)}).hidden
        return next_token(model, params, hidden, batch)[0]

    free = trained(declare(model))

    def backward(params: Any, batch: Any) -> Any:
        return jax.value_and_grad(lambda part: loss(fill(part, params), batch))(pick(params, free))

    program, compile_s = compiled(forward if phase == "forward" else backward, params, batch)
    works = model_work(model, phase, rows, context)
    return Subject(lambda: program(params, batch), compile_s, peak_bytes(program), works, str(model.compute_dtype))


def _whole(batch: Mapping[str, jax.Array], train: bool) -> Context:
    return Context.whole(batch["tokens"], batch["segments"], batch["positions"], train=train)


def _train(model: LanguageModel, rows: int, context: int, optimiser: Any, objectives: Any) -> Subject:
    batch, declared = batch_of(model, rows, context), declare(model)
    state = new_state(model, optimiser, 0, declared=declared)
    params, rest = tree_bytes(state.params), tree_bytes((state.opt_state, state.master))
    grads = 4 * sum(box.value.size for box in jax.tree.leaves(declared, is_leaf=is_declared) if box.trainable)
    step = make_train_step(model, objectives, optimiser, declared=declared)
    program, compile_s = compile_step(step, state, batch)
    total = jnp.int32(1000)
    works = model_work(model, "train", rows, context, update_bytes=optimiser_bytes(params, grads, rest))
    chain = Chain(lambda state: program(state, batch, total), state, lambda rest: rest)
    return Subject(chain, compile_s, peak_bytes(program), works, str(model.compute_dtype))


def _cached(model: LanguageModel, params: Params, phase: Phase, rows: int, context: int, chunk: int) -> Subject:
    """By the compiled calls of generation. The caches hold nothing: what a call takes does not depend on what it reads."""
    generator = Generator(model, prefill_chunk=chunk)
    weights, programs = generator.prepare(params, rows=rows), generator.programs
    ids = np.random.default_rng(0).integers(0, model.vocab_size, (rows, context), np.int32)
    room = context + 1
    held = programs.init(weights, rows, room)()
    before = programs.compile_s
    if phase == "decode":
        step = programs.decode(weights, rows, room)
        start = Progress(*(np.full(rows, n, np.int32) for n in (1, context, 2)))

        def decode(held: Any) -> Any:
            cache, logits, progress = step(weights, held[0], start)
            return (cache, logits), progress

        call = decode
    else:
        length = min(chunk, context)
        step = programs.prefill(weights, rows, room, length)

        def prefill(held: Any) -> Any:
            cache, logits = held
            for at in range(0, context, length):
                new = min(length, context - at)
                piece = np.zeros((rows, length), np.int32)
                piece[:, :new] = ids[:, at : at + new]
                cache, logits = step(
                    weights, cache, logits, piece, np.full(rows, at, np.int32), np.full(rows, new, np.int32)
                )
            return (cache, logits), ()

        call = prefill
    works = model_work(model, phase, rows, context)
    chain = Chain(call, held, lambda rest: rest)
    compile_s = programs.compile_s - before
    return Subject(chain, compile_s, peak_bytes(step), works, str(generator.model.compute_dtype))


# ---- one layer ---------------------------------------------------------------------------------------------------------


def one_layer(
    model: LanguageModel, role: str, phase: Phase, rows: int, context: int, *, chunk: int, seed: int
) -> Subject:
    """A mixer or an ffn by itself, on random input `[b t d]`. What it takes from layers before it is zeros."""
    model = runs_in(model, phase)
    mixes = role in model.mixers
    layer = model.mixer(role) if mixes else model.ffn(role)
    dtype, d = model.compute_dtype, model.d_model
    t = 1 if phase == "decode" else min(chunk, context) if phase == "prefill" else context
    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, t, d)), dtype)
    ids = jnp.zeros((rows, t), jnp.int32)
    given = _given(model, rows, t, train=phase == "backward") if mixes else {}
    boxes = dict(jax.eval_shape(lambda: _init(layer, mixes, x, ids, given))["params"])
    params = init_params(model, jax.random.key(seed), declared=boxes)
    work = [layer_work(model, role, phase, rows, context)]
    if phase in ("prefill", "decode"):
        return _cached_layer(layer, mixes, params, work, x, given, phase, context)
    ctx = Context.whole(ids, train=phase == "backward")

    def forward(params: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        args = (ctx, None, given) if mixes else (ctx,)
        result: Any = layer.apply({"params": params}, x, *args)
        return result[0], _losses(result[-1])

    free = jax.tree.map(lambda box: box.trainable, boxes, is_leaf=is_declared)

    def backward(params: Any, x: jax.Array, dy: jax.Array) -> Any:
        out, pull = jax.vjp(lambda part, x: forward(fill(part, params), x), pick(params, free), x)
        return out, pull((dy, jnp.float32(1.0)))

    arguments = (params, x) if phase == "forward" else (params, x, x)
    program, compile_s = compiled(forward if phase == "forward" else backward, *arguments)
    return Subject(lambda: program(*arguments), compile_s, peak_bytes(program), work, str(dtype))


def _init(layer: Any, mixes: bool, x: jax.Array, ids: jax.Array, given: Mapping[str, jax.Array]) -> Any:
    ctx = Context.whole(ids)
    return layer.init(jax.random.key(0), x, ctx, None, given) if mixes else layer.init(jax.random.key(0), x, ctx)


def _given(model: LanguageModel, rows: int, t: int, train: bool) -> dict[str, jax.Array]:
    """What layers share, at zeros: choices of the first keys."""
    spec: dict[str, jax.ShapeDtypeStruct] = {}
    for role in model.mixers:
        spec |= model.mixer(role).shared_spec(rows, t, train, model.compute_dtype)
    return {name: jnp.zeros(s.shape, s.dtype) for name, s in spec.items()}


def _losses(aux: Aux) -> jax.Array:
    return sum((v.astype(jnp.float32) for k, v in aux.items() if k.startswith("loss/")), jnp.float32(0.0))


def _cached_layer(
    layer: Any, mixes: bool, params: Params, work: list[Work], x: jax.Array, given: Any, phase: Phase, context: int
) -> Subject:
    """Behind `context` tokens, or a prompt of as many, piece by piece. An ffn only meets the rows; it has no cache."""
    rows, t, _ = x.shape
    weights = laid_out({"layer": layer.prepare(params)}, rows)["layer"]
    ids = jnp.zeros((rows, t), jnp.int32)

    def step(cache: Any, weights: Any, x: jax.Array, lengths: jax.Array, new: jax.Array) -> Any:
        ctx = Context.step(ids, lengths, new)
        if not mixes:
            result: Any = layer.apply({"params": weights}, x, ctx)
            return cache, result[0]
        result = layer.apply({"params": weights}, x, ctx, cache, given)
        return result[1], result[0]

    cache = layer.init_cache(rows, context + 1, x.dtype) if mixes else ()
    row = jax.ShapeDtypeStruct((rows,), jnp.int32)
    program, compile_s = compiled(step, cache, weights, x, row, row, donate=0)
    places = [(context, 1)] if phase == "decode" else [(at, min(t, context - at)) for at in range(0, context, t)]

    def call(cache: Any) -> Any:
        y = None
        for at, new in places:
            cache, y = program(cache, weights, x, np.full(rows, at, np.int32), np.full(rows, new, np.int32))
        return cache, y

    chain = Chain(call, cache, lambda rest: rest)
    return Subject(chain, compile_s, peak_bytes(program), work, str(x.dtype))
