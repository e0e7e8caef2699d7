"""What every layer shares: the context of a call, the declaration of a parameter, the cost record.

A layer is a Linen dataclass, pure in and pure out. Its fields are its configuration; `LanguageModel` supplies `d_model`, `dtype`,
`param_dtype` and `norm_eps`. The three protocols (mixer, ffn, residual) are written down in `docs/architecture.md`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import Array

from jaxllm.layers.axes import sides
from jaxllm.ops.low_rank import low_rank_sum

ADAPTER = "_lora_"  # between a parameter's name and `a`, `b`, `scale` of its adapter

Aux = dict[str, Array]
Initializer = Callable[..., Array]


@struct.dataclass
class Rows:
    """One row of a call with a cache. All arrays are int32 `[b]`.

    `lengths` tokens are committed before this call (`accepted` already included) and `positions[:, 0] == lengths`. `new` tokens of
    this call are valid, the rest of the row is padding; the last `tentative` of them may be rejected by the next call, whose
    `accepted` says how many of them were kept. `slots` names the row's place in a pool of states, `tables` its pages by cache kind.
    """

    lengths: Array
    new: Array
    tentative: Array
    accepted: Array
    slots: Array
    tables: Mapping[str, Array] = struct.field(default_factory=dict)


@struct.dataclass
class Context:
    """What a layer may know about a call besides its input. Arrays are int32 `[b, t]`.

    Without a cache, `segments` are document ids of packed rows (0 = padding) and positions restart at each document.
    With a cache a row is one document, right-padded, and `segments` is a 0/1 mask. Padding is never written, never counted.
    """

    tokens: Array
    positions: Array
    segments: Array
    rows: Rows | None = None
    train: bool = struct.field(pytree_node=False, default=False)
    capture: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @classmethod
    def whole(
        cls,
        tokens: Array,
        segments: Array | None = None,
        positions: Array | None = None,
        *,
        train: bool = False,
        capture: tuple[str, ...] = (),
    ) -> "Context":
        """A call on whole sequences. Positions default to the count of earlier tokens of the same document in the row."""
        tokens = jnp.asarray(tokens, jnp.int32)
        segments = jnp.ones_like(tokens) if segments is None else jnp.asarray(segments, jnp.int32)
        if positions is None:
            index = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
            first = jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)
            positions = index - jax.lax.cummax(jnp.where(first, index, 0), axis=1)
        return cls(tokens, jnp.asarray(positions, jnp.int32), segments, None, train, tuple(capture))

    @classmethod
    def step(
        cls,
        tokens: Array,
        lengths: Array,
        new: Array | None = None,
        *,
        tentative: Array | None = None,
        accepted: Array | None = None,
        slots: Array | None = None,
        tables: Mapping[str, Array] | None = None,
        capture: tuple[str, ...] = (),
    ) -> "Context":
        """A call with a cache: prefill, chunk, decode or verify, according to `new`, `tentative` and `accepted` (`[b]` each)."""
        tokens = jnp.asarray(tokens, jnp.int32)
        b, t = tokens.shape
        zeros = jnp.zeros(b, jnp.int32)
        lengths = jnp.asarray(lengths, jnp.int32)
        new = jnp.full(b, t, jnp.int32) if new is None else jnp.asarray(new, jnp.int32)
        rows = Rows(
            lengths=lengths,
            new=new,
            tentative=zeros if tentative is None else jnp.asarray(tentative, jnp.int32),
            accepted=zeros if accepted is None else jnp.asarray(accepted, jnp.int32),
            slots=jnp.arange(b, dtype=jnp.int32) if slots is None else jnp.asarray(slots, jnp.int32),
            tables={} if tables is None else {kind: jnp.asarray(table, jnp.int32) for kind, table in tables.items()},
        )
        offset = jnp.arange(t, dtype=jnp.int32)[None]
        return cls(
            tokens, lengths[:, None] + offset, (offset < new[:, None]).astype(jnp.int32), rows, False, tuple(capture)
        )


@struct.dataclass
class Declared(nn.LogicallyPartitioned):
    """A parameter's one declaration: shape and dtype (`value`), logical axes (`names`), initialiser and flags.

    `trainable=False` means no gradient, no decay, no clipping and no share in the norms. `update(param, statistic)` makes one step
    of such a parameter from the layer's `state/<name>` statistic, once per optimiser step.
    """

    init: Initializer | None = struct.field(pytree_node=False, default=None)
    trainable: bool = struct.field(pytree_node=False, default=True)
    update: Callable[[Array, Array], Array] | None = struct.field(pytree_node=False, default=None)

    def unbox(self, apply_constraint: bool = True) -> Any:
        """The bare value: shardings are fixed when parameters are made, so no constraint is added here."""
        del apply_constraint
        return self.value


@dataclasses.dataclass(frozen=True)
class Normal:
    """Initialiser N(0, stddev^2). Like every initialiser it can draw in JAX (`model.init`) and, without compiling, in numpy
    (`init_params`): `draw` is optional for a layer's own initialisers, which are any hashable `f(key, shape, dtype)`.
    """

    stddev: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        return (self.stddev * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        return np.float32(self.stddev) * rng.standard_normal(shape, dtype=np.float32)


@dataclasses.dataclass(frozen=True)
class Constant:
    """Initialiser: every element is `value`."""

    value: float

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del key
        return jnp.full(shape, self.value, dtype)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        del rng
        return np.full(shape, self.value, np.float32)


# Projections that write into the residual stream start small, so that depth does not blow the stream up at initialisation.
# GPT-2 divides by sqrt(2 * layers); a constant of the same size keeps layers ignorant of the depth they stand in.
RESIDUAL_SCALE = 0.25


def fan_in(size: int, scale: float = 1.0) -> Normal:
    """N(0, scale^2 / size): keeps the variance of `x @ w` for `size` summed inputs."""
    return Normal(scale * size**-0.5)


def param(
    module: nn.Module,
    name: str,
    init: Initializer,
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    dtype: Any = None,
    trainable: bool = True,
    update: Callable[[Array, Array], Array] | None = None,
) -> Array:
    """Read the parameter, or declare it when the module is being initialised.

    A parameter that exists is returned as it is: `prepare` may have replaced it by a fused or quantised leaf, and shapes are checked
    once, against the declaration, where parameters enter the program.
    """
    if module.has_variable("params", name):
        w = nn.meta.unbox(module.get_variable("params", name))  # boxed when they come straight from `model.init`
        return adapted(module, name, w, axes) if module.has_variable("params", f"{name}{ADAPTER}a") else w
    if len(axes) != len(shape):
        raise ValueError(f"parameter {name}: {len(axes)} logical axes for shape {shape}")
    dtype = getattr(module, "param_dtype", jnp.float32) if dtype is None else dtype

    def boxed(key: Array) -> Declared:
        return Declared(init(key, shape, dtype), names=axes, init=init, trainable=trainable, update=update)

    return cast(Array, module.param(name, boxed))  # boxed while initialising, the bare array otherwise


def adapted(module: nn.Module, name: str, w: Array, axes: tuple[str | None, ...]) -> Array:
    """The matrix plus its adapter, float32: see `jaxllm.layers.lora`."""
    split = sides(axes)
    assert split is not None, name
    a, b, scale = (cast(Array, module.get_variable("params", f"{name}{ADAPTER}{part}")) for part in ("a", "b", "scale"))
    return low_rank_sum(w, a, b, scale, split.stack, split.inputs, split.outputs)


@dataclasses.dataclass(frozen=True)
class Cost:
    """What a call costs, from the configuration alone. FLOPs count a multiply-add as 2; only matmuls are counted.

    A call has `b` rows of `t` new tokens; each new token meets `s` keys. Bytes of caches are at the dtype the cost was asked for.
    """

    flops: float = 0.0  # forward matmul FLOPs of the call
    params: int = 0  # parameters held
    params_active: int = 0  # parameters that one token's matmuls use (routed experts: the chosen ones)
    cache_per_token: float = 0.0  # bytes one row's cache holds per token of context
    cache_constant: float = 0.0  # bytes one row's cache holds whatever the context (windows, states, buffers)
    cache_read: float = 0.0  # bytes of cache the call reads
    activation_bytes: float = 0.0  # bytes kept for the backward pass without remat
    collective_bytes: float = 0.0  # bytes all-reduced in the forward under tensor parallelism

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(*(a + b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)))

    def __mul__(self, times: int) -> "Cost":
        return Cost(*(a * times for a in dataclasses.astuple(self)))


def named(aux: Aux, name: str) -> Aux:
    """Prefix a child's keys with its name. Losses keep theirs: they are summed over the whole model."""
    out = {}
    for key, value in aux.items():
        kind, _, rest = key.partition("/")
        out[key if kind == "loss" else f"{kind}/{name}/{rest}"] = value
    return out


def merged(into: Aux, more: Aux) -> Aux:
    """Both; what both have is added."""
    return {**into, **{key: into[key] + value if key in into else value for key, value in more.items()}}


def matrices_as(params: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """For `prepare`: the projections (`*_proj`) in the dtype they are multiplied in, so that no call converts them again."""

    def cast(name: str, a: Any) -> bool:
        return name.endswith("_proj") and a.dtype != dtype

    return {name: a.astype(dtype) if cast(name, a) else a for name, a in params.items()}


class Layer(nn.Module, kw_only=True):
    """Base of mixers and ffns: the four fields that the model supplies, and the defaults of the optional methods."""

    unrolls: ClassVar[bool] = False  # takes an `UnrolledCache`, as the layer of a draft head must

    @property
    def reads_pages(self) -> bool:
        """Whether the layer takes its pools as they are (`jaxllm.pages.Paged`), where it would else get a view of each row's cache."""
        return False

    d_model: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    norm_eps: float = 1e-6

    @nn.nowrap
    def prepare(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Parameters for decoding (fused, absorbed or quantised), from one unstacked layer's parameters. Pure."""
        return dict(params)

    @nn.nowrap
    def params_read(self, tokens: int) -> float:
        """Parameters that a call on so many tokens reads, on average; all but where tokens choose among them."""
        del tokens
        layer: Any = self
        return float(layer.cost(1, 1, 1, self.dtype).params)

    @property
    def token_ids(self) -> int | None:
        """How many token ids the layer has a row for; None = it does not look at them. The model refuses one with too few."""
        return None

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of `shared` that a layer before this one must have given."""
        return ()

    @property
    def gives(self) -> tuple[str, ...]:
        """Names of `shared` that later layers may take."""
        return ()

    @nn.nowrap
    def shared_spec(self, b: int, t: int, train: bool, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Values this layer hands to later layers; the model starts them at zeros."""
        del b, t, train, dtype
        return {}
