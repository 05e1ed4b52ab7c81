"""What is told of a request's life: from events to spans, and how much is kept."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

from scheduler.actions import CopyBlocks, Emit, LookupBlocks, SaveBlocks
from scheduler.events import (
    CopyDone,
    EvictRequested,
    LookupDone,
    MigrateRequested,
    RequestCancelled,
    SaveDone,
    WorkerJoined,
    WorkerLost,
)
from scheduler.life import MAX_SPANS, Life, Span, SpanKind
from scheduler.messages import RequestLife
from scheduler.request import FinishReason
from tests.sim.script import Script, worker_info

K = SpanKind


def kinds(spans: list[Span]) -> list[SpanKind]:
    return [span.kind for span in spans]


def life_of_chunks(num_chunks: int, chunk_s: float = 0.1) -> Life:
    """A request of `num_chunks` chunks of 8 tokens, computed without a break."""
    life = Life(0.0, "submitted")
    life.enter(K.READY, 1.0, "w0", 0, "nothing to load")
    for i in range(num_chunks):
        began_s = 1.0 + i * chunk_s
        life.computed("w0", 8 * i, 8 * i + 8, began_s, began_s + chunk_s, False)
    return life


def test_a_life_from_the_queue_to_the_end() -> None:
    life = Life(10.0, "submitted")
    life.enter(K.READY, 12.0, "w0", 4, "nothing to load")
    life.computed("w0", 4, 8, 12.5, 13.0, False)
    life.computed("w0", 8, 9, 13.5, 14.0, False)
    life.computed("w0", 9, 10, 14.0, 14.25, True)
    life.computed("w0", 10, 11, 14.25, 14.5, True)
    life.finish(15.0, 11, "length")
    assert life.spans() == [
        Span(kind=K.QUEUED, start_s=10.0, end_s=12.0, why="submitted"),
        Span(kind=K.READY, start_s=12.0, end_s=12.5, worker_id="w0", end=4, why="nothing to load"),
        Span(kind=K.PREFILL, start_s=12.5, end_s=13.0, worker_id="w0", first=4, end=8, num_steps=1),
        Span(kind=K.PREFILL, start_s=13.5, end_s=14.0, worker_id="w0", first=8, end=9, num_steps=1),
        Span(kind=K.DECODE, start_s=14.0, end_s=14.5, worker_id="w0", first=9, end=11, num_steps=2),
        Span(kind=K.FINISHED, start_s=15.0, end_s=15.0, end=11, why="length"),
    ]
    assert life.current_kind is None


def test_what_goes_on_has_no_end_and_what_was_told_does_not_change() -> None:
    life = Life(1.0, "submitted")
    assert life.spans()[-1].end_s is None
    life.enter(K.READY, 2.0, "w0", 0, "")
    life.computed("w0", 5, 6, 2.0, 3.0, True)
    told = life.spans()
    life.computed("w0", 6, 7, 3.0, 4.0, True)
    assert (told[-1].end_s, told[-1].num_steps) == (3.0, 1)
    assert (life.spans()[-1].end_s, life.spans()[-1].num_steps) == (4.0, 2)


def test_decode_steps_are_one_span_until_the_request_is_left_out_for_long() -> None:
    life = Life(0.0, "submitted")
    life.enter(K.READY, 0.0, "w0", 0, "")
    for i in range(1000):
        life.computed("w0", 8 + i, 9 + i, i * 0.1, i * 0.1 + 0.1, True)
    assert kinds(life.spans()) == [K.QUEUED, K.READY, K.DECODE]
    assert (life.spans()[-1].first, life.spans()[-1].end) == (8, 1008)
    life.computed("w0", 1008, 1009, 105.0, 105.1, True)
    assert kinds(life.spans())[2:] == [K.DECODE, K.DECODE]


def test_coming_back_is_told() -> None:
    life = Life(0.0, "submitted")
    life.enter(K.LOADING, 1.0, "w0", 0, "looks in the offload store")
    life.enter(K.READY, 2.0, "w0", 0, "nothing to load")
    assert K.RESUMED not in kinds(life.spans()), "the first time is no coming back"
    life.enter(K.SAVING, 3.0, "w0", 16, "asked for")
    life.enter(K.QUEUED, 4.0, None, 17, "saved")
    life.enter(K.LOADING, 5.0, "w1", 0, "looks in the offload store")
    life.enter(K.READY, 6.0, "w1", 16, "blocks loaded")
    resumed = [span for span in life.spans() if span.kind is K.RESUMED]
    assert resumed == [Span(kind=K.RESUMED, start_s=5.0, end_s=5.0, worker_id="w1")]

    restored = Life(0.0, "restored from the journal", has_had_place=True)
    restored.enter(K.READY, 1.0, "w0", 0, "")
    assert K.RESUMED in kinds(restored.spans())


def test_a_step_that_is_said_to_be_longer_than_it_can_have_been_begins_after_what_was_before() -> (
    None
):
    life = Life(0.0, "submitted")
    life.enter(K.READY, 5.0, "w0", 0, "")
    life.computed("w0", 0, 8, 1.0, 6.0, False)
    life.computed("w0", 8, 16, 5.5, 7.0, False)
    assert [(s.start_s, s.end_s) for s in life.spans()] == [
        (0.0, 5.0),
        (5.0, 5.0),
        (5.0, 6.0),
        (6.0, 7.0),
    ]


def test_chunks_are_told_exactly_while_there_are_few() -> None:
    spans = life_of_chunks(100).spans()
    assert [s.first for s in spans if s.kind is K.PREFILL] == list(range(0, 800, 8))


def test_many_chunks_are_joined_so_that_all_of_the_life_is_told() -> None:
    spans = life_of_chunks(5000).spans()
    assert len(spans) <= MAX_SPANS
    assert kinds(spans)[:2] == [K.QUEUED, K.READY]
    chunks = [span for span in spans if span.kind is K.PREFILL]
    assert (chunks[0].first, chunks[-1].end) == (0, 40_000)
    assert all(a.end == b.first for a, b in itertools.pairwise(chunks))
    assert sum(span.num_steps for span in chunks) == 5000


def test_what_was_computed_again_is_not_joined_to_what_was_before() -> None:
    life = life_of_chunks(MAX_SPANS - 11)
    for i in range(20):
        began_s = 1.0 + 0.1 * (MAX_SPANS - 11 + i)
        life.computed("w0", 8 * i, 8 * i + 8, began_s, began_s + 0.1, False)
    chunks = [span for span in life.spans() if span.kind is K.PREFILL]
    [again] = [i for i, span in enumerate(chunks) if i and span.first == 0]
    assert (chunks[again - 1].end, chunks[-1].end) == (8 * (MAX_SPANS - 11), 160)
    assert sum(span.num_steps for span in chunks) == MAX_SPANS + 9


def test_chunks_of_two_workers_are_not_joined() -> None:
    num_here = MAX_SPANS // 2 + 1
    life = life_of_chunks(num_here)
    for i in range(num_here, MAX_SPANS):
        life.computed("w1", 8 * i, 8 * i + 8, 1.0 + 0.1 * i, 1.1 + 0.1 * i, False)
    chunks = [span for span in life.spans() if span.kind is K.PREFILL]
    assert len(chunks) < MAX_SPANS, "some were joined"
    here, there = ([s for s in chunks if s.worker_id == name] for name in ("w0", "w1"))
    assert here[-1].end == there[0].first == 8 * num_here


def test_what_can_not_be_joined_is_left_out_and_counted() -> None:
    life = Life(0.0, "submitted")
    for i in range(1000):
        life.enter(K.READY, i + 0.1, "w0", 0, "")
        life.enter(K.QUEUED, i + 0.2, None, 0, f"evicted {i}")
    spans = life.spans()
    assert len(spans) <= MAX_SPANS + 1
    assert kinds(spans)[:2] == [K.QUEUED, K.OMITTED]
    assert spans[0].start_s == 0.0
    assert spans[-1].why == "evicted 999"
    # Each round but the first has a span in the queue, one on a worker and a moment between.
    assert spans[1].num_steps + len(spans) - 1 == 3 * 1000


# --------------------------------------------------------------------------- what the core tells


class Timed(Script):
    """A core that is told the time with every event: one second more each time."""

    now_s = 100.0

    def say(self, *events: Any) -> list[str]:
        self.now_s += 1.0
        return super().say(*(msgspec.structs.replace(e, time_s=self.now_s) for e in events))

    def life(self, name: str) -> RequestLife:
        lives = self.state.lives(self.now_s, 10, 10)
        return next(life for life in [*lives.live, *lives.ended] if life.info.request_id == name)


def told(life: RequestLife) -> list[str]:
    """Spans in short words."""
    lines = []
    for span in life.spans:
        end = "" if span.end_s is None else f"{span.end_s - 100:g}"
        lines.append(
            f"{span.kind.value} {span.start_s - 100:g}-{end} {span.worker_id or '-'} "
            f"{span.first}:{span.end}"
        )
    return lines


def test_a_request_that_is_evicted_in_mid_prefill_and_comes_back() -> None:
    script = Timed(enable_prefix_caching=False, enable_offload=True)
    script.submit("a", 20, prompt_logprobs=1)
    script.computed(compute_s=0.5)
    script.say(EvictRequested("a"))
    script.computed(compute_s=0.5)
    script.say(SaveDone(script.last(SaveBlocks).op_id, 4, 4))
    script.say(LookupDone(script.last(LookupBlocks).op_id, 16))
    assert told(script.life("a")) == [
        "queued 2-2 - 0:0",
        "ready 2-2.5 w0 0:0",
        "prefill 2.5-3 w0 0:8",
        "prefill 4.5-5 w0 8:16",
        "saving 5-6 w0 0:16",
        "queued 6-6 - 0:16",
        "resumed 6-6 w0 0:0",
        "loading 6- w0 0:0",
    ]


def test_a_request_that_moves() -> None:
    script = Timed(enable_offload=False, max_num_batched_tokens=32)
    script.submit("a", 17, max_tokens=9)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")), MigrateRequested("a", "w1"))
    script.say(CopyDone(script.last(CopyBlocks).op_id, 4))
    script.computed()
    script.say(CopyDone(script.last(CopyBlocks).op_id, 1))
    script.computed("w1")
    assert told(script.life("a")) == [
        "queued 2-2 - 0:0",
        "ready 2-3 w0 0:0",
        "prefill 3-3 w0 0:17",
        "copied 4-5 w1 0:16",
        "copied 6-7 w1 16:20",
        "decode 6-6 w0 17:18",
        "paused 6-7 w0 0:0",
        "moved 7-7 w1 0:18",
        "ready 7-8 w1 0:18",
        "decode 8-8 w1 18:19",
    ]


def test_a_request_whose_worker_was_lost_tells_why_it_waits_again() -> None:
    script = Timed(num_workers=1, enable_offload=False, max_num_batched_tokens=8)
    script.submit("a", 20, prompt_logprobs=1)
    script.computed()
    script.say(WorkerJoined(worker_info("w1")), WorkerLost("w0", "its host is gone"))
    spans = script.life("a").spans
    assert kinds(spans)[-3:] == [K.QUEUED, K.RESUMED, K.READY]
    assert spans[-3].why == "worker lost: its host is gone"
    assert (spans[-1].worker_id, spans[-3].end) == ("w1", 8)


def test_the_last_message_of_a_request_tells_its_life() -> None:
    script = Timed(enable_offload=False)
    script.submit("a", 5, max_tokens=2)
    script.computed()
    assert script.last(Emit).delta.life is None
    script.computed()
    life = script.last(Emit).delta.life
    assert kinds(life) == [K.QUEUED, K.READY, K.PREFILL, K.DECODE, K.FINISHED]
    assert life == script.life("a").spans


def test_lives_are_told_of_the_first_live_ones_and_the_last_ended_ones() -> None:
    script = Timed(enable_offload=False)
    for i in range(400):
        script.submit(f"ended{i}")
        script.say(RequestCancelled(f"ended{i}"))
    for i in range(30):
        script.submit(f"live{i}", priority=-i)
    lives = script.state.lives(1000.0, 3, 2)
    assert (lives.now_s, lives.num_live) == (1000.0, 30)
    assert [life.info.request_id for life in lives.live] == ["live29", "live28", "live27"]
    assert [life.info.request_id for life in lives.ended] == ["ended398", "ended399"]
    assert all(life.finish_reason is FinishReason.ABORT for life in lives.ended)
    assert script.state.lives(1000.0, 0, 0).ended == []
    assert 100 <= len(script.state.lives(1000.0, 0, 10_000).ended) < 400, "so many are kept"


def test_an_illegal_change_tells_the_story() -> None:
    script = Timed(enable_offload=False)
    script.submit("a", 20)
    script.computed()
    story = list(script.state._core.requests["a"].life.story())
    assert story[0] == "102.000s queued (submitted)"
    assert story[-1] == "103.000s prefill on w0 (tokens 0 to 8)"
