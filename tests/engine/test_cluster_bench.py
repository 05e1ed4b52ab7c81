"""The benchmark of one and of two workers, on a tiny model: it runs, and its figures are told."""

from __future__ import annotations

import pytest

from bench import cluster
from tests.engine.conftest import ENGINE

pytestmark = [pytest.mark.usefixtures("local_cluster"), pytest.mark.slow]

WORKS = {"score": cluster.scoring(4, 40), "generate": cluster.generating(4, 8, 8)}


@pytest.fixture(autouse=True)
def small_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that the benchmark leaves at their defaults: small here."""
    monkeypatch.setenv("HAVERSACK_KV_CACHE_BYTES", "16MiB")
    monkeypatch.setenv("HAVERSACK_OFFLOAD_BYTES", "16MiB")
    monkeypatch.setenv("HAVERSACK_NAMESPACE", ENGINE["namespace"])


def test_it_measures_both_engines_and_the_floor(tiny_model: str) -> None:
    shown: list[str] = []
    report = cluster.run(tiny_model, 1, WORKS, shown.append)
    assert set(report["goals"]) == {"score >= 1.8 x", "generate >= 1.8 x"}
    floor = report["floor"]
    assert floor["ratio"] == pytest.approx(
        floor["tokens_per_s"]["two"] / floor["tokens_per_s"]["one"], rel=1e-2
    )
    for what in WORKS:
        figures = report[what]
        assert figures["of_floor"] == pytest.approx(figures["ratio"] / floor["ratio"], rel=1e-2)
        for side in ("one", "two"):
            assert figures[side]["scheduler_cpu_s_per_1000_chunks"] > 0
            assert figures[side]["bytes_per_token"]["to_workers"] > 4, "an id is four bytes"
    back = {what: report[what]["one"]["bytes_per_token"]["from_workers"] for what in WORKS}
    assert back["score"] > 2 * 12, "id, logprob and rank of the actual token and the likeliest one"
    assert back["generate"] > 0
    assert report["score"]["one"]["chunks"] == 4, "each prompt fits into one step"
    assert sorted(report["memory_mib"]) == ["worker-0", "worker-1"]
    for worker in report["memory_mib"].values():
        assert 0 < worker["private"] <= worker["pss"] <= worker["rss"]
    assert [line.split(":")[0] for line in shown] == ["memory", "floor", *WORKS]
