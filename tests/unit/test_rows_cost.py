"""Rows are flat arrays: their number makes no difference to Python's garbage collector."""

from __future__ import annotations

import gc

import numpy as np

from scheduler.codec import int_array
from scheduler.logprobs import Logprobs
from scheduler.messages import Submission
from scheduler.outputs import PromptLogprobsView
from scheduler.request import Request
from scheduler.sampling_params import SamplingParams
from scheduler.submissions import make_requests


def num_objects_held(num_tokens: int) -> int:
    """Return how many tracked objects 32 requests with k=20 and their views keep alive."""
    shape = (num_tokens - 1, 21)
    rows = Logprobs(
        np.zeros(shape, np.int32), np.zeros(shape, np.float32), np.ones(shape, np.int32)
    )
    gc.collect()
    before = len(gc.get_objects())
    kept = []
    for index in range(32):
        prompt = int_array(np.zeros(num_tokens, np.int32))
        params = SamplingParams(prompt_logprobs=20, max_tokens=0)
        request = make_requests(Submission(f"r{index}", prompt, params, seed=0))[0]
        travelled = Request.decode(request.encode())
        view = PromptLogprobsView(rows, None)
        assert len(view) == num_tokens
        assert view[num_tokens - 1] is not None
        kept.append((travelled, view))
    gc.collect()
    return len(gc.get_objects()) - before


def test_long_prompts_make_no_more_objects_than_short_ones() -> None:
    """One object per position and candidate makes collection dominate everything else."""
    assert num_objects_held(4000) <= num_objects_held(40) + 50
