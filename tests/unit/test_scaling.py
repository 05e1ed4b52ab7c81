"""How many workers there should be: on a virtual clock, with workers of a known speed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest

from scheduler.scaling import Change, Load, Scaling, ScalingLimits

SPEED = 1000.0
"""Tokens that a worker computes in a second."""
START_S = 120
"""From when a worker is asked for to when it is ready."""
LIMITS = ScalingLimits(min_workers=1, max_workers=8, target_queue_s=30.0, idle_s=300.0)


def load(
    num_tokens: int = 0, *, workers: int = 1, busy: int | None = None, waited_s: float = 0.0
) -> Load:
    """An engine that has computed for long at `SPEED`."""
    busy = workers if busy is None and num_tokens else busy or 0
    return Load(
        waited_s=waited_s,
        num_tokens_to_do=num_tokens,
        num_computed_tokens=int(SPEED * 100),
        compute_s=100.0,
        is_busy={f"w{i}": i < busy for i in range(workers)},
    )


@pytest.mark.parametrize(
    ("num_tokens", "num_more"), [(0, 0), (30_000, 0), (30_001, 1), (90_000, 2), (10**9, 7)]
)
def test_there_are_to_be_so_many_that_all_is_done_in_time(num_tokens: int, num_more: int) -> None:
    """One computes 30,000 tokens in 30 s; more than max_workers there never are."""
    assert Scaling(LIMITS).look(load(num_tokens), 0, 0.0) == Change(num_more=num_more)


def test_those_on_their_way_count_as_there() -> None:
    scaling = Scaling(LIMITS)
    assert scaling.look(load(90_000), 0, 0.0).num_more == 2
    assert scaling.look(load(90_000), 2, 1.0) == Change()
    assert scaling.look(load(150_000), 2, 2.0).num_more == 2


def test_nothing_is_asked_for_before_the_speed_is_known() -> None:
    unknown = Load(0.0, 10**9, 500, 0.5, {"w0": True})
    assert Scaling(LIMITS).look(unknown, 0, 0.0) == Change()


def test_the_speed_is_that_of_late() -> None:
    """What computes changes: after 5 min of computing at a tenth, so many more are needed."""
    scaling = Scaling(LIMITS)
    scaling.look(load(), 0, 0.0)
    slow = Load(0.0, 30_000, int(SPEED * 100) + 30_000, 400.0, {"w0": True})
    assert scaling.look(slow, 0, 300.0).num_more == 7
    assert scaling.tokens_per_s == pytest.approx(SPEED / 10, rel=0.05)


def test_where_somebody_waits_for_long_there_is_to_be_one_more_at_a_time() -> None:
    """Outputs of unknown length fill all places, and few tokens are known to be due."""
    scaling = Scaling(LIMITS)
    assert scaling.look(load(100, waited_s=29.0), 0, 1000.0) == Change()
    assert scaling.look(load(100, waited_s=31.0), 0, 1002.0).num_more == 1
    for now_s in range(1003, 1100):  # it is on its way
        assert scaling.look(load(100, waited_s=99.0), 1, float(now_s)) == Change()
    for now_s in range(1100, 1129):  # it is there, and is given the time to help
        assert scaling.look(load(100, workers=2, waited_s=99.0), 0, float(now_s)) == Change()
    assert scaling.look(load(100, workers=2, waited_s=99.0), 0, 1130.0).num_more == 1


def test_the_longest_idle_is_given_back_one_at_a_time_down_to_the_least() -> None:
    scaling = Scaling(LIMITS)
    scaling.look(load(100, workers=3, busy=2), 0, 0.0)
    scaling.look(load(workers=3), 0, 10.0)
    assert scaling.look(load(workers=3), 0, 299.0) == Change()
    assert scaling.look(load(workers=3), 0, 300.0) == Change(idle_id="w2")
    assert scaling.look(load(workers=2), 0, 301.0) == Change()
    assert scaling.look(load(workers=2), 0, 310.0) == Change(idle_id="w0")
    assert scaling.look(load(workers=1), 0, 10_000.0) == Change()


def test_a_worker_that_was_used_in_between_is_not_idle_for_long() -> None:
    scaling = Scaling(LIMITS)
    for now_s in range(0, 3000, 200):
        assert scaling.look(load(workers=2), 0, float(now_s)) == Change()
        assert scaling.look(load(10, workers=2), 0, now_s + 100.0) == Change()


def test_a_worker_that_never_comes_is_called_off_when_it_was_not_needed_for_long() -> None:
    scaling = Scaling(LIMITS)
    assert scaling.look(load(90_000), 0, 0.0).num_more == 2
    assert scaling.look(load(), 2, 299.0) == Change()
    assert scaling.look(load(), 2, 300.0) == Change(num_fewer_coming=2)


def test_there_are_never_fewer_than_the_least_nor_is_any_asked_for_beyond_the_most() -> None:
    limits = ScalingLimits(min_workers=2, max_workers=2, idle_s=0.0)
    scaling = Scaling(limits)
    assert scaling.look(load(workers=1), 0, 0.0) == Change(num_more=1)
    assert scaling.look(load(10**9, workers=2), 0, 1.0) == Change()
    assert scaling.look(load(workers=2), 0, 9999.0) == Change()


# ------------------------------------------------------------------------------- over a long time


@dataclass
class World:
    """An engine second by second: work is shared out evenly, and ready workers do it."""

    scaling: Scaling = field(default_factory=lambda: Scaling(LIMITS))
    now_s: int = 0
    num_ready: int = 1
    due_s: list[int] = field(default_factory=list)
    """When those on their way are ready."""
    num_tokens: float = 0.0
    num_computed: float = 0.0
    compute_s: float = 0.0
    history: list[int] = field(default_factory=list)
    """Workers asked for and ready, second by second."""

    def run(self, seconds: int, arriving_per_s: float = 0.0) -> None:
        for _ in range(seconds):
            self.num_tokens += arriving_per_s
            self._second()

    def _second(self) -> None:
        self.now_s += 1
        self.num_ready += sum(due <= self.now_s for due in self.due_s)
        self.due_s = [due for due in self.due_s if due > self.now_s]
        done = min(self.num_tokens, SPEED * self.num_ready)
        num_busy = -int(-done // SPEED)  # the first ones get the work
        self.num_tokens -= done
        self.num_computed += done
        self.compute_s += done / SPEED
        busy = {f"w{i}": i < num_busy for i in range(self.num_ready)}
        seen = Load(0.0, int(self.num_tokens), int(self.num_computed), self.compute_s, busy)
        change = self.scaling.look(seen, len(self.due_s), float(self.now_s))
        self.due_s += [self.now_s + START_S] * change.num_more
        self.due_s = self.due_s[: len(self.due_s) - change.num_fewer_coming]
        self.num_ready -= change.idle_id is not None
        self.history.append(self.num_ready + len(self.due_s))

    def num_turns(self) -> int:
        """How often the number began to fall after it had grown, or to grow after it had fallen."""
        steps = [b - a for a, b in itertools.pairwise(self.history) if b != a]
        return sum(a * b < 0 for a, b in itertools.pairwise(steps))


def test_a_burst_is_met_and_over_once() -> None:
    """Up to what it takes, and down when it is over: no worker comes and goes in between."""
    world = World()
    world.run(60, 200.0)
    assert set(world.history) == {1}
    world.num_tokens += 500_000
    world.run(1200, 200.0)
    assert max(world.history) == 8
    world.run(1200, 200.0)
    assert world.history[-1] == 1
    assert world.num_turns() == 1


def test_a_steady_load_gets_a_steady_number() -> None:
    """2.5 workers' worth: three are needed, once the backlog from before that is done."""
    world = World()
    world.run(3000, 2500.0)
    assert set(world.history[1000:]) == {3}
    assert world.num_turns() == 1
    assert world.num_tokens == 0


def test_a_load_that_comes_and_goes_every_minute_moves_nothing() -> None:
    """No flapping: a worker is not given back between two waves, and asked for again."""
    world = World()
    for _ in range(30):
        world.run(30, 2000.0)
        world.run(30)
    assert world.num_turns() == 0
    assert world.history[-1] == 2
