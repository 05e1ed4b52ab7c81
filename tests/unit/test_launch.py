"""What is found out about a cluster before an engine is started on it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import launch
from cluster.config import EngineConfig
from scheduler.errors import EngineUnavailable
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


def test_the_number_of_workers_follows_the_load_where_it_may() -> None:
    assert launch._scaling(EngineConfig(num_workers=3), 3) is None
    assert launch._scaling(EngineConfig(max_workers=8), 2) == ScalingLimits(2, 8)
    limits = launch._scaling(
        EngineConfig(min_workers=1, num_workers=3, target_queue_s=5, worker_idle_s=60), 3
    )
    assert limits == ScalingLimits(1, 3, 5.0, 60.0)


def test_a_head_that_could_not_serve_a_client_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts a process for each client from outside, and on a busy machine that may fail."""
    answers: list[Exception | None] = [ConnectionError(f"{launch._NO_SERVER}: it ended"), None]
    asked = []

    def init(**arguments: Any) -> None:
        asked.append(arguments["address"])
        error = answers.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(launch.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(launch.ray, "init", init)
    config = EngineConfig(ray_address="ray://h:10001")
    assert launch.connect_to_ray(config)
    assert asked == ["ray://h:10001"] * 2
    answers.append(ConnectionError("ray client connection timeout"))
    with pytest.raises(EngineUnavailable, match=r"ray://h:10001 can't be reached"):
        launch.connect_to_ray(config)
    assert len(asked) == 3
