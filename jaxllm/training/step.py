"""The one train step: micro-batches, gradient, guard, clipping, update. A pure function; `compile_step` puts it on the
devices.

    g = d/dp sum_micro loss(p, micro)          the denominators span all micro-batches, so any split gives the same g
    p <- p + lr(updates) * transform(clip(g))   if the loss and the norms are finite, else nothing moves

One step is one update of the optimiser, however many micro-batches it is cut into.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.layers.base import Context
from jaxllm.model import LanguageModel
from jaxllm.params import declare, is_declared, path_name
from jaxllm.training.losses import Batch, backbone, trained_tokens, valid_tokens
from jaxllm.training.objectives import Forward, Objective, total_loss
from jaxllm.training.optimisers import Optimiser
from jaxllm.training.state import TrainState, Tree, fill, leaves_by_path, owner, pick, step_key, trained

Metrics = dict[str, jax.Array]
Step = Callable[..., tuple[TrainState, Metrics]]


def make_train_step(
    model: LanguageModel,
    objectives: Mapping[str, Objective],
    optimiser: Optimiser,
    *,
    accumulate: int = 1,
    free: Tree | None = None,
    shards: int = 1,
    declared: Tree | None = None,
    watch: bool = False,
    ema: float | None = None,
    teachers: Mapping[str, LanguageModel] | None = None,
) -> Step:
    """`step(state, batch, total_updates, frozen={}) -> (state, metrics)`, to be jitted with a donated state.

    batch: arrays `[b, t]` of a whole step; `accumulate` divides b. total_updates: int32 scalar, of the stage: what
    schedules end at. It is an argument, so that a longer run uses the program that is already compiled. free: tree of
    booleans, false where this stage freezes a parameter; default none. shards: devices that split the batch. Metrics
    are scalars (float32 unless counts): loss, grad_norm, param_norm, update_norm, lr, tokens (not padding),
    trained_tokens, finite, skipped, one entry an objective; and the layers' `metric/*`. watch: also
    `watch/grad_norm/<path>` and `watch/update_ratio/<path>`, the norm of a parameter's update over its own; one number a
    repeat for scanned ones, and `moved_norm`, of what parameters (or their masters) really moved by, rounded to their bits. ema: decay
    of the state's running averages, see `averages_of`.
    teachers: frozen models that objectives look at; their parameters are `frozen`, by the same names, and never part of the state.
    """
    declared = declare(model) if declared is None else declared
    trainable = trained(declared)
    free = jax.tree.map(lambda _: True, trainable) if free is None else free
    moving = jax.tree.map(lambda a, b: a and b, trainable, free)
    tx = optimiser.transform(declared)
    capture = tuple(dict.fromkeys(name for o in objectives.values() for name in o.capture))

    def micro_loss(
        part: Tree, params: Tree, batch: Batch, key: jax.Array, denominators: Any, weights: Any, frozen: Any
    ) -> Any:
        params = fill(part, params)
        ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], train=True, capture=capture)
        dropout, rest = jax.random.split(key)
        out = backbone(model, params, ctx, {"dropout": dropout})
        given = {name: (teacher, frozen[name]) for name, teacher in (teachers or {}).items()}
        forward = Forward(model, params, batch, ctx, out, shards, rest, given)
        loss, shares = total_loss(objectives, forward, denominators, weights)
        states = {k: v for k, v in out.aux.items() if k.startswith("state/")}
        metrics = {k: v.astype(jnp.float32) / accumulate for k, v in out.aux.items() if k.startswith("metric/")}
        return loss, {"loss": loss, "shares": shares, "states": states, "metrics": metrics}

    grad_of = jax.grad(micro_loss, has_aux=True)

    def gradient(
        state: TrainState, batch: Batch, total_updates: jax.Array | int, frozen: Mapping[str, Tree]
    ) -> tuple[Tree, Any]:
        """The gradient of the whole step (None where nothing is trained) and the summed reports of its
        micro-batches."""
        part = pick(state.params, moving)
        denominators = {name: o.count(batch) for name, o in objectives.items()} | {"valid": valid_tokens(batch)}
        weights = {name: o.weight_at(state.updates, total_updates) for name, o in objectives.items()}
        key = step_key(state.key, state.step)
        if accumulate == 1:
            grads, report = grad_of(
                part, state.params, batch, jax.random.fold_in(key, 0), denominators, weights, frozen
            )
            return jax.tree.map(lambda g: g.astype(jnp.float32), grads), report

        def body(total: Tree, xs: tuple[Batch, jax.Array]) -> tuple[Tree, Any]:
            rows, index = xs
            grads, report = grad_of(
                part, state.params, rows, jax.random.fold_in(key, index), denominators, weights, frozen
            )
            return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads), report

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), part)
        total, reports = lax.scan(body, zeros, (split_rows(batch, accumulate), jnp.arange(accumulate)))
        return total, jax.tree.map(lambda x: jnp.sum(x, axis=0), reports)

    def step(
        state: TrainState, batch: Batch, total_updates: jax.Array | int, frozen: Mapping[str, Tree] | None = None
    ) -> tuple[TrainState, Metrics]:
        grads, report = gradient(state, batch, total_updates, frozen or {})
        norm = optax.tree.norm(grads)
        if optimiser.clip_norm is not None:
            scale = jnp.minimum(1.0, optimiser.clip_norm / jnp.maximum(norm, jnp.finfo(jnp.float32).tiny))
            grads = jax.tree.map(lambda g: g * scale, grads)
        lr = optimiser.rate(state.updates, total_updates)
        exact = before = fill(state.master, state.params)
        part = pick(exact, trainable)
        # A frozen parameter has no gradient; the transformation sees zeros there and its verdict on it is dropped
        # below.
        updates, opt_state = tx.update(_with_zeros(grads, part), state.opt_state, part)
        updates = pick(jax.tree.map(lambda u: lr * u.astype(jnp.float32), updates), moving)
        update_norm = optax.tree.norm(updates)
        finite = jnp.isfinite(report["loss"]) & jnp.isfinite(norm)
        if not optimiser.finite_updates:
            finite &= jnp.isfinite(update_norm)

        def moved(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(finite, new.astype(old.dtype), old)

        def added(u: jax.Array | None, p: jax.Array) -> jax.Array:
            return p if u is None else moved(p.astype(jnp.float32) + u, p)

        exact = jax.tree.map(added, updates, exact, is_leaf=lambda x: x is None)
        master = jax.tree.map(lambda m, e: None if m is None else e, state.master, exact, is_leaf=lambda x: x is None)
        params = jax.tree.map(lambda e, p: e.astype(p.dtype), exact, state.params)
        params = update_states(params, declared, free, report["states"], moved)
        opt_state = _keep_frozen(opt_state, state.opt_state, moving, moved)
        one = finite.astype(jnp.int32)
        new = dataclasses.replace(
            state,
            params=params,
            opt_state=opt_state,
            master=master,
            step=state.step + 1,
            updates=state.updates + one,
            skipped=state.skipped + 1 - one,
            ema=None if ema is None else averages_of(state, exact, ema, moved),
        )
        metrics = {
            "loss": report["loss"],
            "grad_norm": norm,
            "update_norm": update_norm,
            "param_norm": optax.tree.norm(pick(exact, trainable)),
            "lr": lr,
            "tokens": valid_tokens(batch).astype(jnp.int32),
            "trained_tokens": trained_tokens(batch),
            "finite": finite,
            "skipped": new.skipped,
        }
        if watch:
            metrics |= by_parameter(declared, grads, updates, exact)
            metrics["moved_norm"] = distance(pick(exact, moving), pick(before, moving))
        return new, {**report["shares"], **report["metrics"], **metrics}

    return step


def averages_of(state: TrainState, exact: Tree, decay: float, moved: Any) -> Tree:
    """`e <- d e + (1 - d) p` once an update (Polyak and Juditsky 1992), `d = min(decay, (1 + n) / (10 + n))` after n updates of the run:
    the first ones forget the start sooner. exact: the new parameters, float32."""
    n = (state.step - state.skipped).astype(jnp.float32)
    d = jnp.minimum(decay, (1 + n) / (10 + n))

    def one(e: jax.Array | None, p: jax.Array) -> jax.Array | None:
        return None if e is None else moved(d * e + (1 - d) * p.astype(jnp.float32), e)

    return jax.tree.map(one, state.ema, exact, is_leaf=lambda x: x is None)


def by_parameter(declared: Tree, grads: Tree, updates: Tree, params: Tree) -> Metrics:
    """Gradient norm, and update norm over parameter norm, of every parameter that has them, a number a repeat where it is scanned."""
    boxes, values = leaves_by_path(declared, is_declared), leaves_by_path(params)
    moved, out = leaves_by_path(updates), {}

    def norm(name: str, x: jax.Array) -> jax.Array:
        first = 1 if boxes[name].names and boxes[name].names[0] == "layers" else 0
        return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(first, x.ndim))))

    for name, gradient in leaves_by_path(grads).items():
        out[f"watch/grad_norm/{name}"] = norm(name, gradient)
        if name in moved:
            out[f"watch/update_ratio/{name}"] = norm(name, moved[name]) / norm(name, values[name])
    return out


def distance(new: Tree, old: Tree) -> jax.Array:
    """Global 2-norm of the difference, taken in float32."""
    return optax.tree.norm(jax.tree.map(lambda a, b: a.astype(jnp.float32) - b.astype(jnp.float32), new, old))


def split_rows(batch: Batch, parts: int) -> dict[str, jax.Array]:
    """`[b, t]` to `[parts, b / parts, t]`. Part i takes rows i, i + parts, ...: rows that lie on one device stay
    there."""

    def cut(x: jax.Array) -> jax.Array:
        return jnp.swapaxes(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 0, 1)

    return {name: cut(x) for name, x in batch.items()}


def update_states(params: Tree, declared: Tree, free: Tree, states: Mapping[str, jax.Array], moved: Any) -> Tree:
    """One step of every parameter that is not trained but declares an `update`, from the statistics of all
    micro-batches.

    As initialisers do, an `update` sees one layer: the axis of scanned repeats is mapped over.
    """

    def one(path: Any, box: Any, may: bool, p: jax.Array) -> jax.Array:
        statistic = states.get(f"state/{path_name(path)}")
        if box.update is None or statistic is None or not may:
            return p
        update = jax.vmap(box.update) if box.names and box.names[0] == "layers" else box.update
        return moved(update(p, statistic), p)

    return jax.tree_util.tree_map_with_path(one, declared, free, params, is_leaf=is_declared)


def _with_zeros(grads: Tree, part: Tree) -> Tree:
    """The gradient in the structure of `part`: zeros for what is trained in general but frozen in this stage."""

    def one(p: jax.Array | None, g: jax.Array | None) -> jax.Array | None:
        return None if p is None else jnp.zeros(p.shape, jnp.float32) if g is None else g

    return jax.tree.map(one, part, grads, is_leaf=lambda x: x is None)


def _keep_frozen(new: Tree, old: Tree, moving: Tree, moved: Any) -> Tree:
    """The optimiser's new state; leaves that belong to a frozen parameter, and all of it after a bad step, stay as they
    were."""
    free = leaves_by_path(moving)

    def one(path: Any, n: jax.Array, o: jax.Array) -> jax.Array:
        name = owner(path_name(path), free)
        return o if name is not None and not free[name] else moved(n, o)

    return jax.tree_util.tree_map_with_path(one, new, old)


def compile_step(
    step: Step, state: TrainState, batch: Batch, mesh: Mesh | None = None, frozen: Mapping[str, Tree] | None = None
) -> tuple[Any, float]:
    """The step compiled for this state and batch (the state is donated), and the seconds that took.

    The compiled step is called with an int32 scalar as `total_updates`, on the host or on all devices; and with `frozen`, the
    parameters of teachers, where there are any.
    """
    start = time.perf_counter()
    everywhere = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    places = jax.tree.map(lambda x: x.sharding, state)
    total = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    more = (frozen,) if frozen else ()
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, everywhere))
    compiled = jitted.lower(state, batch, total, *more).compile()
    return compiled, time.perf_counter() - start
