"""The table of series, and that all that is made from it is as the table says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster import metrics
from cluster.api_metrics import ApiMetrics
from cluster.dashboards.making import ALERTS_FILE, DASHBOARD_FILE, FOLDER, alerts, dashboard, page
from cluster.dashboards.queries import Queries
from cluster.metrics import BUCKETS, RayPublisher
from cluster.series import PREFIX, RAY_PREFIX, Kind, Series
from cluster.series_table import ENGINE_SERIES, SERIES
from scheduler.messages import SchedulerStats, WorkerUse
from scheduler.outbox import EngineStats
from scheduler.timings import Timings

# Labels that may be used; none of them has a value per request.
LABELS = {"reason", "source", "worker", "state", "route", "status"}
# What can be had from other series: sums of these, or what is counted more finely elsewhere.
NOT_TOLD = {
    *("num_finished", "num_failed", "num_aborted", "num_migrations", "migration_pause_s"),
    *("compute_s", "num_worker_cache_queries", "num_store_queries", "num_saved_blocks"),
}
NAMES = {RAY_PREFIX + name for series in SERIES.values() for name in series.sample_names}


def some_stats() -> EngineStats:
    """Counters that are all different, so that none can stand for another."""
    scheduler = SchedulerStats()
    for number, field in enumerate(SchedulerStats.__struct_fields__, 1000):
        if not isinstance(getattr(scheduler, field), dict):
            setattr(scheduler, field, number)
    scheduler.finished_by_reason = {"stop": 11, "error": 12}
    scheduler.migrations_by_reason = {"load": 21}
    timings = Timings()
    timings.queue.observe(0.3, 5)
    timings.queue.observe(7000.0)
    store = dict.fromkeys(("used_bytes", "capacity_bytes", "num_evicted_blocks"), 31)
    journal = dict.fromkeys(("queued_bytes", "file_bytes", "num_results", "written_bytes"), 41)
    return EngineStats(
        scheduler=scheduler,
        store=store | {"num_lost_blocks": 32},
        journal={**journal, "num_failed_writes": 42, "num_dropped_results": 43, "lag_s": 0.25},
        timings=timings,
        workers=[WorkerUse("worker-3", 4, 100, 60, 5.5, 0.5, 2.0)],
        started_s=1.7e9,
    )


@pytest.mark.parametrize("series", SERIES.values(), ids=lambda series: series.name)
def test_names_follow_the_rules_of_prometheus(series: Series) -> None:
    assert re.fullmatch(r"haversack_[a-z0-9]+(_[a-z0-9]+)*", series.name)
    assert series.name.endswith("_total") == (series.kind is Kind.COUNTER)
    assert not series.name.endswith(("_bucket", "_sum", "_count"))
    for unit in ("seconds", "bytes"):
        assert (unit in series.name.split("_")) == (series.unit == unit)
    assert set(series.labels) <= LABELS
    assert series.help.endswith(".")


def test_every_counter_of_the_scheduler_is_told() -> None:
    """A new one that nobody added to the table would be missed by those who watch."""
    told = {
        value
        for s in ENGINE_SERIES
        if s.read
        for _, value in s.read(some_stats())
        if not hasattr(value, "counts")
    }
    numbers = msgspec.structs.asdict(some_stats().scheduler)
    missing = {n for n, value in numbers.items() if isinstance(value, int) and value not in told}
    assert missing == NOT_TOLD


def test_every_sample_has_its_labels_and_what_is_not_there_is_not_told() -> None:
    for stats in (some_stats(), EngineStats(SchedulerStats())):
        for series in ENGINE_SERIES:
            assert series.read is not None
            for labels, _ in series.read(stats):
                assert len(labels) == len(series.labels)
    bare = EngineStats(SchedulerStats())
    empty = [s.name for s in ENGINE_SERIES if s.read is not None and not list(s.read(bare))]
    assert all(re.match("haversack_(store|journal|worker)_", name) for name in empty)


# ------------------------------------------------------------------------------ the endpoint


def families(text: bytes) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(text.decode())}


def test_the_endpoint_tells_all_series_in_prometheus_text() -> None:
    endpoint = ApiMetrics("mine", some_stats)
    endpoint.answered("/score", 200, 0.2)
    found = families(endpoint.text())
    assert {name.removesuffix("_total") for name in SERIES} <= found.keys()
    reasons = found["haversack_requests_finished"].samples
    assert {(s.labels["engine"], s.labels["reason"], s.value) for s in reasons} == {
        ("mine", "stop", 11.0),
        ("mine", "length", 0.0),
        ("mine", "abort", 0.0),
        ("mine", "error", 12.0),
    }
    for series in SERIES.values():
        assert found[series.name.removesuffix("_total")].type == series.kind.value


def test_the_endpoint_tells_histograms_as_counts_up_to_each_bound() -> None:
    found = families(ApiMetrics("mine", some_stats).text())
    samples = found["haversack_request_queue_time_seconds"].samples
    values = {(s.name.rpartition("_")[2], s.labels.get("le")): s.value for s in samples}
    assert values["bucket", "0.25"] == 0
    assert values["bucket", "0.5"] == values["bucket", "2500.0"] == 5
    assert values["bucket", "+Inf"] == values["count", None] == 6
    assert values["sum", None] == pytest.approx(7001.5)


def test_an_engine_that_does_not_answer_is_told_nothing_of() -> None:
    text = ApiMetrics("mine", lambda: None).text()
    assert b"haversack_workers" not in text
    assert b"haversack_http_requests_in_progress 0.0" in text


# --------------------------------------------------------------------------------------- Ray


class FakeRay:
    """What Ray's metrics were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counters: dict[tuple[str, ...], list[float]] = {}
        self.gauges: dict[tuple[str, ...], float] = {}
        ray = self

        class Metric:
            def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
                self._name, self._keys = name, tag_keys

            def _key(self, tags: dict[str, str]) -> tuple[str, ...]:
                assert set(tags) == set(self._keys)
                assert tags.pop("engine") == "mine"
                return self._name, *tags.values()

            def inc(self, value: float, tags: dict[str, str]) -> None:
                assert value > 0, "Ray refuses that"
                ray.counters.setdefault(self._key(dict(tags)), []).append(value)

            def set(self, value: float, tags: dict[str, str]) -> None:
                ray.gauges[self._key(dict(tags))] = value

        monkeypatch.setattr(metrics, "Counter", Metric)
        monkeypatch.setattr(metrics, "Gauge", Metric)


def test_ray_is_told_what_counters_have_grown_by_and_that_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray, publish = FakeRay(monkeypatch), RayPublisher("mine")
    stats = EngineStats(SchedulerStats(num_evictions=3))
    publish(stats)
    publish(stats)
    stats.scheduler.num_evictions = 10
    stats.scheduler.num_steps = 1
    publish(stats)
    assert ray.counters["haversack_evictions",] == [3, 7]
    at_first, later = ray.counters["haversack_steps",]
    assert later + at_first == later == 1.0


def test_a_counter_that_began_anew_has_grown_by_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offload store was restarted; while it did not answer, it told nothing."""
    ray, publish = FakeRay(monkeypatch), RayPublisher("mine")
    store = {"used_bytes": 0, "capacity_bytes": 0, "num_lost_blocks": 0, "num_evicted_blocks": 50}
    publish(EngineStats(SchedulerStats(), store=store))
    publish(EngineStats(SchedulerStats(), store=None))
    publish(EngineStats(SchedulerStats(), store=store | {"num_evicted_blocks": 8}))
    assert ray.counters["haversack_store_evicted_blocks",] == [50, 8]


def test_ray_is_told_gauges_and_the_parts_of_histograms(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = FakeRay(monkeypatch)
    RayPublisher("mine")(some_stats())
    assert ray.gauges["haversack_worker_kv_blocks_used", "worker-3"] == 60
    assert ray.counters["haversack_worker_seconds", "worker-3", "dispatch"] == [0.5]
    name = "haversack_request_queue_time_seconds"
    counts = [ray.gauges[f"{name}_bucket", bound] for bound in BUCKETS]
    assert counts == sorted(counts)
    assert counts[-1] == ray.gauges[f"{name}_count",] == 6
    assert ray.gauges[f"{name}_sum",] == pytest.approx(7001.5)
    told = {name for name, *_ in (*ray.gauges, *(ray.counters))}
    wanted = {n for s in ENGINE_SERIES for n in s.sample_names}
    assert told == {name.removesuffix("_total") for name in wanted}


# ------------------------------------------------------------------ dashboard, rules and page


def test_what_is_made_from_the_tables_is_up_to_date(repo_root: Path) -> None:
    """Else: python -m cluster.dashboards"""
    assert (FOLDER / DASHBOARD_FILE).read_text() == dashboard()
    assert (FOLDER / ALERTS_FILE).read_text() == alerts()
    assert (repo_root / "docs" / "metrics.md").read_text() == page()


def test_every_series_of_the_dashboard_and_the_rules_is_there() -> None:
    for text in (dashboard(), alerts()):
        named = set(re.findall(rf"{RAY_PREFIX}{PREFIX}\w+", text))
        assert named
        assert named <= NAMES


def test_a_query_for_what_is_not_there_can_not_be_made() -> None:
    queries = Queries("5m")
    assert queries.rate("evictions_total") == (
        "sum by (engine) (rate(ray_haversack_evictions_total[5m]))"
    )
    with pytest.raises(KeyError, match="haversack_no_such_thing"):
        queries.now("no_such_thing")
    with pytest.raises(KeyError, match="counter"):
        queries.now("evictions_total")


def test_panels_fill_the_dashboard_without_overlapping() -> None:
    panels = json.loads(dashboard())["panels"]
    places = [tuple(panel["gridPos"][key] for key in "xywh") for panel in panels]
    cells = [(x + i, y + j) for x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    drawn = [panel for panel in panels if panel["type"] != "row"]
    assert all(panel["targets"] and panel["description"] for panel in drawn)


def test_alerts_have_names_severities_and_advice() -> None:
    rules = yaml.safe_load(alerts())["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["description"].endswith(".")
