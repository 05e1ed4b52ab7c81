"""`haversack score` is killed with SIGKILL and started again: not a byte of its output differs."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray

from cluster import Client
from cluster.batches import Batch, BatchOptions
from cluster.scoring import ScoringParams
from tests.engine.conftest import DEADLINE_S, ENGINE
from tests.tiny_models import MAX_MODEL_LEN

COMMAND = [sys.executable, "-c", "from cluster.cli import app; app()", "score"]


def write_rows(path: Path, count: int) -> None:
    """Prompts, pairs and texts, long and short, and every 50th row a bad one."""
    rng = random.Random(count)
    words = ["sea", "lamp", "wind", "north", "wave", "clock", "glass", "tower"]

    def text(num_words: int) -> str:
        return " ".join(rng.choices(words, k=num_words))

    def row(index: int) -> Any:
        if index % 50 == 20:
            too_long = [1] * (MAX_MODEL_LEN + 1)
            return rng.choice([{"prompt": []}, {"prompt": too_long}, {"prom": "a"}, [1]])
        return rng.choice(
            [
                {"prompt": text(rng.randint(1, 20)), "id": f"row-{index}"},
                {"prompt": [rng.randrange(250) for _ in range(rng.randint(1, 60))]},
                {"context": text(5), "continuation": " " + text(2), "id": index},
                {"text": text(rng.randint(1, 10))},
            ]
        )

    path.write_text("".join(json.dumps(row(index)) + "\n" for index in range(count)))


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the command in a process of its own, which joins the shared engine."""
    env = os.environ | {
        "RAY_ADDRESS": ray.get_runtime_context().gcs_address,
        "HAVERSACK_NAMESPACE": ENGINE["namespace"],
        "HAVERSACK_NAME": "shared",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    return subprocess.Popen(
        [*COMMAND, *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_at(process: subprocess.Popen[str], out: Path, lines: int) -> None:
    """Kill the process once its output has so many lines."""
    deadline_s = time.monotonic() + DEADLINE_S
    while num_lines(out) < lines and time.monotonic() < deadline_s and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == -signal.SIGKILL, said


def undisturbed(client: Client, source: Path) -> bytes:
    out = source.with_name("undisturbed.jsonl")
    Batch(source, out, BatchOptions(params=ScoringParams(logprobs=1))).run(client)
    return out.read_bytes()


def killed_and_started_again(source: Path, kills: list[int]) -> bytes:
    """Return the output of a run that was killed at each of these lines."""
    out = source.with_name("killed.jsonl")
    arguments = [str(source), "-o", str(out), "-k", "1"]
    for lines in kills:
        kill_at(start(*arguments, "--max-in-flight", "2"), out, lines)
    num_kept = num_lines(out)
    assert num_kept >= kills[-1]
    process = start(*arguments, "--json")
    said, told = process.communicate(timeout=5 * DEADLINE_S)
    assert process.returncode == 3, told
    facts = json.loads(said)
    assert facts["num_resumed"] == num_kept
    assert facts["num_rows"] == num_lines(out) == num_lines(source)
    return out.read_bytes()


def test_a_killed_run_goes_on_to_the_same_bytes(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write_rows(source, 200)
    assert killed_and_started_again(source, [20]) == undisturbed(client, source)


@pytest.mark.slow
def test_three_kills_in_two_thousand_rows(client: Client, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    write_rows(source, 2000)
    assert killed_and_started_again(source, [150, 700, 1400]) == undisturbed(client, source)


@pytest.mark.slow
def test_ctrl_c_says_how_far_it_is_and_that_it_goes_on(client: Client, tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    write_rows(source, 3000)
    process = start(str(source), "-o", str(out), "-k", "1", "--max-in-flight", "1")
    deadline_s = time.monotonic() + DEADLINE_S
    while num_lines(out) < 20 and time.monotonic() < deadline_s:
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, told
    assert f"{num_lines(out)} of 3000 rows are done; the same command goes on" in told
    assert "Traceback" not in told
