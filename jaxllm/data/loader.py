"""Batches as a pure function of (seed, step, host): nothing to save, nothing to replay, any number of hosts."""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np

from jaxllm.data import checks
from jaxllm.data.plan import Plan, make_plan, row_count
from jaxllm.data.prefetch import Prefetch
from jaxllm.data.soft_labels import SoftLabels
from jaxllm.data.store import TokenStore
from jaxllm.errors import UserError

Batch = dict[str, np.ndarray]


class Loader:
    """Rows of `seq_len` tokens for one host, of a global batch of `batch_size` rows.

    The rows of all steps form one endless list: epoch after epoch, each a fresh shuffle of documents and of rows (see
    `plan.py`). Step s takes rows [s B, (s + 1) B) of it and host k of H its k-th H-th part; the list knows nothing of
    steps or hosts, so a run may resume at any step and on any number of hosts and sees the same rows. Within an epoch
    every token is an input exactly once, and every label that its document has is trained exactly once.

    align: documents start at multiples of this in a row (some mixers pool fixed blocks of a document); must divide
        `seq_len`. 1 packs without gaps.
    fixed: documents stay in their order, rows alone are shuffled: every epoch of every seed has the same rows.
    labels: a teacher's labels of those rows (`jaxllm.data.soft_labels`), which then are part of each batch.
    pad_id: the id under padding; any will do, since padding is segment 0 and has weight 0.
    """

    def __init__(
        self,
        store: TokenStore,
        batch_size: int,
        seq_len: int,
        seed: int = 0,
        host: int = 0,
        hosts: int = 1,
        shuffle: bool = True,
        align: int = 1,
        pad_id: int = 0,
        fixed: bool = False,
        labels: SoftLabels | None = None,
    ):
        for key, value, least in (
            ("train.batch_size", batch_size, 1),
            ("train.seq_len", seq_len, 1),
            ("seed", seed, 0),
            ("hosts", hosts, 1),
            ("host", host, 0),
            ("align", align, 1),
        ):
            checks.whole(key, value, least)
        if batch_size % hosts or host >= hosts:
            raise UserError(
                f"train.batch_size={batch_size}: must be a multiple of the number of hosts, {hosts} "
                f"(this is host {host})"
            )
        if seq_len % align:
            raise UserError(
                f"train.seq_len={seq_len}: must be a multiple of {align}, to which the model's layers align documents"
            )
        if len(store) == 0:
            raise UserError(
                "data: no documents to load here; for validation, give a larger corpus or a smaller "
                "data.val_every (0 turns it off)"
            )
        self.store, self.batch_size, self.seq_len, self.seed = store, batch_size, seq_len, seed
        self.host, self.hosts, self.shuffle, self.align, self.pad_id = host, hosts, shuffle, align, pad_id
        self.fixed, self.labels = fixed or labels is not None, labels
        self.rows_per_epoch = row_count(store, seq_len, align)
        self._plans: OrderedDict[int, Plan] = OrderedDict()  # memo of a pure function: the epoch in use and the next
        self._lock = threading.Lock()

    @property
    def steps_per_epoch(self) -> float:
        return self.rows_per_epoch / self.batch_size

    def batch(self, step: int) -> Batch:
        """This host's part of a step: numpy [batch_size / hosts, seq_len].

        tokens, labels int32: labels[i] is the token after tokens[i] in the same document.
        weights float32: 1 where there is such a label and it is trained, else 0 (and the label is 0): at the end of a
            document, where it goes on in no row, and under padding. Never decided by a token's id.
        segments int32: documents 1.. of each row, 0 is padding. positions int32: from 0 at each segment's start.
        """
        if step < 0:
            raise ValueError(f"step {step} < 0")
        return self.rows(self._rows(step))

    def rows(self, numbers: np.ndarray) -> Batch:
        """Rows of the endless list by their numbers, which must not fall."""
        epoch, row = np.divmod(numbers, self.rows_per_epoch)
        parts = [self._gather(self._plan(int(e)), row[epoch == e]) for e in np.unique(epoch)]
        return parts[0] if len(parts) == 1 else {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}

    def _gather(self, plan: Plan, rows: np.ndarray) -> Batch:
        batch = plan.gather(rows, self.pad_id)
        return batch if self.labels is None else batch | self.labels.rows(plan.numbers(rows))

    def epoch(self, index: int = 0) -> Iterator[Batch]:
        """The batches of one epoch and no more: every token once, the last batch filled up with rows of padding."""
        plan = self._plan(index)
        for step in range(-(-self.rows_per_epoch // self.batch_size)):
            rows = self._rows(step)
            yield self._gather(plan, np.where(rows < self.rows_per_epoch, rows, -1))

    def prefetch(self, start: int, depth: int = 2, stop: int | None = None) -> Prefetch[Batch]:
        """Iterator of (step, batch) from `start` (to `stop`, exclusive), made ahead by a background thread.

        Close it, or use it in a `with`; an error while making a batch is raised where the batch would have come.
        """
        return Prefetch(self.batch, start, depth, stop)

    def position(self, step: int) -> dict[str, Any]:
        """Where the data stands before a step: rows taken, and how many passes those are."""
        taken = step * self.batch_size
        return {"rows": taken, "epochs": taken / self.rows_per_epoch}

    def facts(self) -> dict[str, Any]:
        """What decides the order of tokens; two runs with equal facts see equal rows."""
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "align": self.align,
            "shuffle": self.shuffle,
            "fixed": self.fixed,
            "documents": len(self.store),
            "tokens": self.store.size,
        }

    def _rows(self, step: int) -> np.ndarray:
        """Numbers in the endless list of rows of this host's part of a step."""
        share = self.batch_size // self.hosts
        return step * self.batch_size + self.host * share + np.arange(share, dtype=np.int64)

    def _plan(self, epoch: int) -> Plan:
        epoch = epoch if self.shuffle else 0
        with self._lock:
            if epoch not in self._plans:
                how = (self.align, self.seed, epoch, self.shuffle, self.fixed)
                self._plans[epoch] = make_plan(self.store, self.seq_len, *how)
            self._plans.move_to_end(epoch)
            while len(self._plans) > 2:
                self._plans.popitem(last=False)
            return self._plans[epoch]
