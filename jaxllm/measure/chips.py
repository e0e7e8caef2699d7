"""Peak matmul speed of known chips, for MFU (model FLOPs utilisation). Unknown chips have none, and MFU is "n/a"."""

from __future__ import annotations

from typing import Any

# Dense bf16 FLOP/s of one JAX device, by a part of its `device_kind`; the first part that occurs wins.
# Data sheets often print the figure with 2:4 sparsity, which is twice the dense one used here.
_PEAK_BF16: tuple[tuple[str, float, str], ...] = (
    ("B200", 2250e12, "NVIDIA Blackwell architecture brief, HGX B200, per GPU"),
    ("H200 NVL", 835e12, "NVIDIA H200 data sheet"),
    ("H200", 989e12, "NVIDIA H200 data sheet"),
    ("H100 PCIe", 756e12, "NVIDIA H100 data sheet"),
    ("H100 NVL", 835e12, "NVIDIA H100 data sheet"),
    ("H100", 989e12, "NVIDIA H100 data sheet, SXM5"),
    ("A100", 312e12, "NVIDIA A100 data sheet"),
    ("RTX 4090", 165.2e12, "NVIDIA Ada architecture white paper, fp32 accumulation"),
    ("TPU v4 lite", 137e12, "jax, pallas tpu_info"),
    ("TPU v4", 275e12, "Google Cloud TPU documentation"),
    ("TPU v5 lite", 197e12, "Google Cloud TPU documentation, v5e"),
    ("TPU v5e", 197e12, "Google Cloud TPU documentation"),
    ("TPU v5", 459e12, "Google Cloud TPU documentation, v5p"),
    ("TPU v6", 918e12, "Google Cloud TPU documentation, v6e"),
    # A v7 chip (2307e12) has two TensorCores and JAX shows each as a device.
    ("TPU7", 1153.5e12, "Google Cloud TPU documentation, TPU7x, per core"),
)
_PEAK_EXACT = {"NVIDIA L4": 121e12}  # NVIDIA L4 data sheet; "L4" is also a part of L40 and L40S


def peak_flops(device: Any) -> float | None:
    """Dense bf16 FLOP/s of one device (a `jax.Device` or its `device_kind`), or None where it is not known."""
    kind = device if isinstance(device, str) else str(getattr(device, "device_kind", ""))
    if kind in _PEAK_EXACT:
        return _PEAK_EXACT[kind]
    return next((peak for part, peak, _ in _PEAK_BF16 if part.lower() in kind.lower()), None)
