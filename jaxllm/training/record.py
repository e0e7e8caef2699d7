"""What of a step's metrics is written down: numbers as they are, arrays as one number an element, large ones as what they spread over."""

from collections.abc import Mapping
from typing import Any

import numpy as np

EACH = 128  # elements of an array that get a curve of their own


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """`{name: value}` of scalars and arrays as scalars alone, none of them left out.

    Arrays hold one value a layer, or one a layer and expert. Up to `EACH` elements: `name/0, name/1, ...`, in the order of memory. More,
    as of 58 layers with 256 experts: of each layer `name/0/min`, `/mean` and `/max`; the single values are in the histogram, see `many`.
    """
    record: dict[str, float] = {}
    for name, value in metrics.items():
        array = np.asarray(value)
        if array.ndim == 0:
            record[name] = array.item()
        elif array.size <= EACH or array.ndim == 1:
            record.update({f"{name}/{i}": float(x) for i, x in enumerate(array.ravel())})
        else:
            for i, row in enumerate(array.reshape(len(array), -1).astype(np.float64)):
                record |= {f"{name}/{i}/{kind}": float(getattr(row, kind)()) for kind in ("min", "mean", "max")}
    return record


def many(metrics: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays of which `numbers` gives no single elements: for a histogram."""
    arrays = {name: np.asarray(value) for name, value in metrics.items()}
    return {name: array for name, array in arrays.items() if array.ndim > 1 and array.size > EACH}
