"""Which Ray a process connects to."""

from __future__ import annotations

from typing import Any

import pytest

from cluster import connecting, joining
from cluster.config import EngineConfig
from scheduler.errors import EngineUnavailable


def test_a_head_that_could_not_serve_a_client_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts a process for each client from outside, and on a busy machine that may fail."""
    answers: list[Exception | None] = [ConnectionError(f"{connecting._NO_SERVER}: it ended"), None]
    asked = []

    def init(**arguments: Any) -> None:
        asked.append(arguments["address"])
        error = answers.pop(0)
        if error is not None:
            raise error

    monkeypatch.setattr(connecting.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connecting.ray, "init", init)
    config = EngineConfig(ray_address="ray://h:10001")
    assert connecting.connect_to_ray(config)
    assert asked == ["ray://h:10001"] * 2
    answers.append(ConnectionError("ray client connection timeout"))
    with pytest.raises(EngineUnavailable, match=r"ray://h:10001 can't be reached"):
        connecting.connect_to_ray(config)
    assert len(asked) == 3


@pytest.mark.parametrize(("pid", "place"), [("raylet", "err"), (17, "out")])
def test_warnings_of_the_cluster_go_to_stderr(
    capsys: pytest.CaptureFixture[str], pid: str | int, place: str
) -> None:
    for _ in range(2):
        connecting.warn_on_stderr()
    line = {"lines": [f"of {pid}"], "pid": pid, "is_err": False, "ip": "", "task_name": ""}
    connecting.ray._private.worker.print_to_stdstream(line, ignore_prefix=True)
    read = capsys.readouterr()._asdict()
    assert f"of {pid}" in read.pop(place)
    assert read.popitem()[1] == ""


class Context:
    gcs_address = "10.0.0.1:6379"


@pytest.mark.parametrize("others", [[], ["10.0.0.1:41255"], ["10.0.0.1:1", "10.0.0.1:2"]])
def test_other_rays_of_the_machine_are_named_where_no_engine_is_found(
    monkeypatch: pytest.MonkeyPatch, others: list[str]
) -> None:
    """One that a command started for itself is not the one that Ray chooses."""
    services: Any = connecting.ray._private.services
    found = frozenset([*others, Context.gcs_address])
    monkeypatch.setattr(services, "find_gcs_addresses", lambda: found)
    monkeypatch.setattr(connecting.ray, "get_runtime_context", Context)
    monkeypatch.setattr(joining, "find_engine", lambda config: None)
    with pytest.raises(EngineUnavailable) as caught:
        joining.find_or_start(EngineConfig(), start=False)
    assert all(other in caught.value.message for other in others)
    assert ("HAVERSACK_RAY_ADDRESS" in caught.value.message) == bool(others)
