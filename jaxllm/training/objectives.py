"""Objectives: what a step minimises, as named terms that share one forward pass.

    loss = sum_k  weight_k(update) * L_k / D_k

`D_k = count(batch)` is the term's denominator over the *whole* step, all micro-batches and devices, taken before any
micro-batch runs; `L_k` is a sum, so micro-batches add up to exactly the loss of the undivided batch. The sums a model's
layers report as `loss/<name>` (balance, router z-loss ...) are terms too: an `Aux` gives one a weight, and those that
no `Aux` names count with weight 1, because a layer's own coefficient is already inside.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from jaxllm.errors import UserError
from jaxllm.layers.base import Context
from jaxllm.layers.draft import NAME as DRAFT
from jaxllm.layers.mtp import ahead
from jaxllm.mesh import shard
from jaxllm.model import LanguageModel, Out
from jaxllm.ops.cross_entropy import DEFAULT_CHUNK
from jaxllm.ops.divergence import Direction, DraftLoss, Head, Kept, chunked_divergence, chunked_pairs, draft_loss
from jaxllm.training.losses import (
    Batch,
    backbone,
    head,
    labels_ahead,
    mean,
    next_token,
    top_tokens,
    trained_tokens,
    valid_tokens,
)
from jaxllm.training.schedules import Schedule

Params = Mapping[str, Any]


class Forward(NamedTuple):
    """One forward pass of a micro-batch, shared by all objectives. `shards`: devices that split the batch; `key`:
    random key. teachers: frozen models and their parameters, by the name that an objective gives them."""

    model: LanguageModel
    params: Params
    batch: Batch
    ctx: Context
    out: Out
    shards: int
    key: jax.Array
    teachers: Mapping[str, tuple[LanguageModel, Params]] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Objective:
    """Base. weight: of the term in the loss. schedule: shape of the weight over the stage's updates, null =
    constant."""

    weight: float = 1.0
    schedule: Schedule | None = None

    capture: ClassVar[tuple[str, ...]] = ()  # what the forward pass must capture for it

    def weight_at(self, count: jax.Array, total: jax.Array | int) -> jax.Array:
        """The weight of update `count` of `total`."""
        weight = jnp.float32(self.weight)
        return weight if self.schedule is None else weight * self.schedule.factor(count, total)

    def count(self, batch: Batch) -> jax.Array:
        """The denominator, a scalar or one a part `[n]`: additive over rows, known before the forward pass."""
        raise NotImplementedError

    def __call__(self, forward: Forward) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The sum to be divided by `count` (of parts: each by its own, then added), and further sums (logged divided by the same)."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class NextToken(Objective):
    """Cross-entropy of the next token, in float32, plus `z_loss * logsumexp(logits)^2` per token.

    chunk: tokens, on each device, whose logits live at a time.
    """

    z_loss: float = 0.0
    chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        if self.chunk < 1:
            raise UserError(f"chunk: {self.chunk} must be at least 1")
        if self.z_loss < 0:
            raise UserError(f"z_loss: {self.z_loss} must be 0 or more")

    def count(self, batch: Batch) -> jax.Array:
        return trained_tokens(batch)

    def __call__(self, forward: Forward) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, stats = next_token(
            forward.model,
            forward.params,
            forward.out.hidden,
            forward.batch,
            z_loss=self.z_loss,
            chunk=self.chunk * forward.shards,
        )
        return loss, {"nll": stats.nll, "accuracy": stats.correct, "log_z_squared": stats.z}


@dataclasses.dataclass(frozen=True)
class MultiToken(Objective):
    """Cross-entropy of the token `depth + 1` ahead, from the model's MTP module of that depth (arXiv 2412.19437, equation 24).

    Labels never cross documents: what lies beyond a document's end is neither trained nor counted. One objective a depth, so each
    has its own weight and schedule; DeepSeek-V3 trains with 0.3 / depths, later 0.1 / depths.
    """

    depth: int = 1
    chunk: int = DEFAULT_CHUNK

    capture: ClassVar[tuple[str, ...]] = ("mtp",)

    def __post_init__(self) -> None:
        if self.depth < 1 or self.chunk < 1:
            raise UserError(f"depth: {self.depth} and chunk: {self.chunk} must be at least 1")

    def count(self, batch: Batch) -> jax.Array:
        return trained_tokens(labels_ahead(batch, self.depth))

    def __call__(self, forward: Forward) -> tuple[jax.Array, dict[str, jax.Array]]:
        heads = forward.out.capture.get("mtp", ())
        if self.depth > len(heads):
            raise UserError(
                f"objective.*.depth: {self.depth}, but the model has {len(heads)} MTP modules; set model.mtp.depth"
            )
        hidden, batch = heads[self.depth - 1], labels_ahead(forward.batch, self.depth)
        chunk = self.chunk * forward.shards
        loss, stats = next_token(forward.model, forward.params, hidden, batch, chunk=chunk)
        return loss, {"accuracy": stats.correct}


@dataclasses.dataclass(frozen=True)
class Distill(Objective):
    """Divergence of the model's next-token distributions from a frozen teacher's: see `jaxllm.ops.divergence`.

    teacher: a run folder, checkpoint, Hugging Face folder or GGUF file, of any architecture and the same tokenizer. labels, instead of it:
    a folder of what it said of this text, written by `task=label` at the same temperature. direction: `forward` (the student covers all
    that the teacher may say) or `reverse` (it keeps to what the teacher would say). temperature: of both. top_k: look at that many of the
    teacher's likeliest ids and at all others as one; null = the whole vocabulary, or all that is labelled. Tokens count as
    they do for `NextToken`, with which it is mixed by weights.
    """

    teacher: str | None = None
    labels: str | None = None
    temperature: float = 1.0
    direction: Direction = "forward"
    top_k: int | None = None
    chunk: int = DEFAULT_CHUNK

    def __post_init__(self) -> None:
        if not self.teacher and not self.labels:
            raise UserError(
                "teacher: missing; name the run folder or checkpoint to learn from, or labels made by task=label"
            )
        if self.teacher and self.labels:
            raise UserError(
                f"teacher={self.teacher} and labels={self.labels}: one of them is learned from; leave the other null"
            )
        if not self.temperature > 0 or self.chunk < 1 or (self.top_k is not None and self.top_k < 1):
            raise UserError(
                f"temperature: {self.temperature} must be above 0, chunk={self.chunk} and top_k={self.top_k} at least 1"
            )
        if self.direction not in ("forward", "reverse"):
            raise UserError(f"direction: {self.direction!r} is not forward or reverse")

    def count(self, batch: Batch) -> jax.Array:
        return trained_tokens(batch)

    def __call__(self, forward: Forward) -> tuple[jax.Array, dict[str, jax.Array]]:
        batch, valid_vocab = forward.batch, forward.model.vocab_size
        other: Head | Kept
        if self.teacher:
            teacher, params = forward.teachers[self.teacher]
            ctx = Context.whole(batch["tokens"], batch["segments"], batch["positions"])
            hidden = backbone(teacher, params, ctx).hidden
            other = Head(hidden, head(teacher, params, hidden), teacher.logit_softcap)
            valid_vocab = min(valid_vocab, teacher.vocab_size)
        else:
            other = Kept(batch["soft_ids"], batch["soft_logp"])
        student = Head(
            forward.out.hidden, head(forward.model, forward.params, forward.out.hidden), forward.model.logit_softcap
        )
        loss, same = chunked_divergence(
            student,
            other,
            batch["weights"],
            valid_vocab=valid_vocab,
            temperature=self.temperature,
            direction=self.direction,
            top_k=self.top_k,
            chunk=self.chunk * forward.shards,
        )
        return loss, {"agreement": same}


@dataclasses.dataclass(frozen=True)
class Draft(Objective):
    """What the model's draft head (`jaxllm.layers.draft`) loses against the frozen trunk at each step of its unroll (arXiv 2503.01840):

        sum_j decay^j mean_i loss(p_{i+j+1}, q^j_i),    p: what the trunk says after the token that step j read at i

    steps: as many as `model.draft.unroll`. loss: see `draft_loss`. Where the head has a vocabulary of its own, p is that of the trunk among
    those ids, and a position whose likeliest id is not one of them counts in the mean with a loss of 0. Metrics `loss` and `agreement` (the
    likeliest id is the trunk's) have one value a step.
    """

    steps: int = 7
    decay: float = 0.8
    loss: DraftLoss = "cross_entropy"
    chunk: int = DEFAULT_CHUNK

    capture: ClassVar[tuple[str, ...]] = ("draft",)

    def __post_init__(self) -> None:
        if self.steps < 1 or self.chunk < 1 or not 0 < self.decay <= 1:
            raise UserError(
                f"steps: {self.steps} and chunk: {self.chunk} must be at least 1, decay: {self.decay} in (0, 1]"
            )
        if self.loss not in ("cross_entropy", "acceptance"):
            raise UserError(f"loss: {self.loss!r} is not cross_entropy or acceptance")

    def count(self, batch: Batch) -> jax.Array:
        return jnp.stack([trained_tokens(labels_ahead(batch, j + 1)) for j in range(self.steps)])

    def __call__(self, forward: Forward) -> tuple[jax.Array, dict[str, jax.Array]]:
        drafts = forward.out.capture["draft"]
        losses, same = draft_sums(forward, drafts, self.loss, self.chunk * forward.shards)
        decay = jnp.float32(self.decay) ** jnp.arange(self.steps)
        return decay * losses, {"loss": losses, "agreement": same}


def draft_sums(forward: Forward, drafts: jax.Array, loss: DraftLoss, chunk: int) -> tuple[jax.Array, jax.Array]:
    """Sums over positions at each step of `drafts [steps b t d]`, `[steps]`: of the loss, and of those that agree with the trunk."""
    model, params, batch = forward.model, forward.params, forward.batch
    w = shard(model.draft_head_weight(params).astype(drafts.dtype), None, "act_vocab")
    trunk, ids, drafted = head(model, params, forward.out.hidden), params[DRAFT].get("ids"), None
    if ids is not None:
        trunk = shard(jnp.take(trunk, ids, axis=1), None, "act_vocab")
        drafted = jnp.isin(top_tokens(model, params, forward.out.hidden, chunk), ids)
    losses, same = [], []
    for j, hidden in enumerate(drafts):
        weights = labels_ahead(batch, j + 1)["weights"]
        weights = weights if drafted is None else weights * ahead(drafted, j + 1)
        apart, agree = chunked_pairs(
            Head(hidden, w, model.logit_softcap),
            Head(ahead(forward.out.hidden, j + 1), trunk, model.logit_softcap),
            weights,
            functools.partial(draft_loss, kind=loss),
            valid_vocab=model.vocab_size if ids is None else len(ids),
            chunk=chunk,
        )
        losses.append(apart)
        same.append(agree)
    return jnp.stack(losses), jnp.stack(same)


@dataclasses.dataclass(frozen=True)
class Aux(Objective):
    """The model's own `loss/<name>`, a sum over valid tokens and layers, per valid token. `weight=0` switches it
    off."""

    name: str = ""

    def count(self, batch: Batch) -> jax.Array:
        return valid_tokens(batch)

    def __call__(self, forward: Forward) -> tuple[jax.Array, dict[str, jax.Array]]:
        key = f"loss/{self.name}"
        if key not in forward.out.aux:
            known = _aux_names(forward.out)
            near = difflib.get_close_matches(self.name, known, n=3)
            raise UserError(
                f"objective.*.name: the model reports no loss {self.name!r};"
                f" it reports {', '.join(near or known) or 'none'}"
            )
        return forward.out.aux[key].astype(jnp.float32), {}


def _aux_names(out: Out) -> list[str]:
    return sorted(key.removeprefix("loss/") for key in out.aux if key.startswith("loss/"))


def with_unclaimed(objectives: Mapping[str, Objective], out: Out) -> dict[str, Objective]:
    """The objectives and one `Aux` of weight 1 for each loss of the model that none of them names."""
    claimed = {o.name for o in objectives.values() if isinstance(o, Aux)}
    return {**objectives, **{f"aux_{n}": Aux(name=n) for n in _aux_names(out) if n not in claimed}}


def reweighted(objectives: Mapping[str, Objective], weights: Mapping[str, float], key: str) -> dict[str, Objective]:
    """The objectives with some weights replaced by name (a stage's `weights`)."""
    for name in weights:
        if name not in objectives:
            raise UserError(f"{key}.{name}: no objective of that name; there are {', '.join(objectives)}")
    return {n: dataclasses.replace(o, weight=weights.get(n, o.weight)) for n, o in objectives.items()}


def total_loss(
    objectives: Mapping[str, Objective],
    forward: Forward,
    denominators: Mapping[str, jax.Array],
    weights: Mapping[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """This micro-batch's share of the step's loss, and its shares of the metrics: both add up over micro-batches."""
    loss = jnp.float32(0.0)
    shares: dict[str, jax.Array] = {}
    for name, objective in with_unclaimed(objectives, forward.out).items():
        kind = "valid" if isinstance(objective, Aux) and name not in denominators else name
        total, sums = objective(forward)
        term = jnp.sum(mean(total, denominators[kind]))
        loss = loss + weights.get(name, jnp.float32(objective.weight)) * term
        shares[name] = term
        shares.update({f"{name}/{key}": mean(value, denominators[kind]) for key, value in sums.items()})
    return loss, jax.tree.map(jax.lax.stop_gradient, shares)
