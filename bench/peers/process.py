"""A peer's process, as the benchmark sees it; see `bench.peers.protocol` for what is said.

Between its turns the process is suspended, with all that it has started, so that what these do
while idle (workers that poll, for one) costs the other sides nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import psutil

from bench.peers.catalogue import PeerUnavailable, clean_environment
from bench.peers.protocol import Job, Outcome

_TAIL_LINES = 3
_END_TIMEOUT_S = 10.0


class PeerProcess:
    """One running peer."""

    def __init__(
        self,
        command: Sequence[str],
        variables: Mapping[str, str],
        settings: Mapping[str, Any],
        *,
        start_timeout_s: float,
        job_timeout_s: float,
    ) -> None:
        """Start it and wait until it has loaded its model.

        Args:
            command: the script's command line.
            variables: added to this process's environment, less what peers must not have of it.
            settings: what the script is told first.
            start_timeout_s: seconds that loading may take.
            job_timeout_s: seconds that a job may take.

        Raises:
            PeerUnavailable: it ended, said why it can't run, or took too long.
        """
        self._job_timeout_s = job_timeout_s
        self._seen: set[psutil.Process] = set()
        """All processes of the peer so far; those of one that has ended have other parents now."""
        self._has_ended = False
        self._is_hanging = False
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=clean_environment(os.environ) | dict(variables),
            start_new_session=True,
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        self._stdin = cast("IO[str]", self._process.stdin)
        stdout = cast("IO[str]", self._process.stdout)
        threading.Thread(target=self._read, args=(stdout,), daemon=True).start()
        try:
            self.about: dict[str, Any] = self._ask(settings, start_timeout_s)["about"]
        except BaseException:
            self.close()
            raise
        self.suspend()

    def run(self, job: Job) -> Outcome:
        """Have a job done.

        Raises:
            PeerUnavailable: it can't do it, has ended, or took too long.
        """
        self.resume()
        answer = self._ask(dataclasses.asdict(job), self._job_timeout_s)
        self.suspend()
        return Outcome(**answer["outcome"])

    def pids(self) -> dict[str, int]:
        """Return all processes of the peer: itself as "main", and what it has started."""
        main, *children = self._family()
        return {"main": main.pid} | {f"child-{child.pid}": child.pid for child in children}

    def suspend(self) -> None:
        """Stop all its processes; memory stays as it is."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Let its processes go on."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def close(self) -> None:
        """End the peer and everything that it has started."""
        self.resume()
        with contextlib.suppress(OSError):
            self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.0 if self._is_hanging else _END_TIMEOUT_S)
        for process in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        self._log.close()

    def _family(self) -> list[psutil.Process]:
        """Return the peer's process and what it has started, as far as they are there."""
        try:
            main = psutil.Process(self._process.pid)
            found = [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            found = []
        self._seen.update(found)
        return found

    def _read(self, stdout: IO[str]) -> None:
        for line in stdout:
            self._answers.put(line)
        self._has_ended = True
        self._answers.put(None)

    def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        if self._has_ended or self._is_hanging:
            raise PeerUnavailable(f"it ended, or hangs: {self._tail()}")
        try:
            self._stdin.write(json.dumps(message) + "\n")
            self._stdin.flush()
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            self._is_hanging = True
            raise PeerUnavailable(f"no answer within {timeout_s:g} s: {self._tail()}") from None
        except BrokenPipeError:
            line = None
        if line is None:
            raise PeerUnavailable(f"it ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise PeerUnavailable(answer["error"])
        return answer

    def _tail(self) -> str:
        """Return the last lines that the peer printed."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return " | ".join(lines[-_TAIL_LINES:]) or "it printed nothing"


def command_of(python: Path, module: str) -> list[str]:
    """Return the command line of a peer's script."""
    return [str(python), "-m", module]
