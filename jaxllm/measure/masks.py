"""Pictures of what attention can see: the mask of a layer, and the receptive field of a stack of them, measured by gradients.

Masks are drawn from `jaxllm.ops.mask`, the same description that the layers compute with. A receptive field is not derived but
measured: the gradient of what a model says at one token, with respect to every token it read, is exactly 0 where nothing can come from.
L layers of a window of W keys reach 1 + L (W - 1) tokens back, the token itself included.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.measure.plots import BLUE, GREY, INK
from jaxllm.model import LanguageModel
from jaxllm.ops.mask import Mask
from jaxllm.params import init_params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MASKS = {
    "dense": Mask(),
    "window of 12": Mask(window=12),
    "window of 12 + 4 global": Mask(window=12, global_tokens=4),
    "dilated: 12 keys, every 2nd": Mask(window=12, dilation=2),
    "chunks of 12": Mask(chunk=12),
}


def pattern(mask: Mask, n: int) -> np.ndarray:
    """bool `[n n]`: does query i (row) see key j (column)?"""
    p = jnp.arange(n, dtype=jnp.int32)
    return np.asarray(mask.sees(p[:, None], p[None]))


def influence(model: LanguageModel, n: int, params: Any = None, *, seed: int = 0) -> np.ndarray:
    """`[n n]`: size of the gradient of the final hidden state at token i (row) with respect to the embedding of token j.

    The tokens are the ids 0..n-1, all different, so that a row of the embedding's gradient belongs to one position. params: null =
    as initialised, when nothing has been learned and what can be reached is reached.
    """
    if n > model.vocab_size:
        raise UserError(f"influence: {n} tokens that differ need a vocabulary of as many, not {model.vocab_size}")
    ctx = Context.whole(jnp.arange(n, dtype=jnp.int32)[None])
    params = init_params(model, jax.random.key(seed)) if params is None else params
    direction = np.random.default_rng(seed).standard_normal(model.d_model).astype(np.float32)

    def said(embed: jax.Array, i: jax.Array) -> jax.Array:
        out: Any = model.apply({"params": params | {"embed": embed}}, ctx, method="backbone")[1]
        return out.hidden[0, i].astype(jnp.float32) @ direction

    def one(i: jax.Array) -> jax.Array:
        return jnp.linalg.norm(jax.grad(said)(params["embed"], i)[:n], axis=-1)

    return np.asarray(jax.jit(lambda: jax.lax.map(one, jnp.arange(n)))())


def reached(influence: np.ndarray) -> np.ndarray:
    """int `[n]`: input tokens that each output depends on."""
    return (influence > 0).sum(axis=1)


def mask_figure(masks: Mapping[str, Mask] | None = None, n: int = 48) -> Figure:
    """One panel a mask, with how many keys a query meets on average."""
    masks = MASKS if masks is None else masks
    figure = _panels(len(masks), "What a query sees")
    for axes, (name, mask) in zip(figure.axes, masks.items(), strict=True):
        seen = pattern(mask, n)
        axes.imshow(np.where(seen, 1.0, np.nan), cmap=_one_colour(BLUE), vmin=0, vmax=1, interpolation="nearest")
        _label(axes, name, f"{seen.sum() / n:.1f} keys a query")
    return figure


def receptive_figure(fields: Mapping[str, np.ndarray]) -> Figure:
    """Measured influence on a log scale, one panel a stack; below it, how many tokens the last output can be told by."""
    figure = _panels(len(fields), "What an output depends on, measured by gradients")
    shades = _shades()
    for axes, (name, field) in zip(figure.axes, fields.items(), strict=True):
        shown = np.log10(np.where(field > 0, field, np.nan) / field.max())
        image = axes.imshow(shown, cmap=shades, vmin=-6, vmax=0, interpolation="nearest")
        _label(axes, name, f"last output: {reached(field)[-1]} of {len(field)} tokens")
    bar = figure.colorbar(image, ax=figure.axes, shrink=0.6, ticks=[-6, -4, -2, 0])
    bar.set_label("gradient, log10, relative", fontsize=9, color=INK)
    return figure


def pictures(folder: str | Path, fields: Mapping[str, np.ndarray] | None = None) -> list[Path]:
    """Write masks.png, and receptive_field.png when `fields` are given (`influence` by name); returns the paths."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    figures = {"masks": mask_figure()} | ({"receptive_field": receptive_figure(fields)} if fields else {})
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    return paths


# --- pieces -------------------------------------------------------------------------------------------------------


def _panels(count: int, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.6 * count + 0.4, 3.5), layout="constrained", facecolor="white")
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK)
    figure.subplots(1, count, squeeze=False)
    return figure


def _label(axes: Any, name: str, below: str) -> None:
    axes.set_title(name, loc="left", fontsize=10, color=INK)
    axes.set_xlabel(f"key position\n{below}", fontsize=9, color=INK)
    axes.set_ylabel("query position" if axes.get_subplotspec().is_first_col() else "", fontsize=9, color=INK)
    axes.tick_params(colors=GREY, labelsize=8)
    for spine in axes.spines.values():
        spine.set_color("#D0D0D0")


def _one_colour(colour: str) -> Any:
    from matplotlib.colors import ListedColormap

    return ListedColormap([colour])


def _shades() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("influence", ["#DCEBF5", BLUE, "#00203C"])
