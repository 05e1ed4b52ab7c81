"""The head's host loses power, with the scheduler, the store, the client and Ray's own state."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.hosts.conftest import Console, engine_settings, in_mid_prefill
from tests.hosts.fleet import Host
from tests.hosts.ray_on_hosts import join, start_head

pytestmark = pytest.mark.slow

DURABLE = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": "/tmp/gcs"}
"""Ray keeps its own state in files on the head's disk."""


def test_a_head_that_comes_back_goes_on_with_what_its_disk_holds(
    hosts: Sequence[Host], tiny_model: Path
) -> None:
    """The worker's host was up all the time, and its worker is taken over."""
    head, other, _ = hosts
    start_head(head, DURABLE)
    join(head, [other])
    engine = engine_settings(head, tiny_model, 1)
    client = Console(head, engine, num_requests=2)
    undisturbed = client.run("calm")
    workers = client.ask("look")["workers"]
    request_ids, _ = in_mid_prefill(client, "left", other, 700, detached=True)

    head.power_off()
    head.power_on()
    start_head(head, DURABLE)

    client = Console(head, engine, num_requests=2)
    assert client.ask("results", request_ids=request_ids)["bits"] == undisturbed
    after = client.ask("wait_until_idle", num_workers=1)
    assert after["workers"] == workers
    assert 0 < after["scheduler"]["num_requests_restored"] <= len(request_ids)
    assert after["scheduler"]["num_recomputed_rows"] == 0
    parts = client.ask("parts")
    assert parts["scheduler"]["host"] == head.name
