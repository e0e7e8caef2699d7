"""Validation: the loss over held-out text, weighted by tokens, so that it does not depend on how the text was
batched."""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxllm.layers.base import Context
from jaxllm.layers.draft import NAME as DRAFT
from jaxllm.layers.mtp import ahead
from jaxllm.measure.watch import Recompiled
from jaxllm.mesh import Rules
from jaxllm.model import LanguageModel, Out
from jaxllm.ops.cross_entropy import DEFAULT_CHUNK, chunked_cross_entropy
from jaxllm.training.feed import place
from jaxllm.training.losses import backbone, bits_per_byte, labels_ahead, next_token, perplexity, top_of, top_tokens

FIRST_RANGE = 16  # positions 0 to 15 are the first range; each further one is as long as all before it


class Evaluator:
    """Compiled once a model; `evaluate(params, batches)` then gives `{loss, bpb, perplexity, accuracy, tokens}`, and of each MTP module
    `mtp_<k>/{loss, agreement, accepted}`: how often it chooses what the trunk chooses k positions later with the true tokens before it, and
    how often it and all modules before it do, which is what greedy drafts of k tokens come to. `draft_<k>` is the same of step k of a draft
    head's unroll, its loss that of the text's own tokens among the ids that it can draft.

    token_bytes: UTF-8 bytes of each id, int32 `[vocab]`, 0 for specials: the loss of a document's end counts, its zero
    bytes do not. None: no bits per byte. log: told when a batch of another shape makes it compile again. positions: also `by_position`, the
    loss of tokens by how many of their document stand before them in the row, in ranges that double: `[{from, to, loss, tokens}]`.
    """

    def __init__(
        self,
        model: LanguageModel,
        token_bytes: np.ndarray | None = None,
        *,
        mesh: Mesh | None = None,
        rules: Rules | None = None,
        shards: int = 1,
        log: Callable[[str], None] | None = None,
        positions: bool = False,
    ):
        self.mesh, self.rules = mesh, rules
        self.has_bytes = token_bytes is not None
        widths = jnp.zeros(model.padded_vocab, jnp.int32)
        if token_bytes is not None:
            widths = widths.at[: len(token_bytes)].set(jnp.asarray(token_bytes, jnp.int32))

        def sums(params: Mapping[str, Any], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            capture = tuple(name for name, there in (("mtp", model.mtp), ("draft", model.draft)) if there is not None)
            ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"], capture=capture)
            out = backbone(model, params, ctx)
            _, stats = next_token(model, params, out.hidden, batch, chunk=DEFAULT_CHUNK * shards)
            size = jnp.where(batch["weights"] > 0, widths[batch["labels"]], 0)
            return {
                "nll": stats.nll,
                "correct": stats.correct,
                "weight": jnp.sum(batch["weights"]),
                "bytes": jnp.sum(size),
                **drafted(params, out, batch),
                **(by_position(stats.nll_tokens, batch) if positions else {}),
            }

        def drafted(params: Mapping[str, Any], out: Out, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
            """Sums of each MTP module, and of each step of a draft head."""
            found: dict[str, jax.Array] = {}
            if not capture_of(out):
                return found
            trunk = top_tokens(model, params, out.hidden, DEFAULT_CHUNK * shards)
            for kind, heads in capture_of(out).items():
                accepted = jnp.ones(batch["tokens"].shape, bool)
                for k, head in enumerate(heads, 1):
                    labels = labels_ahead(batch, k)
                    nll, counted, said = judged(kind, params, head, labels)
                    agree = said == ahead(trunk, k)
                    accepted = accepted & agree
                    found |= {f"{kind}_{k}/nll": nll, f"{kind}_{k}/weight": jnp.sum(labels["weights"])}
                    found |= {f"{kind}_{k}/counted": counted}
                    found |= {f"{kind}_{k}/agreement": jnp.sum(agree * labels["weights"])}
                    found |= {f"{kind}_{k}/accepted": jnp.sum(accepted * labels["weights"])}
            return found

        def capture_of(out: Out) -> dict[str, jax.Array]:
            return {kind: out.capture[kind] for kind in ("mtp", "draft") if kind in out.capture}

        def judged(
            kind: str, params: Mapping[str, Any], head: jax.Array, labels: Mapping[str, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            """The loss of a head's hidden states, summed over the tokens it has an id for, their weight, and the ids it would choose
            `[b t]`."""
            chunk = DEFAULT_CHUNK * shards
            ids = params[DRAFT].get("ids") if kind == "draft" else None
            if ids is None:
                _, stats = next_token(model, params, head, labels, chunk=chunk)
                return stats.nll, jnp.sum(labels["weights"]), top_tokens(model, params, head, chunk)
            w = model.draft_head_weight(params)
            place = jnp.minimum(jnp.searchsorted(ids, labels["labels"]), len(ids) - 1)
            weights = jnp.where(ids[place] == labels["labels"], labels["weights"], 0.0)
            softcap = model.logit_softcap
            w = w.astype(head.dtype)
            _, stats = chunked_cross_entropy(
                head, w, place, weights, valid_vocab=len(ids), softcap=softcap, chunk=chunk
            )
            return stats.nll, jnp.sum(weights), ids[top_of(head, w, chunk)]

        self._sums: Callable[..., dict[str, jax.Array]] = jax.jit(sums)
        if log is not None:
            self._sums = Recompiled(self._sums, "validation", log)

    def __call__(
        self, params: Mapping[str, Any], batches: Iterable[Mapping[str, np.ndarray]], limit: int | None = None
    ) -> dict[str, Any]:
        """Over `batches` (at most `limit` of them). Sums are added in double precision on the host."""
        total: dict[str, Any] = collections.defaultdict(float)
        pending: dict[str, jax.Array] | None = None
        for n, batch in enumerate(batches):
            if limit is not None and n >= limit:
                break
            sums = self._sums(params, place(batch, self.mesh, self.rules))
            _add(total, pending)  # read the batch before this one while this one runs
            pending = sums
        _add(total, pending)
        total = {name: float(value) if np.ndim(value) == 0 else value for name, value in total.items()}
        total = collections.defaultdict(float, total)
        loss = total["nll"] / total["weight"] if total["weight"] else math.nan
        return {
            "loss": loss,
            "bpb": bits_per_byte(total["nll"], total["bytes"]) if self.has_bytes else math.nan,
            "perplexity": perplexity(loss),
            "accuracy": total["correct"] / total["weight"] if total["weight"] else math.nan,
            "tokens": int(total["weight"]),
            **_of_modules(total),
            **_of_positions(total),
        }


def ranges(length: int) -> list[tuple[int, int]]:
    """`[0, 16), [16, 32), [32, 64) ...`, the last one up to `length`."""
    edges = [0]
    while edges[-1] < length:
        edges.append(min(length, max(FIRST_RANGE, 2 * edges[-1])))
    return list(itertools.pairwise(edges))


def by_position(nll: jax.Array, batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Sums over the tokens of each range of positions, `[ranges]`. nll `[b t]`."""
    found = ranges(batch["tokens"].shape[1])
    inside = jnp.stack([(batch["positions"] >= low) & (batch["positions"] < high) for low, high in found])
    weights = jnp.where(inside, batch["weights"], 0.0)
    return {"position/weight": jnp.sum(weights, axis=(1, 2)), "position/nll": jnp.sum(weights * nll, axis=(1, 2))}


def _of_positions(total: Mapping[str, Any]) -> dict[str, Any]:
    if "position/weight" not in total:
        return {}
    weights, nll = (np.asarray(total[f"position/{name}"]) for name in ("weight", "nll"))
    edges = [0] + [FIRST_RANGE * 2**i for i in range(len(weights))]
    rows = [
        {"from": edges[i], "to": edges[i + 1] - 1, "loss": float(nll[i] / weights[i]), "tokens": int(weights[i])}
        for i in range(len(weights))
        if weights[i]
    ]
    return {"by_position": rows}


def _of_modules(total: Mapping[str, float]) -> dict[str, float]:
    """Means over the tokens that a module is judged by; nan where there is none."""
    found = {}
    stems = [key.removesuffix("weight") for key in total if key.endswith("/weight")]
    for stem in [stem for stem in stems if stem.startswith(("mtp_", "draft_"))]:
        sums = {"loss": ("nll", "counted"), "agreement": ("agreement", "weight"), "accepted": ("accepted", "weight")}
        for name, (key, of) in sums.items():
            count = total[f"{stem}{of}"]
            found[stem + name] = total[stem + key] / count if count else math.nan
    return found


def _add(total: dict[str, Any], sums: Mapping[str, jax.Array] | None) -> None:
    for name, value in (sums or {}).items():
        total[name] += np.asarray(value, np.float64)
