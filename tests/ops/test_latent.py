"""Attention on cached latents: absorbed, expanded and block by block are one function, and the cheaper form is chosen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.ops.latent import absorbed_is_cheaper, attend_absorbed, attend_latents, latent_naive

B, T, S, H, R = 2, 5, 23, 3, 8
NOPE, TURNED, V = 6, 4, 5
LENGTHS = np.array([17, 3])  # tokens before the call, of which each row has its own number
SCALE = 0.3


def arrays(dtype=jnp.float32, t=T):
    shapes = {
        "q_n": (B, t, H, NOPE),
        "q_r": (B, t, H, TURNED),
        "c": (B, S, R),
        "k_r": (B, S, TURNED),
        "up_k": (H, NOPE, R),
        "up_v": (H, R, V),
    }
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {
        name: jax.random.normal(k, s, jnp.float32).astype(dtype)
        for k, (name, s) in zip(keys, shapes.items(), strict=True)
    }


def place(t=T):
    positions = jnp.asarray(LENGTHS[:, None] + np.arange(t), jnp.int32)
    valid = jnp.array([[True] * t, [True] * (t - 2) + [False] * 2])
    mask = (jnp.arange(S) <= positions[:, :, None]) & valid[:, :, None]
    return positions, valid, mask


def exact(a, mask):
    """The definition in float64, head by head."""
    a = {name: np.asarray(x, np.float64) for name, x in a.items()}
    out = np.zeros((B, T, H, V))
    for b, t, h in np.ndindex(B, T, H):
        seen = np.flatnonzero(mask[b, t])
        if seen.size:
            keys = a["c"][b, seen] @ a["up_k"][h].T
            scores = SCALE * (keys @ a["q_n"][b, t, h] + a["k_r"][b, seen] @ a["q_r"][b, t, h])
            p = np.exp(scores - scores.max())
            out[b, t, h] = p / p.sum() @ (a["c"][b, seen] @ a["up_v"][h])
    return out


def forms(a, positions, valid, mask):
    """Every way to the same output, in one program."""

    def blocks(**kw):
        return attend_latents(**a, positions=positions, valid=valid, scale=SCALE, **kw)

    short = {**a, "q_n": a["q_n"][:, :1], "q_r": a["q_r"][:, :1]}
    return {
        "naive": latent_naive(**a, mask=mask, scale=SCALE),
        "absorbed": attend_absorbed(**a, mask=mask, scale=SCALE),
        "absorbed by blocks": blocks(block=8, queries=2, absorbed=True, direct=2),
        "expanded by blocks": blocks(block=8, absorbed=False),
        "chosen": attend_latents(**short, positions=positions[:, :1], valid=valid[:, :1], scale=SCALE),
    }


# Weights, scores and sums are fp32; in bf16 what is rounded on the way are keys and values (expanded) or q~ and z (absorbed).
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 0.03)])
def test_every_form_is_the_definition(dtype, tolerance):
    a, (positions, valid, mask) = arrays(dtype), place()
    want = exact(a, mask)
    got = jax.jit(forms)(a, positions, valid, mask)
    for name, out in got.items():
        assert out.dtype == dtype, name
        ref = want[:, : out.shape[1]]
        np.testing.assert_allclose(np.asarray(out, np.float64), ref, atol=tolerance * np.abs(want).max(), err_msg=name)
    for name in ("naive", "absorbed", "absorbed by blocks", "expanded by blocks"):
        assert not np.asarray(got[name])[1, T - 2 :].any(), name  # padding sees nothing and gives exactly 0


def test_keys_beyond_the_furthest_query_are_never_met():
    """Blocks behind the last position may hold anything, not-a-numbers included: a long empty cache costs nothing."""
    a, (positions, valid, _) = arrays(), place()
    a["c"] = a["c"].at[:, 16:].set(jnp.nan)
    run = jax.jit(lambda a, p: attend_latents(**a, positions=p, valid=valid, scale=SCALE, block=8, absorbed=False))
    assert np.isfinite(np.asarray(run(a, positions - 8))).all()
    assert not np.isfinite(np.asarray(run(a, positions))).all()


def test_the_cheaper_form_by_multiply_adds():
    v3 = {"r": 512, "n": 128, "o": 64, "v": 128}
    assert absorbed_is_cheaper(1, 4096, **v3) and absorbed_is_cheaper(8, 131072, **v3)
    assert not absorbed_is_cheaper(512, 4096, **v3)
    edge = max(t for t in range(1, 400) if absorbed_is_cheaper(t, 10**7, **v3))
    assert edge == 512 * 256 // (2 * 512 - 256)  # 170
    short = {"r": 4, "n": 16, "o": 4, "v": 16}  # a latent smaller than the heads: absorbing always wins
    assert absorbed_is_cheaper(1000, 4096, **short)
