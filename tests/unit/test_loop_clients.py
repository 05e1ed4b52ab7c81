"""Clients that poll, fall silent, come back, or meet another scheduler than the one they left."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from scheduler.actions import Emit
from scheduler.errors import EngineUnavailable, UnknownClient
from scheduler.events import ClientGone, RequestRestored, RequestSubmitted, Tick
from scheduler.messages import OutputDelta
from scheduler.outbox import Outbox
from scheduler.submissions import make_requests
from tests.loop_fakes import (
    ScriptedState,
    emit,
    make,
    run,
    submission,
    turns,
    until,
)
from tests.sizes import sizes


def emitting(*names: str) -> ScriptedState:
    """A core that tells "c" of each of these whenever something is submitted."""
    state = ScriptedState()
    state.script = lambda event: (
        [emit("c", name) for name in names] if isinstance(event, RequestSubmitted) else []
    )
    return state


def names(answer: Any) -> list[str]:
    return [delivery.delta.request_id for delivery in answer.deliveries]


# ----------------------------------------------------------------------------------------- polls


def test_a_poll_that_is_repeated_brings_the_same_deltas_until_they_are_acknowledged() -> None:
    async def test() -> None:
        state = ScriptedState()
        state.script = lambda event: [emit("c", "a"), emit("c", "b"), emit("other", "x")]
        loop = make(state)
        epoch = loop.connect("c")
        await loop.submit("c", [submission()])
        for _ in range(2):
            answer = await loop.poll("c", epoch, 1.0)
            assert [(d.seq - epoch, d.delta.request_id) for d in answer.deliveries] == [
                (1, "a"),
                (2, "b"),
            ]
        answer = await loop.poll("c", epoch + 1, 1.0)
        assert [d.seq - epoch for d in answer.deliveries] == [2]
        assert (await loop.poll("c", epoch + 2, 0.0)).deliveries == []

    run(test)


def test_a_waiting_poll_is_answered_as_soon_as_there_is_something() -> None:
    async def test() -> None:
        loop = make(emitting("a"))
        loop.connect("c")
        poll = asyncio.create_task(loop.poll("c", 0, 1000.0))
        await asyncio.sleep(0)
        await loop.submit("c", [submission()])
        assert names(await poll) == ["a"]

    run(test)


def test_a_second_poll_sends_the_first_one_home() -> None:
    async def test() -> None:
        loop = make(ScriptedState())
        loop.connect("c")
        first = asyncio.create_task(loop.poll("c", 0, 1000.0))
        await asyncio.sleep(0)
        second = asyncio.create_task(loop.poll("c", 0, 1000.0))
        assert (await first).deliveries == []
        assert not second.done()
        loop.close(EngineUnavailable("over"))
        assert (await second).closed == EngineUnavailable("over").to_wire()

    run(test)


def test_a_client_that_connects_again_keeps_its_outbox_and_its_numbers() -> None:
    async def test() -> None:
        loop = make(emitting("a", "b"))
        epoch = loop.connect("c")
        await loop.submit("c", [submission()])
        await loop.poll("c", epoch + 1, 1.0)
        assert loop.connect("c") == epoch
        assert [d.seq - epoch for d in (await loop.poll("c", epoch + 1, 1.0)).deliveries] == [2]

    run(test)


# ---------------------------------------------------------------------------------- the numbers


def test_an_acknowledgement_of_another_outbox_loses_nothing() -> None:
    """Whether the old scheduler had counted further than the new one, or less far."""
    box = Outbox(5000)
    for name in "abc":
        box.put(OutputDelta(name))
    for stale in (0, 3, 4999, 5000, 5004, 10**18):
        box.acknowledge(stale)
        assert [d.seq for d in box.ready()] == [5001, 5002, 5003], stale
    box.acknowledge(5002)
    assert [d.seq for d in box.ready()] == [5003]


def test_a_poll_that_comes_late_to_a_new_outbox_loses_nothing() -> None:
    """The client was given up and has connected again when its poll of before arrives."""

    async def test() -> None:
        loop = make(emitting("a", "b"))
        old = loop.connect("c")
        await loop.submit("c", [submission()])
        await loop.poll("c", old, 1.0)
        await loop.disconnect("c")
        new = loop.connect("c")
        assert new > old + 2
        await loop.submit("c", [submission()])
        await loop.poll("c", old + 2, 1.0)
        answer = await loop.poll("c", new, 1.0)
        assert names(answer) == ["a", "b"]
        assert all(d.seq > old + 2 for d in answer.deliveries), "a client would take them for old"

    run(test)


def test_epochs_of_one_scheduler_differ_though_the_machines_clock_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 1000)

    async def test() -> None:
        loop = make(ScriptedState())
        assert len({loop.connect(f"c{i}") for i in range(5)}) == 5

    run(test)


# -------------------------------------------------------------------------------------- silence


def test_a_client_that_stops_polling_is_given_up_and_the_core_and_the_host_are_told() -> None:
    async def test() -> None:
        state = ScriptedState()
        gone: list[str] = []
        loop = make(state, client_grace_s=0.01, watch_interval_s=0.001, on_client_gone=gone.append)
        loop.connect("gone")
        await until(lambda: bool(state.of_kind(ClientGone)))
        assert [event.client_id for event in state.of_kind(ClientGone)] == ["gone"]
        await until(lambda: gone == ["gone"])
        answer = await loop.poll("gone", 0, 0.0)
        assert answer.is_forgotten
        assert answer.closed is None
        with pytest.raises(UnknownClient, match="connect"):
            await loop.submit("gone", [submission()])
        with pytest.raises(UnknownClient, match="connect"):
            await loop.attach("gone", "r")

    run(test)


def test_a_client_that_polls_is_not_given_up() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state, client_grace_s=0.02, watch_interval_s=0.001)
        loop.connect("c")
        while len(state.of_kind(Tick)) < 100:
            await loop.poll("c", 0, 0.005)
        assert not state.of_kind(ClientGone)

    run(test)


def test_a_poll_of_a_dead_client_does_not_keep_it_alive_for_long() -> None:
    """Its process is gone, but the poll that it left behind waits here for as long as it said."""

    async def test() -> None:
        state = ScriptedState()
        loop = make(state, client_grace_s=0.02, watch_interval_s=0.001)
        loop.connect("c")
        answer = await loop.poll("c", 0, 1000.0)
        assert answer.deliveries == []
        await until(lambda: bool(state.of_kind(ClientGone)))

    run(test)


def test_a_client_that_leaves_is_gone_at_once_and_its_poll_ends() -> None:
    async def test() -> None:
        state = ScriptedState()
        gone: list[str] = []
        loop = make(state, on_client_gone=gone.append)
        loop.connect("c")
        poll = asyncio.create_task(loop.poll("c", 0, 1000.0))
        await asyncio.sleep(0)
        for _ in range(2):
            await loop.disconnect("c")
        assert (await poll).deliveries == []
        assert [event.client_id for event in state.of_kind(ClientGone)] == ["c"]
        assert gone == ["c"]

    run(test)


def test_no_client_is_given_up_for_time_in_which_the_scheduler_itself_was_frozen() -> None:
    """When its process goes on, it has not heard of anybody for longer than the grace."""

    async def test() -> None:
        state = ScriptedState()
        loop = make(state, client_grace_s=0.1, watch_interval_s=0.02)
        loop.connect("c")
        await until(lambda: bool(state.of_kind(Tick)))
        time.sleep(0.3)  # the process is frozen
        seen = len(state.of_kind(Tick))
        await until(lambda: len(state.of_kind(Tick)) > seen)
        await turns()
        assert not state.of_kind(ClientGone)
        assert not (await loop.poll("c", 0, 0.0)).is_forgotten

    run(test)


# ---------------------------------------------------------------------------- another scheduler


def test_a_client_of_restored_requests_is_told_to_connect_again_and_loses_nothing() -> None:
    """What ended while nobody was there to say so comes only to a client that asks again; one that
    went on polling as before would wait for ever."""

    async def test() -> None:
        state = ScriptedState()
        request = make_requests(submission("r"), client_id="c")[0]
        state.script = lambda event: (
            [Emit("c", OutputDelta("r"))] if isinstance(event, RequestRestored) else []
        )
        loop = make(state)
        loop.restore([request])
        await turns()
        assert state.of_kind(RequestRestored)[0].request is request
        assert (await loop.poll("c", 123456, 1000.0)).is_forgotten
        with pytest.raises(UnknownClient, match="connect"):
            await loop.submit("c", [submission()])
        epoch = loop.connect("c")
        answer = await loop.poll("c", epoch, 1.0)
        assert not answer.is_forgotten
        assert names(answer) == ["r"]

    run(test)


def test_a_client_of_restored_requests_has_the_grace_to_come_back_and_no_longer() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state, client_grace_s=0.02, watch_interval_s=0.001)
        requests = [make_requests(submission(name), client_id=name)[0] for name in ("back", "away")]
        unowned = make_requests(submission("nobody's"))[0]
        loop.restore([*requests, unowned])
        loop.expect("host's")
        loop.connect("back")
        poll = asyncio.create_task(loop.poll("back", 0, 1000.0))
        await until(lambda: len(state.of_kind(ClientGone)) == 2)
        assert {event.client_id for event in state.of_kind(ClientGone)} == {"away", "host's"}
        ticks = len(state.of_kind(Tick))
        assert ticks >= 20, "given up before its grace was over"
        await poll

    run(test)


def test_a_client_that_is_expected_and_asks_what_it_does_not_get_is_not_silent() -> None:
    async def test() -> None:
        state = ScriptedState()
        loop = make(state, client_grace_s=0.02, watch_interval_s=0.001)
        loop.expect("c")
        while len(state.of_kind(Tick)) < 100:
            assert (await loop.poll("c", 0, 0.0)).is_forgotten
            await asyncio.sleep(0)
        assert not state.of_kind(ClientGone)

    run(test)


def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    async def test() -> None:
        loop = make(emitting("a"))
        before, others = sizes(loop), asyncio.all_tasks()
        for i in range(100):
            client_id = f"c{i}"
            loop.connect(client_id)
            poll = asyncio.create_task(loop.poll(client_id, 0, 1000.0))
            await loop.submit(client_id, [submission()])
            if i % 3 == 0:
                poll.cancel()
            await loop.disconnect(client_id)
        await until(lambda: asyncio.all_tasks() == others)
        await turns()
        assert sizes(loop) == before

    run(test)
