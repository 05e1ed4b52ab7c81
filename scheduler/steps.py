"""Writes step messages: what a worker has to be told so that it can compute a chunk."""

from __future__ import annotations

import numpy as np

from scheduler.codec import id_array, int_array
from scheduler.live import LiveRequest
from scheduler.messages import Chunk, NewRequest
from scheduler.policy import stop_ids

_NO_TOKENS = np.empty(0, dtype=np.int32)


def make_chunk(live: LiveRequest, end: int) -> Chunk:
    """Return the message for the request's next chunk, up to `end`."""
    request = live.request
    start = live.next_position
    return Chunk(
        request_id=request.request_id,
        start=start,
        token_ids=int_array(request.token_ids(start, end)),
        new_block_ids=id_array(live.block_ids[live.num_sent_blocks :]),
        row_target_ids=int_array(request.row_target_ids(start, end)),
        first_row_position=request.row_position(start),
        sample=end == request.num_tokens and len(request.output_token_ids) < request.max_tokens,
        new=None if live.is_known_to_worker else _new_request(live),
        first_new_position=live.num_kv_tokens,
    )


def _new_request(live: LiveRequest) -> NewRequest:
    request = live.request
    params = request.sampling_params
    history = request.token_ids(0, request.num_tokens) if params.needs_token_history else _NO_TOKENS
    return NewRequest(
        sampling_params=params,
        seed=request.seed,
        num_prompt_tokens=request.num_prompt_tokens,
        num_prompt_logprobs=params.num_prompt_logprobs,
        banned_until_min_tokens=stop_ids(request) if params.min_tokens else (),
        num_output_tokens=len(request.output_token_ids),
        history=int_array(history),
    )
