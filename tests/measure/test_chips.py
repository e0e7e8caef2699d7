"""What is known of chips, and the probe that measures a processor."""

import json

import jax
import pytest

from jaxllm.config import CONF
from jaxllm.errors import UserError
from jaxllm.measure import probe
from jaxllm.measure.chips import Chip, detect, filled, known, peak_flops

FOLDER = CONF / "chip"


@pytest.mark.parametrize(
    ("kind", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 920e12),
        ("TPU7x", 1155e12),
        ("cpu", None),
        ("some new chip", None),
    ],
)
def test_peaks(kind, peak):
    assert peak_flops(kind, FOLDER) == peak
    assert sum(chip.is_kind(kind) for chip in known(FOLDER).values()) == (peak is not None or kind == "cpu")


def test_this_device_has_the_peak_of_its_kind():
    assert peak_flops(jax.devices()[0], FOLDER) == peak_flops(jax.devices()[0].device_kind, FOLDER)


def test_every_file_is_whole_and_names_its_source():
    for name, chip in known(FOLDER).items():
        assert chip.source and chip.kinds, name
        if chip.tpu is None and not chip.measured:
            assert "https://" in chip.source or "github.com/" in chip.source, f"{name}: where can its figures be read?"
        if not chip.measured:
            chip = filled(chip)
            assert chip.peak("bfloat16") >= chip.peak("float32") > 1e12 > chip.link, name
            assert 1e11 < chip.link < chip.bandwidth < 1e13 or chip.link < 1e11 < chip.bandwidth, name
            assert 1.5e10 < chip.memory < 3e11, name


def test_mistakes():
    with pytest.raises(UserError, match="chip.bandwidth: -1"):
        Chip(name="x", bandwidth=-1.0)
    with pytest.raises(UserError, match="chip.tpu: 'v99'"):
        filled(Chip(name="x", tpu="v99"))


@pytest.fixture
def quick(monkeypatch):
    """A probe of almost no size, which counts how often it is taken."""
    taken = []
    real = probe.probe

    def small(load=0.0):
        taken.append(1)
        return real(size=64, stream=2**16, tries=1) | {"load": load}

    monkeypatch.setattr(probe, "probe", small)
    return taken


def test_a_processor_is_measured_once(quick, tmp_path):
    file, cpu = tmp_path / "chips" / "cpu.json", detect("cpu", FOLDER)
    first = probe.measured(cpu, file)
    assert first.peak("float32") > 1e6 and first.bandwidth > 1e6 and first.memory > 1e9 and first.link is None
    assert probe.measured(cpu, file) == first and len(quick) == 1
    file.write_text("{torn")
    assert probe.measured(cpu, file).memory == first.memory and len(quick) == 2
    assert json.loads(file.read_text())["jax"] == jax.__version__
    given = Chip(name="mine", measured=True, bandwidth=5.0, matmul={"float32": 7.0})
    assert probe.measured(given, file).bandwidth == 5.0 and probe.measured(given, file).peak("float32") == 7.0


def test_a_busy_machine_is_not_remembered(quick, tmp_path, monkeypatch):
    small, lines = probe.probe, []
    monkeypatch.setattr(probe, "probe", lambda: small(load=0.6 * probe._cores()))
    probe.measured(detect("cpu", FOLDER), tmp_path / "cpu.json", lines.append)
    assert not list(tmp_path.iterdir()) and "not kept" in lines[0]


def test_a_chip_with_numbers_is_left_alone(tmp_path):
    chip = detect("NVIDIA H200", FOLDER)
    assert probe.measured(chip, tmp_path / "no.json") is chip
