"""Published savings at a million tokens, from the configurations that were released."""

import importlib.util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "experiments" / "long_context_costs" / "costs.py"


@pytest.fixture(scope="module")
def costs():
    spec = importlib.util.spec_from_file_location("long_context_costs", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_released_configurations_give_the_published_savings(costs):
    found = costs.claims()
    want = {"v4_pro_flops_weighed": 0.27, "v4_pro_bytes": 0.10, "v4_flash_flops_weighed": 0.10, "v4_flash_bytes": 0.07}
    assert {name: found[name] for name in want} == pytest.approx(want, abs=0.006)
    assert 0.26 < found["v4_pro_flops"] < 0.27 and found["v4_pro_elements"] == 4924 / 42944
    assert found["index_share"] == pytest.approx(2.73, abs=0.01)
    assert 2.8 < found["index_share_expanded"] < found["index_share_quarter"] < 2.9


def test_released_configurations_have_the_published_sizes(costs):
    totals = {"deepseek_v32": (671e9, 37e9), "deepseek_v4_pro": (1.6e12, 49e9), "deepseek_v4_flash": (284e9, 13e9)}
    for name, (total, active) in totals.items():
        cost = costs.model(f"model={name}").cost(1, 1, 1)
        assert cost.params == pytest.approx(total, rel=0.02) and cost.params_active == pytest.approx(active, rel=0.03)


def test_every_mechanism_has_a_row_for_every_context_and_a_curve(costs, tmp_path):
    """Latents are a cache of 576 elements a token and layer; entries make the cache of compressed attention the smallest."""
    built = {kind: costs.stack(kind) for kind in ("MLA", "DSA", "CSA/HCA")}
    results = {kind: {c: costs.decode(m, c) for c in costs.CONTEXTS} for kind, m in built.items()}
    assert results["MLA"][4096]["held"] == 60 * 576 * 2 * 4096
    assert results["DSA"][2**20]["flops"] < 0.1 * results["MLA"][2**20]["flops"]
    text = costs.table(results)
    assert text.count("\n| DSA |") == 3 and "1024k" in text
    costs.plot(results, tmp_path / "costs.png")
    assert (tmp_path / "costs.png").stat().st_size > 10_000
