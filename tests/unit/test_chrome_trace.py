"""The trace that Perfetto shows: all of a life is there, and no two slices of a row cross."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from cluster.chrome_trace import ChromeTrace
from cluster.tracing import MAX_ENDED, trace_all
from scheduler import core
from scheduler.errors import EngineUnavailable, InvalidRequest
from scheduler.life import Span, SpanKind
from scheduler.messages import Lives, RequestInfo, RequestLife
from scheduler.request import RequestStatus

T0 = 1.7e9


def span(
    kind: SpanKind, start_s: float, end_s: float, worker: str | None = None, **more: Any
) -> Span:
    return Span(kind=kind, start_s=T0 + start_s, end_s=T0 + end_s, worker_id=worker, **more)


def some_life() -> list[Span]:
    """Queued, computed on w0 while a block is saved, evicted, and finished on w1."""
    return [
        span(SpanKind.QUEUED, 0.0, 1.0, why="submitted"),
        span(SpanKind.LOADING, 1.0, 1.5, "w0"),
        span(SpanKind.PREFILL, 1.5, 2.5, "w0", first=0, end=512, num_steps=1),
        span(SpanKind.SAVED, 2.0, 4.0, "w0", first=0, end=512),
        span(SpanKind.PREFILL, 2.5, 3.0, "w0", first=512, end=600, num_steps=1),
        span(SpanKind.SAVING, 3.0, 3.5, "w0"),
        span(SpanKind.QUEUED, 3.5, 5.0, why="its blocks go to another"),
        span(SpanKind.RESUMED, 5.0, 5.0, "w1"),
        span(SpanKind.DECODE, 5.0, 7.0, "w1", first=600, end=640, num_steps=40),
        span(SpanKind.FINISHED, 7.0, 7.0, why="length"),
    ]


def events(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def rows(found: list[dict[str, Any]]) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """The slices of each row, by its process' name and its number."""
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    by_row = defaultdict(list)
    for event in found:
        if event["ph"] == "X":
            by_row[names[event["pid"]], event["tid"]].append(event)
    return by_row


def test_a_life_is_drawn_in_its_row_and_on_the_workers(tmp_path: Path) -> None:
    with ChromeTrace(tmp_path / "trace.json") as trace:
        trace.add("r", some_life(), prompt_tokens=600)
    found = events(tmp_path / "trace.json")
    drawn = {
        row: [(e["name"], e["ts"] - T0 * 1e6, e["dur"]) for e in slices]
        for row, slices in rows(found).items()
    }
    assert drawn == {
        ("requests", 1): [
            ("r", 0, 7_000_000),
            ("queued", 0, 1_000_000),
            ("loading", 1_000_000, 500_000),
            ("prefill", 1_500_000, 1_000_000),
            ("prefill", 2_500_000, 500_000),
            ("saving", 3_000_000, 500_000),
            ("queued", 3_500_000, 1_500_000),
            ("decode", 5_000_000, 2_000_000),
        ],
        ("w0", 1): [
            ("r", 1_500_000, 1_500_000),
            ("prefill", 1_500_000, 1_000_000),
            ("prefill", 2_500_000, 500_000),
        ],
        ("w1", 1): [("r", 5_000_000, 2_000_000), ("decode", 5_000_000, 2_000_000)],
        ("saves and copies", 1): [("saved: r", 2_000_000, 2_000_000)],
    }
    moments = [(e["name"], e["args"].get("why")) for e in found if e["ph"] == "i"]
    assert moments == [("resumed", None), ("finished", "length")]
    chunk = next(e for e in found if e["name"] == "prefill")
    assert chunk["args"] == {"worker": "w0", "tokens": "0 to 512", "steps": 1}


def crossing(slices: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Pairs of slices of which neither lies in the other nor behind it."""
    ends = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in slices]
    return [
        (a[2], b[2])
        for i, a in enumerate(ends)
        for b in ends[i + 1 :]
        if not (a[1] <= b[0] or b[1] <= a[0])
        and not (a[0] <= b[0] and b[1] <= a[1])
        and not (b[0] <= a[0] and a[1] <= b[1])
    ]


@pytest.mark.parametrize("seed", range(5))
def test_slices_of_a_row_never_cross(tmp_path: Path, seed: int) -> None:
    """Also where spans overlap, which a worker's clock may make them do."""
    rng = random.Random(seed)
    with ChromeTrace(tmp_path / "trace.json") as trace:
        for number in range(60):
            start = number * 0.3 + rng.random()
            life = [span(SpanKind.QUEUED, start, start + rng.random())]
            for _ in range(rng.randrange(1, 12)):
                begin = start + 4 * rng.random()
                kind = rng.choice([SpanKind.PREFILL, SpanKind.DECODE, SpanKind.SAVED])
                worker = rng.choice(["w0", "w1"])
                life.append(span(kind, begin, begin + rng.random(), worker))
            trace.add(f"r{number}", life)
    for slices in rows(events(tmp_path / "trace.json")).values():
        assert not crossing(slices)


def test_requests_one_after_the_other_share_a_row(tmp_path: Path) -> None:
    with ChromeTrace(tmp_path / "trace.json") as trace:
        for number in range(20):
            start = 10.0 * number
            trace.add(f"r{number}", [span(SpanKind.QUEUED, start, start + 10.0)])
    assert set(rows(events(tmp_path / "trace.json"))) == {("requests", 1)}


def test_names_and_reasons_may_hold_anything(tmp_path: Path) -> None:
    name = 'a "b"\n</script>\u2028 é'
    with ChromeTrace(tmp_path / "trace.json") as trace:
        trace.add(name, [span(SpanKind.QUEUED, 0, 1, why="\x00")])
    assert name in [event["name"] for event in events(tmp_path / "trace.json")]


def test_what_comes_after_the_end_is_left_out(tmp_path: Path) -> None:
    trace = ChromeTrace(tmp_path / "trace.json")
    trace.close()
    trace.add("late", some_life())
    trace.close()
    assert events(tmp_path / "trace.json") == []
    assert trace.num_requests == 0


def test_a_file_that_can_not_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file"):
        ChromeTrace(tmp_path / "no" / "such" / "folder.json")


# ------------------------------------------------------------------------ everybody's requests


def ended(name: str) -> RequestLife:
    info = RequestInfo(name, "c", RequestStatus.FINISHED, None, 0, 5, 5, 2, 0, 0, 0, 0, 1.0)
    return RequestLife(info, [span(SpanKind.QUEUED, 0, 1), span(SpanKind.FINISHED, 1, 1)])


class FakeEngine:
    """Remembers which requests have ended."""

    def __init__(self) -> None:
        self.ended = [ended("before")]
        self.is_gone = False

    def lives(self, max_live: int, max_ended: int) -> Lives:
        if self.is_gone:
            raise EngineUnavailable("gone")
        return Lives(T0, [], self.ended[-max_ended:], 0)


def test_everybodys_requests_that_end_meanwhile_are_written_once(tmp_path: Path) -> None:
    engine = FakeEngine()
    with trace_all(tmp_path / "trace.json", engine.lives) as trace:
        engine.ended += [ended("a"), ended("b")]
    assert trace.num_requests == 2
    names = [slices[0]["name"] for slices in rows(events(tmp_path / "trace.json")).values()]
    assert set(names) == {"a", "b"}


def test_no_more_is_asked_for_than_the_engine_remembers() -> None:
    assert core._MAX_ENDED == MAX_ENDED


def test_that_requests_are_missing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine()
    with trace_all(tmp_path / "trace.json", engine.lives) as trace:
        engine.ended += [ended(f"r{i}") for i in range(MAX_ENDED + 9)]
    assert trace.num_requests == MAX_ENDED
    assert "misses some" in caplog.text


def test_an_engine_that_goes_away_leaves_a_whole_file(tmp_path: Path) -> None:
    engine = FakeEngine()
    with trace_all(tmp_path / "trace.json", engine.lives):
        engine.is_gone = True
    assert events(tmp_path / "trace.json") == []
