"""A whole host is lost under a request that is in mid-prefill on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import Scenario
from tests.hosts.fleet import Host
from tests.hosts.ray_on_hosts import ray_address

pytestmark = pytest.mark.slow

_START_S = 120.0
_RUN_S = 120.0


def settings(hosts: Sequence[Host], model: Path) -> dict[str, Any]:
    """Two workers, which need a CPU each and so are on the second and the third host."""
    head, victim, _ = hosts
    return {
        "engine": {
            "model": str(model),
            "num_workers": 2,
            "device": "cpu",
            "dtype": "float32",
            "block_size": 8,
            "num_blocks": 800,
            "max_num_batched_tokens": 16,
            "num_threads": 1,
            "offload_bytes": 2**25,
            "save_finished": False,
            "enable_prefix_caching": False,
            "ray_address": ray_address(head),
        },
        "victim": victim.address,
        "num_requests": 4,
        "num_tokens": 1500,
        "num_computed_tokens": 600,
    }


def test_a_host_that_is_powered_off_in_mid_prefill_changes_no_bit(
    ray_hosts: Sequence[Host],
    tiny_model: Path,
    start_scenario: Callable[[Host, str, dict[str, Any]], Scenario],
) -> None:
    head, victim, survivor = ray_hosts
    scenario = start_scenario(head, "long_prompts", settings(ray_hosts, tiny_model))
    workers = scenario.wait_for("started", _START_S)["workers"]
    assert sorted(workers.values()) == [victim.address, survivor.address]
    scenario.wait_for("undisturbed", _RUN_S)
    scenario.wait_for("prefilling", _RUN_S)
    victim.power_off()
    finished = scenario.wait_for("finished", _RUN_S)
    assert all(finished["same"])
    assert finished["stats"]["scheduler"]["num_workers_lost"] == 1
    assert finished["stats"]["scheduler"]["num_recomputed_rows"] == 0
    scenario.wait_for("done", _RUN_S)
