"""What is written down of a step: every layer and every expert, however many there are."""

import numpy as np

from jaxllm.training.record import EACH, many, numbers


def test_every_element_of_small_arrays_and_every_layer_of_large_ones():
    load = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
    metrics = {"loss": np.float32(2.5), "depth": np.arange(200.0), "small": np.arange(6.0).reshape(2, 3), "load": load}
    record = numbers(metrics)
    assert record["loss"] == 2.5
    assert record["depth/199"] == 199.0 and [record[f"small/{i}"] for i in range(6)] == list(range(6))
    assert load.size > EACH
    for i, row in enumerate(load):
        assert [record[f"load/{i}/{kind}"] for kind in ("min", "mean", "max")] == [row.min(), row.mean(), row.max()]
    assert len(record) == 1 + 200 + 6 + 6 * 3
    assert all(type(value) is float for value in record.values())
    held = many(metrics)
    assert list(held) == ["load"]
    np.testing.assert_array_equal(held["load"], load)
