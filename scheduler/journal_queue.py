"""What the journal's file still lacks: records merged by request, and which requests are live.

Rules:
- The records of one request lie together, so the queue is as large as the rows that wait, however
  many steps brought them.
- A submission takes the place of everything under its id. It is a new one where no request of that
  id is live: the n requests of one submission come together, before any of them can end, and a
  live one's id can't be submitted again.
- Beyond `max_bytes` the oldest unwritten results are given up. What a live request needs to go on
  is never given up.
The module knows no file, no thread and no clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from scheduler.actions import Record, RecordFinished, RecordProgress, RecordSubmitted
from scheduler.codec import encode
from scheduler.journal_records import StoredRequest, encoded_progress, num_array_bytes

_RECORD_BYTES = 512
"""What a record takes beside its arrays, roughly."""


@dataclass(slots=True, eq=False)
class UnwrittenRequest:
    """What the file lacks of one request, in order."""

    submitted: bytes | None = None
    """The encoded `Request`; None where the file has it."""
    progress: list[RecordProgress] = field(default_factory=list)
    finished: RecordFinished | None = None
    finished_s: float = 0.0
    """When it ended, in the journal's clock."""

    def parts(self) -> Iterator[bytes]:
        """Yield what the file lacks of `StoredRequest.parts`."""
        if self.submitted is not None:
            yield self.submitted
        yield from encoded_progress(self.progress)

    def extend(self, later: UnwrittenRequest) -> None:
        """Take in what came after."""
        self.progress += later.progress
        if later.finished is not None:
            self.finished, self.finished_s = later.finished, later.finished_s


@dataclass(slots=True, eq=False)
class UnwrittenFamily:
    """What the file lacks of one submission."""

    replaces: bool = False
    """Whether all that the file has under this id goes first."""
    requests: dict[str, UnwrittenRequest] = field(default_factory=dict)
    num_records: int = 0
    num_bytes: int = 0

    def extend(self, later: UnwrittenFamily) -> None:
        """Take in what came after."""
        for request_id, unwritten in later.requests.items():
            mine = self.requests.get(request_id)
            if mine is None:
                self.requests[request_id] = unwritten
            else:
                mine.extend(unwritten)
        self.num_records += later.num_records
        self.num_bytes += later.num_bytes

    def over(self, stored: list[StoredRequest]) -> list[StoredRequest]:
        """Return what the file will hold of the submission, where it holds `stored` now."""
        found = {} if self.replaces else {each.request_id: each for each in stored}
        for request_id, unwritten in self.requests.items():
            before = found.get(request_id) or StoredRequest(request_id, [], None)
            finished = encode(unwritten.finished) if unwritten.finished else before.finished
            parts = [*before.parts, *unwritten.parts()]
            found[request_id] = StoredRequest(request_id, parts, finished)
        return list(found.values())


Batch = dict[str, UnwrittenFamily]
"""Unwritten submissions by their id, oldest first."""


class UnwrittenQueue:
    """Records on their way to the file. Not thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        """Hold `max_bytes` of results at most, beside what live requests need."""
        self._max_bytes = max_bytes
        self._families: Batch = {}
        self._ended: dict[str, None] = {}
        """Ids in `_families` with requests of which none is live, oldest first."""
        self._parents: dict[str, str] = {}
        """Live request id -> submission id."""
        self._live: dict[str, set[str]] = {}
        """Submission id -> ids of its live requests, at least one."""
        self.num_records = 0
        self.num_bytes = 0
        self.num_dropped = 0
        """Results that were given up since the start."""

    def __bool__(self) -> bool:
        return bool(self._families)

    @property
    def num_live(self) -> int:
        return len(self._parents)

    def add_live(self, request_id: str, parent_id: str) -> None:
        """Take note of a live request that the file has already."""
        self._parents[request_id] = parent_id
        self._live.setdefault(parent_id, set()).add(request_id)

    def add(self, record: Record, now_s: float) -> None:
        """Append a record. One about a request that is not live is ignored."""
        match record:
            case RecordSubmitted():
                self._submit(record)
            case RecordProgress():
                parent_id = self._parents.get(record.request_id)
                if parent_id is not None:
                    size = num_array_bytes(record) + _RECORD_BYTES
                    self._unwritten(parent_id, record.request_id, size).progress.append(record)
            case RecordFinished():
                parent_id = self._parents.get(record.request_id)
                if parent_id is not None:
                    unwritten = self._unwritten(parent_id, record.request_id, _RECORD_BYTES)
                    unwritten.finished, unwritten.finished_s = record, now_s
                    self._end(record.request_id, parent_id)

    def drop_live(self, request_id: str) -> None:
        """Take note that a live request is gone from the file."""
        parent_id = self._parents.get(request_id)
        if parent_id is not None:
            self._end(request_id, parent_id)

    def take(self) -> Batch:
        """Return all that waits, and hold nothing."""
        batch, self._families = self._families, {}
        self._ended = {}
        self.num_records = self.num_bytes = 0
        return batch

    def put_back(self, batch: Batch) -> None:
        """Put what `take` returned before all that was added since."""
        newer, self._families = self._families, batch
        for parent_id, family in newer.items():
            older = batch.get(parent_id)
            if older is None or family.replaces:
                batch[parent_id] = family
            else:
                older.extend(family)
        self.num_records = sum(family.num_records for family in batch.values())
        self.num_bytes = sum(family.num_bytes for family in batch.values())
        self._ended = {
            parent_id: None
            for parent_id, family in batch.items()
            if family.requests and parent_id not in self._live
        }
        self._drop_oldest()

    def peek(self, parent_id: str) -> UnwrittenFamily | None:
        """Return a copy of what waits of a submission; None where nothing does."""
        family = self._families.get(parent_id)
        if family is None:
            return None
        requests = {
            name: UnwrittenRequest(r.submitted, list(r.progress), r.finished, r.finished_s)
            for name, r in family.requests.items()
        }
        return UnwrittenFamily(family.replaces, requests, family.num_records, family.num_bytes)

    def _submit(self, record: RecordSubmitted) -> None:
        parent_id = record.parent_id
        live = self._live.get(parent_id)
        if not live or record.request_id in live:
            self._replace(parent_id)
        self.add_live(record.request_id, parent_id)
        size = len(record.request) + _RECORD_BYTES
        self._unwritten(parent_id, record.request_id, size).submitted = record.request

    def _replace(self, parent_id: str) -> None:
        for request_id in self._live.pop(parent_id, ()):
            del self._parents[request_id]
        self._discard(parent_id)
        self._families[parent_id] = UnwrittenFamily(replaces=True)

    def _discard(self, parent_id: str) -> UnwrittenFamily | None:
        family = self._families.pop(parent_id, None)
        if family is not None:
            self.num_records -= family.num_records
            self.num_bytes -= family.num_bytes
        self._ended.pop(parent_id, None)
        return family

    def _unwritten(self, parent_id: str, request_id: str, num_bytes: int) -> UnwrittenRequest:
        """Return where a record of `num_bytes` goes, and count it."""
        family = self._families.get(parent_id)
        if family is None:
            family = self._families[parent_id] = UnwrittenFamily()
        for counter in (family, self):
            counter.num_records += 1
            counter.num_bytes += num_bytes
        unwritten = family.requests.get(request_id)
        if unwritten is None:
            unwritten = family.requests[request_id] = UnwrittenRequest()
        return unwritten

    def _end(self, request_id: str, parent_id: str) -> None:
        del self._parents[request_id]
        live = self._live[parent_id]
        live.remove(request_id)
        if not live:
            del self._live[parent_id]
            if parent_id in self._families:
                self._ended[parent_id] = None
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Give up unwritten results, the oldest first, until the rest is small enough.

        Where the file has the beginning of one, that goes too, or a restart would compute it again
        for nobody.
        """
        while self.num_bytes > self._max_bytes and self._ended:
            parent_id = next(iter(self._ended))
            family = self._discard(parent_id)
            self.num_dropped += 1
            if family is not None and not family.replaces:
                self._families[parent_id] = UnwrittenFamily(replaces=True)
