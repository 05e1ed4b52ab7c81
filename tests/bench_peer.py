"""A peer that needs no model: it answers at once, and fails, ends or hangs when it is told to.

What it does with a job is the job's workload. Settings may tell it to start a child, out of reach
of signals to its group.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

from bench.peers.protocol import Job, Outcome, run_peer


class BenchPeer:
    def __init__(self, settings: dict[str, Any]) -> None:
        if settings.get("fails_to_load"):
            raise ValueError("no such model")
        self.about: dict[str, Any] = {"threads": settings.get("threads")}
        if settings.get("has_child"):
            child = subprocess.Popen(
                [sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True
            )
            self.about["child"] = child.pid

    def score(self, job: Job) -> Outcome:
        print("what libraries print is no answer")
        subprocess.run(["echo", "nor what their children print"], check=True)
        if job.workload == "fail":
            raise ValueError("this one is too much")
        if job.workload == "end":
            print("a last word", file=sys.stderr)
            os._exit(3)
        if job.workload == "hang":
            time.sleep(600)
        num_rows = [len(p) - start for p, start in zip(job.prompts, job.starts, strict=True)]
        if job.workload == "rescore":
            num_rows = [rows - 1 for rows in num_rows]
        return Outcome(0.5, num_rows, [0.0 for _ in num_rows])

    def generate(self, job: Job) -> Outcome:
        return Outcome(
            0.5,
            first_token_ids=[0 for _ in job.prompts],
            num_generated=sum(job.max_tokens),
        )


if __name__ == "__main__":
    run_peer(BenchPeer)
