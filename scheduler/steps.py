"""Writes step messages: what a worker has to be told so that it can compute a chunk.

A chunk goes on from where those under way will have brought the request. The token that one of
them samples is not known yet: `LAST_SAMPLED` stands for it.
"""

from __future__ import annotations

import numpy as np

from scheduler.codec import id_array, int_array
from scheduler.live import LiveRequest
from scheduler.messages import LAST_SAMPLED, Chunk, NewRequest
from scheduler.policy import stop_ids

_NO_TOKENS = np.empty(0, dtype=np.int32)
_LAST_SAMPLED = id_array([LAST_SAMPLED])


def make_chunk(live: LiveRequest, end: int, max_more_tokens: int = 0) -> Chunk:
    """Return the message for the request's next chunk, up to `end`."""
    request = live.request
    start, num_outputs = live.planned_position, live.num_planned_outputs
    is_known = start < request.num_tokens
    return Chunk(
        request_id=request.request_id,
        start=start,
        token_ids=int_array(request.token_ids(start, end)) if is_known else _LAST_SAMPLED,
        new_block_ids=id_array(live.block_ids[live.num_sent_blocks :]),
        row_target_ids=int_array(request.row_target_ids(start, end)),
        first_row_position=request.row_position(start),
        sample=end == request.num_prompt_tokens + num_outputs and num_outputs < request.max_tokens,
        new=None if live.is_known_to_worker else _new_request(live),
        first_new_position=max(live.num_kv_tokens, start),
        max_more_tokens=max_more_tokens,
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
        stop_ids=stop_ids(request),
        num_output_tokens=len(request.output_token_ids),
        history=int_array(history),
    )
