"""A fake scheduler that scores in the background, and a client that has only to do with scoring."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from cluster.connection import Connection
from cluster.handle import RequestHandle
from cluster.intake import Intake
from cluster.scorer import Scorer
from scheduler.errors import EngineUnavailable, HaversackError, Overloaded
from scheduler.messages import Submission
from scheduler.outbox import EngineInfo
from tests.fake_scheduler import FakeScheduler, Family

DEADLINE_S = 60.0


class Engine(FakeScheduler):
    """A scheduler whose client has a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.max_live = 10**9
        """Requests beyond which others are refused as `Overloaded`."""
        self.refused_tokens: dict[int, HaversackError] = {}
        """Prompts that end with one of these are refused."""
        self.held_tokens: set[int] = set()
        """Prompts that end with one of these are not computed."""
        self.seen: list[Submission] = []
        self.num_overloaded = 0

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        with self._lock:
            if method == "poll" and not self._has_work(args[0]):
                self._changed.wait(0.01)
            return super().call(method, *args, timeout_s=timeout_s)

    def tell(self, method: str, *args: Any) -> None:
        with self._lock:
            super().tell(method, *args)
            self._changed.notify_all()

    def live(self) -> list[Family]:
        with self._lock:
            return [family for family in self.families.values() if not family.is_over]

    def release(self) -> None:
        with self._lock:
            self.held_tokens.clear()
            self._changed.notify_all()

    def _is_held(self, family: Family) -> bool:
        return int(family.submission.prompt_token_ids[-1]) in self.held_tokens

    def _has_work(self, client_id: str) -> bool:
        outbox = self.outboxes.get(client_id)
        return bool(outbox) or any(not self._is_held(family) for family in self.live())

    def step(self) -> None:
        for family in self.live():
            if not self._is_held(family):
                family.step()
                self._tell(family)

    def _submit(self, client_id: str, submission: Submission) -> HaversackError | None:
        error = self.refused_tokens.get(int(submission.prompt_token_ids[-1]))
        if error is not None:
            return error
        if len(self.live()) >= self.max_live:
            self.num_overloaded += 1
            return Overloaded("full", retry_after_s=0.0)
        self.seen.append(submission)
        self._changed.notify_all()
        return super()._submit(client_id, submission)


class ScoringClient(Scorer):
    """What of a client has to do with scoring."""

    def __init__(self, engine: Engine) -> None:
        self._connection = Connection(engine, "scorer")
        self._intake = Intake(self._connection)
        self._connection.start()

    def _send(self, handles: list[RequestHandle]) -> list[RequestHandle | HaversackError]:
        return self._connection.submit(handles)

    @property
    def info(self) -> EngineInfo:
        return self._connection.info

    @property
    def tokenizer(self) -> Any:
        return self._intake.tokenizer

    def close(self) -> None:
        self._connection.close()
        for handle in self._connection.end(EngineUnavailable("closed")):
            handle.abandon()


@contextmanager
def scoring_client(engine: Engine) -> Iterator[ScoringClient]:
    """Connect a client; whatever does not end by itself ends after a while, and fails its test."""
    client = ScoringClient(engine)
    watch = threading.Timer(DEADLINE_S, client.close)
    watch.start()
    yield client
    watch.cancel()
    client.close()
