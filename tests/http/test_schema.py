"""The OpenAPI page is true: what it allows and what it forbids is answered, never by a bug."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from cluster import Client
from tests.engine.conftest import DEADLINE_S
from tests.http.test_errors import refused

_EXAMPLES = 30
"""Of each operation, whether as the page says or not."""
_COMPUTING = frozenset({"/v1/completions", "/v1/chat/completions", "/score"})
_TIMEOUT_S = 1.0
"""Of each request, since some fill the context."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_finds_a_bug(main_url: str, engine: Client, mode: str) -> None:
    import schemathesis  # slow to import

    schema = schemathesis.openapi.from_url(f"{main_url}/openapi.json")
    kind = schemathesis.GenerationMode(mode)
    with httpx.Client(timeout=DEADLINE_S) as http:
        for found in schema.get_all_operations():
            operation = found.ok()
            if mode == "positive" or operation.body:
                _try(http, main_url, operation, kind)


def _try(http: httpx.Client, url: str, operation: Any, mode: Any) -> None:
    @settings(
        max_examples=_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if isinstance(case.body, dict) and operation.path in _COMPUTING:
            case.body.setdefault("timeout_s", _TIMEOUT_S)
        answer = case.call(base_url=url)
        if answer.status_code != 200:
            assert answer.status_code != 500, answer.text
            refused(answer, answer.status_code)
            return
        case.validate_response(answer)

    ask()
