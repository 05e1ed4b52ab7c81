"""`ray_config.yaml` as an operator's `ray up` reads it: Ray's own preparation and schema."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config


@pytest.fixture
def config(repo_root: Path) -> dict[str, Any]:
    return yaml.safe_load((repo_root / "ray_config.yaml").read_text())


@pytest.fixture
def prepared(config: dict[str, Any]) -> dict[str, Any]:
    return prepare_config(copy.deepcopy(config))


def test_rays_schema_accepts_it(prepared: dict[str, Any]) -> None:
    validate_config(prepared)


def test_rays_schema_would_refuse_a_misspelt_key(config: dict[str, Any]) -> None:
    """The check above can fail: Ray's schema knows no key but its own."""
    config["head_start_ray_comands"] = []
    with pytest.raises(jsonschema.ValidationError, match="head_start_ray_comands"):
        validate_config(prepare_config(config))


def test_every_worker_address_is_started(config: dict[str, Any], prepared: dict[str, Any]) -> None:
    """With fewer min_workers than addresses, Ray leaves machines idle without a word."""
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    (node_type,) = prepared["available_node_types"].values()
    assert node_type["min_workers"] == len(config["provider"]["worker_ips"])


@pytest.mark.parametrize("key", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_dead_links_are_noticed_on_every_machine(config: dict[str, Any], key: str) -> None:
    """Without keepalives a call between two workers cut off from each other hangs for ever."""
    start = config[key][-1]
    assert "RAY_grpc_client_keepalive_time_ms=5000" in start
    assert "RAY_grpc_client_keepalive_timeout_ms=5000" in start
    assert "ulimit -n $(ulimit -Hn)" in start


def test_the_head_counts_a_silent_machine_as_lost_within_seconds(config: dict[str, Any]) -> None:
    """By default a machine that loses power is missed after a minute."""
    start = config["head_start_ray_commands"][-1]
    settings = dict(word.rstrip(";").split("=", 1) for word in start.split() if "=" in word)
    period_s = int(settings["RAY_health_check_period_ms"]) / 1000
    timeout_s = int(settings["RAY_health_check_timeout_ms"]) / 1000
    failures = int(settings["RAY_health_check_failure_threshold"])
    assert failures * (period_s + timeout_s) < 10


def test_the_head_starts_all_workers_of_a_local_provider(config: dict[str, Any]) -> None:
    """The newer autoscaler, which is the default, starts one too few."""
    assert "RAY_enable_autoscaler_v2=0" in config["head_start_ray_commands"][-1]
    assert (
        "--autoscaling-config=~/ray_bootstrap_config.yaml"
        in (config["head_start_ray_commands"][-1])
    )


def test_the_start_command_is_one_shell_line(config: dict[str, Any]) -> None:
    """A folded YAML block with a stray indent would break the command in two."""
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[key]:
            assert "\n" not in command
