"""Takes the screenshots in docs/images from a real engine: python -m tests.pictures.shots

Two workers of the default model score texts while requests are evicted and moved, and the live page
is looked at while others are decoded and wait.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import ray

from cluster import Batch, BatchOptions, Client, SamplingParams, ScoringParams
from cluster.api_settings import ApiSettings
from cluster.block_use import BlockUse
from cluster.config import EngineConfig
from cluster.report import Report
from cluster.serving import Endpoint
from scheduler.errors import HaversackError
from scheduler.request import RequestStatus
from tests.browser import Browser

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
TEXTS = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Water boils at 100 degrees Celsius at sea level; on a mountain it boils at less.",
    "A request that is evicted between two chunks of its prompt goes on where it was.",
    "In 1969 Neil Armstrong became the first person to walk on the Moon. He said that it was one "
    "small step for a man, but one giant leap for mankind, and came home three days later.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + "
    "fibonacci(n - 2)\n",
]


def main() -> None:
    """Take both."""
    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    settings = {"num_workers": 2, "num_blocks": 96, "max_num_batched_tokens": 32, "num_threads": 1}
    with (
        tempfile.TemporaryDirectory(prefix="pictures-") as folder,
        Client(name="shots", max_num_seqs=6, **settings) as client,
    ):
        browser = Browser(Path(folder))
        try:
            shoot_report(client, browser, Path(folder))
            shoot_live(client, browser)
        finally:
            browser.close()


def shoot_report(client: Client, browser: Browser, folder: Path) -> None:
    """Score the texts, and a long one that is disturbed, and look at the report."""
    rows = [{"prompt": text} for text in TEXTS]
    rows.append({"prompt": " ".join(TEXTS[:4] * 3), "id": "long"})
    rows.append({"context": "The capital of France is", "continuation": " Paris", "id": "pair"})
    source, page = folder / "texts.jsonl", folder / "report.html"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    decode = client.token_text()
    use = BlockUse(client.workers)
    report = Report(
        page,
        source=source.name,
        output="texts.scores.jsonl",
        model=client.info.model,
        decode=decode,
        num_logprobs=5,
        use=use,
    )
    over = threading.Event()
    disturber = threading.Thread(target=disturb, args=(client, over))
    disturber.start()
    options = BatchOptions(params=ScoringParams(logprobs=5, skip_reading_prefix_cache=True))
    progress = Batch(source, folder / "scores.jsonl", options).run(client, report)
    over.set()
    disturber.join()
    use.stop()
    report.finish(progress)
    with browser.page(page.as_uri(), width=1000, height=1000) as shown:
        shown.hover(".row:nth-child(4) .t:nth-child(9)")
        shown.js("window.scrollTo(0, 0)")
        shown.hover(".row:nth-child(1) .t:nth-child(5)")
        shown.screenshot(IMAGES / "report.png")


def disturb(client: Client, over: threading.Event) -> None:
    """Evict and move what runs, now and then."""
    while not over.wait(0.4):
        running = [r for r in client.requests() if r.status is RequestStatus.RUNNING]
        for info in running[-1:]:
            others = [w.worker_id for w in client.workers() if w.worker_id != info.worker_id]
            with suppress(HaversackError):
                client.migrate(info.request_id, others[0])
        for info in running[:1]:
            client.evict(info.request_id)


def shoot_live(client: Client, browser: Browser) -> None:
    """Decode more requests than there is room for, and look at the live page meanwhile."""
    endpoint = Endpoint(
        ApiSettings(EngineConfig(**client.info.settings), (client.info.model,)), port=0
    )
    params = SamplingParams(max_tokens=160, ignore_eos=True, seed=1)
    try:
        with browser.page(f"{endpoint.url}/", width=1000, height=1000) as shown:
            shown.js("(() => { const w = document.querySelector('#window'); w.value = '15'; })()")
            shown.click("#score")
            shown.wait_for("document.querySelectorAll('#scored .t').length > 0")
            handles = []
            for i in range(16):
                name = f"story-{i:02d}"
                handles.append(client.submit(TEXTS[i % 5], params, request_id=name))
            over = threading.Event()
            disturber = threading.Thread(target=disturb, args=(client, over))
            disturber.start()
            time.sleep(9)
            over.set()
            disturber.join()
            shown.js("window.scrollTo(0, 0)")
            shown.screenshot(IMAGES / "live.png")
            for handle in handles:
                handle.cancel()
    finally:
        endpoint.stop()


if __name__ == "__main__":
    main()
