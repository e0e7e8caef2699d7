"""How one tensor of a foreign checkpoint holds one or several of our parameters. Every form is read in both directions.

Shapes are of one layer. PyTorch's Linear stores `[out, in]`, ours are einsum operands with the inputs first: `[d h k]`, `[h v d]`.
Letters as everywhere: d model, h query heads, g kv heads, k head dim, v value dim, r latent, n nope part of a key, e experts.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Form(Protocol):
    def shape(self, ours: Sequence[Shape]) -> Shape:
        """The foreign tensor's shape, from those of our parameters."""
        ...

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        """Foreign to ours; views where possible."""
        ...

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Ours to foreign."""
        ...


@dataclass(frozen=True)
class Same:
    """As it is: embeddings, norms, sinks."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return ours[0]

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0]


@dataclass(frozen=True)
class Table(Same):
    """Whole numbers, written as int64: which expert a token goes to."""

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].astype(np.int64)


@dataclass(frozen=True)
class Flat:
    """A vector of all heads: biases `[h k]` as `[h k]` in one axis."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return (math.prod(ours[0]),)

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor.reshape(ours[0])]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(-1)


@dataclass(frozen=True)
class Linear:
    """A Linear's weight `[out, in]`. inputs: how many of our first axes are summed over.

    swap_halves: the two halves of each head's channels change places. Turning by the negative angle, as nanochat does, is turning by
    the positive one with the halves swapped, and scores do not depend on the order of the channels.
    """

    inputs: int = 1
    swap_halves: bool = False

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return math.prod(ours[0][self.inputs :]), math.prod(ours[0][: self.inputs])

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [self._swapped(tensor.T.reshape(ours[0]))]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        (array,) = arrays
        return self._swapped(array).reshape(math.prod(array.shape[: self.inputs]), -1).T

    def _swapped(self, array: np.ndarray) -> np.ndarray:
        return np.roll(array, array.shape[-1] // 2, axis=-1) if self.swap_halves else array


@dataclass(frozen=True)
class InOut:
    """GPT-2's Conv1D: a weight `[in, out]`, already the way round that ours are."""

    inputs: int = 1

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return math.prod(ours[0][: self.inputs]), math.prod(ours[0][self.inputs :])

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor.reshape(ours[0])]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(self.shape([arrays[0].shape]))


@dataclass(frozen=True)
class Side:
    """Several of ours side by side on the last axis of one tensor, each flattened by `form`: GPT-2's c_attn holds q, k and v."""

    form: InOut | Flat

    def shape(self, ours: Sequence[Shape]) -> Shape:
        parts = [self.form.shape([shape]) for shape in ours]
        return (*parts[0][:-1], sum(part[-1] for part in parts))

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        ends = np.cumsum([self.form.shape([shape])[-1] for shape in ours])[:-1]
        pieces = np.split(tensor, ends, axis=-1)
        return [self.form.split(piece, [shape])[0] for piece, shape in zip(pieces, ours, strict=True)]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([self.form.join([array]) for array in arrays], axis=-1)


@dataclass(frozen=True)
class PerHead:
    """MLA's kv_b_proj `[h (n + v), r]`: each head's n key rows, then its v value rows; ours are `[r h n]` and `[r h v]`."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        r, h, _ = ours[0]
        return h * sum(shape[2] for shape in ours), r

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        r, h, n = ours[0]
        rows = tensor.reshape(h, -1, r).transpose(2, 0, 1)
        return [rows[:, :, :n], rows[:, :, n:]]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        rows = np.concatenate(list(arrays), axis=2)  # [r h n+v]
        return rows.transpose(1, 2, 0).reshape(-1, rows.shape[0])


@dataclass(frozen=True)
class Grouped:
    """Several Linears in one `[out, in]`, group by group: `groups` heads, and of each the outputs of the first of ours, of the second, ...

    Qwen3-Next holds the queries and gates of an attention head so, and all that a key head of its linear attention reads.
    """

    groups: int

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return sum(math.prod(shape[1:]) for shape in ours), ours[0][0]

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        sizes = [math.prod(shape[1:]) // self.groups for shape in ours]
        rows = np.split(tensor.reshape(self.groups, -1, tensor.shape[1]), np.cumsum(sizes)[:-1], axis=1)
        return [part.reshape(-1, tensor.shape[1]).T.reshape(shape) for part, shape in zip(rows, ours, strict=True)]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        d = arrays[0].shape[0]
        rows = [array.reshape(d, -1).T.reshape(self.groups, -1, d) for array in arrays]
        return np.concatenate(rows, axis=1).reshape(-1, d)


@dataclass(frozen=True)
class Taps:
    """Depthwise convolutions, one after the other, `[c 1 n]`; ours are `[n h k]`, the last tap on the current token in both."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return sum(math.prod(shape[1:]) for shape in ours), 1, ours[0][0]

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        ends = np.cumsum([math.prod(shape[1:]) for shape in ours])[:-1]
        parts = np.split(tensor[:, 0], ends)
        return [part.T.reshape(shape) for part, shape in zip(parts, ours, strict=True)]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate([array.reshape(array.shape[0], -1).T for array in arrays])[:, None]


@dataclass(frozen=True)
class Padded:
    """A vector with axes of size 1 around it."""

    before: int
    after: int

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return (*(1,) * self.before, *ours[0], *(1,) * self.after)

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor.reshape(ours[0])]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(self.shape([arrays[0].shape]))


@dataclass(frozen=True)
class Experts:
    """All experts in one tensor, several of ours side by side: `[e i o]` as `[e (o..) i]`, and biases `[e o]` as `[e (o..)]`.

    outputs_first: rows are outputs, as in a Linear; gpt-oss has them in the last axis. interleaved: output by output, gate and up in
    turn, as in gpt-oss; else one after the other.
    """

    outputs_first: bool = True
    interleaved: bool = False

    def shape(self, ours: Sequence[Shape]) -> Shape:
        outer, total = ours[0][:-1], sum(shape[-1] for shape in ours)
        return (outer[0], total, outer[1]) if self._turned(ours[0]) else (*outer, total)

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        if self._turned(ours[0]):
            tensor = tensor.transpose(0, 2, 1)
        if self.interleaved:
            return [tensor[..., n :: len(ours)] for n in range(len(ours))]
        return np.split(tensor, np.cumsum([shape[-1] for shape in ours])[:-1], axis=-1)

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        if self.interleaved:
            whole = np.stack(list(arrays), axis=-1).reshape(*arrays[0].shape[:-1], -1)
        else:
            whole = np.concatenate(list(arrays), axis=-1)
        return whole.transpose(0, 2, 1) if self._turned(arrays[0].shape) else whole

    def _turned(self, shape: Shape) -> bool:
        return self.outputs_first and len(shape) == 3


@dataclass(frozen=True)
class Blocks:
    """One Linear a group, below each other, `[(g o), i]`; ours are `[g i.. o]`."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        g, *inputs, o = ours[0]
        return g * o, math.prod(inputs)

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        g, *_, o = ours[0]
        return [tensor.reshape(g, o, -1).transpose(0, 2, 1).reshape(ours[0])]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        (array,) = arrays
        g, o = array.shape[0], array.shape[-1]
        return array.reshape(g, -1, o).transpose(0, 2, 1).reshape(g * o, -1)


@dataclass(frozen=True)
class Rows:
    """A matrix whose rows are all but our first axis: hyper-connections' `[m n d]` as `[m (n d)]`."""

    def shape(self, ours: Sequence[Shape]) -> Shape:
        return ours[0][0], math.prod(ours[0][1:])

    def split(self, tensor: np.ndarray, ours: Sequence[Shape]) -> list[np.ndarray]:
        return [tensor.reshape(ours[0])]

    def join(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return arrays[0].reshape(arrays[0].shape[0], -1)
