"""The table of the dashboard's panels."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.dashboards.queries import Queries

_ENGINES = Queries(window="$__rate_interval", chosen='engine=~"$engine"')
_now, _rate, _quantile, _mean = _ENGINES.now, _ENGINES.rate, _ENGINES.quantile, _ENGINES.mean


@dataclass(frozen=True)
class Panel:
    """One panel."""

    title: str
    unit: str
    """Grafana's name of the unit."""
    help: str
    queries: dict[str, str]
    """Legend -> PromQL."""
    stack: bool = False


def _latency(title: str, name: str, help_text: str) -> Panel:
    queries = {
        "p50 {{engine}}": _quantile(0.5, name),
        "p95 {{engine}}": _quantile(0.95, name),
        "p99 {{engine}}": _quantile(0.99, name),
        "mean {{engine}}": _mean(name),
    }
    return Panel(title, "s", help_text, queries)


ROWS: dict[str, tuple[Panel, ...]] = {
    "Requests": (
        Panel(
            "Requests",
            "short",
            "Running ones have blocks on a worker, or are on their way there.",
            {
                "running {{engine}}": _now("requests_running"),
                "waiting {{engine}}": _now("requests_waiting"),
            },
            stack=True,
        ),
        Panel(
            "Ends",
            "reqps",
            "Requests that end, by reason, and submissions that are refused.",
            {
                "{{reason}} {{engine}}": _rate("requests_finished_total", "reason"),
                "refused {{engine}}": _rate("requests_refused_total"),
            },
            stack=True,
        ),
        Panel(
            "Tokens",
            "short",
            "Tokens a second: of prompts that are done, and generated.",
            {
                "prompt {{engine}}": _rate("prompt_tokens_total"),
                "generated {{engine}}": _rate("generation_tokens_total"),
                "computed {{engine}}": _rate("computed_tokens_total"),
            },
        ),
        Panel(
            "Prompt logprob rows",
            "short",
            "Rows a second: computed, and supplied by the row cache.",
            {
                "computed {{engine}}": _rate("prompt_logprob_rows_total"),
                "row cache {{engine}}": _rate("row_cache_hit_rows_total"),
            },
            stack=True,
        ),
        Panel(
            "Waiting tokens",
            "short",
            "Known tokens of the requests in the queue.",
            {"{{engine}}": _now("waiting_tokens")},
        ),
    ),
    "Latency": (
        _latency(
            "Time to first token",
            "time_to_first_token_seconds",
            "From submission to the first generated token.",
        ),
        _latency(
            "Between tokens",
            "inter_token_latency_seconds",
            "From one generated token to the next.",
        ),
        _latency(
            "End to end",
            "e2e_request_latency_seconds",
            "From submission to the end.",
        ),
        _latency(
            "Queued",
            "request_queue_time_seconds",
            "From submission until the first chunk is sent to a worker.",
        ),
        _latency(
            "Prefill",
            "request_prefill_time_seconds",
            "From the first chunk to the end of the prompt, prompt logprobs included.",
        ),
        _latency(
            "Decode",
            "request_decode_time_seconds",
            "From the first generated token to the last one.",
        ),
    ),
    "Workers": (
        Panel(
            "Workers",
            "short",
            "Workers that are there, and those lost or drained a second.",
            {
                "there {{engine}}": _now("workers"),
                "lost {{engine}}": _rate("workers_lost_total"),
                "drained {{engine}}": _rate("workers_drained_total"),
            },
        ),
        Panel(
            "What workers do",
            "percentunit",
            "Shares of all workers' time. Dispatch is time with a step under way that is not spent "
            "computing: much of it means that the scheduler or the network is what limits.",
            {
                "{{state}} {{engine}}": f"{_rate('worker_seconds_total', 'state')}"
                f" / on (engine) group_left () {_rate('worker_seconds_total')}"
            },
            stack=True,
        ),
        Panel(
            "Computing, by worker",
            "percentunit",
            "Seconds of computing a second.",
            {"{{worker}} {{engine}}": _rate("worker_seconds_total", "worker", state="compute")},
        ),
        Panel(
            "Requests, by worker",
            "short",
            "Requests that have blocks on a worker.",
            {"{{worker}} {{engine}}": _now("worker_requests", "worker")},
        ),
        Panel(
            "Blocks in use, by worker",
            "percentunit",
            "KV blocks that requests or saves hold, of those that a worker has.",
            {
                "{{worker}} {{engine}}": f"{_now('worker_kv_blocks_used', 'worker')}"
                f" / {_now('worker_kv_blocks', 'worker')}"
            },
        ),
        Panel(
            "Steps",
            "short",
            "Steps a second, and chunks in a step.",
            {
                "steps a second {{engine}}": _rate("steps_total"),
                "chunks in a step {{engine}}": f"{_rate('chunks_total')} / {_rate('steps_total')}",
            },
        ),
    ),
    "Caches": (
        Panel(
            "Blocks in use",
            "percentunit",
            "KV blocks that requests or saves hold, of those of all workers.",
            {"{{engine}}": f"{_now('kv_blocks_used')} / {_now('kv_blocks')}"},
        ),
        Panel(
            "Prefix hits",
            "percentunit",
            "Of the tokens that admitted requests could read, those found: on the worker, or in "
            "the offload store. A bypass asks for nothing, and is no miss.",
            {
                "{{source}} {{engine}}": _rate(
                    "prefix_hit_tokens_total", "source", source="worker|store"
                )
                + f" / on (engine) group_left () {_rate('prefix_queried_tokens_total')}"
            },
            stack=True,
        ),
        Panel(
            "Tokens not computed",
            "short",
            "Tokens a second whose KV was found; a resumed request finds its own.",
            {"{{source}} {{engine}}": _rate("prefix_hit_tokens_total", "source")},
            stack=True,
        ),
        Panel(
            "Bypasses",
            "short",
            "Admissions a second that could read no shared block.",
            {"{{engine}}": _rate("prefix_bypasses_total")},
        ),
        Panel(
            "Row cache",
            "bytes",
            "Memory of the prompt logprob rows that are kept.",
            {"{{engine}}": _now("row_cache_bytes")},
        ),
    ),
    "Evictions, moves and losses": (
        Panel(
            "Evictions and moves",
            "short",
            "A second. Moves go on while they are computed; evicted requests wait again.",
            {
                "evicted {{engine}}": _rate("evictions_total"),
                "moved: {{reason}} {{engine}}": _rate("migrations_total", "reason"),
                "given up {{engine}}": _rate("migrations_failed_total"),
            },
        ),
        _latency(
            "Pause of a move",
            "migration_pause_seconds",
            "For how long a request stands still while its last blocks move.",
        ),
        Panel(
            "Computed again",
            "percentunit",
            "Tokens computed again after an eviction or a loss, of all that were computed.",
            {
                "{{engine}}": f"{_rate('recomputed_tokens_total')}"
                f" / {_rate('computed_tokens_total')}"
            },
        ),
        Panel(
            "Rows computed again",
            "short",
            "Prompt logprob rows computed although they were held: 0, or there is a bug.",
            {"{{engine}}": _rate("recomputed_prompt_logprob_rows_total")},
        ),
    ),
    "Offload store and journal": (
        Panel(
            "Store",
            "bytes",
            "Bytes of saved KV, and how many there may be.",
            {
                "used {{engine}}": _now("store_bytes"),
                "capacity {{engine}}": _now("store_capacity_bytes"),
            },
        ),
        Panel(
            "KV that travels",
            "Bps",
            "To and from the store, and from worker to worker.",
            {
                "saved {{engine}}": _rate("store_saved_bytes_total"),
                "loaded {{engine}}": _rate("store_loaded_bytes_total"),
                "moved {{engine}}": _rate("migrated_bytes_total"),
            },
        ),
        Panel(
            "Blocks that left the store",
            "short",
            "Blocks a second: dropped to make room, and lost with a node.",
            {
                "dropped {{engine}}": _rate("store_evicted_blocks_total"),
                "lost {{engine}}": _rate("store_lost_blocks_total"),
            },
        ),
        Panel(
            "Journal's lag",
            "s",
            "Age of the oldest record that is not on disk: what a crash would cost.",
            {"{{engine}}": _now("journal_lag_seconds")},
        ),
        Panel(
            "Journal",
            "bytes",
            "Size of the file, and what waits to be written.",
            {
                "file {{engine}}": _now("journal_file_bytes"),
                "waiting {{engine}}": _now("journal_queued_bytes"),
            },
        ),
    ),
}
"""Title of a row -> its panels, two beside each other."""
