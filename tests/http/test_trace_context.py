"""A caller's trace context comes with its HTTP request, into the engine."""

from __future__ import annotations

import threading

import httpx
import pytest

from cluster import Client, SamplingParams
from tests.engine.conftest import wait_for

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
BODIES = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 4, "request_id": "traced"},
    "/score": {"context": "Hi", "continuations": [" there"], "request_id": "traced"},
}


def submitted(engine: Client) -> str | None:
    """The id of what was asked over HTTP, while it is live."""
    found = {info.request_id for info in engine.requests() if "traced" in info.request_id}
    return found.pop() if found else None


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("header", "expected"), [(CALLER, CALLER), ("nonsense", None)])
def test_a_callers_trace_context_comes_with_its_requests(
    main_url: str, engine: Client, path: str, header: str, expected: str | None
) -> None:
    """They wait behind others, so that another client can look at them before they end."""
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    busy = engine.submit_many([[40, number] for number in range(24)], params, priority=-1)
    answers: list[httpx.Response] = []

    def ask() -> None:
        headers = {"traceparent": header}
        url = main_url + path
        answers.append(httpx.post(url, json=BODIES[path], headers=headers, timeout=60))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for(lambda: submitted(engine) is not None, "it is submitted")
    handle = engine.attach(submitted(engine) or "")
    assert handle.submission.traceparent == expected
    for each in busy:
        each.cancel()
    asking.join()
    assert answers[0].status_code == 200
