"""How the weights of a decoder lie in memory: on CPU the fast layout depends on how many rows are decoded together.

One row times a matrix `[in, out]` runs along its rows at the speed of memory. From two rows on XLA's CPU library wants the weights of
an output side by side and, given `[in, out]`, brings them there at every token. So the few large matrices that all tokens meet
are transposed once, when the caller says that it decodes more than one row. The numbers do not change.
"""

from collections.abc import Mapping
from typing import Any

import jax

from jaxllm.ops.linear import Transposed

# Fused by `prepare` or large by nature, multiplied through `ops.linear.linear`, and with one output axis, the last.
FFN = frozenset({"gate_up_proj", "up_proj", "down_proj"})
MATRICES = FFN | {"qkv_proj", "o_proj"}


def laid_out(weights: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Prepared weights in the layout for `rows` rows. Only weights on one CPU device are touched."""
    if rows < 2 or not _on_one_cpu(weights):
        return dict(weights)

    def one(path: Any, leaf: Any) -> Any:
        name = getattr(path[-1], "key", None)
        of_experts = name in FFN and leaf.ndim > 2  # multiplied all at once, each with rows of its own
        return Transposed.of(leaf) if name in MATRICES and not of_experts else leaf

    return dict(jax.tree_util.tree_map_with_path(one, dict(weights)))


def _on_one_cpu(weights: Mapping[str, Any]) -> bool:
    devices = jax.tree.leaves(weights)[0].devices()
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)
