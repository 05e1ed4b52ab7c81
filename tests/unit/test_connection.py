"""A client's handles outlive the scheduler's restarts, and end where the engine is really gone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster import generating, line
from cluster.connection import Connection
from cluster.generating import submit_as_room_comes
from cluster.handle import RequestHandle
from cluster.patience import GONE_S, UNREACHABLE_S, Patience, Unreachable
from scheduler.codec import decode, int_array
from scheduler.errors import (
    DuplicateRequest,
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    UnknownRequest,
    UnknownWorker,
)
from scheduler.messages import Submission
from scheduler.outputs import RequestOutput
from scheduler.sampling_params import SamplingParams
from tests.fake_scheduler import ByteTable, FakeScheduler

PROMPT = int_array([3, 1, 4, 1, 5])
PARAMS = SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=2)


_CLIENTS = itertools.count()


class Driver:
    """A connection whose thread is driven by hand: a turn at a time, and one in every pause."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.scheduler = scheduler
        self.is_in_turn = False
        self.connection = Connection(
            scheduler, f"client-{next(_CLIENTS)}", wait=self.wait, clock=lambda: scheduler.now_s
        )

    def wait(self, seconds: float) -> None:
        self.scheduler.now_s += seconds
        if not self.is_in_turn:
            self.turn()

    def turn(self) -> bool:
        self.is_in_turn = True
        try:
            return self.connection.turn()
        finally:
            self.is_in_turn = False

    def until_done(self, *handles: RequestHandle) -> None:
        for _ in range(1000):
            if all(handle.done() for handle in handles) or not self.turn():
                return
        pytest.fail("the handles do not end")

    def handle(
        self, request_id: str = "r", params: SamplingParams = PARAMS, **fields: Any
    ) -> RequestHandle:
        submission = Submission(request_id, PROMPT, params, seed=fields.pop("seed", 7), **fields)
        return self.handle_of(submission)

    def handle_of(self, submission: Submission) -> RequestHandle:
        return RequestHandle(submission, None, ByteTable(), self.connection.tell_cancel)

    def submit(self, request_id: str = "r", **arguments: Any) -> RequestHandle:
        (outcome,) = self.connection.submit([self.handle(request_id, **arguments)])
        if isinstance(outcome, HaversackError):
            raise outcome
        return outcome

    def output(self, handle: RequestHandle) -> RequestOutput:
        self.until_done(handle)
        return handle.result(0)


@pytest.fixture
def scheduler() -> FakeScheduler:
    return FakeScheduler()


@pytest.fixture
def driver(scheduler: FakeScheduler) -> Driver:
    return Driver(scheduler)


def undisturbed(params: SamplingParams = PARAMS, request_id: str = "r") -> RequestOutput:
    driver = Driver(FakeScheduler())
    return driver.output(driver.submit(request_id, params=params))


def assert_same(output: RequestOutput, expected: RequestOutput) -> None:
    """Rows are compared as bits."""
    assert output.outputs == expected.outputs
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.prompt_token_ids == expected.prompt_token_ids


def submitted(scheduler: FakeScheduler) -> list[str]:
    """Every id that was submitted, in order, as often as it was."""
    messages = [args[1] for method, args in scheduler.calls if method == "submit"]
    return [s.request_id for message in messages for s in decode(message, list[Submission])]


def once(action: Callable[[], None]) -> Any:
    return iter([action])


# ----------------------------------------------------------------------------------- restarts


@pytest.mark.parametrize("has_journal", [True, False])
@pytest.mark.parametrize("num_lost_steps", [0, 2])
@pytest.mark.parametrize("num_turns", range(8))
def test_a_restart_in_any_phase_changes_nothing_of_the_result(
    num_turns: int, num_lost_steps: int, has_journal: bool
) -> None:
    """Before the prompt is done, in mid-stream, and with the last delta not acknowledged."""
    scheduler = FakeScheduler(has_journal=has_journal)
    driver = Driver(scheduler)
    handle = driver.submit()
    for _ in range(num_turns):
        driver.turn()
    was_done = handle.done()
    scheduler.restart(num_lost_steps)
    assert_same(driver.output(handle), undisturbed())
    for _ in range(3):
        driver.turn()
    assert scheduler.num_calls("submit") == (1 if was_done else 2)
    assert scheduler.num_calls("connect") == 2


def test_numbers_that_begin_again_lose_nothing(driver: Driver) -> None:
    """The clock that they begin from was set back: old acknowledgements must not count."""
    scheduler = driver.scheduler
    scheduler.epoch_step = 1
    handles = [driver.submit(f"r{i}") for i in range(3)]
    driver.turn()
    scheduler.restart()
    scheduler.step()
    driver.until_done(*handles)
    for handle in handles:
        assert_same(handle.result(0), undisturbed())


KINDS = ["restart", "lose steps", "forget", "lose answer", "out of reach"]
FAULTS = st.dictionaries(st.integers(0, 25), st.sampled_from(KINDS), max_size=8)


@given(
    faults=FAULTS,
    has_journal=st.booleans(),
    many=st.lists(
        st.builds(
            SamplingParams,
            n=st.integers(1, 3),
            max_tokens=st.integers(0, 8),
            stop=st.sampled_from([(), ("ab", "bc"), (" d", "c")]),
            logprobs=st.none() | st.integers(0, 1),
            prompt_logprobs=st.none() | st.integers(0, 1),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_whatever_happens_the_results_are_those_of_an_undisturbed_run(
    faults: dict[int, str], has_journal: bool, many: list[SamplingParams]
) -> None:
    """Faults strike before, in and after any call, several times, with several requests live."""
    scheduler = FakeScheduler(has_journal=has_journal)
    driver = Driver(scheduler)
    counter = itertools.count()
    call = scheduler.call

    def faulty(method: str, *args: Any, timeout_s: float) -> Any:
        match faults.get(next(counter)):
            case "restart":
                scheduler.restart()
            case "lose steps":
                scheduler.restart(2)
            case "forget":
                scheduler.forget()
            case "lose answer":
                call(method, *args, timeout_s=timeout_s)
                raise Unreachable("the answer is lost")
            case "out of reach":
                raise Unreachable("out of reach")
        return call(method, *args, timeout_s=timeout_s)

    scheduler.call = faulty  # type: ignore[method-assign]
    handles = [driver.handle(f"r{i}", params) for i, params in enumerate(many)]
    outcomes = driver.connection.submit(handles)
    assert outcomes == handles
    driver.until_done(*handles)
    for i, (handle, params) in enumerate(zip(handles, many, strict=True)):
        assert_same(handle.result(0), undisturbed(params, f"r{i}"))
    for _ in range(40):
        driver.turn()
    assert all(family.is_over for family in scheduler.families.values())


def test_an_answer_that_is_lost_comes_again_and_nothing_twice(driver: Driver) -> None:
    scheduler = driver.scheduler
    scheduler.after["poll"] = itertools.cycle([scheduler.lose_answer, lambda: None])
    handle = driver.submit()
    streamed: list[int] = []
    consumer = threading.Thread(
        target=lambda: streamed.extend(t for d in handle.stream() for t in d.token_ids)
    )
    consumer.start()
    output = driver.output(handle)
    consumer.join(10)
    assert_same(output, undisturbed())
    assert streamed == output.outputs[0].token_ids
    assert scheduler.num_calls("connect") == 1


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("has_journal", [True, False])
def test_a_submission_that_meets_the_restart_is_sent_again(when: str, has_journal: bool) -> None:
    """Lost on its way, or taken by a scheduler that died before it could say so."""
    scheduler = FakeScheduler(has_journal=has_journal)
    driver = Driver(scheduler)

    def die() -> None:
        scheduler.restart()
        scheduler.lose_answer()

    getattr(scheduler, when)["submit"] = once(die)
    assert_same(driver.output(driver.submit()), undisturbed())
    assert list(scheduler.families) == (["r"] if has_journal else [])


def test_a_restart_between_a_submission_and_its_answer_loses_no_request(driver: Driver) -> None:
    """The line has connected again, without it, before the old scheduler's yes arrives."""
    scheduler = driver.scheduler
    scheduler.has_journal = False

    def restart() -> None:
        scheduler.restart()
        driver.turn()
        driver.turn()

    scheduler.after["submit"] = once(restart)
    assert_same(driver.output(driver.submit()), undisturbed())


def test_a_client_that_was_given_up_submits_again(driver: Driver) -> None:
    handle = driver.submit()
    driver.turn()
    driver.turn()
    driver.scheduler.forget()
    assert_same(driver.output(handle), undisturbed())


def test_what_is_not_live_any_more_is_not_submitted_again(driver: Driver) -> None:
    driver.output(driver.submit("old"))
    running = driver.submit("new", params=SamplingParams(max_tokens=50))
    driver.scheduler.restart()
    driver.output(running)
    assert submitted(driver.scheduler)[2:] == ["new"]


def test_other_calls_get_through_a_restart(driver: Driver) -> None:
    scheduler = driver.scheduler
    scheduler.before["stats"] = iter([scheduler.lose_answer] * 5)
    assert driver.connection.stats().store is None
    scheduler.before["cancel"] = iter([scheduler.lose_answer] * 5)
    handle = driver.submit()
    driver.connection.cancel("r")
    assert driver.output(handle).outputs[0].finish_reason == "abort"


# ------------------------------------------------------------------------ refused the second time


def test_a_handle_whose_submission_is_refused_after_a_restart_ends_with_that(
    driver: Driver,
) -> None:
    """Another client has taken its id meanwhile: that one's request is not touched."""
    scheduler = driver.scheduler
    handle = driver.submit()
    other = driver.submit("other")
    driver.turn()
    scheduler.restart()
    scheduler.refusals["r"] = DuplicateRequest("taken", param="request_id")
    driver.until_done(handle, other)
    with pytest.raises(DuplicateRequest, match="taken"):
        handle.result(0)
    assert_same(other.result(0), undisturbed())
    assert ("cancel", (["r"],)) not in scheduler.calls
    scheduler.refusals.clear()
    assert_same(driver.output(driver.submit()), undisturbed())


def test_a_queue_that_is_full_after_a_restart_is_waited_for(driver: Driver) -> None:
    scheduler = driver.scheduler
    handle = driver.submit()
    scheduler.restart()
    scheduler.has_journal = False
    scheduler.families.clear()
    scheduler.refusals["r"] = Overloaded("full", retry_after_s=5.0)
    for _ in range(10):
        driver.turn()
    assert not handle.done()
    assert 3 <= scheduler.num_calls("submit") <= 11
    scheduler.refusals.clear()
    assert_same(driver.output(handle), undisturbed())


def test_a_queue_that_stays_full_after_a_restart_ends_the_handle(driver: Driver) -> None:
    handle = driver.submit()
    driver.scheduler.restart()
    driver.scheduler.refusals["r"] = Overloaded("full", retry_after_s=5.0)
    driver.until_done(handle)
    with pytest.raises(Overloaded):
        handle.result(0)
    assert driver.scheduler.now_s >= UNREACHABLE_S


# ------------------------------------------------------------------------------- gone for good


def test_a_scheduler_whose_name_is_gone_ends_the_handles_within_seconds(driver: Driver) -> None:
    handle = driver.submit()
    driver.scheduler.is_absent = True
    driver.until_done(handle)
    with pytest.raises(EngineUnavailable, match="gone"):
        handle.result(0)
    assert GONE_S <= driver.scheduler.now_s < 2 * GONE_S
    assert driver.scheduler.num_calls("poll") < 30
    for call in (driver.submit, driver.connection.stats):
        with pytest.raises(EngineUnavailable, match="gone"):
            call()


def test_a_name_that_comes_back_in_time_goes_on(driver: Driver) -> None:
    scheduler = driver.scheduler
    handle = driver.submit()
    driver.turn()
    scheduler.is_absent = True
    while scheduler.now_s < GONE_S / 2:
        driver.turn()
    scheduler.is_absent = False
    scheduler.has_journal = False
    scheduler.restart()
    assert_same(driver.output(handle), undisturbed())


def test_a_scheduler_that_never_answers_ends_handles_and_calls_after_a_deadline(
    driver: Driver,
) -> None:
    handle = driver.submit()
    driver.scheduler.is_frozen = True
    begin_s = driver.scheduler.now_s
    driver.until_done(handle)
    with pytest.raises(EngineUnavailable, match="did not answer"):
        handle.result(0)
    assert UNREACHABLE_S <= driver.scheduler.now_s - begin_s < 2 * UNREACHABLE_S
    frozen = Driver(FakeScheduler())
    frozen.scheduler.is_frozen = True
    with pytest.raises(EngineUnavailable):
        frozen.submit()
    assert frozen.scheduler.num_calls("submit") < 10


def test_a_frozen_scheduler_that_wakes_up_goes_on(driver: Driver) -> None:
    scheduler = driver.scheduler
    handle = driver.submit()
    driver.turn()
    scheduler.is_frozen = True
    while scheduler.now_s < UNREACHABLE_S / 2:
        driver.turn()
    scheduler.is_frozen = False
    assert_same(driver.output(handle), undisturbed())
    assert scheduler.num_calls("connect") == 1


def test_an_engine_that_was_shut_down_says_so_at_once(driver: Driver) -> None:
    """What it had computed is still handed over."""
    short = driver.submit("short", params=SamplingParams(max_tokens=1))
    handle = driver.submit(params=SamplingParams(max_tokens=500))
    driver.scheduler.step()
    driver.scheduler.closed = EngineUnavailable("the engine was shut down")
    driver.until_done(handle, short)
    assert len(short.result(0).outputs[0].token_ids) == 1
    with pytest.raises(EngineUnavailable, match="shut down"):
        handle.result(0)
    assert driver.scheduler.now_s == 0
    with pytest.raises(EngineUnavailable, match="shut down"):
        driver.submit("late")


def test_pauses_between_tries_grow_and_are_not_the_same_for_all() -> None:
    now_s = 0.0
    patience, other = Patience(lambda: now_s), Patience(lambda: now_s)
    failure = Unreachable("away")
    pauses = [patience.pause_after(failure) for _ in range(10)]
    assert 0.04 < pauses[0] < 0.2
    assert 0.9 < pauses[-1] <= 2.0
    assert pauses != [other.pause_after(failure) for _ in range(10)]
    patience.answered()
    assert patience.pause_after(failure) < 0.2


# --------------------------------------------------------------------------------------- cancel


def test_a_cancel_that_was_lost_with_the_scheduler_is_repeated(driver: Driver) -> None:
    scheduler = driver.scheduler
    handle = driver.submit(params=SamplingParams(max_tokens=10_000))
    driver.turn()
    scheduler.is_frozen = True
    handle.cancel()
    driver.turn()
    scheduler.is_frozen = False
    output = driver.output(handle)
    assert output.outputs[0].finish_reason == "abort"
    assert scheduler.num_tokens_computed < 20


def test_a_restart_wakes_no_completion_that_a_stop_string_ended(driver: Driver) -> None:
    """The cancel that follows a stop string is lost, and the request starts anew."""
    scheduler = driver.scheduler
    scheduler.has_journal = False
    params = SamplingParams(max_tokens=10_000, stop="ab")
    expected = undisturbed(params)
    handle = driver.submit(params=params)
    scheduler.tell = lambda method, *args: scheduler.restart()  # type: ignore[method-assign]
    while scheduler.num_calls("connect") < 2:
        driver.turn()
    del scheduler.tell
    assert_same(driver.output(handle), expected)
    assert scheduler.num_tokens_computed < 200


# ------------------------------------------------------------------------------- the same again


def test_the_same_content_under_a_live_id_is_the_same_handle(driver: Driver) -> None:
    first = driver.submit()
    driver.turn()
    assert driver.submit(timeout_s=5.0) is first
    assert driver.scheduler.num_calls("submit") == 1
    for different in ({"seed": 8}, {"params": SamplingParams(max_tokens=5)}, {"priority": 1}):
        with pytest.raises(DuplicateRequest):
            driver.submit(**different)
    assert_same(driver.output(first), undisturbed())


def test_an_id_twice_in_one_batch_is_one_handle_or_refused(driver: Driver) -> None:
    handles = [driver.handle(), driver.handle(), driver.handle(seed=8), driver.handle("s")]
    first, same, different, other = driver.connection.submit(handles)
    assert first is handles[0]
    assert same is first
    assert isinstance(different, DuplicateRequest)
    assert other is handles[3]
    assert_same(driver.output(handles[0]), undisturbed())


def test_who_comes_second_shares_the_answer_of_a_submission_under_way(driver: Driver) -> None:
    """Another thread submits the same while the first one's answer is not there yet."""
    scheduler = driver.scheduler
    outcomes: list[Any] = []

    def second() -> None:
        outcomes.extend(driver.connection.submit([driver.handle()]))

    thread = threading.Thread(target=second)
    scheduler.refusals["r"] = RequestTooLarge("too large")
    scheduler.before["submit"] = once(thread.start)
    with pytest.raises(RequestTooLarge):
        driver.submit()
    thread.join(10)
    assert [type(outcome) for outcome in outcomes] == [RequestTooLarge]


def test_what_was_submitted_elsewhere_is_followed_from_its_beginning(driver: Driver) -> None:
    """A retry from another process, while the first one runs and after it has ended."""
    retry = Driver(driver.scheduler)
    first = driver.submit()
    for _ in range(3):
        driver.turn()
    second = retry.submit()
    assert_same(retry.output(second), undisturbed())
    assert_same(driver.output(first), undisturbed())
    num_computed = driver.scheduler.num_tokens_computed
    assert_same(retry.output(retry.submit()), undisturbed())
    assert driver.scheduler.num_tokens_computed == num_computed


# --------------------------------------------------------------------------------------- attach


def test_any_client_can_attach_by_id_alone(driver: Driver) -> None:
    other = Driver(driver.scheduler)
    first = driver.submit()
    for _ in range(2):
        driver.turn()
    attached = other.connection.attach("r", other.handle_of)
    assert other.connection.attach("r", other.handle_of) is attached
    assert driver.connection.attach("r", driver.handle_of) is first
    driver.scheduler.restart()
    assert_same(other.output(attached), undisturbed())
    assert_same(driver.output(first), undisturbed())
    late = other.connection.attach("r", other.handle_of)
    assert late is not attached
    assert_same(other.output(late), undisturbed())


def test_what_comes_before_attaching_is_answered_is_not_missed(driver: Driver) -> None:
    other = Driver(driver.scheduler)
    driver.submit()

    def fetch() -> None:
        for _ in range(3):
            other.turn()

    driver.scheduler.after["attach"] = once(fetch)
    assert_same(other.output(other.connection.attach("r", other.handle_of)), undisturbed())


@pytest.mark.parametrize("when", ["before", "after"])
def test_attaching_gets_through_a_restart(driver: Driver, when: str) -> None:
    other = Driver(driver.scheduler)
    driver.submit()

    def die() -> None:
        driver.scheduler.restart()
        driver.scheduler.lose_answer()

    getattr(driver.scheduler, when)["attach"] = once(die)
    assert_same(other.output(other.connection.attach("r", other.handle_of)), undisturbed())


def test_a_restart_between_attaching_and_its_answer_loses_nothing(driver: Driver) -> None:
    other = Driver(driver.scheduler)
    driver.submit()

    def restart() -> None:
        driver.scheduler.restart()
        other.turn()
        other.turn()

    driver.scheduler.after["attach"] = once(restart)
    assert_same(other.output(other.connection.attach("r", other.handle_of)), undisturbed())


def test_attaching_to_nothing_is_refused_and_the_id_stays_free(driver: Driver) -> None:
    with pytest.raises(UnknownRequest):
        driver.connection.attach("r", driver.handle_of)
    assert_same(driver.output(driver.submit()), undisturbed())


# ------------------------------------------------------------------------------ limits of messages


def test_a_submission_that_is_sent_again_has_what_is_left_of_its_time(driver: Driver) -> None:
    scheduler = driver.scheduler
    handle = driver.submit(timeout_s=100.0, params=SamplingParams(max_tokens=10_000))
    scheduler.now_s += 30
    scheduler.has_journal = False
    scheduler.restart()
    driver.turn()
    driver.turn()
    first, second = [
        decode(args[1], list[Submission])[0]
        for method, args in scheduler.calls
        if method == "submit"
    ]
    assert first.timeout_s == 100.0
    assert second.timeout_s is not None
    assert 69 < second.timeout_s <= 70
    handle.cancel()
    driver.until_done(handle)


def test_large_submissions_travel_in_several_messages(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_MAX_MESSAGE_BYTES", 3 * PROMPT.nbytes)
    handles = [driver.handle(f"r{i}") for i in range(10)]
    assert driver.connection.submit(handles) == handles
    assert driver.scheduler.num_calls("submit") == 4
    driver.scheduler.restart()
    driver.until_done(*handles)
    assert driver.scheduler.num_calls("submit") == 8
    for handle in handles:
        assert_same(handle.result(0), undisturbed())


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_submission_is_cancelled_wherever_it_is(driver: Driver, when: str) -> None:
    """Ctrl-C before it is sent, or before the answer; then the user tries again at once."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    scheduler = driver.scheduler
    getattr(scheduler, when)["submit"] = once(interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.submit(params=SamplingParams(max_tokens=10_000))
    with pytest.raises(DuplicateRequest):
        driver.submit()
    for _ in range(3):
        driver.turn()
    assert scheduler.num_tokens_computed < 10
    assert all(family.is_over for family in scheduler.families.values())
    assert_same(driver.output(driver.submit()), undisturbed())


def test_an_interrupted_detached_submission_goes_on(driver: Driver) -> None:
    """Its user asks for it again by its id, from wherever."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    driver.scheduler.before["submit"] = once(interrupt)
    with pytest.raises(KeyboardInterrupt):
        driver.submit(detached=True)
    assert_same(driver.output(driver.submit(detached=True)), undisturbed())


def test_the_same_again_after_a_cancel_waits_for_that_and_starts_anew(driver: Driver) -> None:
    first = driver.submit()
    driver.turn()
    first.cancel()
    with pytest.raises(DuplicateRequest):
        driver.submit(seed=8)
    second: list[RequestHandle] = []
    thread = threading.Thread(target=lambda: second.append(driver.submit()))
    thread.start()
    driver.until_done(first)
    thread.join(10)
    assert first.result(0).outputs[0].finish_reason == "abort"
    assert second[0] is not first
    assert_same(driver.output(second[0]), undisturbed())


# ----------------------------------------------------------------------------------- back pressure


def test_more_than_the_queue_holds_goes_in_as_room_comes_and_in_order() -> None:
    """Bounded: never more than one try beyond what there is room for, once that is known."""
    room, taken, sent, pauses = 10, [], [], []
    driver = Driver(FakeScheduler())

    def submit(handles: list[RequestHandle]) -> list[RequestHandle | HaversackError]:
        nonlocal room
        sent.append(len(handles))
        outcomes: list[RequestHandle | HaversackError] = []
        for handle in handles:
            if room:
                room -= 1
                taken.append(handle.request_id)
                outcomes.append(handle)
            else:
                outcomes.append(Overloaded("full", retry_after_s=4.0))
        return outcomes

    def wait(seconds: float) -> None:
        nonlocal room
        pauses.append(seconds)
        room += 3

    handles = [driver.handle(f"r{i}") for i in range(40)]
    submit_as_room_comes(handles, submit, wait)
    assert taken == [handle.request_id for handle in handles]
    assert not any(handle.done() for handle in handles)
    assert all(2.0 <= pause <= 4.0 for pause in pauses)
    assert sum(sent[1:]) < 3 * len(handles)


class Door:
    """Takes requests: some only when they come again, and one never."""

    def __init__(self, full: set[str], too_large: str) -> None:
        self.full = full
        self.too_large = too_large
        self.taken: list[str] = []

    def submit(self, batch: list[RequestHandle]) -> list[RequestHandle | HaversackError]:
        return [self._outcome(handle) for handle in batch]

    def _outcome(self, handle: RequestHandle) -> RequestHandle | HaversackError:
        name = handle.request_id
        if name in self.full:
            self.full.remove(name)
            return Overloaded("full")
        if name == self.too_large:
            return RequestTooLarge("too large")
        self.taken.append(name)
        return handle


def test_one_that_is_refused_stops_what_comes_after_it_but_nothing_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generating, "_MAX_BATCH", 3)
    driver = Driver(FakeScheduler())
    handles = [driver.handle(f"r{i}") for i in range(4)]
    door = Door(full={"r1"}, too_large="r2")
    submit_as_room_comes(handles, door.submit, lambda seconds: None)
    assert door.taken == ["r0", "r1"]
    with pytest.raises(RequestTooLarge):
        handles[2].result(0)


def test_or_it_stops_nothing_where_each_is_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those after it nor those that found the queue full."""
    monkeypatch.setattr(generating, "_MAX_BATCH", 3)
    driver = Driver(FakeScheduler())
    handles = [driver.handle(f"r{i}") for i in range(6)]
    door = Door(full={"r0", "r2", "r4"}, too_large="r1")
    submit_as_room_comes(handles, door.submit, lambda seconds: None, stops_at_refusal=False)
    assert sorted(door.taken) == ["r0", "r2", "r3", "r4", "r5"]
    assert [handle.done() for handle in handles] == [i == 1 for i in range(6)]


# ------------------------------------------------------------------------------------ operators


def test_a_drain_whose_answer_was_lost_has_happened(driver: Driver) -> None:
    """Tried again, the worker is not there any more: that is what was wanted."""

    def unknown() -> None:
        raise UnknownWorker("no such worker")

    scheduler = driver.scheduler
    scheduler.before["drain"] = iter([scheduler.lose_answer, unknown])
    driver.connection.drain("worker-0", 5.0, False)
    scheduler.before["drain"] = once(unknown)
    with pytest.raises(UnknownWorker):
        driver.connection.drain("worker-0", 5.0, False)


def test_a_wrong_call_is_not_repeated(driver: Driver) -> None:
    def wrong() -> None:
        raise InvalidRequest("wrong")

    driver.scheduler.before["stats"] = once(wrong)
    with pytest.raises(InvalidRequest, match="wrong"):
        driver.connection.stats()
    assert driver.scheduler.num_calls("stats") == 1


# ----------------------------------------------------------------------------- the thread, the end


def test_the_thread_fetches_and_ends_with_the_connection() -> None:
    scheduler = FakeScheduler()
    connection = Connection(scheduler, "threaded")
    connection.start()
    handle = RequestHandle(
        Submission("r", PROMPT, PARAMS, seed=7), None, ByteTable(), connection.tell_cancel
    )
    assert connection.submit([handle]) == [handle]
    assert_same(handle.result(10), undisturbed())
    assert connection.close()
    assert scheduler.outboxes == {}
    assert not any(t.name.endswith(connection.client_id) for t in threading.enumerate())


def test_a_bug_in_the_client_ends_its_handles(driver: Driver) -> None:
    handle = driver.submit()

    def bug() -> None:
        raise ZeroDivisionError

    driver.scheduler.before["poll"] = once(bug)
    driver.until_done(handle)
    with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
        handle.result(0)


def test_closing_says_whether_the_engine_knows(driver: Driver) -> None:
    handle = driver.submit()
    driver.scheduler.is_frozen = True
    assert not driver.connection.close()
    error = EngineUnavailable("closed")
    assert driver.connection.end(error) == [handle]
    with pytest.raises(EngineUnavailable, match="closed"):
        driver.submit("late")
