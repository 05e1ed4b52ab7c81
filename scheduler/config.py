"""Settings of the scheduling core; `cluster.config` fills them in from the user's settings."""

from __future__ import annotations

import msgspec


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits within which the core decides."""

    block_size: int = 16
    """Tokens per KV block; the same on every worker."""
    max_num_batched_tokens: int = 512
    """Tokens per step of a worker, decodes and prefill chunks together."""
    max_num_seqs: int = 64
    """Requests running on a worker at once."""
    max_decode_steps: int = 1
    """Tokens of each request that a step may bring where all of them decode and nobody waits."""
    max_steps_in_flight: int = 2
    """Steps that a worker may have been sent and not answered; with 2 it never waits for one."""
    max_model_len: int = 8192
    """Positions a request may use, prompt and output together."""
    vocab_size: int = 2**31 - 1
    """Token ids are below this."""
    eos_token_ids: tuple[int, ...] = ()
    cache_namespace: str = ""
    """Part of every block hash: engines share blocks only with equal models."""
    enable_prefix_caching: bool = True
    """Whether workers keep full blocks of finished requests for others."""
    enable_offload: bool = True
    """Whether there is an offload store to save to and load from."""
    save_finished: bool = True
    """Whether finished requests' full blocks go to the offload store for other workers to find."""
    save_segment_tokens: int = 0
    """Running requests save their KV each time so many new tokens are computed, so that a lost
    worker costs at most that much; 0 saves on eviction only."""
    enable_migration: bool = True
    """Whether the core moves requests between workers by itself, to even out load and blocks."""
    enable_journal: bool = False
    """Whether there is a journal to write to."""
    row_cache_bytes: int = 256 * 2**20
    """Prompt rows kept for requests with the same prefix; 0 keeps none."""
    max_queued_requests: int = 20_000
    """Waiting requests, beyond which new ones are refused with `Overloaded`."""
    max_queued_tokens: int = 50_000_000
    """Tokens that waiting requests need computed, beyond which new ones are refused."""
    max_logprobs: int = -1
    """Largest k of logprobs and prompt_logprobs a request may ask for; -1 is the vocabulary."""
    max_rows_bytes: int = 4 * 2**30
    """Largest size of one request's logprob rows; larger ones are refused at submission."""
    max_rows_bytes_per_step: int = 64 * 2**20
    """Chunks are cut shorter where their prompt rows would be larger than this."""
