"""The gated delta rule: a state that forgets, and writes only what it got wrong. Here are its truths.

    S <- diag(e^{g_t}) S;   u_t = beta_t (v_t - S^T k_t);   S <- S + k_t u_t^T;   o_t = S^T q_t

S `[k v]` fp32 a head; the decay comes before the prediction, the output after the write. g, log-decays <= 0, is `[b t h k]`, a channel each
(Kimi Delta Attention, Kimi Linear, arXiv 2510.26692, section 3), or `[b t h]`, a head each (Gated DeltaNet, arXiv 2412.06464).

`recurrent` is that, token by token. `chunk_naive` does C tokens at once and lets their decays lie in memory as they are written. The fast
forms are `delta_chunk.py` and, by Pallas, `delta_pallas.py`; `delta.py` chooses.

Everywhere: q, k `[b t h k]` (normed and scaled by the caller), v `[b t h v]`, beta `[b t h]`; `first`, bool `[b t]`: before this token
the state is emptied (a document begins); state `[b h k v]`. A token with beta = 0 and g = 0 leaves no trace: that is what padding is.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax


def per_channel(g: Array, k: Array) -> Array:
    """Decays of a head as decays of its channels: `[b t h]`, `[b t h 1]` or `[b t h k]` -> `[b t h k]`."""
    return jnp.broadcast_to(g if g.ndim == k.ndim else g[..., None], k.shape)


def empty_state(k: Array, v: Array) -> Array:
    """Zeros `[b h k v]` for `k [b t h k]` and `v [b t h v]`."""
    return jnp.zeros((k.shape[0], k.shape[2], k.shape[3], v.shape[3]), jnp.float32)


def still(g: Array, beta: Array, valid: Array) -> tuple[Array, Array]:
    """g and beta in fp32, zero where `valid [b t]` is false: such a token changes no state."""
    g = jnp.where(valid.reshape(valid.shape + (1,) * (g.ndim - 2)), g.astype(jnp.float32), 0.0)
    return g, jnp.where(valid[:, :, None], beta.astype(jnp.float32), 0.0)


def recurrent(
    q: Array, k: Array, v: Array, g: Array, beta: Array, first: Array | None = None, state: Array | None = None
) -> tuple[Array, Array]:
    """The truth, fp32: outputs `[b t h v]` in v's dtype and the state after the last token."""
    start = empty_state(k, v) if state is None else state.astype(jnp.float32)
    decay = jnp.exp(per_channel(g.astype(jnp.float32), k))
    if first is not None:
        decay = jnp.where(first[:, :, None, None], 0.0, decay)

    def step(s: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, beta = x
        s = s * decay[..., None]
        u = beta[..., None] * (v - jnp.einsum("bhk,bhkv->bhv", k, s, precision=lax.Precision.HIGHEST))
        s = s + k[..., None] * u[:, :, None, :]
        return s, jnp.einsum("bhk,bhkv->bhv", q, s, precision=lax.Precision.HIGHEST)

    xs = tuple(x.astype(jnp.float32).swapaxes(0, 1) for x in (q, k, v, decay, beta))
    end, out = lax.scan(step, start, xs)
    return out.swapaxes(0, 1).astype(v.dtype), end


def chunk_naive(
    q: Array,
    k: Array,
    v: Array,
    g: Array,
    beta: Array,
    first: Array | None = None,
    state: Array | None = None,
    *,
    chunk: int = 64,
) -> tuple[Array, Array]:
    """The same, C tokens at once (the WY form), the decays between all pairs of a chunk written out: `[b h C C k]`.

    With G_r = g_1 + .. + g_r within a chunk, unrolling the recurrence gives `(I + A) U = beta (V - (e^G K) S)` with

        A_ri = beta_r sum_k K_rk K_ik e^{G_rk - G_ik}  (i < r),     M_ri = the same with Q_r and no beta  (i <= r)
        O = (e^G Q) S + M U;     S <- e^{G_C} S + (e^{G_C - G} K)^T U
    """
    b, t, h, width = k.shape
    pad = -t % chunk
    parts = [q, k, v, per_channel(g, k), beta[..., None]]
    q, k, v, g, beta = (
        jnp.pad(x.astype(jnp.float32), ((0, 0), (0, pad), (0, 0), (0, 0))).transpose(0, 2, 1, 3) for x in parts
    )
    reset = jnp.zeros((b, t), bool) if first is None else first
    reset = jnp.pad(reset, ((0, 0), (0, pad)))
    s = jnp.zeros((b, h, width, v.shape[-1]), jnp.float32) if state is None else state.astype(jnp.float32)
    out = []
    for start in range(0, t + pad, chunk):
        qc, kc, vc, gc, bc = (x[:, :, start : start + chunk] for x in (q, k, v, g, beta))
        doc = jnp.cumsum(reset[:, start : start + chunk], axis=1)  # 0: the document that the state belongs to
        total = jnp.cumsum(gc, axis=2)
        pair = _pairs(total, doc)
        lower = jnp.tril(jnp.einsum("bhrk,bhik,bhrik->bhri", bc * kc, kc, pair), -1)
        scores = jnp.tril(jnp.einsum("bhrk,bhik,bhrik->bhri", qc, kc, pair))
        old = jnp.where((doc == 0)[:, None, :, None], jnp.exp(total), 0.0)
        rhs = bc * (vc - jnp.einsum("bhrk,bhkv->bhrv", kc * old, s))
        u = jax.scipy.linalg.solve_triangular(jnp.eye(chunk) + lower, rhs, lower=True, unit_diagonal=True)
        out.append(jnp.einsum("bhrk,bhkv->bhrv", qc * old, s) + jnp.einsum("bhri,bhiv->bhrv", scores, u))
        s = s * old[:, :, -1, :, None] + jnp.einsum("bhik,bhiv->bhkv", kc * pair[:, :, -1], u)
    o = jnp.concatenate(out, axis=2)[:, :, :t].transpose(0, 2, 1, 3)
    return o.astype(parts[2].dtype), s


def _pairs(total: Array, doc: Array) -> Array:
    """`e^{G_r - G_i}` `[b h C C k]` for i <= r of one document, else 0.

    Masked before and after `exp`: above the diagonal the exponent is positive and unbounded, and its gradient would be inf * 0.
    """
    c = total.shape[2]
    sees = (jnp.tril(jnp.ones((c, c), bool)) & (doc[:, :, None] == doc[:, None, :]))[:, None, :, :, None]
    difference = jnp.where(sees, total[:, :, :, None] - total[:, :, None], 0.0)
    return jnp.where(sees, jnp.exp(difference), 0.0)
