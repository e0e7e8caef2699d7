"""From the loader's numpy batches to arrays on the mesh."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh

from jaxllm.data.soft_labels import NAMES as SOFT
from jaxllm.mesh import Rules, batch_sharding

NAMES = ("tokens", "labels", "positions", "segments", "weights")


def place(
    batch: Mapping[str, np.ndarray], mesh: Mesh | None = None, rules: Rules | None = None
) -> dict[str, jax.Array]:
    """Rows over the mesh axes that split the batch. With several processes each passes its own rows."""
    arrays = {name: batch[name] for name in (*NAMES, *SOFT) if name in NAMES or name in batch}
    if mesh is None:
        return jax.device_put(arrays)
    sharding = batch_sharding(mesh, rules)
    if jax.process_count() == 1:
        return jax.device_put(arrays, sharding)
    return {name: jax.make_array_from_process_local_data(sharding, x) for name, x in arrays.items()}
