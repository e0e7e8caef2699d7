"""The gated delta rule of one long sequence over several devices, each with its own piece of the tokens.

A piece acts on the state it is given as an affine map, `S_out = M S_in + N`, and on its outputs as `o = R S_in + o'`. Pieces compose:
`(M_2 M_1, M_2 N_1 + N_2)` (Kimi K3's report, section 5.1.2). The rule treats the columns of v apart, so all four come out of one run
without S_in: k more columns of v that are 0, on a state that starts as the identity, give M and R beside N and o'. What devices
exchange is M and N alone, `k (k + v)` numbers a head, whatever the length.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from jaxllm.ops.delta_pairs import dot

Rule = Callable[..., tuple[Array, Array]]


def across(
    rule: Rule, axis: str, parts: tuple[Array, ...], first: Array | None, state: Array | None
) -> tuple[Array, Array]:
    """`rule` of a sequence whose tokens are split over the mesh axis `axis`, inside `shard_map`: outputs of this device's tokens, and
    the state after the last token of all, the same on every device. parts: q, k, v, g, beta, of a piece, as in `delta_rule.py`. Exact,
    derivatives too.
    """
    q, k, v, g, beta = parts
    b, _, h, width = k.shape
    values = v.shape[-1]
    identity = jnp.broadcast_to(jnp.eye(width), (b, h, width, width))
    wide = jnp.concatenate([v.astype(jnp.float32), jnp.zeros(k.shape, jnp.float32)], axis=-1)
    start = jnp.concatenate([jnp.zeros((b, h, width, values)), identity], axis=-1)
    out, end = rule(q, k, wide, g, beta, first, start)
    pieces = lax.all_gather(end, axis)
    before = jnp.zeros((b, h, width, values)) if state is None else state.astype(jnp.float32)
    starts = []
    for n in range(pieces.shape[0]):
        starts.append(before)
        before = pieces[n, ..., :values] + dot("bhij,bhjv->bhiv", pieces[n, ..., values:], before)
    mine = jnp.stack(starts)[lax.axis_index(axis)]
    out = out[..., :values] + dot("bthk,bhkv->bthv", out[..., values:], mine)
    return out.astype(v.dtype), before
