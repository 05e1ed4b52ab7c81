"""Every series that Haversack tells Prometheus: the one table of their names and meanings.

What is registered with Ray, answered at the endpoint's `/metrics`, drawn in the dashboard, watched
by the alert rules and listed in docs/metrics.md is all made from `SERIES`.

Rules:
- Names follow Prometheus: base units, `_total` on counters. Where vLLM has a counterpart the series
  means the same, and `vllm` names it.
- Every series of an engine has the label `engine`, its name. No label has a value per request.
- A counter counts since `haversack_scheduler_start_time_seconds`; a restart of the scheduler begins
  anew, which is how Prometheus expects counters to behave. What requests did before it is not
  counted again, and those that come back are in no latency: when they began is not known any more.
"""

from __future__ import annotations

from cluster.series import (
    PREFIX,
    Kind,
    Series,
    counter,
    each_worker,
    gauge,
    histogram,
    hit_tokens,
    journal_field,
    scheduler_field,
    scheduler_reasons,
    store_field,
    timing,
    worker_seconds,
)
from scheduler.request import FinishReason

MIGRATION_REASONS = ("asked", "blocks", "drain", "load")

_REQUESTS = (
    gauge(
        "requests_running",
        "requests",
        "Requests between the queue and their end.",
        scheduler_field("num_running"),
        vllm="num_requests_running",
    ),
    gauge(
        "requests_waiting",
        "requests",
        "Requests in the queue.",
        scheduler_field("num_waiting"),
        vllm="num_requests_waiting",
    ),
    gauge(
        "waiting_tokens",
        "tokens",
        "Known tokens of the requests in the queue.",
        scheduler_field("num_queued_tokens"),
    ),
    counter(
        "requests_finished",
        "requests",
        "Requests that ended: stop, length, abort (cancelled, or the client has gone) or error.",
        scheduler_reasons("finished_by_reason", [reason.value for reason in FinishReason]),
        "reason",
        vllm="request_success",
    ),
    counter(
        "requests_refused",
        "requests",
        "Submissions that were refused and never queued.",
        scheduler_field("num_refused"),
    ),
    counter(
        "requests_expired",
        "requests",
        "Requests that ran past their timeout_s; they are among those that ended in error.",
        scheduler_field("num_expired"),
    ),
    counter(
        "requests_restored",
        "requests",
        "Requests that came back from the journal when the scheduler was restarted.",
        scheduler_field("num_requests_restored"),
    ),
)

_LATENCIES = (
    histogram(
        "time_to_first_token",
        "From submission to the first generated token.",
        timing("time_to_first_token"),
        vllm="time_to_first_token_seconds",
    ),
    histogram(
        "inter_token_latency",
        "From one generated token to the next; tokens that come together share the time equally.",
        timing("inter_token"),
        vllm="inter_token_latency_seconds",
    ),
    histogram(
        "e2e_request_latency",
        "From submission to the end, of requests that ended with stop or length.",
        timing("end_to_end"),
        vllm="e2e_request_latency_seconds",
    ),
    histogram(
        "request_queue_time",
        "From submission until the first chunk is sent to a worker.",
        timing("queue"),
        vllm="request_queue_time_seconds",
    ),
    histogram(
        "request_prefill_time",
        "From the first chunk to the end of the prompt, prompt logprobs included.",
        timing("prefill"),
        vllm="request_prefill_time_seconds",
    ),
    histogram(
        "request_decode_time",
        "From the first generated token to the last one.",
        timing("decode"),
        vllm="request_decode_time_seconds",
    ),
)

_TOKENS = (
    counter(
        "prompt_tokens",
        "tokens",
        "Tokens of prompts that are done: computed or from caches.",
        scheduler_field("num_prefilled_tokens"),
        vllm="prompt_tokens",
    ),
    counter(
        "accepted_prompt_tokens",
        "tokens",
        "Prompt tokens of requests that were accepted.",
        scheduler_field("num_prompt_tokens"),
    ),
    counter(
        "generation_tokens",
        "tokens",
        "Generated tokens.",
        scheduler_field("num_generated_tokens"),
        vllm="generation_tokens",
    ),
    counter(
        "computed_tokens",
        "tokens",
        "Tokens that workers computed, repetitions included.",
        scheduler_field("num_computed_tokens"),
    ),
    counter(
        "recomputed_tokens",
        "tokens",
        "Tokens whose KV was computed again after an eviction or a loss.",
        scheduler_field("num_recomputed_tokens"),
    ),
    counter(
        "prompt_logprob_rows",
        "rows",
        "Prompt logprob rows that workers computed.",
        scheduler_field("num_prompt_rows"),
    ),
    counter(
        "recomputed_prompt_logprob_rows",
        "rows",
        "Prompt logprob rows that were computed although they were held: a bug if not 0.",
        scheduler_field("num_recomputed_rows"),
    ),
)

_CACHES = (
    counter(
        "prefix_queried_tokens",
        "tokens",
        "Tokens, not computed by the request before, that admitted requests could read caches for.",
        scheduler_field("num_queried_tokens"),
        vllm="prefix_cache_queries",
    ),
    counter(
        "prefix_hit_tokens",
        "tokens",
        "Tokens whose KV was had and not computed: from the worker's prefix cache, the offload "
        "store, or a resumed request's own from either, which is no hit of a query.",
        hit_tokens,
        "source",
        vllm="prefix_cache_hits",
    ),
    counter(
        "prefix_bypasses",
        "requests",
        "Admissions that could read no shared block, such as those that skip the cache: no misses.",
        scheduler_field("num_cache_bypasses"),
    ),
    counter(
        "row_cache_hit_rows",
        "rows",
        "Prompt logprob rows that the row cache supplied.",
        scheduler_field("num_row_cache_hit_rows"),
    ),
    gauge(
        "row_cache_blocks",
        "blocks",
        "Blocks whose rows the row cache holds, by kind of row.",
        scheduler_field("num_row_cache_blocks"),
    ),
    gauge(
        "row_cache_bytes",
        "bytes",
        "Memory of the row cache.",
        scheduler_field("num_row_cache_bytes"),
    ),
    gauge("kv_blocks", "blocks", "KV blocks of all workers.", scheduler_field("num_blocks")),
    gauge(
        "kv_blocks_used",
        "blocks",
        "KV blocks in use; cached ones that may be reused are not.",
        scheduler_field("num_used_blocks"),
    ),
)

_WORKERS = (
    gauge("workers", "workers", "Workers that are there.", scheduler_field("num_workers")),
    counter(
        "workers_lost",
        "workers",
        "Workers that died, hung or could not be reached.",
        scheduler_field("num_workers_lost"),
    ),
    counter(
        "workers_drained",
        "workers",
        "Workers that were emptied and ended on request.",
        scheduler_field("num_workers_drained"),
    ),
    gauge(
        "worker_requests",
        "requests",
        "Requests that have blocks on a worker.",
        each_worker(lambda worker: worker.num_running),
        "worker",
    ),
    gauge(
        "worker_kv_blocks",
        "blocks",
        "KV blocks of a worker.",
        each_worker(lambda worker: worker.num_blocks),
        "worker",
    ),
    gauge(
        "worker_kv_blocks_used",
        "blocks",
        "KV blocks of a worker in use.",
        each_worker(lambda worker: worker.num_used_blocks),
        "worker",
    ),
    counter(
        "worker_seconds",
        "seconds",
        "A worker's time: compute (steps, as the worker says), dispatch (a step is under way, but "
        "not computed: messages and waiting) and idle (none is).",
        worker_seconds,
        "worker",
        "state",
    ),
    counter("steps", "steps", "Steps sent to workers.", scheduler_field("num_steps")),
    counter("chunks", "chunks", "Chunks in those steps.", scheduler_field("num_chunks")),
    gauge(
        "scheduler_start_time_seconds",
        "seconds",
        "Unix time at which the scheduler was started, or restarted.",
        lambda stats: [((), stats.started_s)],
    ),
)

_MOVES = (
    counter(
        "evictions",
        "requests",
        "Evictions of requests from their workers.",
        scheduler_field("num_evictions"),
        vllm="num_preemptions",
    ),
    counter(
        "migrations",
        "requests",
        "Moves to another worker: asked for, to free blocks, to drain a worker, to even out load.",
        scheduler_reasons("migrations_by_reason", MIGRATION_REASONS),
        "reason",
    ),
    counter(
        "migrations_failed",
        "requests",
        "Moves that were given up; the request went on.",
        scheduler_field("num_migrations_failed"),
    ),
    histogram(
        "migration_pause",
        "For how long requests stood still while their last blocks moved.",
        timing("migration_pause"),
    ),
    counter(
        "migrated_blocks",
        "blocks",
        "KV blocks copied from worker to worker.",
        scheduler_field("num_migrated_blocks"),
    ),
    counter(
        "migrated_bytes",
        "bytes",
        "Bytes of those.",
        scheduler_field("num_migrated_bytes"),
    ),
)

_STORE = (
    gauge("store_bytes", "bytes", "Bytes in the offload store.", store_field("used_bytes")),
    gauge(
        "store_capacity_bytes",
        "bytes",
        "Bytes that the offload store may hold.",
        store_field("capacity_bytes"),
    ),
    counter(
        "store_saved_blocks",
        "blocks",
        "KV blocks whose bytes travelled to the offload store.",
        scheduler_field("num_copied_blocks"),
    ),
    counter("store_saved_bytes", "bytes", "Bytes of those.", scheduler_field("num_saved_bytes")),
    counter(
        "store_loaded_blocks",
        "blocks",
        "KV blocks written into workers from the store.",
        scheduler_field("num_loaded_blocks"),
    ),
    counter("store_loaded_bytes", "bytes", "Bytes of those.", scheduler_field("num_loaded_bytes")),
    counter(
        "store_evicted_blocks",
        "blocks",
        "KV blocks that the store dropped to make room.",
        store_field("num_evicted_blocks"),
    ),
    counter(
        "store_lost_blocks",
        "blocks",
        "KV blocks of the store whose data was gone.",
        store_field("num_lost_blocks"),
    ),
    counter(
        "stores_lost",
        "stores",
        "Losses of the whole store, which came back empty.",
        scheduler_field("num_stores_lost"),
    ),
)

_JOURNAL = (
    gauge(
        "journal_lag_seconds",
        "seconds",
        "Age of the oldest record that is not on disk.",
        journal_field("lag_s"),
    ),
    gauge("journal_queued_bytes", "bytes", "Records not on disk.", journal_field("queued_bytes")),
    gauge(
        "journal_file_bytes", "bytes", "Size of the journal's file.", journal_field("file_bytes")
    ),
    gauge(
        "journal_results",
        "requests",
        "Submissions whose results the journal keeps.",
        journal_field("num_results"),
    ),
    counter(
        "journal_written_bytes",
        "bytes",
        "Bytes written to the journal.",
        journal_field("written_bytes"),
    ),
    counter(
        "journal_failed_writes",
        "writes",
        "Writes that failed, and are tried again.",
        journal_field("num_failed_writes"),
    ),
    counter(
        "journal_dropped_results",
        "requests",
        "Results that were given up since too much waited for the disk.",
        journal_field("num_dropped_results"),
    ),
)

HTTP_REQUESTS = Series(
    f"{PREFIX}http_requests_total",
    Kind.COUNTER,
    "requests",
    "HTTP requests that were answered, by route and status.",
    None,
    ("route", "status"),
)
HTTP_REQUEST_SECONDS = Series(
    f"{PREFIX}http_request_duration_seconds",
    Kind.HISTOGRAM,
    "seconds",
    "From an HTTP request to the end of its answer.",
    None,
    ("route",),
    vllm="http_request_duration_seconds",
)
HTTP_IN_PROGRESS = Series(
    f"{PREFIX}http_requests_in_progress",
    Kind.GAUGE,
    "requests",
    "HTTP requests that are being answered.",
    None,
)

GROUPS: dict[str, tuple[Series, ...]] = {
    "Requests": _REQUESTS,
    "Latency": _LATENCIES,
    "Tokens and rows": _TOKENS,
    "Caches and blocks": _CACHES,
    "Workers": _WORKERS,
    "Evictions and moves": _MOVES,
    "Offload store": _STORE,
    "Journal": _JOURNAL,
    "HTTP endpoint": (HTTP_REQUESTS, HTTP_REQUEST_SECONDS, HTTP_IN_PROGRESS),
}
"""Every series, by what it is about."""
SERIES: dict[str, Series] = {series.name: series for group in GROUPS.values() for series in group}
"""Every series by its name."""
ENGINE_SERIES = tuple(series for series in SERIES.values() if series.read is not None)
"""Those that the engine itself tells."""
