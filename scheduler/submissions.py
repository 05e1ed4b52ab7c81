"""A submission and its requests: how one becomes the others, and how to tell two apart."""

from __future__ import annotations

import hashlib

from scheduler.codec import encode
from scheduler.messages import Submission
from scheduler.request import Request
from scheduler.sampling_params import SEED_LIMIT


def content_hash(submission: Submission) -> bytes:
    """Return 16 bytes that are equal for submissions that ask for the same.

    The id, the time limit, whether it is detached and the trace context are not part of what is
    asked for.
    """
    asked = (
        submission.prompt_token_ids,
        submission.sampling_params,
        submission.seed,
        submission.priority,
        submission.cache_salt,
    )
    return hashlib.blake2b(encode(asked), digest_size=16).digest()


def submission_of(request: Request) -> Submission:
    """Return what was submitted, from any one of the requests that were made of it."""
    return Submission(
        request_id=request.parent_id,
        prompt_token_ids=request.prompt_token_ids,
        sampling_params=request.submitted_params,
        seed=(request.seed - request.index) % SEED_LIMIT,
        priority=request.priority,
        cache_salt=request.cache_salt,
        detached=request.detached,
        traceparent=request.traceparent,
    )


def make_requests(submission: Submission, *, client_id: str = "") -> list[Request]:
    """Return the n requests of one submission, each with a random stream of its own.

    Prompt logprobs belong to the prompt, so only the first one computes them; the others then
    have no rows to miss, and read the prefix cache unless the user asked to skip it. `max_tokens`
    is the user's; admission lowers it to what the context can hold.
    """
    params = submission.sampling_params
    siblings = params.without_prompt_logprobs()
    name = submission.request_id
    content = content_hash(submission)
    return [
        Request(
            request_id=name if params.n == 1 else f"{name}#{index}",
            parent_id=name,
            index=index,
            prompt_token_ids=submission.prompt_token_ids,
            sampling_params=params if index == 0 else siblings,
            submitted_params=params,
            seed=(submission.seed + index) % SEED_LIMIT,
            max_tokens=-1 if params.max_tokens is None else params.max_tokens,
            client_id=client_id,
            priority=submission.priority,
            cache_salt=submission.cache_salt,
            detached=submission.detached,
            traceparent=submission.traceparent,
            content_hash=content,
        )
        for index in range(params.n)
    ]
