"""Every `conf/mixer/*.yaml` and `conf/ffn/*.yaml` keeps the contract. A new file is picked up by its name alone."""

import functools

import contract
import pytest
import toys

from jaxllm.compose import component
from jaxllm.config import options

TOYS = {
    "toy_recurrent": ({"m": toys.ToyRecurrent}, "2* m/dense"),
    "toy_shared": (
        {"m": toys.ToyRecurrent, "own": toys.ToyShare, "use": functools.partial(toys.ToyShare, owner=False)},
        "own/dense | 2* m/dense use/dense",
    ),
}
AFTER = {"dsa_shared": "dsa"}  # mixers that take what another kind of layer before them gives
CHECKS = [getattr(contract, name) for name in dir(contract) if name.startswith("check_")]
STATELESS = [
    getattr(contract, f"check_{name}")
    for name in ("causal", "packed", "padding", "bf16_gradients", "sharded", "cost", "flops")
]


@functools.cache
def subject(kind: str) -> contract.Subject:
    if kind.startswith("mixer/"):
        name = kind.removeprefix("mixer/")
        mixers = {"m": component("mixer", name)}
        if name not in AFTER:
            return contract.Subject(contract.model_of(mixers, "2* m/dense"))
        return contract.Subject(
            contract.model_of(mixers | {"own": component("mixer", AFTER[name])}, "own/dense | 2* m/dense")
        )
    if kind.startswith("ffn/"):
        ffn = component("ffn", kind.removeprefix("ffn/"))
        return contract.Subject(contract.model_of({"m": component("mixer", "gqa")}, "2* m/f", {"f": ffn}))
    mixers, layers = TOYS[kind]
    return contract.Subject(contract.model_of(mixers, layers))


CASES = [(f"mixer/{name}", check) for name in options("mixer") for check in CHECKS]
CASES += [(name, check) for name in sorted(TOYS) for check in CHECKS]
CASES += [
    (f"ffn/{name}", check) for name in options("ffn") for check in STATELESS
]  # an ffn has no cache to split or to roll back


@pytest.mark.parametrize(
    ("kind", "check"), CASES, ids=[f"{kind}-{check.__name__.removeprefix('check_')}" for kind, check in CASES]
)
def test_contract(kind, check):
    check(subject(kind))
