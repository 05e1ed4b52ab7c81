"""The profile of a worker's steps: its parts are the whole, and looking changes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AttentionInterface

from bench import profile
from bench.profile import HEAD, LINEAR, REST, WHOLE_LAYERS, Stopwatch
from tests.tiny_models import tiny_llama
from workers import attention, model_runner, tile_products


def test_a_part_within_another_stops_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    watch = Stopwatch()
    for at_s, part in ((1.0, "step"), (2.0, "layer"), (5.0, None), (9.0, None)):
        now_s = at_s
        if part is None:
            watch.leave()
        else:
            watch.enter(part)
    now_s = 20.0
    assert watch.take() == {"step": 1.0 + 4.0, "layer": 3.0}
    assert watch.take() == {}


def test_a_part_that_raises_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("time.perf_counter", lambda: now_s)
    watch = Stopwatch()

    def fail() -> None:
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        watch.around("step", fail)()
    now_s = 5.0
    watch.enter("step")
    now_s = 6.0
    watch.leave()
    assert watch.take() == {"step": 1.0}


def test_the_parts_of_a_step_are_seen_and_nothing_stays_behind(tmp_path: Path) -> None:
    attention.register()
    before = (AttentionInterface()[attention.IMPLEMENTATION], model_runner.select_rows)
    report = profile.run(str(tiny_llama(tmp_path)), [40], [2], context=8, k=1, repeats=2)
    assert (AttentionInterface()[attention.IMPLEMENTATION], model_runner.select_rows) == before
    prefill, decode = report["batches"]
    assert (prefill["batch"], prefill["tokens"]) == ("prefill-40", 40)
    assert (decode["batch"], decode["tokens"]) == ("decode-2", 2)
    for batch in (prefill, decode):
        parts = batch["parts_ms"]
        by_parts = {LINEAR, "attention"} <= set(parts)
        assert {HEAD, REST, "norms, rotary, activation"} <= set(parts)
        can_be_whole = batch is decode or tile_products.widens()
        assert by_parts or (WHOLE_LAYERS in parts and can_be_whole)
        assert all(ms > 0 for ms in parts.values())
        assert set(batch["floors_ms"]) == {LINEAR, HEAD}
        assert batch["operators"][0]["ms"] >= batch["operators"][-1]["ms"] >= 0
    assert "row selection, argmax" in prefill["parts_ms"], "its rows were asked for"


def test_a_prefill_may_come_behind_tokens_that_are_there(tmp_path: Path) -> None:
    report = profile.run(
        str(tiny_llama(tmp_path)), [40, 20], [], context=8, k=1, repeats=3, behind=50
    )
    assert report["behind"] == 64
    assert [(b["batch"], b["tokens"]) for b in report["batches"]] == [
        ("prefill-40 behind 64", 40),
        ("prefill-20 behind 64", 20),
    ]
