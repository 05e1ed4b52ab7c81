"""Ctrl-C is taken note of, wherever the main thread is, and ends what waits for it."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli_common import until_interrupted

DEADLINE_S = 60.0
SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_is_taken_note_of_and_the_second_breaks_off(
    first: signal.Signals, second: signal.Signals
) -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with until_interrupted() as interruption:
        interruption.check()
        signal.raise_signal(first)
        assert interruption.has_come
        interruption.wait()
        with pytest.raises(KeyboardInterrupt):
            interruption.check()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(second)
    assert [signal.getsignal(number) for number in SIGNALS] == before


@pytest.mark.parametrize("waits", ["interruption.wait()", "sys.stdin.buffer.readline()"])
def test_it_ends_a_wait(waits: str, repo_root: Path) -> None:
    """For the interruption itself, or for a line of stdin."""
    script = f"""
import sys
from cluster.cli_common import until_interrupted
with until_interrupted() as interruption:
    print("waits", flush=True)
    {waits}
    print("came", interruption.has_come)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=repo_root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGINT)
            assert process.wait(DEADLINE_S) == 0
            assert process.stdout.read() == "came True\n"
        finally:
            process.kill()
