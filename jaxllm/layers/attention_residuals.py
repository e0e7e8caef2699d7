"""Attention residuals: a site reads a learned mixture of what earlier layers wrote, in the place of their sum.

    x = sum_i p_i V_i,   p = softmax_i( sum_d w_d gamma_d V_id / rms(V_i) )        w, gamma of the site; no factor 1/sqrt(d)

*Block* (Kimi K3): the sources V are the embedding, the finished blocks of `block_size` layers, each the sum of what its layers wrote,
and the running sum of the block at hand, once it has one. *Full*: the embedding and what every single site wrote. Before the final
norm there is one more mixture. Nothing crosses tokens, so there is no cache.
Kimi Team 2026, arXiv 2603.15031, and the Kimi K3 report, arXiv 2607.24653, section 2.2.

Finished blocks cross a scanned group as values that are read, not carried: carried ones would be saved for the backward once a repeat.
So a block can end only where a group of `model.layers` ends.
"""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from flax import struct
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Constant, Cost, param
from jaxllm.layers.residual import Residual
from jaxllm.mesh import shard
from jaxllm.ops.depth_attention import depth_attention
from jaxllm.pattern import Group


@struct.dataclass
class Depth:
    """done: the embedding and finished blocks (full: every output), `[b t d]` each. prefix: the running sum, which counts where `begun`."""

    done: tuple[Array, ...]
    prefix: Array | None
    begun: Array | None


class AttentionResiduals(Residual, kw_only=True):
    """R is a `Depth`.

    mode: `block` or `full`. block_size: layers (mixer and ffn together) of a block; null = each group of `model.layers` is one.
    Parameters of a site and of the end: `query [d]` (w, zero at first: a plain mean) and `norm [d]` (gamma).
    """

    mode: str = "block"
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("block", "full"):
            raise UserError(f"residual.mode: {self.mode!r} is not block or full")
        if self.block_size is not None and (self.mode == "full" or self.block_size < 1):
            raise UserError(
                f"residual.block_size: {self.block_size} must be at least 1, and null with mode=full; mode={self.mode}"
            )
        if self.scale != 1.0:
            raise UserError(f"residual.scale: {self.scale} has no meaning here, a site chooses what it reads; drop it")
        super().__post_init__()

    @property
    def grows(self) -> bool:
        return self.mode == "full"

    def setup(self) -> None:
        if self.site in ("mixer", "ffn", "out"):
            self.query = param(self, "query", Constant(0.0), (self.d_model,), ("norm",))
            self.norm = param(self, "norm", Constant(1.0), (self.d_model,), ("norm",))

    @nn.nowrap
    def _ends(self, groups: tuple[Group, ...]) -> tuple[int, ...]:
        """Layers after which a group ends, the last one's end left out."""
        ends = [sum(group.layers for group in groups[: i + 1]) for i in range(len(groups))]
        return tuple(ends[:-1])

    @nn.nowrap
    def check(self, groups: tuple[Group, ...]) -> None:
        total, ends = sum(group.layers for group in groups), self._ends(groups)
        for end in range(self.block_size, total, self.block_size) if self.block_size is not None else ():
            if end not in ends:
                raise UserError(
                    f"model.layers: with residual.block_size={self.block_size} a group must end after layer {end}, here groups end after"
                    f" {', '.join(map(str, (*ends, total)))}; write a | there"
                )

    def start(self, e: Array) -> Depth:
        if self.mode == "full":
            return Depth((e,), None, None)
        return Depth((e,), jnp.zeros_like(e), jnp.array(False))

    def read(self, R: Depth) -> Array:
        query = self.query.astype(jnp.float32) * self.norm.astype(jnp.float32)
        sources, last = (R.done, True) if R.prefix is None else ((*R.done, R.prefix), R.begun)
        return shard(depth_attention(sources, query, last, self.norm_eps), "batch", "length", "act_embed")

    def write(self, R: Depth, y: Array) -> Depth:
        if R.prefix is None:
            return Depth((*R.done, shard(y, "batch", "length", "act_embed")), None, None)
        return Depth(R.done, shard(R.prefix + y, "batch", "length", "act_embed"), jnp.array(True))

    def finish(self, R: Depth) -> Array:
        return self.read(R)

    def split(self, R: Depth) -> tuple[Any, Any]:
        return (R, ()) if R.prefix is None else ((R.prefix, R.begun), R.done)

    def merge(self, carry: Any, fixed: Any) -> Depth:
        return carry if isinstance(carry, Depth) else Depth(fixed, *carry)

    def boundary(self, R: Depth, layers: int) -> Depth:
        if R.prefix is None or (self.block_size is not None and layers % self.block_size):
            return R
        return Depth((*R.done, R.prefix), jnp.zeros_like(R.prefix), jnp.array(False))

    def view(self, R: Depth) -> Array:
        """The sum of all sources: what the stream of a plain network would be."""
        return sum(R.done[1:], R.done[0]) + (0 if R.prefix is None else R.prefix)

    @nn.nowrap
    def cost(self, batch: int, t: int, groups: tuple[Group, ...], dtype: Any) -> Cost:
        """`4 d` FLOPs a token, source and site, and one source more kept a block."""
        total, d = sum(group.layers for group in groups), self.d_model
        if self.mode == "full":
            sources, kept = sum(range(1, 2 * total + 2)), 2 * total
        else:
            ends = self._ends(groups) if self.block_size is None else range(self.block_size, total, self.block_size)
            blocks = [1 + sum(end <= layer for end in ends) for layer in range(total)]
            # The first site of a block meets finished blocks alone, all others the running sum too.
            sources = sum(2 * n + 2 for n in blocks) - len(set(blocks)) + blocks[-1] + 1
            kept = len(set(blocks))
        size = (2 * total + 1) * 2 * d
        return Cost(
            flops=4 * batch * t * d * sources,
            params=size,
            params_active=size,
            activation_bytes=batch * t * d * kept * jnp.dtype(dtype).itemsize,
        )
