"""What a chip can do at most: products a second by dtype, bytes a second of memory and of links. `conf/chip/*.yaml` holds them.

A chip that no file describes has no numbers, and what would need them is "n/a": never a guess. TPUs come from jax's own table. The
processor of this machine is measured once, by a probe of a few seconds (`jaxllm.measure.probe`).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jaxllm.errors import UserError


@dataclasses.dataclass(frozen=True)
class Chip:
    """One JAX device.

    matmul: dense FLOP/s by dtype, a multiply-add counting 2. bandwidth: bytes/s of main memory. memory: its bytes. link: bytes/s out
    of one device to its peers, and as many in. layer_overhead: seconds a layer of a decode step takes beside its work. kinds: regular
    expressions, one of which is found in jax's `device_kind`. tpu, cores: entry of jax's table of TPUs, and its TensorCores that make
    one device. measured: the numbers come from a probe of this machine. null = not known.
    """

    name: str
    kinds: Sequence[str] = ()
    matmul: Mapping[str, float] = dataclasses.field(default_factory=dict)
    bandwidth: float | None = None
    memory: float | None = None
    link: float | None = None
    layer_overhead: float = 0.0
    tpu: str | None = None
    cores: int = 1
    measured: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        numbers = {**{f"matmul.{k}": v for k, v in self.matmul.items()}, "bandwidth": self.bandwidth}
        numbers |= {"memory": self.memory, "link": self.link}
        for name, value in numbers.items():
            if value is not None and not value > 0:
                raise UserError(f"chip.{name}: {value} must be above 0, or null where it is not known")
        if self.layer_overhead < 0:
            raise UserError(f"chip.layer_overhead: {self.layer_overhead} must be 0 or more seconds")

    def peak(self, dtype: Any) -> float | None:
        """Dense FLOP/s of products in this dtype (a name or a numpy dtype)."""
        return self.matmul.get(str(getattr(dtype, "name", dtype)))

    def is_kind(self, kind: str) -> bool:
        return any(re.search(pattern, kind, re.IGNORECASE) for pattern in self.kinds)


def known(folder: Path) -> dict[str, Chip]:
    """The chips of a `conf/chip` folder by file name."""
    return {file.stem: _read(file) for file in sorted(folder.glob("*.yaml"))}


def _read(file: Path) -> Chip:
    node = yaml.safe_load(file.read_text(encoding="utf-8"))
    node = {name: value for name, value in node.items() if name != "_target_"}
    numbers = {name: float(node[name]) for name in ("bandwidth", "memory", "link", "layer_overhead") if name in node}
    return Chip(**node | numbers | {"matmul": {name: float(v) for name, v in node.get("matmul", {}).items()}})


def detect(device: Any, folder: Path) -> Chip:
    """The chip of a `jax.Device` (or a `device_kind`); one without numbers where none of the files describes it."""
    kind = device if isinstance(device, str) else str(getattr(device, "device_kind", ""))
    found = next((chip for chip in known(folder).values() if chip.is_kind(kind)), None)
    return Chip(name=kind or "unknown", source="not described in conf/chip") if found is None else filled(found)


def filled(chip: Chip) -> Chip:
    """With the numbers of jax's table where the chip is a TPU. float32 is multiplied in bfloat16 there, by jax's default precision."""
    if chip.tpu is None:
        return chip
    from jax.experimental.pallas import tpu

    try:
        facts = tpu.get_tpu_info_for_chip(tpu.ChipVersion(chip.tpu), 1)
    except ValueError as error:
        raise UserError(f"chip.tpu: {chip.tpu!r} is not in jax's table of TPUs") from error
    speeds = {
        "bfloat16": facts.bf16_ops_per_second,
        "float32": facts.bf16_ops_per_second,
        "int8": facts.int8_ops_per_second,
        "float8": facts.fp8_ops_per_second,
    }
    return dataclasses.replace(
        chip,
        matmul={name: float(chip.cores * speed) for name, speed in speeds.items() if speed} | dict(chip.matmul),
        bandwidth=chip.bandwidth or float(chip.cores * facts.mem_bw_bytes_per_second),
        memory=chip.memory or float(chip.cores * facts.hbm_capacity_bytes),
    )


def peak_flops(device: Any, folder: Path) -> float | None:
    """Dense bfloat16 FLOP/s of one device, or None where it is not known without measuring."""
    return detect(device, folder).peak("bfloat16")
