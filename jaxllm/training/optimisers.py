"""Optimisers: an optax transformation at learning rate 1, a peak, a schedule and a clipping norm.

The train step multiplies the transformation's updates by `rate(count)`, so the rate that is logged is the rate that was
used, whatever the optimiser, and nothing but the state's own update count can advance it. What may be decayed or
orthogonalised is read from the parameters' declared logical axes, never guessed from names or ranks.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from optax.contrib import MuonDimensionNumbers

from jaxllm.errors import UserError
from jaxllm.layers.axes import maps_features, sides
from jaxllm.layers.base import Declared
from jaxllm.params import is_declared
from jaxllm.training.schedules import Cosine, Schedule


def is_matrix(declared: Declared) -> bool:
    """Is the parameter trained, and does it map one feature space to another? See `jaxllm.layers.axes`."""
    return declared.trainable and maps_features(declared.names)


def matrices(declared: Any) -> Any:
    """Tree of booleans over the trained parameters (None elsewhere): what may be decayed."""
    return jax.tree.map(lambda d: is_matrix(d) if d.trainable else None, declared, is_leaf=is_declared)


@dataclasses.dataclass(frozen=True)
class Optimiser:
    """Base. lr: the peak learning rate. clip_norm: global norm of the gradient over trained parameters, null = no
    clipping. master: keep float32 copies of trained parameters that are kept in fewer bits, and move those; without,
    an update below half of a parameter's last bit is rounded away."""

    lr: float = 1e-3
    schedule: Schedule = Cosine(warmup_steps=100)
    clip_norm: float | None = 1.0
    master: bool = True

    # Does a gradient of finite norm always give a finite update? Then the guard need not wait for the update's norm, and
    # the update can be fused into the parameters' one pass through memory (a third of the optimiser's time on CPU).
    finite_updates: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.lr < float(np.finfo(np.float32).max):  # the step holds it so
            raise UserError(f"lr: {self.lr} must be above 0 and finite in float32")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm: {self.clip_norm} must be above 0, or null for no clipping")

    def rate(self, count: jax.Array | int, total: jax.Array | int) -> jax.Array:
        """The learning rate of update `count` of `total`, float32."""
        return jnp.float32(self.lr) * self.schedule.factor(count, total)

    def transform(self, declared: Any) -> optax.GradientTransformation:
        """Updates at learning rate 1, to be scaled and added. `declared`: the model's declaration; parameters and
        gradients come as trees with None where a parameter is not trained."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class AdamW(Optimiser):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101), on matrices only.

        m <- b1 m + (1 - b1) g;  v <- b2 v + (1 - b2) g^2;  p <- p - lr (m^ / (sqrt(v^) + eps) + weight_decay p)

    Moments are float32. Defaults: the usual ones of language models (b2 = 0.95, decay 0.1, norm 1).
    """

    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    finite_updates: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}: {getattr(self, name)} must be in [0, 1)")
        if self.weight_decay < 0:
            raise UserError(f"weight_decay: {self.weight_decay} must be 0 or more")

    def transform(self, declared: Any) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_adam(self.b1, self.b2, self.eps, mu_dtype=jnp.float32),
            optax.add_decayed_weights(self.weight_decay, matrices(declared)),
            optax.scale(-1.0),
        )


def muon_axes(declared: Declared, per_head: bool = False) -> MuonDimensionNumbers | None:
    """Which axes of a parameter Muon takes as the inputs and the outputs of a matrix, all others being a stack; None = AdamW's.

    Inputs come first, as in every projection here; `heads, head` are one side together. AdamW keeps what is no matrix, embedding
    and head, and routers (whose outputs are choices, not features). per_head: q, k and v are one matrix a head (Kimi K3).
    """
    axes = sides(declared.names)
    if axes is None or not is_matrix(declared) or "vocab" in declared.names:
        return None
    inputs, outputs = axes.inputs, axes.outputs
    if any(declared.names[side[0]] == "expert" for side in (inputs, outputs)):
        return None
    if per_head and len(outputs) == 2:
        outputs = outputs[1:]  # the axis of heads joins the stack
    return MuonDimensionNumbers(inputs, outputs)


def _to_rms(updates: Any, axes: Any, rms: float) -> Any:
    """Orthogonal matrices `[n, m]` have a root mean square of `max(n, m)^-0.5`; make it `rms`."""

    def one(dims: MuonDimensionNumbers, u: jax.Array) -> jax.Array:
        sides: list[Any] = [dims.reduction_axis, dims.output_axis]
        return u * (rms * max(math.prod(u.shape[i] for i in side) for side in sides) ** 0.5)

    return jax.tree.map(one, axes, updates, is_leaf=lambda x: isinstance(x, MuonDimensionNumbers))


@dataclasses.dataclass(frozen=True)
class Muon(Optimiser):
    """Momentum whose matrices are made orthogonal by Newton-Schulz steps (Jordan et al. 2024); AdamW for all else.

    beta, nesterov, ns_steps: of Muon. rms: root mean square of a matrix' update, whatever its shape, so that one `lr` suits both
    halves (Liu et al. 2025, arXiv 2502.16982: 0.2, what AdamW's updates have). per_head: see `muon_axes`. b1, b2, eps: of AdamW.
    weight_decay: of all matrices, decoupled.
    """

    beta: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    rms: float = 0.2
    per_head: bool = False
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("beta", "b1", "b2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise UserError(f"{name}: {getattr(self, name)} must be in [0, 1)")
        if self.ns_steps < 1 or self.rms <= 0 or self.weight_decay < 0:
            raise UserError(
                f"ns_steps: {self.ns_steps} must be at least 1, rms={self.rms} above 0, weight_decay={self.weight_decay} 0 or more"
            )

    def transform(self, declared: Any) -> optax.GradientTransformation:
        def split(d: Declared) -> tuple[str | None, Any]:
            axes = muon_axes(d, self.per_head)
            group = None if not d.trainable else "adam" if axes is None else "muon"
            return group, axes if group == "muon" else None if group is None else optax.MaskedNode()

        groups, axes = (jax.tree.map(lambda d, i=i: split(d)[i], declared, is_leaf=is_declared) for i in (0, 1))
        orthogonal = optax.chain(
            optax.contrib.scale_by_muon(
                ns_steps=self.ns_steps,
                beta=self.beta,
                eps=self.eps,
                mu_dtype=jnp.float32,
                nesterov=self.nesterov,
                weight_dimension_numbers=axes,
            ),
            optax.stateless(lambda updates, _: _to_rms(updates, axes, self.rms)),
        )
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps, mu_dtype=jnp.float32)
        return optax.chain(
            optax.partition({"muon": orthogonal, "adam": adam}, groups),
            optax.add_decayed_weights(self.weight_decay, matrices(declared)),
            optax.scale(-1.0),
        )


@dataclasses.dataclass(frozen=True)
class Optax(Optimiser):
    """Any optax optimiser whose updates are proportional to its learning rate, as `{_target_: optax.lion, _partial_:
    true}`.

    It is built with `learning_rate=1` (its own rate is this class's `lr` and `schedule`) and, where it takes one, a
    `mask` that keeps weight decay on matrices.
    """

    optimizer: Callable[..., Any] = optax.sgd

    def transform(self, declared: Any) -> optax.GradientTransformation:
        known = inspect.signature(self.optimizer).parameters
        given = getattr(self.optimizer, "keywords", {})
        if "learning_rate" not in known:
            raise UserError(f"optimizer: {self.optimizer} takes no learning_rate, so it is no optax optimiser")
        if "learning_rate" in given:
            raise UserError("optimizer.learning_rate: set lr and schedule beside optimizer instead")
        extra = {"mask": matrices(declared)} if "mask" in known and "mask" not in given else {}
        return self.optimizer(learning_rate=1.0, **extra)
