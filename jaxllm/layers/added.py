"""What is added to a model that is there and trained beside it: adapters on its matrices, or a draft head. All else stays frozen.

The tree of parameters holds both; what a checkpoint keeps of it is what was added, and the checkpoint names the model it was added to.
"""

from collections.abc import Mapping
from typing import Any

from jaxllm.layers.base import ADAPTER
from jaxllm.layers.draft import NAME as DRAFT

Tree = dict[str, Any]


def frozen(tree: Mapping[str, Any]) -> Tree:
    """A declaration in which everything but the draft head stands still, whatever a layer's statistics say."""
    return {
        key: value if key == DRAFT else frozen(value) if isinstance(value, Mapping) else still(value)
        for key, value in tree.items()
    }


def still(box: Any) -> Any:
    """One parameter's declaration, without gradient and without an update of its own."""
    return box.replace(trainable=False, update=None)


def own(declared: Mapping[str, Any], inside: bool = False) -> Tree:
    """Tree of booleans: what is kept, that is everything that is not the base's."""
    out: Tree = {}
    for key, box in declared.items():
        here = inside or key == DRAFT
        out[key] = own(box, here) if isinstance(box, Mapping) else here or box.trainable or ADAPTER in key
    return out


def without(params: Mapping[str, Any]) -> Tree:
    """The tree of the base: nothing that was added."""
    return {
        key: without(value) if isinstance(value, Mapping) else value
        for key, value in params.items()
        if ADAPTER not in key and key != DRAFT
    }


def additions(declared: Mapping[str, Any]) -> Tree:
    """What was added, alone."""
    out: Tree = {}
    for key, box in declared.items():
        if key == DRAFT or ADAPTER in key:
            out[key] = box
        elif isinstance(box, Mapping) and (below := additions(box)):
            out[key] = below
    return out
