"""The collectives of compiled programs: what XLA put there, counted through loops and sized."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxllm.compose import compose
from jaxllm.errors import UserError
from jaxllm.measure.collectives import collectives, rows, table
from jaxllm.mesh import build_mesh
from jaxllm.tasks import TaskIO, count

LAYERS, B, D, F = 5, 4, 8, 32
TEXT = """
HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[16])) -> (s32[], f32[16]) {
  %g = (f32[4]{0}, f32[16]{0}) all-gather-start(%x), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %gd = f32[16]{0} all-gather-done(%g)
  %r = bf16[2,8]{1,0} reduce-scatter(%y), replica_groups=[2,4]<=[8], to_apply=%add, metadata={op_name="jit(s)/transpose(jvp(M))/b0/ffn/dot"}
}

%cond (p: (s32[], f32[16])) -> pred[] {
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (x: f32[16], /*index=5*/y: f32[16]) -> f32[16] {
  %a = (f32[16]{0}, s8[3]{0}) all-reduce(%x, %z), replica_groups=mesh['data'=4,'tensor'=2] {'tensor'}, to_apply=%add
  %w = (s32[], f32[16]) while(%t), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"12"}}
  %v = (s32[], f32[16]) while(%t), condition=%cond, body=%body
  %one = f32[16]{0} all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add
}
"""


def test_a_text_by_hand():
    found = {(c.kind, c.devices): c for c in collectives(TEXT, 8)}
    assert len(found) == 3, "a group of one device says nothing to anybody"
    both = found["all-reduce", 2]
    assert (both.bytes, both.count) == (16 * 4 + 3, 1)
    assert both.seconds(67e3) == pytest.approx(1e-3)  # 2 (n - 1) / n of its bytes
    gather, scatter = found["all-gather", 4], found["reduce-scatter", 4]
    assert gather.bytes == 64 and scatter.bytes == 4 * 2 * 8 * 2 and scatter.where == "backward ffn"
    assert gather.count is None, "12 turns of one loop and an unknown number of the other"
    assert gather.seconds(1e9) is None and both.seconds(None) is None
    known = collectives(TEXT.replace("%v = (s32[], f32[16]) while(%t), condition=%cond, body=%body", ""), 8)
    assert {c.count for c in known if c.kind != "all-reduce"} == {12}
    assert [r["count"] for r in rows(known, 1e9)].count(12) == 2 and len(table(known, None)) == 4
    assert collectives("", 8) == []


def test_a_scan_of_column_and_row_split_layers(devices):
    """Megatron's pair: one all-reduce of the stream a layer, and none within."""
    mesh = build_mesh({"tensor": 4})

    def step(x, up, down):
        def layer(x, w):
            return x + jax.lax.with_sharding_constraint(jax.nn.gelu(x @ w[0]) @ w[1], P()), None

        return jax.lax.scan(layer, x, (up, down))[0]

    def shape(dims, *spec):
        return jax.ShapeDtypeStruct(dims, jnp.float32, sharding=jax.NamedSharding(mesh, P(*spec)))

    with jax.set_mesh(mesh):
        weights = shape((LAYERS, D, F), None, None, "tensor"), shape((LAYERS, F, D), None, "tensor")
        text = jax.jit(step).lower(shape((B, D)), *weights).compile().as_text()
    (only,) = collectives(text, 4)
    assert (only.kind, only.devices, only.bytes, only.count) == ("all-reduce", 4, 4 * B * D, LAYERS)


def test_a_train_step_through_the_task(devices):
    """Tensor parallelism costs one all-reduce of the stream for each half of each layer, forward."""
    small = [
        "model=tiny",
        "model.vocab_size=64",
        "model.d_model=16",
        "model.ffns.dense.d_ff=32",
        "task=count",
        "track=none",
    ]
    small += ["model.mixers.global.num_heads=2", "model.mixers.global.num_kv_heads=2", "model.layers=3* global/dense"]
    small += [
        "mesh.axes.tensor=2",
        "mesh.axes.fsdp=1",
        "train.batch_size=4",
        "train.seq_len=8",
        "count.collectives=true",
    ]
    lines, io = [], TaskIO()
    io.log = lambda text, level="info": lines.append(text)
    result = count.run(compose([*small, "chip=h100", "count.phase=train"]), io)
    stream = [c for c in result["collectives"] if c["kind"] == "all-reduce" and c["bytes"] == 4 * 8 * 16 * 4]
    forward = [c for c in stream if c["where"] in ("forward mixer", "forward ffn")]
    assert sum(c["count"] for c in forward) == 2 * 3
    said = sum(row["number"] * row["collective_bytes"] for row in result["layers"])
    assert sum(c["count"] * c["bytes"] for c in forward) == said, (
        "the calculator's bytes are those of the compiled program"
    )
    assert 0 < result["collective_bytes"] and 0 < result["collective_seconds"] < 1e-3
    assert any("links of H100 SXM" in line for line in lines)
    with pytest.raises(UserError, match="cpu_devices=64 stands in"):
        count.run(compose([*small, "mesh.axes.data=32"]), io)
