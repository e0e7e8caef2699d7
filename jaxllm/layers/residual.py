"""Residual schemes: how a block reads its input from the stream and writes its output back.

A scheme is a module, one instance a site (`mixer`, `ffn` of each block, and `out` of the model), so that it may own parameters:

    start(e) -> R        the embeddings become the stream's representation
    read(R) -> x         what the site's layer sees, before its norm;   write(R, y) -> R   where its output goes
    finish(R) -> x       what the final norm sees
    split(R) -> (carry, fixed), merge(carry, fixed) -> R     what a scan carries, and what it only reads
    boundary(R, layers) -> R     called between groups, after so many layers: the only place where R may change its structure

And, without parameters:

    grows                R changes its structure at every write: the model then runs a group's repeats one after another
    view(R) -> x         what inspection shows as the stream
    check(groups)        raises where the scheme does not suit the layers;   cost(..) -> Cost   of all sites together
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from jaxllm.layers.base import Cost
from jaxllm.mesh import shard
from jaxllm.pattern import Group


class Residual(nn.Module, kw_only=True):
    """The plain scheme, and the base of all others: `x <- x + scale y`. R is `x [b t d]` itself.

    scale: Granite's residual multiplier; 1 is the ordinary residual network.
    """

    site: str
    scale: float = 1.0
    d_model: int
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    norm_eps: float = 1e-6

    @property
    def grows(self) -> bool:
        return False

    def start(self, e: Array) -> Any:
        return e

    def read(self, R: Any) -> Array:
        return R

    def write(self, R: Any, y: Array) -> Any:
        # Without this constraint the partitioner re-decides the stream's layout at each layer: three times the all-reduces.
        if self.scale != 1.0:
            y = y * jnp.asarray(self.scale, y.dtype)
        return shard(R + y, "batch", "length", "act_embed")

    def finish(self, R: Any) -> Array:
        return R

    def split(self, R: Any) -> tuple[Any, Any]:
        return R, ()

    def merge(self, carry: Any, fixed: Any) -> Any:
        del fixed
        return carry

    def boundary(self, R: Any, layers: int) -> Any:
        del layers
        return R

    def view(self, R: Any) -> Array:
        return self.finish(R)

    @nn.nowrap
    def check(self, groups: tuple[Group, ...]) -> None:
        del groups

    @nn.nowrap
    def cost(self, batch: int, t: int, groups: tuple[Group, ...], dtype: Any) -> Cost:
        """Of a call, beyond the additions of a plain network, which are not counted."""
        del batch, t, groups, dtype
        return Cost()
