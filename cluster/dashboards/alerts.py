"""The table of alert rules: what is worth waking somebody, and what is worth a look by day."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.dashboards.queries import Queries

_soon, _slow, _hour = Queries("5m"), Queries("15m"), Queries("1h")


@dataclass(frozen=True)
class Alert:
    """One rule."""

    name: str
    query: str
    """PromQL that has a value where the alert holds."""
    lasts: str
    """For how long it has to hold, as Prometheus writes durations."""
    severity: str
    """critical: requests are not served, or results may be lost; warning: they soon may be."""
    summary: str
    advice: str
    """What it means and what to do."""


ALERTS = (
    Alert(
        "HaversackNoWorkers",
        f"{_soon.now('workers')} == 0",
        "1m",
        "critical",
        "no worker computes",
        "Requests wait, and fail when startup_timeout_s is over. See why workers end in the log of "
        "the scheduler, and whether the cluster has room for them: haversack status, ray status.",
    ),
    Alert(
        "HaversackEngineIsGone",
        _hour.gone("workers"),
        "1m",
        "warning",
        "the engine is not there any more",
        "It told its counters within the last hour. If nobody ended it: is its node there, and its "
        "scheduler (ray list actors)? What is detached waits in the journal for its restart.",
    ),
    Alert(
        "HaversackWorkersAreLost",
        f"{_slow.increase('workers_lost_total')} > 3",
        "0m",
        "warning",
        "workers are lost again and again",
        "More than 3 in 15 minutes. One loss is nothing: requests go on elsewhere. Many are out of "
        "memory, a bad node, or a request that kills its worker: see the scheduler's log.",
    ),
    Alert(
        "HaversackSchedulerRestarted",
        f"{_slow.now('scheduler_start_time_seconds')}"
        f" > {_slow.earliest('scheduler_start_time_seconds')}",
        "0m",
        "warning",
        "the scheduler was restarted in the last 15 minutes",
        "With a journal, requests went on; without one, clients sent theirs again. See its log, "
        "and the memory of its node.",
    ),
    Alert(
        "HaversackRequestsFail",
        f"{_soon.rate('requests_finished_total', reason='error')}"
        f" > 0.05 * {_soon.rate('requests_finished_total')}",
        "10m",
        "critical",
        "more than 5 % of requests end in error",
        "Their errors say why, and so does the scheduler's log. Those past their timeout_s count, "
        "and are ray_haversack_requests_expired_total.",
    ),
    Alert(
        "HaversackRequestsRefused",
        f"{_soon.rate('requests_refused_total')} > 0",
        "10m",
        "warning",
        "submissions are refused",
        "The queue is full (clients see 429), or clients send what can never fit. Add workers, or "
        "raise max_queued_requests and max_queued_tokens.",
    ),
    Alert(
        "HaversackRequestsQueueForLong",
        f"{_soon.quantile(0.95, 'request_queue_time_seconds')} > 60",
        "15m",
        "warning",
        "1 request in 20 waits for more than a minute",
        "The engine has more to do than it can. Add workers. Where jobs that may wait share it "
        "with users, give them a priority above 0.",
    ),
    Alert(
        "HaversackMuchIsRecomputed",
        f"{_slow.rate('recomputed_tokens_total')} > 0.1 * {_slow.rate('computed_tokens_total')}",
        "15m",
        "warning",
        "more than 10 % of the work is done again",
        "Evicted requests don't find their KV again. Raise offload_bytes or kv_cache_bytes, or "
        "lower max_num_seqs.",
    ),
    Alert(
        "HaversackRowsAreRecomputed",
        f"{_hour.increase('recomputed_prompt_logprob_rows_total')} > 0",
        "0m",
        "critical",
        "prompt logprobs were computed twice",
        "That can't be, by construction: report it, with the log of the scheduler.",
    ),
    Alert(
        "HaversackRequestsAreEvictedOften",
        f"{_slow.rate('evictions_total')} > {_slow.rate('requests_finished_total')}",
        "15m",
        "warning",
        "a request is evicted more than once before it ends",
        "Workers have too few KV blocks for what they run at once. Raise kv_cache_bytes, or lower "
        "max_num_seqs.",
    ),
    Alert(
        "HaversackDispatchIsSlow",
        f"{_slow.rate('worker_seconds_total', state='dispatch')}"
        f" > 0.3 * {_slow.rate('worker_seconds_total', state='compute|dispatch')}",
        "15m",
        "warning",
        "workers wait for messages for 30 % of their busy time",
        "The scheduler's node is busy with something else, or the network is slow. With very small "
        "models it is no trouble.",
    ),
    Alert(
        "HaversackStoreIsLost",
        f"{_hour.increase('stores_lost_total')} > 1",
        "0m",
        "warning",
        "the offload store was lost more than once in an hour",
        "What it held is computed again. See the memory of its node.",
    ),
    Alert(
        "HaversackJournalLags",
        f"{_soon.now('journal_lag_seconds')} > 10",
        "2m",
        "critical",
        "the journal is not written",
        "A crash of the scheduler's node would cost all since then, and detached submissions wait "
        "for it. See whether the disk is full or slow: haversack status --json tells the error.",
    ),
    Alert(
        "HaversackJournalDropsResults",
        f"{_slow.increase('journal_dropped_results_total')} > 0",
        "0m",
        "critical",
        "the journal gives results up",
        "The disk has been too slow for too long, and results of detached requests are lost.",
    ),
)
