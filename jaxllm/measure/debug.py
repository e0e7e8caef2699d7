"""Where did it go wrong? Names the first place in a step, in the order of computation, whose numbers are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.layers.base import Context
from jaxllm.model import LanguageModel, Out
from jaxllm.ops.cross_entropy import chunked_cross_entropy
from jaxllm.params import path_name


def first_nonfinite(model: LanguageModel, params: Mapping[str, Any], batch: Mapping[str, Any]) -> str | None:
    """One line that names it, or None if all is finite.

    Looked at in this order: the parameters, the batch, the stream after each block (the layer's place in the pattern
    and in the parameter tree is named), the final hidden states, the loss, and the gradient of each parameter. The
    forward pass is that of training without dropout; it runs once more with the stream of every block kept, so it takes
    `layers * b * t * d` numbers of memory.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        if (bad := _bad(leaf)) is not None:
            return f"parameter {path_name(path)}{bad}"
    for name, array in batch.items():
        if np.issubdtype(np.asarray(array).dtype, np.floating) and (bad := _bad(array)) is not None:
            return f"batch {name}{bad}"
    arrays = {name: jnp.asarray(x) for name, x in batch.items() if np.ndim(x) == 2}
    (loss, (stream, hidden)), grads = jax.jit(jax.value_and_grad(lambda p: _loss(model, p, arrays), has_aux=True))(
        params
    )
    for k, layer in enumerate(["the embedding", *_layers(model)]):
        if (bad := _bad(stream[k])) is not None:
            return f"output of {layer}{bad} (row, token, channel)"
    if (bad := _bad(hidden)) is not None:
        return f"hidden states after final_norm{bad} (row, token, channel)"
    if (bad := _bad(loss)) is not None:
        return f"loss of the head{bad}"
    for path, leaf in jax.tree_util.tree_flatten_with_path(grads)[0]:
        if (bad := _bad(leaf)) is not None:
            return f"gradient of {path_name(path)}{bad}"
    return None


def _loss(
    model: LanguageModel, params: Any, batch: Mapping[str, jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], train=True, capture=("stream",))
    result: Any = model.apply({"params": params}, ctx, method="backbone", rngs={"dropout": jax.random.key(0)})
    out: Out = result[1]
    loss, _ = chunked_cross_entropy(
        out.hidden,
        model.head_weight(params).astype(out.hidden.dtype),
        batch["labels"],
        batch["weights"],
        valid_vocab=model.vocab_size,
        softcap=model.logit_softcap,
    )
    # Losses of the layers matter only through their gradient here: a non-finite one shows there.
    loss = loss + sum((v.astype(jnp.float32) for k, v in out.aux.items() if k.startswith("loss/")), jnp.float32(0))
    return loss, (out.capture["stream"], out.hidden)


def _layers(model: LanguageModel) -> list[str]:
    """`layer 3 of 12, global/dense (g1/b0, repeat 2)`, in the order of computation."""
    names: list[str] = []
    for i, group in enumerate(model.groups):
        for n in range(group.repeats):
            for j, (mixer, ffn) in enumerate(group.period):
                names.append(f"layer {len(names)} of {model.num_layers}, {mixer}/{ffn} (g{i}/b{j}, repeat {n})")
    return names


def _bad(x: Any) -> str | None:
    """How many numbers are not finite and where the first is, as the end of a sentence; None if all are finite."""
    array = np.asarray(x)
    finite = np.isfinite(array.astype(np.float32))
    if finite.all():
        return None
    first = tuple(int(i) for i in np.argwhere(~finite)[0])
    return f": {int((~finite).sum())} of {array.size} numbers are not finite, first {array[first]} at {first}"
