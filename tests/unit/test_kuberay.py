"""The files for Kubernetes: what KubeRay's operator takes, and that they fit the repository.

The operator's own definitions hold all of Kubernetes' pods. Here are the fields that its two kinds
have above the pods, and those of pods that are used; no others are let through.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cluster.config import EngineConfig
from tests.unit.test_ray_config import load, start_command, variables

FILES = ["cluster/deploy/kuberay-cluster.yaml", "cluster/deploy/kuberay-service.yaml"]


def fields(required: tuple[str, ...] = (), **known: Any) -> dict[str, Any]:
    """A schema of an object that has these fields and no others."""
    return {
        "type": "object",
        "properties": known,
        "required": list(required),
        "additionalProperties": False,
    }


TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
ANY: dict[str, Any] = {"type": "object"}
LIST: dict[str, Any] = {"type": "array"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
"""Parameters of `ray start` are text, numbers too."""
VARIABLE = fields(("name",), name=TEXT, value=TEXT, valueFrom=ANY)
CONTAINER = fields(
    ("name", "image", "resources"),
    name=TEXT,
    image=TEXT,
    env={"type": "array", "items": VARIABLE},
    lifecycle=fields(postStart=fields(exec=fields(command={"type": "array", "items": TEXT}))),
    ports={"type": "array", "items": fields(("containerPort",), containerPort=COUNT, name=TEXT)},
    resources=fields(("limits", "requests"), limits=TEXTS, requests=TEXTS),
    volumeMounts=LIST,
)
POD = fields(
    ("spec",),
    metadata=ANY,
    spec=fields(
        ("containers",),
        containers={"type": "array", "minItems": 1, "items": CONTAINER},
        volumes=LIST,
        nodeSelector=TEXTS,
        tolerations=LIST,
        terminationGracePeriodSeconds=COUNT,
    ),
)
CLUSTER = fields(
    ("headGroupSpec",),
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        version={"enum": ["v1", "v2"]},
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        image=TEXT,
        resources=ANY,
        env=LIST,
    ),
    headGroupSpec=fields(
        ("template",),
        template=POD,
        rayStartParams=TEXTS,
        serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
        headService=ANY,
        enableIngress=FLAG,
    ),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            ("groupName", "minReplicas", "maxReplicas", "template"),
            groupName=TEXT,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            numOfHosts=COUNT,
            idleTimeoutSeconds=COUNT,
            rayStartParams=TEXTS,
            scaleStrategy=ANY,
            template=POD,
        ),
    },
    gcsFaultToleranceOptions=ANY,
    headServiceAnnotations=TEXTS,
    suspend=FLAG,
)
SERVICE = fields(
    ("rayClusterConfig",),
    serveConfigV2=TEXT,
    rayClusterConfig=CLUSTER,
    serveService=ANY,
    upgradeStrategy=fields(type={"enum": ["NewCluster", "None"]}),
    excludeHeadPodFromServeSvc=FLAG,
)


def documents(root: Path, name: str) -> dict[str, dict[str, Any]]:
    """A file's objects, by their kind."""
    return {d["kind"]: d for d in yaml.safe_load_all((root / name).read_text())}


@pytest.fixture(params=FILES)
def objects(repo_root: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return documents(repo_root, request.param)


def cluster_of(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The Ray cluster, whether it stands alone or in a service."""
    if "RayCluster" in objects:
        return objects["RayCluster"]["spec"]
    return objects["RayService"]["spec"]["rayClusterConfig"]


def containers(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The head's, and then that of each group."""
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"]["containers"][0] for group in groups]


def check(objects: dict[str, dict[str, Any]]) -> None:
    for kind, schema in {"RayCluster": CLUSTER, "RayService": SERVICE}.items():
        if kind in objects:
            assert objects[kind]["apiVersion"] == "ray.io/v1"
            jsonschema.validate(objects[kind]["spec"], schema)


def test_the_operator_knows_every_field(objects: dict[str, dict[str, Any]]) -> None:
    check(objects)


@pytest.mark.parametrize("where", ["cluster", "head", "container"])
def test_a_misspelt_field_would_be_found(objects: dict[str, dict[str, Any]], where: str) -> None:
    cluster = cluster_of(objects)
    places = {
        "cluster": cluster,
        "head": cluster["headGroupSpec"],
        "container": containers(cluster)[0],
    }
    places[where]["rayVersoin"] = "1"
    with pytest.raises(jsonschema.ValidationError, match="rayVersoin"):
        check(objects)


def test_all_pods_have_the_version_of_ray_that_is_installed(
    objects: dict[str, dict[str, Any]], repo_root: Path
) -> None:
    constraints = (repo_root / "constraints.txt").read_text()
    (pinned,) = re.findall(r"^ray==(.+)$", constraints, re.MULTILINE)
    assert cluster_of(objects)["rayVersion"] == pinned
    dockerfile = (repo_root / "cluster/deploy/Dockerfile").read_text()
    assert re.findall(r"^FROM rayproject/ray:([\d.]+)-", dockerfile, re.MULTILINE) == [pinned]


def test_losses_are_noticed_as_soon_as_on_machines_of_ones_own(
    objects: dict[str, dict[str, Any]], repo_root: Path
) -> None:
    local = load(repo_root, "ray_config.yaml")
    wanted = variables(start_command(local, "head"))
    others = {"RAY_enable_autoscaler_v2", "AUTOSCALER_HEARTBEAT_TIMEOUT_S", "RAY_AUTH_MODE"}
    for container in containers(cluster_of(objects)):
        has = {each["name"]: each.get("value") for each in container["env"]}
        for name in wanted.keys() - others - {"--port", "--num-cpus", "--autoscaling-config"}:
            assert has[name] == wanted[name]


def test_the_engine_starts_on_the_head_and_computes_on_gpus(
    objects: dict[str, dict[str, Any]],
) -> None:
    cluster = cluster_of(objects)
    head, worker = containers(cluster)
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert "nvidia.com/gpu" in worker["resources"]["limits"]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
    command = head["lifecycle"]["postStart"]["exec"]["command"][-1]
    assert "haversack start --no-wait --config /etc/haversack/engine.yaml" in command


def test_the_engines_settings_are_allowed_and_fit_the_pods(
    objects: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text(objects["ConfigMap"]["data"]["engine.yaml"])
    engine = EngineConfig.load(file, env={})
    (group,) = cluster_of(objects)["workerGroupSpecs"]
    assert (engine.num_workers, engine.max_workers) == (group["minReplicas"], group["maxReplicas"])
    head = cluster_of(objects)["headGroupSpec"]["template"]["spec"]
    mounts = {each["name"]: each["mountPath"] for each in head["containers"][0]["volumeMounts"]}
    assert str(engine.journal_path).startswith(mounts["journal"] + "/")
    volumes = {each["name"]: each for each in head["volumes"]}
    assert volumes["engine"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]
    claim = objects["PersistentVolumeClaim"]["metadata"]["name"]
    assert volumes["journal"]["persistentVolumeClaim"]["claimName"] == claim


def test_serve_finds_the_application(repo_root: Path) -> None:
    service = documents(repo_root, FILES[1])["RayService"]["spec"]
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    source = (repo_root / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"\ndef {name}(args: dict[str, str])" in source
