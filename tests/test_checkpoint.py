"""Checkpoints: whole or not there, equal bits on any mesh, and every misfit named."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jaxllm.checkpoint import Checkpoints, read_meta
from jaxllm.errors import UserError
from jaxllm.mesh import build_mesh


@struct.dataclass
class State:
    step: jax.Array
    params: dict
    opt: tuple
    typed: jax.Array
    raw: jax.Array


def make_state(seed: int, width: int = 8, dtype=jnp.bfloat16) -> State:
    a, b, c = jax.random.split(jax.random.key(seed), 3)
    params = {
        "embed": jax.random.normal(a, (16, width), dtype),
        "g0": {"w": jax.random.normal(b, (2, width, 4)), "none": jnp.zeros((0, 3))},
    }
    moments = jax.tree.map(lambda x: jax.random.normal(c, x.shape), params)
    opt = (moments, {"count": jnp.int32(seed)})
    return State(jnp.int32(seed), params, opt, jax.random.key(seed), jax.random.PRNGKey(7))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)


def bits(x) -> bytes:
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x).tobytes()


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert bits(a) == bits(b)


@pytest.fixture
def saved(tmp_path):
    """Checkpoints with steps 10 and 20, written by an object that is already closed."""
    writer = Checkpoints(tmp_path / "checkpoints")
    for step in (10, 20):
        writer.save(step, make_state(step), {"step": step, "config": "a: 1\n"})
    writer.close()
    return tmp_path / "checkpoints"


def test_round_trip_gives_equal_bits_and_types(saved):
    state, meta, step = Checkpoints(saved).restore(abstract(make_state(0)))
    assert step == 20 and meta == {"step": 20, "config": "a: 1\n"}
    assert_equal(state, make_state(20))
    assert jax.random.normal(state.typed) == jax.random.normal(make_state(20).typed)
    older, _, step = Checkpoints(saved).restore(abstract(make_state(0)), step=10)
    assert step == 10
    assert_equal(older, make_state(10))


def test_the_folder_is_data_without_pickle(saved):
    for path in saved.rglob("*"):
        assert path.is_dir() or not path.read_bytes().startswith((b"\x80\x03", b"\x80\x04", b"\x80\x05")), path
    assert read_meta(saved / "20") == {"step": 20, "config": "a: 1\n"}
    with pytest.raises(UserError, match="not a whole checkpoint"):
        read_meta(saved / "30")


def test_params_alone_come_from_the_checkpoints_own_table(saved):
    params, meta, step = Checkpoints(saved).restore_params()
    assert step == 20 and meta["step"] == 20
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(params))
    assert_equal(params, jax.tree.map(np.asarray, make_state(20).params))
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    tree = jax.tree.map(lambda _: one, params)
    for shardings in (one, tree):
        placed, _, _ = Checkpoints(saved).restore_params(shardings=shardings)
        assert isinstance(placed["embed"], jax.Array) and bits(placed["embed"]) == bits(params["embed"])
    del tree["embed"]
    with pytest.raises(UserError, match="params/embed is there but not wanted"):
        Checkpoints(saved).restore_params(shardings=tree)


def test_donating_right_after_an_async_save_keeps_the_saved_values(tmp_path):
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    x, writer = jnp.zeros((1024, 1024)), Checkpoints(tmp_path, keep_last=9)
    for step in range(3):
        writer.save(step, {"params": {"x": x}}, {})
        for _ in range(4):
            x = add(x)
    writer.close()
    for step in range(3):
        params, _, _ = writer.restore_params(step=step)
        assert (params["x"] == 4 * step).all()


# --- keeping --------------------------------------------------------------------------------------------------------


def test_keeps_the_last_and_the_best(tmp_path):
    writer = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for step, metric in [(1, 0.5), (2, 0.1), (3, float("nan")), (4, None), (5, 0.3), (6, 0.4)]:
        assert writer.save(step, {"params": {"x": jnp.ones(3)}}, {}, metric)
    writer.close()
    assert writer.steps() == [2, 5, 6] and writer.best() == 2 and writer.latest() == 6
    again = Checkpoints(tmp_path, keep_last=1, keep_best=0)  # another process, other settings
    again.restore_params()
    assert again.save(7, {"params": {"x": jnp.ones(3)}}, {})
    again.close()
    assert again.steps() == [7] and again.best() is None
    with pytest.raises(UserError, match="keep_last=0"):
        Checkpoints(tmp_path, keep_last=0)


def test_saving_the_step_one_stands_at_writes_nothing(saved):
    run = Checkpoints(saved)
    state, meta, step = run.restore(abstract(make_state(0)))
    before = {p: p.stat().st_mtime_ns for p in saved.rglob("*")}
    assert run.save(step, state, meta) is False
    assert {p: p.stat().st_mtime_ns for p in saved.rglob("*")} == before


def test_going_back_sets_the_left_future_aside(saved):
    said: list[str] = []
    run = Checkpoints(saved, warn=said.append)
    state, meta, _ = run.restore(abstract(make_state(0)), step=10)
    assert run.save(15, state, meta)
    run.close()
    assert run.steps() == [10, 15] and run.latest() == 15
    assert (saved / "20.superseded").is_dir() and len(said) == 1 and "20" in said[0]


# --- misfits --------------------------------------------------------------------------------------------------------


def test_misfits_name_the_leaf_and_read_nothing(saved):
    run, good = Checkpoints(saved), abstract(make_state(0))

    with pytest.raises(UserError) as shape:
        run.restore(abstract(make_state(0, width=6)))
    for part in ("params/embed", "[16, 8] there", "[16, 6] here"):
        assert part in str(shape.value)

    with pytest.raises(UserError) as dtype:
        run.restore(abstract(make_state(0, dtype=jnp.float32)))
    for part in ("params/embed is bfloat16 there and float32 here", "never cast"):
        assert part in str(dtype.value)

    renamed = good.replace(params={"table": good.params["embed"], "g0": good.params["g0"]})
    with pytest.raises(UserError) as names:
        run.restore(renamed)
    assert "params/table is missing there" in str(names.value)
    assert "params/embed is there but not wanted" in str(names.value)

    with pytest.raises(UserError, match=r"typed is key<fry> there and key<rbg> here"):
        run.restore(good.replace(typed=jax.eval_shape(lambda: jax.random.key(0, impl="rbg"))))
    with pytest.raises(UserError, match="typed has shape"):
        run.restore(good.replace(typed=good.raw))
    for error in (shape, dtype, names):
        assert "\n" not in str(error.value) and str(saved / "20") in str(error.value)


def test_an_empty_or_absent_folder_is_named(tmp_path):
    with pytest.raises(UserError, match="no whole checkpoint"):
        Checkpoints(tmp_path / "nothing").restore_params()
    with pytest.raises(UserError, match="checkpoint 5 cannot be used"):
        Checkpoints(tmp_path).restore_params(step=5)
    assert not (tmp_path / "nothing").exists()


def test_dotted_names_that_collide_are_refused_before_writing(tmp_path):
    with pytest.raises(ValueError, match="same name"):
        Checkpoints(tmp_path).save(1, {"params": {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}}, {})
    assert not list(tmp_path.iterdir())


# --- damage ---------------------------------------------------------------------------------------------------------


def _largest(folder: Path) -> Path:
    return max((folder / "state").rglob("d/*"), key=lambda p: p.stat().st_size)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE = {
    "array truncated": lambda folder: _truncate(_largest(folder)),
    "array deleted": lambda folder: _largest(folder).unlink(),
    "commit marker deleted": lambda folder: (folder / "commit_success.txt").unlink(),
    "checkpoint metadata deleted": lambda folder: (folder / "_CHECKPOINT_METADATA").unlink(),
    "tree metadata truncated": lambda folder: _truncate(folder / "state" / "_METADATA"),
    "our JSON truncated": lambda folder: _truncate(folder / "meta" / "metadata"),
    "our JSON deleted": lambda folder: (folder / "meta" / "metadata").unlink(),
    "state deleted": lambda folder: shutil.rmtree(folder / "state"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_newest_is_named_and_can_be_saved_again(saved, kind):
    DAMAGE[kind](saved / "20")
    said: list[str] = []
    run = Checkpoints(saved)
    assert run.latest() == 10
    state, _, step = run.restore(abstract(make_state(0)), warn=said.append)
    assert step == 10
    assert_equal(state, make_state(10))
    assert len(said) == 1 and "checkpoint 20" in said[0] and "using step 10" in said[0] and "\n" not in said[0]
    with pytest.raises(UserError, match="checkpoint 20 cannot be used"):
        run.restore(abstract(make_state(0)), step=20)
    run = Checkpoints(saved, warn=said.append)  # an object that has read nothing finds its way too
    assert run.save(20, make_state(21), {"again": True})
    run.close()
    assert run.steps() == [10, 20] and (saved / "20.damaged").is_dir()
    state, meta, _ = run.restore(abstract(make_state(0)))
    assert meta == {"again": True}
    assert_equal(state, make_state(21))


def test_damage_that_only_reading_shows_falls_back_too(saved):
    (saved / "20" / "files.json").unlink()
    for path in (saved / "20" / "state").rglob("d/*"):  # all: which file holds the parameters is the writer's choice
        _truncate(path)
    said: list[str] = []
    run = Checkpoints(saved)
    _, _, step = run.restore_params(warn=said.append)
    assert step == 10 and len(said) == 1 and "checkpoint 20" in said[0]
    assert run.steps() == [10]
    assert run.save(20, make_state(20), {})
    run.close()
    assert run.steps() == [10, 20]


def _flip(path: Path, start: float, stop: float) -> None:
    data = bytearray(path.read_bytes())
    part = slice(int(start * len(data)), int(stop * len(data)))
    data[part] = bytes(255 - x for x in data[part])
    path.write_bytes(data)


@pytest.mark.parametrize("start", [0.1, 0.4, 0.7])
def test_flipped_bytes_are_found_whatever_they_expand_to(saved, start):
    """Arrays are compressed without a checksum: at some places of a file other bytes are just other numbers."""
    _flip(_largest(saved / "20"), start, start + 0.1)
    said: list[str] = []
    state, _, step = Checkpoints(saved).restore(abstract(make_state(20)), warn=said.append)
    assert step == 10 and len(said) == 1 and "checkpoint 20" in said[0] and "CRC-32" in said[0]
    assert_equal(state, make_state(10))
    with pytest.raises(UserError, match="checkpoint 20 cannot be used; tried: 20"):
        Checkpoints(saved).restore(abstract(make_state(20)), step=20)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # see backend.quiet_late_callbacks
def test_what_only_reading_onto_devices_shows_falls_back(tmp_path):
    """Without the note of sizes and checksums, what Orbax says of bad bytes has no type of its own."""
    place = jax.NamedSharding(build_mesh({}), jax.P())
    state = {"params": {"w": jnp.asarray(np.random.default_rng(0).standard_normal((64, 512)), jnp.float32)}}
    wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), state)
    run = Checkpoints(tmp_path)
    for step in (10, 20):
        run.save(step, state, {})
    run.close()
    (tmp_path / "20" / "files.json").unlink()
    _flip(_largest(tmp_path / "20"), 0.25, 0.5)
    said: list[str] = []
    assert Checkpoints(tmp_path).restore(wanted, warn=said.append)[2] == 10
    assert len(said) == 1 and "checkpoint 20" in said[0] and "bound method" not in said[0]


def test_missing_rights_are_not_taken_for_damage(saved, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("jaxllm.checkpoint._read", refuse)
    with pytest.raises(PermissionError):
        Checkpoints(saved).restore_params()


# --- full disk ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["blocking part", "writer thread"])
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(saved, monkeypatch, where):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    run = Checkpoints(saved, keep_last=1, keep_best=0)
    run.restore(abstract(make_state(0)))
    with monkeypatch.context() as patch:
        save, seal = "orbax.checkpoint.CheckpointManager.save", "jaxllm.checkpoint.Checkpoints._seal"
        patch.setattr(save if where == "blocking part" else seal, full)
        with pytest.raises(UserError) as error:
            run.save(30, make_state(30), {})
            run.wait()
    for part in ("checkpoint 30", "no space left", str(saved), "checkpoint 20 is intact"):
        assert part in str(error.value)
    assert run.latest() == 20 and not list(saved.glob("30*"))
    assert run.save(30, make_state(30), {})  # space was made
    run.close()
    assert run.steps() == [30]


def test_a_really_full_disk(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        run = Checkpoints(disk, keep_last=1)
        run.save(1, {"params": {"x": jnp.arange(64)}}, {"ok": True})
        run.wait()
        noise = jax.random.normal(jax.random.key(0), (512, 1024))
        with pytest.raises(UserError, match="checkpoint 2: no space left .* checkpoint 1 is intact"):
            run.save(2, {"params": {"x": noise}}, {})
            run.wait()
        assert run.restore_params()[1:] == ({"ok": True}, 1)
        assert not list(disk.glob("2*"))
        run.close()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


# --- other processes: kill -9, and other meshes -------------------------------------------------------------------

KILLED = """
    import os, signal, sys
    import jax, jax.numpy as jnp
    from jaxllm import checkpoint
    folder, when = sys.argv[1:]
    run = checkpoint.Checkpoints(folder)
    state = lambda i: {"params": {"x": jnp.full((256, 1024), i, jnp.float32)}, "step": jnp.int32(i)}
    run.save(1, state(1), {"step": 1})
    run.wait()
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    if when == "before the commit":
        run._seal = die
        run.close()
    run.save(2, state(2), {"step": 2})
    if when == "before the commit":
        run.wait()
    die()
"""

MESHES = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_num_cpu_devices", 8)
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
    from jaxllm.checkpoint import Checkpoints
    from jaxllm.errors import UserError

    def mesh(a, b):
        return jax.make_mesh((a, b), ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[: a * b])

    def state(m):
        host = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
        put = lambda value, *spec: jax.device_put(value, NamedSharding(m, P(*spec)))
        params = {"w": put(host, "x", "y"), "b": put(jnp.asarray(host[0], jnp.bfloat16), "y")}
        mu = {"w": put(host * 2, "y", "x")}
        return {"params": params, "mu": mu, "key": put(jax.random.key(3)), "n": jnp.int32(5)}

    run = Checkpoints(sys.argv[1])
    run.save(4, state(mesh(2, 4)), {})
    run.close()
    raw = lambda v: np.asarray(jax.random.key_data(v) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else v)
    for shape in [(1, 1), (4, 2), (2, 4)]:
        want = state(mesh(*shape))
        spec = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), want)
        got, _, _ = run.restore(spec)
        for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
            assert a.dtype == b.dtype and raw(a).tobytes() == raw(b).tobytes(), (shape, path)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (shape, path, a.sharding)
    loose, _, _ = run.restore(jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), want))
    assert raw(loose["params"]["w"]).tobytes() == raw(want["params"]["w"]).tobytes()
    jax.jit(lambda a, b: a.sum() + b)(want["params"]["w"], loose["n"])  # uncommitted: goes along with any mesh
    bad = NamedSharding(mesh(1, 3), P("y"))
    try:
        run.restore_params(shardings={"w": bad, "b": bad})
    except UserError as error:
        assert "params/b" in str(error) or "params/w" in str(error), error
    else:
        raise AssertionError("a mesh of 3 cannot hold 8 rows")
    print("meshes agree")
"""


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """The child processes of this module, started together because most of their time is imports."""
    folder = tmp_path_factory.mktemp("children")
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[1])}
    env.pop("XLA_FLAGS", None)
    jobs = {
        "before the commit": (KILLED, [str(folder / "a"), "before the commit"]),
        "at once": (KILLED, [str(folder / "b"), "at once"]),
        "meshes": (MESHES, [str(folder / "c")]),
    }
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), *arguments],
            env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for name, (code, arguments) in jobs.items()
    }  # fmt: skip
    done = {name: (child.communicate(timeout=300), child.returncode) for name, child in started.items()}
    return {name: (Path(jobs[name][1][0]), *done[name]) for name in jobs}


@pytest.mark.parametrize("when", ["before the commit", "at once"])
def test_kill_9_during_an_async_save_leaves_a_whole_step(processes, when):
    folder, (_, stderr), code = processes[when]
    assert code == -signal.SIGKILL, stderr
    said: list[str] = []
    run = Checkpoints(folder, warn=said.append)
    params, meta, step = run.restore_params()
    assert step in ((1,) if when == "before the commit" else (1, 2))
    assert meta == {"step": step} and (params["x"] == step).all()
    if step == 1 and list(folder.glob("2.*")):
        assert len(said) == 1 and "checkpoint 2" in said[0] and "never finished" in said[0]
    if step == 1:
        assert run.save(2, {"params": {"x": jnp.full((4,), 2.0)}}, {"step": 2})
        run.close()
        assert run.steps() == [1, 2] and not list(folder.glob("2.*")), "the half-written folder is cleaned up"


def test_other_meshes_get_equal_bits(processes):
    _, (stdout, stderr), code = processes["meshes"]
    assert code == 0 and "meshes agree" in stdout, stderr


def test_meta_must_be_json(tmp_path):
    with pytest.raises(TypeError):
        Checkpoints(tmp_path).save(1, {"params": {"x": jnp.ones(1)}}, {"bad": object()})
    assert not list(tmp_path.iterdir())


def test_the_table_on_disk_is_plain_json(saved):
    envelope = json.loads((saved / "20" / "meta" / "metadata").read_text())
    entry = next(e for e in envelope["leaves"] if e["keys"] == ["params", "embed"])
    assert entry == {"keys": ["params", "embed"], "shape": [16, 8], "dtype": "bfloat16", "impl": None}
