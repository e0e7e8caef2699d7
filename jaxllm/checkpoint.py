"""Checkpoints: Orbax behind one small module, plus the checks it leaves to its caller (`checkpoint_files`).

On disk (a local or mounted folder; only arrays and JSON, never code)::

    checkpoints/20/state/               the arrays, under nested names (params/g0/b0/mixer/wq/kernel ...)
    checkpoints/20/meta/metadata        JSON: format, step, metric, the caller's meta, shape and dtype of every leaf
    checkpoints/20/files.json           size and CRC-32 of the files below state/, written just before the commit
    checkpoints/20/commit_success.txt   the commit marker, written last
    checkpoints/20.damaged, 20.superseded   what stood in the way of a new checkpoint 20; kept, never read again

* Atomic and asynchronous: arrays are copied to the host, a background thread writes them under a temporary name, and
  the folder is renamed when it is whole. A kill leaves the earlier checkpoints and at worst a temporary folder.
* Orbax casts a stored dtype to the requested one without a word. Here every leaf's shape and dtype is compared with the
  checkpoint's own table before anything is read, and a difference is a `UserError` that names the leaf.
* Random keys are stored as raw uint32 with the name of their generator, and come back typed if they went in typed.
* Saving at step S after going back to an earlier step sets every later checkpoint aside: they belong to a future that
  this run has left, and `latest` must mean the newest state of the run as it is now.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxllm import checkpoint_files as files
from jaxllm.checkpoint_files import Keys, Leaf
from jaxllm.errors import UserError

IN_FLIGHT = 64 * 2**20  # bytes a save may hold beside the state, where no single array is larger
PIECE = 4 * 2**20
TEMPORARY = ".orbax-checkpoint-tmp"  # Orbax's suffix for a folder that is still being written

Warn = Callable[[str], None]
V = TypeVar("V")


class Checkpoints:
    """The checkpoints of one run.

    folder: holds one sub-folder a step; created on the first save.
    keep_last: how many of the newest whole checkpoints stay (>= 1).
    keep_best: how many of those with the lowest finite `metric` stay besides (0: none).
    warn: told in one line of whatever is passed over or set aside; the `jaxllm.checkpoint` logger by default.
    """

    def __init__(self, folder: str | Path, keep_last: int = 3, keep_best: int = 1, warn: Warn | None = None):
        if keep_last < 1:
            raise UserError(f"train.keep_last={keep_last}: at least one checkpoint must be kept, use 1 or more")
        if keep_best < 0:
            raise UserError(f"train.keep_best={keep_best}: use 0 (none) or more")
        self.folder = Path(os.path.abspath(folder))
        self.keep_last, self.keep_best = keep_last, keep_best
        self._warn: Warn = warn or logging.getLogger(__name__).warning
        self._manager: ocp.CheckpointManager | None = None
        self._damaged: dict[int, str] = {}  # found while reading the files: the cheap checks cannot see it
        self._pending: tuple[int, float | None] | None = None  # (step, metric) of the save in flight
        self._at: int | None = None  # the step this run stands at: last saved or restored here

    # --- looking --------------------------------------------------------------------------------------------------

    def path(self, step: int) -> Path:
        """The folder of one step, whether it exists or not."""
        return self.folder / str(step)

    def steps(self) -> list[int]:
        """Whole steps, ascending, judged by JSON files and file sizes only. A save in flight is not among them."""
        return [step for step in self._present() if self._damage(step) is None]

    def latest(self) -> int | None:
        """The newest whole step, or None."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """The whole step with the lowest finite metric (the later one of equals), or None."""
        ranked = self._ranked(self.steps())
        return ranked[0] if ranked else None

    def _present(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal() and p.is_dir())

    def _damage(self, step: int) -> str | None:
        return self._damaged.get(step) or files.damage(self.path(step))

    def _ranked(self, whole: list[int]) -> list[int]:
        """Steps with a metric, best first."""

        def metric(step: int) -> float | None:
            if self._pending is not None and self._pending[0] == step:
                return self._pending[1]
            return files.read_envelope(self.path(step))["metric"]

        scored = [(value, -step) for step in whole if (value := metric(step)) is not None]
        return [-minus for _, minus in sorted(scored)]

    def should_preserve(self, checkpoints: Any, *, context: Any) -> list[bool]:
        """Orbax's preservation policy: the last whole ones and the best ones stay; damaged ones do not count and go."""
        del context
        steps = [info.step for info in checkpoints]
        saving = self._pending[0] if self._pending else None
        whole = [step for step in steps if step == saving or self._damage(step) is None]
        keep = {*whole[-self.keep_last :], *self._ranked(whole)[: self.keep_best]}
        return [step in keep for step in steps]

    # --- saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, state: Any, meta: Mapping[str, Any], metric: float | None = None) -> bool:
        """Start saving `state`, a pytree of arrays with a top-level `params`; returns once the arrays are copied.

        meta: JSON. metric: lower is better, counts for `keep_best`; None or a non-finite value is never a best.
        Returns False, and writes nothing, if this step is the one the run stands at and it is whole on disk.
        Raises UserError if this or the previous save met a full disk; earlier checkpoints are intact then.
        Every process of a multi-process run calls it.
        """
        self.wait()
        if step == self._at and step in self.steps():
            return False
        leaves, arrays = files.pack(state)
        score = float(metric) if metric is not None and math.isfinite(metric) else None
        envelope = {
            "format": files.FORMAT,
            "step": step,
            "metric": score,
            "meta": json.loads(json.dumps(meta)),  # a copy, and a TypeError now rather than in the writer thread
            "leaves": [leaf._asdict() for leaf in leaves],
        }
        self._clear_way(step)
        self._pending = (step, score)
        try:
            state_args = ocp.args.StandardSave(arrays, save_args=jax.tree.map(_in_pieces, arrays))
            self._open(arrays).save(
                step,
                args=ocp.args.Composite(state=state_args, meta=ocp.args.JsonSave(envelope)),
                force=True,
            )
        except Exception as error:
            raise self._failure(error) from error
        except BaseException:  # interrupted half-way: a save tried again must not find this one pending
            self._pending = self._manager = None
            raise
        self._at = step
        return True

    def wait(self) -> None:
        """Block until the save in flight is on disk; raises what went wrong with it (UserError for a full disk)."""
        if self._pending is None or self._manager is None:
            return
        try:
            self._manager.wait_until_finished()
        except Exception as error:
            raise self._failure(error) from error
        step, self._pending = self._pending[0], None
        if (reason := files.damage(self.path(step))) is not None:
            raise RuntimeError(f"checkpoint {step} in {self.folder} is not whole after saving: {reason}")

    def close(self) -> None:
        """Wait for the save in flight and stop the background threads. The object can be used again."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()
                self._manager = None

    def _open(self, arrays: Any) -> ocp.CheckpointManager:
        # Opened on the first save, not before: reading somebody's run must not write to it or clean anything up.
        if self._manager is None:
            # What is copied, compressed and not yet on disk is at most about one array more than the largest: left alone, Orbax holds
            # all of them at once, a second copy of the state.
            largest = max((_local_bytes(leaf) for leaf in jax.tree.leaves(arrays)), default=0)
            handler = ocp.StandardCheckpointHandler(save_concurrent_gb=(max(largest, IN_FLIGHT) + 2**20) / 10**9)
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self,
                cleanup_tmp_directories=True,
                lightweight_initialize=True,  # a damaged old folder must not stop the run from saving
                async_options=ocp.options.AsyncOptions(post_finalization_callback=self._seal),
            )
            self._manager = ocp.CheckpointManager(
                self.folder, options=options, item_handlers={"state": handler, "meta": ocp.JsonCheckpointHandler()}
            )
        return self._manager

    def _seal(self) -> None:
        """Runs in the writer thread when all arrays are on disk, before the commit: note size and checksum of every file."""
        if jax.process_index() == 0 and self._pending is not None:
            for folder in self.folder.glob(f"{self._pending[0]}{TEMPORARY}*"):
                (folder / files.SIZES).write_text(json.dumps(files.seal(folder / "state")), encoding="utf-8")

    def _clear_way(self, step: int) -> None:
        """Rename every checkpoint at or after `step`: damaged ones, and those of a future this run went back from."""
        blocking = [other for other in self._present() if other >= step]
        if not blocking:
            return
        for old in blocking if jax.process_index() == 0 else []:
            reason = self._damage(old)
            target = self.folder / f"{old}.{'damaged' if reason else 'superseded'}"
            shutil.rmtree(target, ignore_errors=True)
            self.path(old).rename(target)
            why = f"it is damaged ({reason})" if reason else f"the run went back and now saves step {step}"
            self._warn(f"checkpoint {old} in {self.folder} is set aside as {target.name}: {why}")
        if jax.process_count() > 1:
            from jax.experimental import multihost_utils

            multihost_utils.sync_global_devices(f"checkpoints set aside before {step}")
        for old in blocking:
            self._damaged.pop(old, None)
        if self._manager is not None:
            self._manager.reload()

    def _failure(self, error: Exception) -> Exception:
        """Forget the failed save, free what it wrote, and say what is left."""
        step, manager = self._pending[0] if self._pending else self._at, self._manager
        self._pending = self._manager = self._at = None
        if manager is not None:
            with contextlib.suppress(Exception):  # it repeats the error that is being reported
                manager.close()
        if jax.process_index() == 0:
            for folder in self.folder.glob(f"{step}{TEMPORARY}*"):
                shutil.rmtree(folder, ignore_errors=True)
        last = self.latest()
        kept = "no earlier checkpoint exists" if last is None else f"checkpoint {last} is intact"
        if files.disk_full(error):
            return UserError(f"checkpoint {step}: no space left in {self.folder}; {kept}; free some space, then resume")
        if isinstance(error, PermissionError):
            return UserError(f"checkpoint {step}: no right to write in {self.folder}; {kept}; choose another run_dir")
        return RuntimeError(f"checkpoint {step} was not written to {self.folder}: {files.one_line(error)}; {kept}")

    # --- restoring ------------------------------------------------------------------------------------------------

    def restore(
        self, abstract: Any, step: int | None = None, warn: Warn | None = None
    ) -> tuple[Any, dict[str, Any], int]:
        """(state, meta, step) of the newest whole checkpoint, or of `step`.

        abstract: the state's tree with `jax.ShapeDtypeStruct` leaves. A leaf with `.sharding` is read straight onto it,
        whatever mesh the checkpoint was saved from; one without becomes an ordinary uncommitted array.
        A damaged newest checkpoint is named through `warn` in one line and the previous one is used.
        Raises UserError when nothing whole exists, when the named `step` is damaged or absent, and for a leaf that is
        missing, not wanted, or of another shape or dtype (nothing has been read then).
        """
        wanted = files.flatten(abstract)

        def read(folder: Path, stored: dict[Keys, Leaf]) -> list[Any]:
            files.compare(folder, wanted, stored)
            placed = {keys: getattr(leaf, "sharding", None) for keys, leaf in wanted.items()}
            arrays = _read(folder, [stored[keys] for keys in wanted], placed)
            return [files.unpack(stored[keys], arrays[keys]) for keys in wanted]

        values, meta, found = self._newest(step, warn, read)
        self._at = found
        return jax.tree.unflatten(jax.tree.structure(abstract), values), meta, found

    def restore_params(
        self, step: int | None = None, shardings: Any = None, warn: Warn | None = None, averaged: bool = True
    ) -> tuple[dict[str, Any], dict[str, Any], int]:
        """(params, meta, step), reading nothing but the `params` entry; shapes come from the checkpoint itself.

        shardings: None for numpy arrays, one `jax.sharding.Sharding` for all, or a tree of them shaped like the params.
        averaged: running averages (the entry `ema`) in the place of the parameters that have them, in these ones' dtypes.
        """

        def read(folder: Path, stored: dict[Keys, Leaf]) -> dict[str, Any]:
            leaves = [leaf for leaf in stored.values() if leaf.keys[0] == "params"]
            if not leaves:
                raise UserError(f"checkpoint {folder} holds no params: it is not one of a training run")
            placed = {leaf.keys: shardings for leaf in leaves}
            if shardings is not None and not isinstance(shardings, jax.sharding.Sharding):
                placed = files.flatten({"params": shardings})
                files.compare_names(folder, placed, [leaf.keys for leaf in leaves])
            average = {leaf.keys[1:]: leaf for leaf in stored.values() if averaged and leaf.keys[0] == "ema"}
            chosen = [average.get(leaf.keys[1:], leaf) for leaf in leaves]
            placed = {pick.keys: placed[leaf.keys] for pick, leaf in zip(chosen, leaves, strict=True)}
            found = _read(folder, chosen, placed)
            out: dict[Keys, Any] = {}
            for pick, leaf in zip(chosen, leaves, strict=True):
                array = found[pick.keys]
                out[leaf.keys[1:]] = array if pick.dtype == leaf.dtype else array.astype(leaf.dtype)
            return files.nest(out)

        return self._newest(step, warn, read)

    def _newest(
        self, step: int | None, warn: Warn | None, read: Callable[[Path, dict[Keys, Leaf]], V]
    ) -> tuple[V, dict[str, Any], int]:
        """Try the newest checkpoint (or `step` alone), then older ones while they prove damaged."""
        self.wait()
        warn = warn or self._warn
        passed: list[str] = []
        for candidate in sorted(self._present(), reverse=True) if step is None else [step]:
            folder = self.path(candidate)
            reason = self._damage(candidate)
            if reason is None and (reason := files.corruption(folder)) is not None:
                self._damaged[candidate] = reason
            if reason is None:
                envelope = files.read_envelope(folder)
                try:
                    found = read(folder, files.read_table(envelope))
                except Exception as error:  # what Orbax raises for bad bytes has no type of its own
                    if isinstance(error, UserError) or files.not_damage(error):
                        raise
                    reason = self._damaged[candidate] = files.one_line(error)
                else:
                    self._report(candidate, passed, warn, unfinished=step is None)
                    return found, envelope["meta"], candidate
            passed.append(f"{candidate} ({reason})")
        whole = ", ".join(map(str, self.steps())) or "none"
        which = "no whole checkpoint" if step is None else f"checkpoint {step} cannot be used"
        raise UserError(f"{self.folder}: {which}; tried: {', '.join(passed) or 'nothing there'}; whole ones: {whole}")

    def _report(self, used: int, passed: list[str], warn: Warn, unfinished: bool) -> None:
        for damaged in passed:
            warn(f"checkpoint {damaged} in {self.folder} is damaged; using step {used} instead")
        if unfinished:
            names = (p.name.partition(TEMPORARY)[0] for p in self.folder.glob(f"*{TEMPORARY}*"))
            for later in sorted({int(name) for name in names if name.isdecimal() and int(name) > used}):
                warn(f"checkpoint {later} in {self.folder} was never finished; using step {used} instead")


def read_meta(checkpoint_path: str | Path) -> dict[str, Any]:
    """The caller's meta of one checkpoint folder (.../checkpoints/20), without touching its arrays."""
    folder = Path(checkpoint_path)
    if (reason := files.damage(folder)) is not None:
        raise UserError(f"{folder} is not a whole checkpoint: {reason}")
    return files.read_envelope(folder)["meta"]


def _local_bytes(leaf: Any) -> int:
    """Bytes of an array that this process writes, or a little more."""
    shards = getattr(leaf, "addressable_shards", None)
    return int(leaf.nbytes) if shards is None else sum(shard.data.nbytes for shard in shards)


def _in_pieces(leaf: Any) -> ocp.SaveArgs:
    """Large arrays are compressed piece by piece."""
    return ocp.SaveArgs(chunk_byte_size=max(PIECE, leaf.nbytes // 64))


def _read(folder: Path, leaves: list[Leaf], shardings: Mapping[Keys, Any]) -> dict[Keys, Any]:
    """Read the given leaves and no others: onto their sharding, or as numpy. Random keys stay raw."""
    arguments: dict[Keys, ocp.RestoreArgs] = {}
    for leaf in (leaf for leaf in leaves if leaf.stored):
        sharding = shardings[leaf.keys]
        files.check_placement(folder, leaf, sharding)
        arguments[leaf.keys] = (
            ocp.RestoreArgs(restore_type=np.ndarray) if sharding is None else ocp.ArrayRestoreArgs(sharding=sharding)
        )
    found: dict[Keys, Any] = {}
    if arguments:
        nested = files.nest(arguments)
        item = jax.tree.map(lambda _: 0, nested)
        request = ocp.args.PyTreeRestore(item=item, restore_args=nested, partial_restore=True)
        with contextlib.closing(ocp.Checkpointer(ocp.CompositeCheckpointHandler())) as reader:
            found = files.flatten(reader.restore(folder, args=ocp.args.Composite(state=request))["state"])
    arrays = {leaf.keys: found[leaf.keys] if leaf.stored else np.zeros(leaf.shape, leaf.dtype) for leaf in leaves}
    for leaf in (leaf for leaf in leaves if leaf.impl is None):
        array = arrays[leaf.keys]
        if (tuple(array.shape), str(array.dtype)) != (leaf.shape, leaf.dtype):
            raise ValueError(f"{leaf.name} is {array.dtype}{list(array.shape)} on disk, not as in the table")
    return arrays
