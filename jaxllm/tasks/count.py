"""`task=count model=NAME`: parameters, FLOPs and bytes of a model, from its configuration alone. Nothing is allocated.

Conventions. FLOPs are those of matrix products, a multiply-add counts 2. Causal: a token of a sequence of length n meets (n + 1) / 2
keys on average. Training is three forward passes' worth. Bytes of caches are at the model's compute dtype.

Two counts of what one token uses are in circulation, and both are given. `params_active`: parameters of its matrix products; an embedding
of its own is a table of which one row is read, and is no part of it (DeepSeek's 37 billion of 671). `params_active_with_embedding`: that
table too (Mixtral's 12.9 of 46.7). Under tied embeddings the table is the head, and the two are the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.measure.memory import shard_bytes, tree_bytes
from jaxllm.mesh import abstract_mesh, param_shardings
from jaxllm.model import LanguageModel
from jaxllm.params import declare, is_declared, path_name
from jaxllm.tasks import TaskIO
from jaxllm.tasks.calculate import answers
from jaxllm.tasks.count_layers import by_layer, predicted
from jaxllm.tasks.count_layers import table as layer_table
from jaxllm.tasks.count_memory import training_memory
from jaxllm.training.settings import TrainSettings


@dataclasses.dataclass(frozen=True)
class CountSettings:
    """context: tokens a row, batch: rows; null = the training configuration's (phase train) or 1024 and 1. phase: what one token is
    part of: a decode step with `context` tokens before it, a prefill of `context` tokens, or a training step on them; activations are
    counted for the last, and for `devices`. collectives: also
    compile a train step for the mesh (seconds to minutes) and list what its devices say to each other.

    Questions, each answered when asked (`jaxllm.tasks.calculate`): memory_gb: how many rows fit? devices: bytes of one by ZeRO stage.
    accept: probability that a drafted token is kept, with draft tokens a step that cost draft_cost steps each: how fast is speculation?
    tools: an HTML file to write, with calculators and sliders."""

    context: int | None = None
    batch: int | None = None
    phase: Literal["decode", "prefill", "train"] = "decode"
    collectives: bool = False
    memory_gb: float | None = None
    devices: int | None = None
    accept: float | None = None
    draft: int = 4
    draft_cost: float = 0.0
    tools: str | None = None

    def __post_init__(self) -> None:
        for name in ("context", "batch", "devices"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UserError(f"{name}: {value} must be at least 1")
        if self.memory_gb is not None and self.memory_gb <= 0:
            raise UserError(f"memory_gb: {self.memory_gb:g} must be above 0")
        if self.accept is not None and not 0 <= self.accept <= 1:
            raise UserError(f"accept: {self.accept:g} must be a probability, in [0, 1]")
        if self.draft < 0 or self.draft_cost < 0:
            raise UserError(f"draft: {self.draft} and draft_cost: {self.draft_cost:g} must be at least 0")


def run(cfg: Config, io: TaskIO) -> dict[str, Any]:
    """The JSON fields of the count; the table of parameters goes to stderr."""
    settings: CountSettings = cfg.section("count")
    train: TrainSettings = cfg.section("train")
    model = cfg.build("model", **vocabulary(cfg))
    place = cfg.section("mesh")
    mesh = abstract_mesh(place.axes)
    declared = declare(model)
    training = settings.phase == "train"
    context = settings.context or (train.seq_len if training else 1024)
    batch = settings.batch or (train.batch_size if training else 1)
    if model.max_seq_len is not None and context > model.max_seq_len:
        raise UserError(f"count.context: {context} is longer than model.max_seq_len={model.max_seq_len}")

    for line in table(declared, mesh, place.rules):
        io.log(line)
    cost = model.cost(1, 1, context)
    boxes = jax.tree.leaves(declared, is_leaf=is_declared)
    total = sum(box.value.size for box in boxes)
    whole = training or settings.devices is not None
    memory = training_memory(
        cfg, model, declared, mesh, activations=whole, rows=settings.batch, length=settings.context
    )
    result = {
        "params_total": total,
        "params_active": (active := total - (cost.params - cost.params_active)),
        "params_active_with_embedding": active + tables(model, declared),
        "params_trained": sum(box.value.size for box in boxes if box.trainable),
        "flops_per_token": flops_per_token(model, settings.phase, context),
        "cache_bytes_per_token": cost.cache_per_token,
        "cache_bytes_constant": cost.cache_constant,
        "cache_bytes_total": batch * (cost.cache_per_token * context + cost.cache_constant),
        "train_bytes": sum(memory["per_device"].values()) if whole else None,
        "train_bytes_parts": memory["per_device"],
        "train_rows": memory["rows"],
        "train_seq_len": memory["length"],
        "mesh": {name: size for name, size in mesh.shape.items()},
        "context": context,
        "batch": batch,
        "phase": settings.phase,
        "dtype": str(model.compute_dtype),
        "layers": by_layer(model, settings.phase, batch, context),
        **predicted(cfg, model, settings.phase, batch, context, memory["per_device"]),
    }
    for line in layer_table(result["layers"], settings.phase, batch, context) + summary(result):
        io.log(line)
    result |= answers(cfg, io, settings, result)
    if settings.collectives:
        from jaxllm.tasks.collectives import of_train_step

        result |= of_train_step(cfg, io, model, settings.batch, settings.context)
    return result


def tables(model: LanguageModel, declared: Any) -> int:
    """Elements of the tables of which a token reads one row: positions, and an embedding that is not the head too."""
    names = ("positions",) if model.tie_embeddings else ("embed", "positions")
    return sum(declared[name].value.size for name in names if name in declared)


def vocabulary(cfg: Config) -> dict[str, int]:
    """The size of the vocabulary when the model takes the tokenizer's: read from the tokenizer's settings, which is all there is."""
    if cfg.get("model.vocab_size", None) is not None:
        return {}
    size = cfg.get("data.tokenizer.vocab_size", None)
    if size is None:
        tokenizer = cfg.build("data").tokenizer
        size = getattr(tokenizer, "vocab_size", None)
    if not size:
        raise UserError(
            "model.vocab_size: null, and the tokenizer's size is not known before it is made; give model.vocab_size=N"
        )
    return {"vocab_size": int(size)}


def flops_per_token(model: LanguageModel, phase: str, context: int) -> float:
    """Of a decode step behind `context` tokens, or on average over a causal sequence of that length."""
    if phase == "decode":
        return model.cost(1, 1, context).flops
    forward = model.cost(1, context, (context + 1) / 2).flops / context
    return forward * (3 if phase == "train" else 1)


def table(declared: Any, mesh: Any, rules: Any) -> list[str]:
    """One line a parameter: path, shape, elements, logical axes, how it is split, bytes a device."""
    rows = [("parameter", "shape", "elements", "axes", "split over", "bytes/device")]
    shardings = jax.tree.leaves(param_shardings(declared, mesh, rules))
    for (path, box), sharding in zip(
        jax.tree_util.tree_leaves_with_path(declared, is_leaf=is_declared), shardings, strict=True
    ):
        leaf = jax.ShapeDtypeStruct(box.value.shape, box.value.dtype, sharding=sharding)
        split = " ".join(
            "-" if part is None else "*".join(part) if isinstance(part, tuple) else str(part) for part in sharding.spec
        )
        name = path_name(path) + ("" if box.trainable else " (not trained)")
        rows.append(
            (
                name,
                "x".join(map(str, leaf.shape)),
                f"{leaf.size:,}",
                " ".join(str(a or "-") for a in box.names),
                split,
                f"{shard_bytes(leaf):,}",
            )
        )
    total = [box.value for box in jax.tree.leaves(declared, is_leaf=is_declared)]
    rows.append(("total", "", f"{sum(v.size for v in total):,}", "", "", f"{tree_bytes(total):,} in all"))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = (2, 5)
    return [
        "  ".join(
            c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def summary(result: dict[str, Any]) -> list[str]:
    """The totals in words a person reads."""
    least = (
        result["predicted_ms"]
        if isinstance(result["predicted_ms"], str)
        else f"at least {result['predicted_ms']:,.3g} ms"
    )
    parts = ", ".join(f"{name} {value / 2**20:,.1f}" for name, value in result["train_bytes_parts"].items())
    held = result["train_bytes_parts"].values()
    micro = f"{result['train_rows']} x {result['train_seq_len']} tokens micro-batch: {parts} (MiB)"
    if result["train_bytes"] is None:
        micro = f"without activations, which count.phase=train counts: {parts} (MiB)"
    return [
        "",
        f"parameters      {result['params_total']:,} ({result['params_active']:,} used by one token,"
        f" {result['params_active_with_embedding']:,} with tables it is looked up in)",
        f"{result['phase']:<15} {result['flops_per_token'] / 1e6:,.2f} MFLOP a token at context {result['context']:,}",
        f"cache           {result['cache_bytes_per_token']:,.0f} bytes a token and row + {result['cache_bytes_constant']:,.0f};"
        f" {result['cache_bytes_total'] / 2**20:,.1f} MiB for {result['batch']} x {result['context']:,} in {result['dtype']}",
        f"time            {least} on one {result['chip']} ({result['limit']} binds)",
        f"training        {sum(held) / 2**20:,.1f} MiB a device, {micro}",
    ]
