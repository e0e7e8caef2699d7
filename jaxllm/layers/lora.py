"""Low-rank adapters (Hu et al. 2021, arXiv 2106.09685) on any matrix of a model, chosen by its name.

    W = W0 + (alpha / r) A B,      A [inputs, r] ~ N(0, 1 / inputs),   B [r, outputs] = 0

W0 is frozen, A and B are trained, and at the start W is W0 to the last bit. An adapter is three parameters beside the one it
changes (`q_proj_lora_a`, `_b`, `_scale`) and adds nothing to any layer: `base.param` hands a layer the sum. So it suits every mixer and
ffn, each layer of a scan and each expert of a stack has its own (their axes lead both A and B), and remat, sharding, accumulation and
checkpoints see parameters like all others. The sum is made once a layer and call; its gradient, as large as W0, lives for one layer.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import UserError
from jaxllm.layers.axes import Sides, sides
from jaxllm.layers.base import ADAPTER, Constant, Declared, fan_in
from jaxllm.ops.low_rank import low_rank_sum
from jaxllm.targets import matching

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class LoRA:
    """rank, alpha: see the module. targets: globs over parameter paths, of the matrices that get an adapter. also: globs of further
    parameters that are trained in full and kept with the adapters (norms, say). base: the checkpoint of W0; training fills it in."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("*/mixer/*_proj",)
    also: tuple[str, ...] = ()
    base: str | None = None

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise UserError(f"model.lora: rank={self.rank} must be at least 1 and alpha={self.alpha} above 0")
        if not self.targets:
            raise UserError("model.lora.targets: name at least one matrix, such as '*/mixer/*_proj'")

    def declare(self, tree: Mapping[str, Any]) -> Tree:
        """The declaration of a model with its adapters; all else but `also` is frozen. Raises UserError for a glob that names nothing
        that can be adapted: norms, biases, routers and the vocabulary's matrices cannot."""
        boxes = dict(boxes_of(tree))
        able = [name for name, box in boxes.items() if box.trainable and adaptable(box) is not None]
        chosen = matching(self.targets, able, "model.lora.targets", "matrix that can be adapted")
        rest = [name for name, box in boxes.items() if box.trainable and name not in chosen]
        free = matching(self.also, rest, "model.lora.also", "parameter that is left")

        def declared(tree: Mapping[str, Any], prefix: str) -> Tree:
            out: Tree = {}
            for key, box in tree.items():
                name = f"{prefix}{key}"
                if isinstance(box, Mapping):
                    out[key] = declared(box, f"{name}/")
                    continue
                out[key] = box if name in free else box.replace(trainable=False, update=None)
                if name in chosen:
                    out |= {f"{key}{ADAPTER}{part}": leaf for part, leaf in self._adapter(box).items()}
            return out

        return declared(tree, "")

    def _adapter(self, box: Declared) -> Tree:
        """`a`, `b` and `scale` of one matrix. float32, whatever the matrix is kept in: small steps must not be rounded away."""
        axes, names = adaptable(box), box.names
        assert axes is not None

        def leaf(init: Any, place: tuple[int | None, ...], **flags: Any) -> Declared:
            shape = tuple(self.rank if i is None else box.value.shape[i] for i in place)
            known = tuple(None if i is None else names[i] for i in place)
            return Declared(jax.ShapeDtypeStruct(shape, jnp.float32), names=known, init=init, **flags)

        start = fan_in(math.prod(box.value.shape[i] for i in axes.inputs))
        repeats = tuple(i for i in axes.stack if names[i] == "layers")
        return {
            "a": leaf(start, (*axes.stack, *axes.inputs, None)),
            "b": leaf(Constant(0.0), (*axes.stack, None, *axes.outputs)),
            "scale": leaf(Constant(self.alpha / self.rank), repeats, trainable=False),
        }


def adaptable(box: Declared) -> Sides | None:
    """The sides of a matrix that may have an adapter, else None."""
    return None if "vocab" in box.names else sides(box.names)


def boxes_of(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Declared]]:
    """(path, box) of every parameter of a declaration."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from boxes_of(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value


def merge(params: Mapping[str, Any], declared: Mapping[str, Any]) -> Tree:
    """Parameters with their adapters added in, each in its own dtype; numpy stays numpy. declared: of the model without adapters."""
    out: Tree = {}
    for key, box in declared.items():
        value = params[key]
        if isinstance(box, Mapping):
            out[key] = merge(value, box)
            continue
        if f"{key}{ADAPTER}a" in params:
            axes = adaptable(box)
            assert axes is not None
            a, b, scale = (jnp.asarray(params[f"{key}{ADAPTER}{part}"]) for part in ("a", "b", "scale"))
            whole = low_rank_sum(jnp.asarray(value), a, b, scale, axes.stack, axes.inputs, axes.outputs)
            whole = whole.astype(value.dtype)
            value = np.asarray(whole) if isinstance(value, np.ndarray) else whole
        out[key] = value
    return out
