"""Manifold-constrained hyper-connections: several residual streams, mixed by matrices that can neither grow nor shrink them.

For streams X `[n d]` of a token, at each site f (a mixer or an ffn, norm included):

    h = [h_pre, h_post, h_comb] = F RMS(flatten X)                 RMS without a weight, F [n + n + n n, n d]
    pre = sigmoid(s_0 h_pre + b_pre) + eps      post = 2 sigmoid(s_1 h_post + b_post)
    C = sinkhorn(s_2 h_comb + b_comb)           columns sum to 1
    X'_k = post_k f(sum_i pre_i X_i) + sum_j C_jk X_j

All streams start as the embedding. Before the final norm they are added up, weighted as by `pre` (DeepSeek-V4), or averaged (GLM-5.3).
Hyper-connections: Zhu et al. 2024, arXiv 2409.19606. The constraint: Xie et al. 2025, arXiv 2512.24880. Order of operations and eps:
DeepSeek-V4, arXiv 2606.19348, and its released code. Weights are computed in fp32; `post` and C multiply in the streams' dtype.
"""

import dataclasses
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxllm.errors import UserError
from jaxllm.layers.base import Constant, Cost, Initializer, fan_in, param
from jaxllm.layers.residual import Residual
from jaxllm.mesh import shard
from jaxllm.ops.hyper_connections import collapse, expand
from jaxllm.pattern import Group

# At the start the dynamic part is small, as in both papers, and streams hardly mix: their mean is an ordinary residual stream. With
# equal entries in C all streams would stay equal, and C would have no gradient.
DYNAMIC, DIAGONAL = 0.01, 4.0


@dataclasses.dataclass(frozen=True)
class _Base:
    """Initialiser of `base`: zero, but for the diagonal of C."""

    streams: int

    def __call__(self, key: Array, shape: tuple[int, ...], dtype: Any) -> Array:
        del key, shape
        n = self.streams
        return jnp.asarray(np.concatenate([np.zeros(2 * n), DIAGONAL * np.eye(n).ravel()]), dtype)


class HyperConnections(Residual, kw_only=True):
    """R is `[b t n d]`.

    streams: n. sinkhorn_iterations: normalisations of the columns. hc_eps: added where the equations say so, and to every divisor.
    ends: how streams become one before the final norm, `weighted` or `mean`. Parameters of a site: `fn [m n d]`, `base [m]`,
    `gains [3]` (the s of the equations) with m = n (2 + n), in the order pre, post, C by rows; of the end: `fn [n n d]`, `base [n]`,
    `gains [1]`.
    """

    streams: int = 4
    sinkhorn_iterations: int = 20
    hc_eps: float = 1e-6
    ends: str = "weighted"

    def __post_init__(self) -> None:
        if self.streams < 1 or self.sinkhorn_iterations < 1:
            raise UserError(
                f"residual: streams={self.streams} and sinkhorn_iterations={self.sinkhorn_iterations} must be at least 1"
            )
        if self.ends not in ("weighted", "mean"):
            raise UserError(f"residual.ends: {self.ends!r} is not weighted or mean")
        if self.scale != 1.0:
            raise UserError(
                f"residual.scale: {self.scale} has no meaning here, each site learns how much it writes; drop it"
            )
        super().__post_init__()

    def setup(self) -> None:
        n = self.streams
        if self.site in ("mixer", "ffn"):
            self._declare(n * (2 + n), 3, _Base(n))
        elif self.site == "out" and self.ends == "weighted":
            self._declare(n, 1, Constant(0.0))

    def _declare(self, m: int, gains: int, base: Initializer) -> None:
        n, d = self.streams, self.d_model
        self.fn = param(self, "fn", fan_in(n * d), (m, n, d), (None, None, "embed"))
        self.base = param(self, "base", base, (m,), (None,))
        self.gains = param(self, "gains", Constant(DYNAMIC), (gains,), (None,))

    def start(self, e: Array) -> Array:
        b, t, d = e.shape
        return shard(jnp.broadcast_to(e[:, :, None], (b, t, self.streams, d)), "batch", "length", None, "act_embed")

    def read(self, R: Array) -> Array:
        n = self.streams
        x = collapse(R, self.fn[:n], self.base[:n], self.gains[0], self.hc_eps, self.norm_eps)
        return shard(x, "batch", "length", "act_embed")

    def write(self, R: Array, y: Array) -> Array:
        n = self.streams
        weights = (self.fn[n:], self.base[n:], self.gains[1:])
        R = expand(R, y, *weights, self.sinkhorn_iterations, self.hc_eps, self.norm_eps)
        return shard(R, "batch", "length", None, "act_embed")

    def finish(self, R: Array) -> Array:
        return self.read(R) if self.ends == "weighted" else self.view(R)

    def view(self, R: Array) -> Array:
        return jnp.mean(R.astype(jnp.float32), axis=2).astype(R.dtype)

    @nn.nowrap
    def cost(self, batch: int, t: int, groups: tuple[Group, ...], dtype: Any) -> Cost:
        """A site projects `n d` numbers to m, reads `2 n d` and writes `2 (n + n^2) d` FLOPs a token; what is kept is n times wider."""
        n, d, m = self.streams, self.d_model, self.streams * (2 + self.streams)
        sites = 2 * sum(group.layers for group in groups)
        end = self.ends == "weighted"
        params = sites * (n * d * m + m + 3) + end * (n * d * n + n + 1)
        flops = sites * 2 * d * (n * m + 2 * n + n * n) + end * 2 * d * (n * n + n)
        kept = sites * (n - 1) * d * jnp.dtype(dtype).itemsize
        return Cost(flops=batch * t * flops, params=params, params_active=params, activation_bytes=batch * t * kept)
