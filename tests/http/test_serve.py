"""`haversack serve` from a shell: it says where it answers, and Ctrl-C ends all that it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
import ray
from ray import serve

from cluster import Client, InvalidConfig
from cluster.serve_app import build
from tests.engine.conftest import DEADLINE_S
from tests.http.conftest import until

pytestmark = pytest.mark.slow


@contextmanager
def serving(engine: Client, main_url: str, repo_root: Path) -> Iterator[subprocess.Popen[str]]:
    """`haversack serve` of the shared engine, behind the address of the main endpoint."""
    env = os.environ | {
        "PYTHONPATH": str(repo_root),
        "HAVERSACK_API_KEY": "sesame,poppy",
        "HAVERSACK_NAMESPACE": engine.info.settings["namespace"],
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
    }
    command = [sys.executable, "-c", "from cluster.cli import app; app()", "serve"]
    command += ["--name", "http", "--json"]
    command += ["--port", main_url.rpartition(":")[2], "--served-model-name", "mine"]
    command += ["--route-prefix", "/mine"]
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def facts_of(process: subprocess.Popen[str]) -> dict[str, str]:
    """Return what it says when it answers."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    facts: dict[str, str] = json.loads(line)
    return facts


def test_it_serves_until_it_is_interrupted(
    shared_engine: Client, main_url: str, repo_root: Path
) -> None:
    """On a Ray that has an engine and a Serve: it joins the one, and leaves both as they were."""
    with serving(shared_engine, main_url, repo_root) as process:
        facts = facts_of(process)
        assert facts == {"url": f"{main_url}/mine", "model": "mine"}
        with openai.OpenAI(base_url=f"{facts['url']}/v1", api_key="poppy") as client:
            found = client.completions.create(model="mine", prompt="Hi", max_tokens=2)
        assert found.usage is not None
        assert found.usage.completion_tokens == 2
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
        assert "sesame" not in errors
    assert shared_engine.workers()


def test_one_that_is_killed_makes_room_for_the_next(
    shared_engine: Client, main_url: str, repo_root: Path
) -> None:
    """Nobody has to tidy up after it, on a Ray that outlives it."""
    with serving(shared_engine, main_url, repo_root) as process:
        url = facts_of(process)["url"]
        assert httpx.get(f"{url}/health").status_code == 200
        process.kill()
    with serving(shared_engine, main_url, repo_root) as process:
        assert facts_of(process)["url"] == url
        assert httpx.get(f"{url}/health").status_code == 200
        process.kill()
    until(lambda: httpx.get(f"{url}/health"), 404)


def test_serves_own_tools_can_deploy_it(
    shared_engine: Client, main_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a RayService does: from an import path, arguments and an environment."""
    monkeypatch.setenv("HAVERSACK_API_KEY", "sesame,poppy")
    namespace = str(shared_engine.info.settings["namespace"])
    where = {"name": "http", "namespace": namespace, "served_model_name": "mine"}
    serve.run(build(where), name="built", route_prefix="/built")
    try:
        url = f"{main_url}/built/v1/models"
        assert httpx.get(url).status_code == 401
        found = httpx.get(url, headers={"Authorization": "Bearer poppy"}).json()
        assert [model["id"] for model in found["data"]] == ["mine"]
    finally:
        serve.delete("built")
    with pytest.raises(InvalidConfig, match="served_model_name"):
        build({"model": "mine"})
