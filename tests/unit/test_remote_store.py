"""A store that hangs is replaced by an empty one, however briefly each caller waits for that."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from cluster import remote
from cluster.remote import RemoteStore

DEADLINE_S = 20.0


class Method:
    """What `handle.method` is: `remote` begins a call."""

    def __init__(self, call: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        self.remote = call


class Actor:
    """A store's actor under Ray: killed, it comes up again as another incarnation."""

    def __init__(self) -> None:
        self._names = map(str, itertools.count())
        self.incarnation = next(self._names)
        self.hangs = False
        self.num_kills_in_vain = 0
        self.num_kills = 0
        self.serve = Method(self._serve)

    async def _serve(self, epoch: int) -> str:
        if self.hangs:
            await asyncio.Event().wait()
        return self.incarnation

    def kill(self) -> None:
        self.num_kills += 1
        if self.num_kills_in_vain > 0:
            self.num_kills_in_vain -= 1
            return
        self.incarnation, self.hangs = next(self._names), False


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Actor:
    made = Actor()
    monkeypatch.setattr(remote, "_kill", lambda handle, no_restart: handle.kill())
    seconds = {"PING_TIMEOUT": 0.2, "START_TIMEOUT": 0.3, "RETRY": 0.01, "END": 0.1}
    for name, value_s in seconds.items():
        monkeypatch.setattr(remote, f"_STORE_{name}_S", value_s)
    return made


async def impatient(call: Callable[[], Coroutine[Any, Any, None]], timeout_s: float) -> int:
    """Call until it returns, each time for so long; return how many times that took."""
    for num_calls in itertools.count(1):
        try:
            await asyncio.wait_for(call(), timeout_s)
        except asyncio.TimeoutError:
            continue
        return num_calls
    raise AssertionError


async def given_up(call: Coroutine[Any, Any, None]) -> None:
    """Begin a call, and wait for it too briefly."""
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(call, 0.01)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(story, DEADLINE_S))


def opened(actor: Actor) -> RemoteStore:
    return RemoteStore(1, lambda: (actor, False))


def test_what_is_there_is_opened_as_it_is(actor: Actor) -> None:
    run(opened(actor).open())
    assert (actor.num_kills, actor.incarnation) == (0, "0")


def test_a_store_that_died_by_itself_is_not_ended_again(actor: Actor) -> None:
    async def story() -> None:
        store = opened(actor)
        await store.open()
        actor.incarnation = "restarted"
        await store.restart()

    run(story())
    assert actor.num_kills == 0


@pytest.mark.parametrize("hangs", [False, True])
def test_one_that_is_there_is_ended_once(actor: Actor, hangs: bool) -> None:
    async def story() -> None:
        store = opened(actor)
        await store.open()
        for expected in ("1", "2"):
            actor.hangs = hangs
            await store.restart()
            assert actor.incarnation == expected

    run(story())
    assert actor.num_kills == 2


@pytest.mark.parametrize("share", [0.3, 0.9, 1.0, 1.1])
def test_one_that_hangs_is_ended_also_where_callers_wait_for_less_than_a_ping(
    actor: Actor, share: float
) -> None:
    async def story() -> None:
        store = opened(actor)
        await store.open()
        actor.hangs = True
        await impatient(store.restart, share * remote._STORE_PING_TIMEOUT_S)

    run(story())
    assert (actor.incarnation, actor.num_kills) == ("1", 1)


@pytest.mark.parametrize("hangs", [False, True])
def test_ending_it_in_vain_is_tried_again(actor: Actor, hangs: bool) -> None:
    async def story() -> None:
        store = opened(actor)
        await store.open()
        actor.hangs, actor.num_kills_in_vain = hangs, 2
        await store.restart()

    run(story())
    assert (actor.incarnation, actor.num_kills) == ("1", 3)


def test_what_came_while_nobody_waited_is_taken_and_not_ended(actor: Actor) -> None:
    async def story() -> None:
        store = opened(actor)
        await store.open()
        actor.hangs = True
        await given_up(store.restart())
        while not actor.num_kills:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2 * remote._STORE_RETRY_S)
        await store.restart()

    run(story())
    assert (actor.incarnation, actor.num_kills) == ("1", 1)


def test_one_that_was_never_opened_in_time_is_not_taken_as_it_is(actor: Actor) -> None:
    """Nobody knows what it holds, and for whom."""

    async def story() -> None:
        store = opened(actor)
        actor.hangs = True
        await given_up(store.open())
        actor.hangs = False
        await store.restart()

    run(story())
    assert (actor.incarnation, actor.num_kills) == ("1", 1)


def test_what_ray_can_not_do_once_is_told_once(actor: Actor) -> None:
    answers: list[Exception] = [RuntimeError("the head is away")]

    def find() -> tuple[Any, bool]:
        if answers:
            raise answers.pop()
        return actor, False

    async def story() -> None:
        store = RemoteStore(1, find)
        with pytest.raises(RuntimeError, match="head is away"):
            await store.open()
        await store.restart()

    run(story())
    assert actor.incarnation == "1"
