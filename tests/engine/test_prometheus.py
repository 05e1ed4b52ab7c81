"""A real Prometheus reads a running engine: every series is there, every query has an answer.

Takes Debian's package `prometheus`, for the server and promtool.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from cluster import Client, SamplingParams
from cluster.api_metrics import ApiMetrics
from cluster.dashboards.making import ALERTS_FILE, FOLDER, alerts, dashboard
from cluster.series import RAY_PREFIX
from cluster.series_table import ENGINE_SERIES
from tests.engine.conftest import DEADLINE_S, engine_with_journal, wait_for

pytestmark = pytest.mark.slow

NAME = "watched"
CONFIG = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
rule_files: ['{rules}']
scrape_configs:
- job_name: ray
  static_configs: [{{targets: ['127.0.0.1:{port}']}}]
"""


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"there is no {name} here: apt-get install prometheus")
    return found


@pytest.fixture(scope="module")
def engine(
    local_cluster: None, tiny_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """An engine with a store and a journal, which has served some requests."""
    tool("prometheus")
    with engine_with_journal(tiny_model, NAME, tmp_path_factory) as client:
        params = SamplingParams(max_tokens=20, prompt_logprobs=1, ignore_eos=True)
        client.generate(["To be, or not to be"] * 3, params)
        yield client


class Prometheus:
    """A server's answers."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/api/v1/"

    def ask(self, path: str, **query: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as answer:
            return json.load(answer)["data"]

    def is_up(self) -> bool:
        try:
            self.ask("status/buildinfo")
        except OSError:
            return False
        return True

    def value(self, query: str) -> float | None:
        """Return the only value of a query; None where it has none."""
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if len(found) == 1 else None


@pytest.fixture(scope="module")
def prometheus(engine: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Prometheus, with our rules, reading the page of this machine's Ray."""
    folder = tmp_path_factory.mktemp("prometheus")
    ask_nodes: Any = ray.nodes
    (node,) = [node for node in ask_nodes() if node["Alive"]]
    config = CONFIG.format(rules=FOLDER / ALERTS_FILE, port=node["MetricsExportPort"])
    (folder / "prometheus.yml").write_text(config)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                tool("prometheus"),
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    server = Prometheus(port)
    try:
        wait_for(server.is_up, f"Prometheus answers; see {folder / 'log'}")
        yield server
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


def test_the_rules_are_good(prometheus: Prometheus) -> None:
    check = [tool("promtool"), "check", "rules", str(FOLDER / ALERTS_FILE)]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    wait_for(lambda: all_healthy(prometheus), "every rule has been evaluated")
    assert len(rules) == alerts().count("alert:")


def all_healthy(prometheus: Prometheus) -> bool:
    rules = prometheus.ask("rules")["groups"][0]["rules"]
    assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
    return all(rule["health"] == "ok" for rule in rules)


def test_every_series_is_there(prometheus: Prometheus) -> None:
    """Also those of which nothing has happened: they are 0, so that the first time is seen."""
    wanted = {RAY_PREFIX + name for series in ENGINE_SERIES for name in series.sample_names}

    def missing() -> set[str]:
        return wanted - set(prometheus.ask("label/__name__/values"))

    wait_for(lambda: not missing(), f"all series are there; of {len(wanted)} some are missing")


def test_prometheus_knows_what_the_engine_says(prometheus: Prometheus, engine: Client) -> None:
    engine.generate("one more", SamplingParams(max_tokens=3, ignore_eos=True))
    stats = engine.stats()
    finished = f'ray_haversack_requests_finished_total{{engine="{NAME}",reason="length"}}'
    first = f'ray_haversack_time_to_first_token_seconds_count{{engine="{NAME}"}}'
    total = f'ray_haversack_time_to_first_token_seconds_sum{{engine="{NAME}"}}'
    wait_for(lambda: prometheus.value(finished) == 4.0, "the ends of requests are told")
    wait_for(lambda: prometheus.value(first) == 4.0, "latencies are told")
    assert prometheus.value(total) == pytest.approx(stats.timings.time_to_first_token.total_s)
    lost = prometheus.value(f'ray_haversack_workers_lost_total{{engine="{NAME}"}}')
    assert lost is not None
    assert lost + 1.0 == 1.0, "it is 0, or as small as Ray lets it be"


def test_every_query_of_the_dashboard_and_the_rules_has_an_answer(prometheus: Prometheus) -> None:
    panels = json.loads(dashboard())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    queries = [
        query.replace("$__rate_interval", "30s").replace("$engine", NAME) for query in queries
    ]

    def unanswered() -> list[str]:
        return [query for query in queries if not prometheus.ask("query", query=query)["result"]]

    wait_for(lambda: not unanswered(), "every panel has something to draw")


def test_the_endpoints_page_is_as_prometheus_wants_it(engine: Client) -> None:
    stats = engine.stats()
    page = ApiMetrics(NAME, lambda: stats).text()
    check = [tool("promtool"), "check", "metrics"]
    done = subprocess.run(check, input=page, capture_output=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert re.search(rb'haversack_workers\{engine="watched"\} 2.0', page)
