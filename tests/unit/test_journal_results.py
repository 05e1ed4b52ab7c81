"""Results: readable from the end of their requests for as long as they should be, and bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scheduler.actions import Record
from scheduler.codec import int_array
from scheduler.journal import Journal
from scheduler.request import Request
from tests.journals import (
    DEADLINE_S,
    Clock,
    advanced,
    finished,
    is_durable,
    new_request,
    same_bits,
    submitted,
    wait_until,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.db"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with closing(Journal(path, result_ttl_s=60)) as journal:
        yield journal


# ------------------------------------------------------------------------------------ results


def test_a_result_is_there_as_soon_as_its_end_is_appended(path: Path) -> None:
    """A client that asks right after the end does not depend on when the disk is written."""
    request = new_request()
    with closing(Journal(path, result_ttl_s=60, min_interval_s=3600)) as journal:
        journal.append([submitted(request)])
        assert is_durable(journal)
        journal.append([advanced(request, 6)])
        assert journal.result("r") is None
        journal.append([advanced(request, 7), finished(request)])
        assert journal.stats().num_queued_records == 3
        same_bits(journal.result("r"), [request])
        assert is_durable(journal)
        same_bits(journal.result("r"), [request])
        assert journal.stats().num_queued_records == 0


def test_siblings_end_one_by_one(path: Path) -> None:
    """n=3: those that have ended can be read, the others go on after a restart."""
    family = [new_request(f"f#{index}", "f", index=index) for index in range(3)]
    with closing(Journal(path, result_ttl_s=60)) as journal:
        journal.append([submitted(request) for request in family])
        journal.append([advanced(request, 6) for request in family])
        journal.append([finished(family[2])])
        same_bits(journal.result("f"), [family[2]])
    with closing(Journal(path, result_ttl_s=60)) as journal:
        same_bits(journal.load(), family[:2])
        assert (journal.stats().num_live, journal.stats().num_results) == (2, 0)
        journal.append([finished(family[0]), finished(family[1])])
        assert is_durable(journal)
        same_bits(journal.result("f"), family)
        assert (journal.stats().num_live, journal.stats().num_results) == (0, 1)
        assert journal.load() == []


@pytest.mark.parametrize("is_written", [True, False])
@pytest.mark.parametrize("new_n", [1, 2, 3])
@pytest.mark.parametrize("old_n", [1, 2, 3])
def test_a_new_submission_under_an_old_id_clears_the_whole_old_one(
    journal: Journal, old_n: int, new_n: int, is_written: bool
) -> None:
    """And its second request does not clear its first, whatever n was before."""

    def family(n: int, seed: int) -> list[Request]:
        names = ["f"] if n == 1 else [f"f#{index}" for index in range(n)]
        return [new_request(name, "f", index=i, seed=seed) for i, name in enumerate(names)]

    old, new = family(old_n, 1), family(new_n, 2)
    journal.append([*map(submitted, old), *(finished(request) for request in old)])
    if is_written:
        assert is_durable(journal)
    journal.append([submitted(request) for request in new])
    assert journal.result("f") is None
    journal.append([finished(request) for request in new])
    same_bits(journal.result("f"), new)
    assert is_durable(journal)
    same_bits(journal.result("f"), new)
    assert journal.stats().num_results == 1


def test_results_are_read_whole_while_others_are_written(journal: Journal) -> None:
    done = [new_request(f"done-{index}") for index in range(4)]
    for request in done:
        journal.append([submitted(request), advanced(request, 6), finished(request)])
    stop = threading.Event()
    wrong: list[str] = []

    def read(request: Request) -> None:
        expected = request.encode()
        while not stop.is_set():
            found = journal.result(request.request_id)
            if found is None or found[0].encode() != expected:
                wrong.append(request.request_id)

    readers = [threading.Thread(target=read, args=(request,)) for request in done]
    for reader in readers:
        reader.start()
    busy = new_request("busy", max_tokens=1000)
    journal.append([submitted(busy)])
    for _ in range(200):
        journal.append([advanced(busy, busy.num_tokens)])
        if busy.num_tokens % 20 == 0:
            assert is_durable(journal)
    stop.set()
    for reader in readers:
        reader.join(DEADLINE_S)
    assert not wrong
    assert is_durable(journal)
    same_bits(journal.load(), [busy])


# ------------------------------------------------------------------------------------- expiry


def test_a_result_is_kept_for_its_time_and_no_longer(path: Path) -> None:
    """Also where the process was away when the time was over, and where nobody has looked yet."""
    clock = Clock()
    early, late, live = new_request("early"), new_request("late"), new_request("live")
    with closing(Journal(path, result_ttl_s=100, clock=clock)) as journal:
        journal.append([submitted(early), submitted(live), finished(early)])
        clock.now_s += 60
        journal.append([submitted(late), finished(late)])
        clock.now_s += 39
        same_bits(journal.result("early"), [early])
        assert is_durable(journal)
        same_bits(journal.result("early"), [early])
        clock.now_s += 1
        assert journal.result("early") is None
        wait_until(lambda: journal.stats().num_results == 1)
        same_bits(journal.result("late"), [late])
    clock.now_s += 60
    with closing(Journal(path, result_ttl_s=100, clock=clock)) as journal:
        assert journal.result("late") is None
        wait_until(lambda: journal.stats().num_results == 0)
        assert journal.stats().result_bytes == 0
        same_bits(journal.load(), [live])


def test_siblings_of_a_live_request_are_kept_until_all_have_ended(path: Path) -> None:
    """A client that comes back needs all n, also those that ended long before the last."""
    clock = Clock()
    first, second = (new_request(f"f#{index}", "f", index=index) for index in range(2))
    other = new_request("other")
    with closing(Journal(path, result_ttl_s=10, clock=clock)) as journal:
        journal.append([submitted(first), submitted(second), finished(first)])
        journal.append([submitted(other), finished(other)])
        assert is_durable(journal)
        clock.now_s += 1000
        wait_until(lambda: journal.stats().num_results == 0)
        journal.append([finished(second)])
        same_bits(journal.result("f"), [first, second])
        assert is_durable(journal)
        clock.now_s += 9
        same_bits(journal.result("f"), [first, second])


def test_beyond_the_size_allowed_the_oldest_results_go_first(path: Path) -> None:
    clock = Clock()
    with closing(Journal(path, result_ttl_s=1e9, max_result_bytes=50_000, clock=clock)) as journal:
        for index in range(20):
            request = new_request(str(index), prompt_token_ids=int_array(range(2500)))
            clock.now_s += 1
            journal.append([submitted(request), finished(request)])
        assert is_durable(journal)
        wait_until(lambda: journal.stats().result_bytes <= 50_000)
        kept = [index for index in range(20) if journal.result(str(index)) is not None]
    assert kept == [16, 17, 18, 19]


def test_what_a_result_takes_is_counted_the_same_over_a_restart(path: Path) -> None:
    sizes = set()
    for is_restarted in (False, True):
        family = [new_request(f"f#{index}", "f", index=index) for index in range(2)]
        journal = Journal(path, result_ttl_s=3600)
        journal.append([*map(submitted, family), advanced(family[0], 4), finished(family[1])])
        assert is_durable(journal)
        if is_restarted:
            journal.close()
            journal = Journal(path, result_ttl_s=3600)
        journal.append([advanced(family[0], 6), finished(family[0])])
        assert is_durable(journal)
        sizes.add(journal.stats().result_bytes)
        journal.close()
        with closing(Journal(path, result_ttl_s=3600)) as journal:
            sizes.add(journal.stats().result_bytes)
    assert len(sizes) == 1
    assert sizes != {0}


def file_bytes(path: Path) -> int:
    return sum(each.stat().st_size for each in path.parent.iterdir())


def large_result(name: str) -> list[Record]:
    """About 250 kB."""
    request = new_request(name, prompt_token_ids=int_array(range(60_000)), prompt_logprobs=None)
    return [submitted(request), advanced(request, 60_000), finished(request)]


def test_the_file_does_not_grow_with_what_has_passed_through_it(path: Path) -> None:
    limit = 2 * 2**20
    with closing(Journal(path, result_ttl_s=3600, max_result_bytes=limit)) as journal:
        for index in range(250):
            journal.append(large_result(str(index)))
            if index % 20 == 0:
                assert is_durable(journal)
                wait_until(lambda: journal.stats().result_bytes <= limit)
        assert is_durable(journal)
        assert journal.stats().written_bytes > 60e6
        assert file_bytes(path) < 40e6
    assert file_bytes(path) < 20e6


def test_the_file_shrinks_after_a_crowd_of_results(path: Path) -> None:
    clock = Clock()
    with closing(Journal(path, result_ttl_s=100, clock=clock)) as journal:
        for index in range(120):
            journal.append(large_result(str(index)))
        assert is_durable(journal)
    assert file_bytes(path) > 25e6
    clock.now_s += 101
    with closing(Journal(path, result_ttl_s=100, clock=clock)) as journal:
        wait_until(lambda: journal.stats().file_bytes < 10e6)
        assert journal.stats().num_results == 0
    assert file_bytes(path) < 10e6
