"""Where an endpoint's work is done: what is large must not hold the endpoint's own interpreter."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.api_engine import ApiEngine
from cluster.api_work import LARGE


class _Elsewhere:
    def run(self, work: Any, *args: Any) -> Any:
        return ("elsewhere", work("its own texts", *args))


def test_large_work_is_done_in_the_other_process() -> None:
    engine: Any = object.__new__(ApiEngine)  # as it is without an engine to join
    engine.texts, engine._helper = "the endpoint's texts", _Elsewhere()
    engine._short = engine._large = ThreadPoolExecutor(1)

    def work(texts: str, value: int) -> tuple[str, int]:
        return texts, value

    assert asyncio.run(engine.work(LARGE, work, 1)) == ("the endpoint's texts", 1)
    assert asyncio.run(engine.work(LARGE + 1, work, 2)) == ("elsewhere", ("its own texts", 2))
    engine._short.shutdown()
