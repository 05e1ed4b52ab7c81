"""The files for `ray up` as an operator's machine reads them: Ray's own preparation and schema."""

from __future__ import annotations

import copy
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster.config import EngineConfig

FILES = ["ray_config.yaml", "cluster/deploy/aws.yaml", "cluster/deploy/gcp.yaml"]
ENGINE = "cluster/deploy/engine.yaml"
NODE_VARIABLES = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_worker_niceness": "0",
    "RAY_grpc_client_keepalive_time_ms": "5000",
    "RAY_grpc_client_keepalive_timeout_ms": "5000",
}
"""Without keepalives a call between two workers cut off from each other hangs for ever."""


def load(root: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((root / name).read_text())
    return found


@pytest.fixture(params=FILES)
def config(repo_root: Path, request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(repo_root, request.param)


@pytest.fixture
def local(repo_root: Path) -> dict[str, Any]:
    return load(repo_root, "ray_config.yaml")


def prepare(config: dict[str, Any]) -> dict[str, Any]:
    """What Ray makes of a file before it looks at it, which needs no credentials."""
    found: dict[str, Any] = prepare_config(copy.deepcopy(config))
    return found


def variables(command: str) -> dict[str, str]:
    """What a start command exports."""
    return dict(word.rstrip(";").split("=", 1) for word in command.split() if "=" in word)


def start_command(config: dict[str, Any], role: str) -> str:
    (command,) = [c for c in config[f"{role}_start_ray_commands"] if "ray start" in c]
    return str(command)


def test_rays_schema_accepts_it(config: dict[str, Any]) -> None:
    validate_config(prepare(config))


def test_rays_schema_would_refuse_a_misspelt_key(config: dict[str, Any]) -> None:
    """The check above can fail: Ray's schema knows no key but its own."""
    config["head_start_ray_comands"] = []
    with pytest.raises(jsonschema.ValidationError, match="head_start_ray_comands"):
        validate_config(prepare(config))


def test_every_machine_of_ones_own_is_started(local: dict[str, Any]) -> None:
    """With fewer min_workers than addresses, Ray leaves machines idle without a word."""
    num_machines = len(local["provider"]["worker_ips"])
    assert local["min_workers"] == local["max_workers"] == num_machines
    (node_type,) = prepare(local)["available_node_types"].values()
    assert node_type["min_workers"] == num_machines
    # The newer autoscaler, which is the default, starts one too few with this provider.
    assert variables(start_command(local, "head"))["RAY_enable_autoscaler_v2"] == "0"


@pytest.mark.parametrize("role", ["head", "worker"])
@pytest.mark.parametrize(("num_failures", "exit_code"), [(0, 0), (2, 0), (3, 1)])
def test_a_ray_that_does_not_start_is_started_again(
    config: dict[str, Any], tmp_path: Path, role: str, num_failures: int, exit_code: int
) -> None:
    """It gives up where a busy machine takes long, and the autoscaler then drops the machine."""
    calls = tmp_path / "calls"
    ray = tmp_path / "ray"
    ray.write_text(
        f'#!/bin/sh\necho "$1" >> {calls}\n'
        f'[ "$1" = stop ] || [ "$(grep -c start {calls})" -gt {num_failures} ]\n'
    )
    ray.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RAY_HEAD_IP": "10.0.0.1"}
    done = subprocess.run(["bash", "-c", start_command(config, role)], env=environment)
    assert done.returncode == exit_code
    expected = ["start", "stop"] * num_failures + ["start"] * (exit_code == 0)
    assert calls.read_text().split() == expected


def test_workers_are_spot_instances_and_the_head_is_not(repo_root: Path) -> None:
    aws = load(repo_root, "cluster/deploy/aws.yaml")["available_node_types"]
    assert aws["worker"]["node_config"]["InstanceMarketOptions"]["MarketType"] == "spot"
    assert "InstanceMarketOptions" not in aws["head"]["node_config"]
    gcp = load(repo_root, "cluster/deploy/gcp.yaml")["available_node_types"]
    (scheduling,) = gcp["worker"]["node_config"]["scheduling"]
    assert scheduling["provisioningModel"] == "SPOT"
    assert "scheduling" not in gcp["head"]["node_config"]


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_spot_instances_watch_for_the_notice_that_they_end(repo_root: Path, cloud: str) -> None:
    last = load(repo_root, f"cluster/deploy/{cloud}.yaml")["worker_start_ray_commands"][-1]
    assert f"~/haversack/cluster/deploy/watch_notice.sh {cloud} $RAY_HEAD_IP:6379 " in last
    assert last.endswith("< /dev/null &> /dev/null &)"), "or SSH would wait for it"
    assert (repo_root / "cluster/deploy/watch_notice.sh").exists()


@pytest.mark.parametrize("role", ["head", "worker"])
def test_dead_links_are_noticed_on_every_machine(config: dict[str, Any], role: str) -> None:
    command = start_command(config, role)
    assert NODE_VARIABLES.items() <= variables(command).items()
    assert "ulimit -n $(ulimit -Hn)" in command


def test_the_head_counts_a_silent_machine_as_lost_within_seconds(config: dict[str, Any]) -> None:
    """By default a machine that loses power is missed after a minute."""
    settings = variables(start_command(config, "head"))
    period_s = int(settings["RAY_health_check_period_ms"]) / 1000
    timeout_s = int(settings["RAY_health_check_timeout_ms"]) / 1000
    failures = int(settings["RAY_health_check_failure_threshold"])
    silence_s = failures * (period_s + timeout_s)
    assert silence_s < 10
    # Else a machine that is cut off for a moment ends its Ray although nobody has missed it.
    of_worker = variables(start_command(config, "worker"))
    assert int(of_worker["RAY_gcs_rpc_server_reconnect_timeout_s"]) > silence_s


def test_nothing_computes_on_the_head(config: dict[str, Any]) -> None:
    assert "--num-cpus=0" in start_command(config, "head")
    assert "--num-cpus" not in start_command(config, "worker")


def test_the_last_thing_the_head_does_is_to_start_the_engine(
    config: dict[str, Any], repo_root: Path
) -> None:
    """Which must not wait: the machines for its workers are started after that."""
    last = config["head_start_ray_commands"][-1]
    assert last == f"haversack start --no-wait --config ~/haversack/{ENGINE}"
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start_command(config, "head")
    assert not any("haversack start" in each for each in config["worker_start_ray_commands"])


def test_the_engine_of_a_cluster_is_one_that_its_settings_allow(repo_root: Path) -> None:
    engine = EngineConfig.load(repo_root / ENGINE, env={})
    assert engine.journal_path is not None
    assert engine.device == "cuda", "nothing can be found out before the machines are there"
    assert engine.num_workers == load(repo_root, "ray_config.yaml")["min_workers"]


def test_machines_get_all_that_an_installation_needs(
    config: dict[str, Any], repo_root: Path
) -> None:
    project = (repo_root / "pyproject.toml").read_text()
    needed = {"pyproject.toml", "constraints.txt"}
    for key in ("packages", "license-files", "readme"):
        value = re.findall(rf"^{key} = (.+)$", project, re.MULTILINE)[0]
        needed |= set(re.findall(r'"(.+?)"', value))
    inner = ("cluster.", "workers.")  # packages in the folder of another one
    needed = {name for name in needed if not name.startswith(inner)}
    assert set(config["file_mounts"].values()) == needed
    for target, source in config["file_mounts"].items():
        assert target == f"~/haversack/{source}"
        assert (repo_root / source).exists()
    assert config["setup_commands"][-1] == "bash ~/haversack/cluster/deploy/setup_node.sh"
    assert (repo_root / "cluster/deploy/setup_node.sh").exists()


def test_every_command_is_one_shell_line(config: dict[str, Any]) -> None:
    """A folded YAML block with a stray indent would break a command in two."""
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        for command in config[key]:
            assert "\n" not in command
