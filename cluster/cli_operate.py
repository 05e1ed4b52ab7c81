"""`haversack status`, `top`, `requests`, `evict`, `migrate` and `drain`: look after an engine."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table

from cluster.cli_common import Config, Json, Name, engine, json_text, out, show, visible
from cluster.client import Client
from cluster.prompts import is_seconds
from scheduler.errors import InvalidRequest, UnknownRequest
from scheduler.messages import RequestInfo, WorkerReport
from scheduler.outbox import EngineStats

RequestId = Annotated[str, typer.Argument(help="The request's id.")]
WorkerId = Annotated[str, typer.Argument(help="The worker's id, as `status` shows it.")]

_SHOWN_COUNTERS = (
    *("num_running", "num_waiting", "num_finished", "num_failed", "num_aborted", "num_refused"),
    *("num_evictions", "num_migrations", "num_workers_lost", "num_recomputed_tokens"),
)
_MAX_SHOWN_REQUESTS = 20
_BAR_WIDTH = 20


def status(config: Config = None, name: Name = None, as_json: Json = False) -> None:
    """Show the running engine: its workers, counters and what it is doing."""
    with engine(config, start=False, name=name) as client:
        seen = _Snapshot(client)
    counters = Table("what", "value", show_header=False, box=None)
    counters.add_row("model", seen.model)
    for key in _SHOWN_COUNTERS:
        counters.add_row(
            key.removeprefix("num_").replace("_", " "), str(getattr(seen.stats.scheduler, key))
        )
    show(seen.facts(), as_json, counters, _workers_table(seen.workers))


def top(
    interval: Annotated[float, typer.Option(help="Seconds between two looks.")] = 1.0,
    count: Annotated[int | None, typer.Option(help="Looks; without it, until Ctrl-C.")] = None,
    config: Config = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Watch the running engine: workers, blocks, queues, requests and where they are.

    With --json, a line for each look.
    """
    with engine(config, start=False, name=name) as client:
        for param, value in (("interval", interval), ("count", count)):
            if value is not None and not is_seconds(value, above_zero=True):
                raise InvalidRequest(f"{param} is {value:g}: give more than 0", param=param)
        looks = _looks(client, interval, itertools.count() if count is None else range(count))
        try:
            _show_looks(looks, as_json)
        except KeyboardInterrupt:
            return  # that is how it is left


def _looks(client: Client, interval_s: float, numbers: Iterable[int]) -> Iterator[_Snapshot]:
    for number in numbers:
        if number:
            time.sleep(interval_s)
        yield _Snapshot(client)


def _show_looks(looks: Iterator[_Snapshot], as_json: bool) -> None:
    if as_json:
        for seen in looks:
            print(json_text(seen.facts()), flush=True)
        return
    before: _Snapshot | None = None
    with Live(console=out, auto_refresh=False) as live:
        for seen in looks:
            live.update(_view(seen, before), refresh=True)
            before = seen


class _Snapshot:
    """What an engine looks like at one time."""

    def __init__(self, client: Client) -> None:
        self.model: str = client.info.model
        self.stats: EngineStats = client.stats()
        self.workers: list[WorkerReport] = client.workers()
        self.requests: list[RequestInfo] = client.requests()
        self.taken_s = time.monotonic()

    def facts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "workers": msgspec.to_builtins(self.workers),
            "requests": msgspec.to_builtins(self.requests),
            "scheduler": msgspec.to_builtins(self.stats.scheduler),
            "store": self.stats.store,
            "journal": self.stats.journal,
        }

    def tokens_per_s(self, before: _Snapshot | None) -> float:
        """Tokens that workers computed since, a second."""
        if before is None:
            return 0.0
        new = self.stats.scheduler.num_computed_tokens - before.stats.scheduler.num_computed_tokens
        return max(new, 0) / max(self.taken_s - before.taken_s, 1e-9)


def _view(seen: _Snapshot, before: _Snapshot | None) -> Group:
    counters = seen.stats.scheduler
    line = (
        f"{seen.model}   {counters.num_running} running   {counters.num_waiting} waiting "
        f"({counters.num_queued_tokens} tokens)   {seen.tokens_per_s(before):.0f} tokens/s   "
        f"{counters.num_finished} finished   {counters.num_failed} failed   "
        f"{counters.num_evictions} evictions   {counters.num_migrations} migrations   "
        f"{counters.num_workers_lost} workers lost"
    )
    shown = _requests_table(seen.requests[:_MAX_SHOWN_REQUESTS])
    shown.caption = f"{len(seen.requests)} live"
    return Group(line, _workers_table(seen.workers), shown)


def requests(config: Config = None, name: Name = None, as_json: Json = False) -> None:
    """List the live requests of all clients, in order of service."""
    with engine(config, start=False, name=name) as client:
        found = client.requests()
    table = _requests_table(found)
    table.caption = f"{len(found)} live"
    show({"requests": msgspec.to_builtins(found)}, as_json, table)


def evict(
    request_id: RequestId, config: Config = None, name: Name = None, as_json: Json = False
) -> None:
    """Take a request off its worker; it is saved, queued again and goes on later."""
    with engine(config, start=False, name=name) as client:
        if not any(request_id in (i.request_id, _parent(i)) for i in client.requests()):
            raise UnknownRequest(f"no live request is called {request_id!r}", request_id=request_id)
        client.evict(request_id)
    show({"evicted": request_id}, as_json, f"{request_id} is evicted")


def migrate(
    request_id: RequestId,
    worker_id: WorkerId,
    config: Config = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Move a request to another worker while it goes on."""
    with engine(config, start=False, name=name) as client:
        client.migrate(request_id, worker_id)
    facts = {"migrating": request_id, "worker": worker_id}
    show(facts, as_json, f"{request_id} moves to {worker_id}")


def drain(
    worker_id: WorkerId,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which what is still there is evicted.")
    ] = 30.0,
    replace: Annotated[bool, typer.Option(help="Start another worker in its place.")] = False,
    config: Config = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Move a worker's requests to the others and end it; returns when it has ended."""
    with engine(config, start=False, name=name) as client:
        client.drain(worker_id, deadline, replace=replace)
    show({"drained": worker_id}, as_json, f"{worker_id} has ended")


def _requests_table(found: list[RequestInfo]) -> Table:
    table = Table("request", "state", "worker", "prompt", "computed", "output", "moved", "seconds")
    for info in found:
        table.add_row(
            visible(info.request_id),
            info.status.value,
            info.worker_id or "",
            str(info.num_prompt_tokens),
            str(info.num_computed_tokens),
            str(info.num_output_tokens),
            str(info.num_evictions + info.num_migrations + info.num_workers_lost),
            f"{info.waited_s:.1f}",
        )
    return table


def _workers_table(workers: list[WorkerReport]) -> Table:
    table = Table("worker", "node", "device", "state", "running", "blocks in use", "")
    for worker in workers:
        share = worker.num_used_blocks / max(worker.num_blocks, 1)
        table.add_row(
            worker.worker_id,
            worker.node_id[:8],
            worker.devices,
            "draining" if worker.is_draining else "serving",
            str(worker.num_running),
            f"{worker.num_used_blocks} of {worker.num_blocks}",
            "#" * round(share * _BAR_WIDTH),
        )
    return table


def _parent(info: RequestInfo) -> str:
    """Return the id that one of n completions was submitted under."""
    return info.request_id.rpartition("#")[0]
