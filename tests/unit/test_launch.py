"""What is found out about a cluster before an engine is started on it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import bundles, fleet, launch
from cluster.config import EngineConfig
from scheduler.scaling import ScalingLimits


def on(monkeypatch: pytest.MonkeyPatch, *nodes: dict[str, float]) -> None:
    """Have a cluster of nodes with these resources."""
    total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    monkeypatch.setattr(launch, "resources_of_nodes", lambda: list(nodes))
    monkeypatch.setattr(launch, "resources", lambda which: total)


@pytest.mark.parametrize(
    ("settings", "num_gpus", "num_workers"),
    [
        ({}, 1.0, 6),
        ({}, 2.0, 3),
        ({}, 0.5, 12),
        ({}, 0.0, 1),
        ({"max_workers": 4}, 1.0, 4),
        ({"min_workers": 8, "max_workers": 9}, 1.0, 8),
        ({"min_workers": 2}, 0.0, 2),
        ({"tensor_parallel_size": 2}, 1.0, 3),
        ({"tensor_parallel_size": 4}, 1.0, 1),
        ({"tensor_parallel_size": 2}, 0.0, 1),
    ],
)
def test_by_default_there_is_one_worker_per_gpu(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], num_gpus: float, num_workers: int
) -> None:
    on(monkeypatch, {"CPU": 0}, {"CPU": 16, "GPU": 4}, {"CPU": 8, "GPU": 2})
    assert launch._workers_at_start(EngineConfig(**settings), num_gpus) == num_workers


@pytest.mark.parametrize(
    ("settings", "num_threads"),
    [
        ({"num_workers": 2}, 12),
        ({"num_workers": 1}, 16),
        ({"num_workers": 1, "max_workers": 8}, 3),
        ({"num_workers": 99}, 1),
        ({"num_workers": 2, "tensor_parallel_size": 3}, 4),
    ],
)
def test_workers_share_the_cores_that_there_are(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, int], num_threads: int
) -> None:
    on(monkeypatch, {"CPU": 0}, {"CPU": 16}, {"CPU": 8})
    assert launch._threads_per_worker(EngineConfig(**settings)) == num_threads


def test_while_there_is_only_a_head_a_worker_has_the_threads_that_it_reserves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`ray up` starts the engine before the machines that it computes on are there."""
    on(monkeypatch, {"CPU": 0})
    assert launch._threads_per_worker(EngineConfig(num_workers=2, cpus_per_worker=4)) == 4
    assert launch._threads_per_worker(EngineConfig(num_workers=2, cpus_per_worker=0.5)) == 1


def test_the_fleet_is_told_of_the_processes_of_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, {"CPU": 16, "GPU": 4})
    config = EngineConfig(tensor_parallel_size=2, cpus_per_worker=3)
    _, own = launch.engine_spec(config)
    assert (own.num_workers, own.tensor_parallel_size) == (2, 2)
    assert (own.worker_options["num_cpus"], own.worker_options["num_gpus"]) == (3, 1)


@pytest.mark.parametrize(
    ("size", "lacking", "asked"),
    [
        (1, "asked for 6 GPU for 6 workers with 1 each", "6 workers with 1 CPU and 1 GPU each are"),
        (
            3,
            "asked for 18 CPU for 6 workers of 3 bundles with 1 each and "
            "18 GPU for 6 workers of 3 bundles with 1 each",
            "6 workers of 3 bundles with 1 CPU and 1 GPU each are asked for. The cluster has",
        ),
    ],
)
def test_a_shortage_names_what_each_process_asks_for(
    monkeypatch: pytest.MonkeyPatch, size: int, lacking: str, asked: str
) -> None:
    on(monkeypatch, {"CPU": 16, "GPU": 4})
    monkeypatch.setattr(fleet, "resources", launch.resources)
    monkeypatch.setattr(fleet, "resources_of_nodes", launch.resources_of_nodes)
    _, own = launch.engine_spec(EngineConfig(num_workers=6, tensor_parallel_size=size))
    assert own.lacking() == lacking
    assert own.describe_shortage().startswith(asked)


@pytest.mark.parametrize(
    ("nodes", "strategy"),
    [
        ([{"CPU": 2.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 2.0}], "STRICT_PACK"),
        ([{"CPU": 9.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 9.0}], "PACK"),
        ([], "PACK"),
    ],
)
def test_processes_of_one_worker_are_on_one_node_where_one_has_room_for_all(
    monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, float]], strategy: str
) -> None:
    asked: list[tuple[Any, Any]] = []

    def make(bundle_list: list[dict[str, float]], **options: Any) -> str:
        asked.append((bundle_list, options))
        return "group"

    monkeypatch.setattr(bundles, "placement_group", make)
    place = bundles.in_new_group("ns/worker-0", 2, {"CPU": 1.0, "GPU": 1.0}, nodes)
    assert (place.placement_group, place.placement_group_bundle_index) == ("group", 0)
    options = {"strategy": strategy, "name": "ns/worker-0", "lifetime": "detached"}
    assert asked == [([{"CPU": 1.0, "GPU": 1.0}] * 2, options)]


def test_the_number_of_workers_follows_the_load_where_it_may() -> None:
    assert launch._scaling(EngineConfig(num_workers=3), 3) is None
    assert launch._scaling(EngineConfig(max_workers=8), 2) == ScalingLimits(2, 8)
    limits = launch._scaling(
        EngineConfig(min_workers=1, num_workers=3, target_queue_s=5, worker_idle_s=60), 3
    )
    assert limits == ScalingLimits(1, 3, 5.0, 60.0)
