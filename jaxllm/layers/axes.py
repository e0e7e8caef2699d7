"""What the logical axes of a parameter say about it: whether it is a matrix, and which axes are its inputs and its outputs.

One reading of the declaration for everybody who needs it: weight decay, Muon, low-rank adapters.
"""

from collections.abc import Sequence
from typing import NamedTuple

STACKS = ("layers", "expert")  # leading axes that merely stack independent matrices
NOT_FEATURES = ("conv", "norm", None)  # taps of a depth-wise convolution, gains: no direction in feature space
HEADS = ("heads", "kv_heads")  # together with `head` one output (or input) of a projection


class Sides(NamedTuple):
    """Axes of a matrix by what they are: those that stack independent matrices, its inputs, its outputs."""

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


def maps_features(names: Sequence[str | None]) -> bool:
    """Does a parameter of these axes map one feature space to another? True for projections and embeddings; false for norms,
    biases (a q/k/v bias `[heads, head]` included) and convolution taps."""
    rest = list(names)
    while rest and rest[0] in STACKS:
        rest.pop(0)
    features = [
        n for i, n in enumerate(rest) if n not in NOT_FEATURES and not (n == "head" and i and rest[i - 1] in HEADS)
    ]
    return len(features) >= 2


def sides(names: Sequence[str | None]) -> Sides | None:
    """The axes of a matrix, or None where inputs and outputs cannot be told apart by their names.

    Inputs come first, as in every projection here; `heads, head` are one side together.
    """
    stack: list[int] = []
    found: list[tuple[int, ...]] = []
    for i, name in enumerate(names):
        if name in NOT_FEATURES or (name in STACKS and not found):
            stack.append(i)
        elif name == "head" and i and names[i - 1] in HEADS:
            found[-1] = (*found[-1], i)
        else:
            found.append((i,))
    return Sides(tuple(stack), found[0], found[1]) if len(found) == 2 else None
