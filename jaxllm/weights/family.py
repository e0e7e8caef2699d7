"""A family: what a config.json of some model types means here, and which of its tensors is which of our parameters.

One declarative table serves both directions. `to_model` turns a config.json into a model node; `rules` pair tensors and parameters;
`to_config` proposes a config.json for a model of ours, and the proposal counts only if `to_model` makes the same model of it again.
"""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from jaxllm.layers.base import Declared
from jaxllm.model import LanguageModel
from jaxllm.params import is_declared, path_name
from jaxllm.weights.config_json import ConfigJson
from jaxllm.weights.forms import Experts, Form, Shape

Node = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """`ours`: one or several parameters, of the model ("embed") or of a layer ("mixer/q_proj"). theirs: the tensor, `{i}` the layer;
    `{e}` the expert, where each has a tensor of its own: then it holds one entry of the first axis of ours.

    Several rules for the same parameters are layouts: the first is written, and reading takes the one whose tensors are there.
    beside: it speaks of layers alone that have this parameter too, where layers of two kinds have some of one name.
    """

    ours: tuple[str, ...]
    theirs: str
    form: Form
    beside: str = ""

    @property
    def of_layer(self) -> bool:
        return "{i}" in self.theirs

    @property
    def of_expert(self) -> bool:
        return "{e}" in self.theirs

    def fits(self, boxes: Mapping[str, Declared]) -> bool:
        """Whether it speaks of these parameters: those of experts have the names of a dense layer's, and one axis more."""
        if self.beside and self.beside not in boxes:
            return False
        of_experts = self.of_expert or isinstance(self.form, Experts)
        return all(name in boxes and ("expert" in boxes[name].names) == of_experts for name in self.ours)


@dataclass(frozen=True)
class Family:
    """model_type, architecture: as config.json has them, the first of each is what we write.

    prefix: of the names of the backbone's tensors; files of the backbone alone come without it. ignore: regular expressions of
    tensors that hold nothing a model learns (tables of angles or masks that old versions saved). aside: such expressions by
    config.json, of tensors that the model itself does not run (draft layers). by_size: rules whose form depends on the model's sizes.
    draft: of what a draft layer (`jaxllm.layers.mtp`) has beside its block, whose rules are those of any layer.
    """

    model_types: tuple[str, ...]
    architectures: tuple[str, ...]
    to_model: Callable[[ConfigJson], Node]
    to_config: Callable[[LanguageModel], Node]
    rules: tuple[Rule, ...]
    prefix: str = "model."
    ignore: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)
    aside: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda config: ()
    by_size: Callable[[LanguageModel], tuple[Rule, ...]] = lambda model: ()
    draft: tuple[Rule, ...] = ()


class NoPlace(Exception):
    """A model that a family cannot hold; each argument says one thing that is in the way."""


class NoClass(NoPlace):
    """A model with layers of a kind that a family does not have."""


class Differs(NoPlace):
    """A model that differs from the family's nearest in the fields that are named."""


@dataclass(frozen=True)
class Placed:
    """A rule at work: the paths of its parameters in the stacked tree, and the tensors that hold them.

    names: of the tensors, and at: of each, where it lies in the parameters: () the whole of them, (n,) the n-th repeat, (n, e) the
    e-th expert of it. shapes: of the parts of the parameters that one tensor holds, without padding of the vocabulary. trained: by
    gradients; what is not (biases that choose experts) keeps its precision in files of any dtype.
    """

    rule: Rule
    paths: tuple[str, ...]
    names: tuple[str, ...]
    at: tuple[tuple[int, ...], ...]
    shapes: tuple[Shape, ...]
    trained: bool = True


def plan(
    family: Family, model: LanguageModel, declared: Mapping[str, Any], there: Container[str] | None = None
) -> list[Placed]:
    """Where every declared parameter of the stacked tree is found. there: the tensors of a file, which decide between layouts.

    Raises NoPlace for a parameter that the family has no tensor for.
    """
    boxes = leaves(declared)
    free = [path for path in boxes if not _in_group(path) and not path.startswith("mtp/")]
    places = _match(family.rules, family, model, "", free, boxes, (0,), there, of_layer=False, stacked=False)
    first = 0
    heads = model.mtp_heads()
    for k in range(0 if heads is None else heads.depth):  # draft layers, numbered on from the last layer
        stem = f"mtp/d{k + 1}/"
        number = (model.num_layers + k,)
        for part, rules in ((stem, family.draft), (stem + "block/", family.rules)):
            inside = [path.removeprefix(part) for path in boxes if path.startswith(part)]
            if part == stem:
                inside = [path for path in inside if not path.startswith("block/")]
            places += _match(rules, family, model, part, inside, boxes, number, there, of_layer=True, stacked=False)
    for i, group in enumerate(model.groups):
        for j in range(len(group.period)):
            stem = f"g{i}/b{j}/"
            numbers = tuple(first + n * len(group.period) + j for n in range(group.repeats))
            inside = [path.removeprefix(stem) for path in boxes if path.startswith(stem)]
            places += _match(
                family.rules, family, model, stem, inside, boxes, numbers, there, of_layer=True, stacked=True
            )
        first += group.layers
    return places


def leaves(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by path name; of a declaration, its boxes."""
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_declared)[0]}


def _in_group(path: str) -> bool:
    return path[0] == "g" and path[1:].partition("/")[0].isdecimal()


def _match(
    table: tuple[Rule, ...],
    family: Family,
    model: LanguageModel,
    stem: str,
    inside: list[str],
    boxes: Mapping[str, Declared],
    numbers: tuple[int, ...],
    there: Container[str] | None,
    *,
    of_layer: bool,
    stacked: bool,
) -> list[Placed]:
    """The rules of `table` that speak of the parameters `inside`, all of which must be spoken of. of_layer: those of a layer, `numbers`
    telling which; stacked: with an axis of their own for it."""
    left, found = set(inside), list[Placed]()
    here = {name: boxes[stem + name] for name in inside}
    rules = [rule for rule in (*family.by_size(model), *table) if rule.of_layer == of_layer]
    if there is not None:  # rules whose tensors are there come first; the others then name what is missing
        rules.sort(key=lambda rule: rule.theirs.format(i=numbers[0], e=0) not in there)
    for rule in rules:
        if not left.issuperset(rule.ours) or not rule.fits(here):
            continue
        left -= set(rule.ours)
        paths = tuple(stem + name for name in rule.ours)
        shapes = tuple(_shape(model, path, boxes[path], stacked) for path in paths)
        names, at = [], []
        for n, number in enumerate(numbers):
            for e in range(shapes[0][0] if rule.of_expert else 1):
                names.append(rule.theirs.format(i=number, e=e))
                at.append((*((n,) if stacked else ()), *((e,) if rule.of_expert else ())))
        if rule.of_expert:
            shapes = tuple(shape[1:] for shape in shapes)
        trained = all(boxes[path].trainable for path in paths)
        found.append(Placed(rule, paths, tuple(names), tuple(at), shapes, trained))
    if left:
        name = sorted(left)[0]
        raise NoPlace(f"{family.model_types[0]} has no tensor for the parameter {stem}{name}")
    return found


def _shape(model: LanguageModel, path: str, box: Declared, stacked: bool) -> Shape:
    shape = tuple(box.value.shape[1:] if stacked else box.value.shape)
    if path == "embed":
        return (model.vocab_size, *shape[1:])
    return (*shape[:-1], model.vocab_size) if path == "lm_head" else shape
