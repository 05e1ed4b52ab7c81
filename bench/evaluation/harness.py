"""lm-evaluation-harness as its users run it: its own command, in an environment of its own.

The module knows the harness's command line and the files that it writes, and no engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers.catalogue import PeerSpec, Show, clean_environment

TASKS_FOLDER = Path(__file__).parent / "tasks"
CHOICES, DOCUMENTS, CONTINUED = "haversack_choices", "haversack_documents", "haversack_continued"
_SPEC = PeerSpec("lm_eval", "lm_eval", own_environment=True, sees_ours=True)
_TIMEOUT_S = 3600.0
_TAIL_LINES = 15


class HarnessFailed(Exception):
    """The harness ended with an error; the text has its last lines."""


@dataclass
class Found:
    """What the harness found in one run."""

    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Task -> metric -> value."""
    loglikelihoods: dict[str, list[list[float]]] = field(default_factory=dict)
    """Task -> row -> one value for each choice, or for the whole document."""
    is_greedy: dict[str, list[list[bool]]] = field(default_factory=dict)
    """Task -> row -> for each choice, whether it is what the model would say."""
    texts: dict[str, list[str]] = field(default_factory=dict)
    """Task -> row -> what the model said."""


class Harness:
    """The installed harness."""

    def __init__(self, show: Show) -> None:
        """Install it where it is not there.

        Raises:
            PeerUnavailable: it can't be had.
        """
        self._python = _SPEC.python(show)
        variables, _ = _SPEC.variables(self._python, os.cpu_count() or 1)
        self._env = clean_environment(os.environ) | variables | {"HF_DATASETS_OFFLINE": "1"}

    def run(
        self,
        model: str,
        model_args: Mapping[str, Any],
        tasks: Sequence[str],
        batch_size: int,
        *options: str,
    ) -> Found:
        """Run tasks, and return what was found.

        Args:
            model: the harness's name of a kind of model, such as `hf` or `local-completions`.
            model_args: its settings.
            tasks: of `TASKS_FOLDER`.
            batch_size: rows at once.
            options: further words of the command line.

        Raises:
            HarnessFailed: it ended with an error.
        """
        with tempfile.TemporaryDirectory() as folder:
            command = self.command(model, model_args, tasks, batch_size, *options)
            command += ["--output_path", folder, "--log_samples"]
            done = subprocess.run(
                [str(self._python), "-m", *command],
                env=self._env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_TIMEOUT_S,
            )
            if done.returncode:
                lines = [line for line in done.stdout.splitlines() if line.strip()]
                raise HarnessFailed("\n".join(lines[-_TAIL_LINES:]))
            return found_in(Path(folder), tasks)

    @staticmethod
    def command(
        model: str,
        model_args: Mapping[str, Any],
        tasks: Sequence[str],
        batch_size: int,
        *options: str,
    ) -> list[str]:
        """Return the harness's command line, as a user would type it."""
        told = ",".join(f"{name}={value}" for name, value in model_args.items())
        return [
            *("lm_eval", "run", "--model", model, "--model_args", told),
            *("--include_path", str(TASKS_FOLDER), "--tasks", ",".join(tasks)),
            *("--batch_size", str(batch_size), *options),
        ]


def found_in(folder: Path, tasks: Sequence[str]) -> Found:
    """Return what the harness wrote into a folder."""
    found = Found()
    results = json.loads(next(folder.rglob("results_*.json")).read_text())["results"]
    for task in tasks:
        found.metrics[task] = {
            name.removesuffix(",none"): value
            for name, value in results[task].items()
            if name.endswith(",none") and "_stderr" not in name and isinstance(value, float)
        }
        lines = next(folder.rglob(f"samples_{task}_*.jsonl")).read_text().splitlines()
        rows = sorted(map(json.loads, lines), key=lambda row: row["doc_id"])
        # One answer for each request of a row; the harness writes numbers as text.
        answers = [[answer[0] for answer in row["resps"]] for row in rows]
        if task == CONTINUED:
            found.texts[task] = [str(row[0]) for row in answers]
        elif task == CHOICES:
            found.loglikelihoods[task] = [[float(each[0]) for each in row] for row in answers]
            found.is_greedy[task] = [[each[1] == "True" for each in row] for row in answers]
        else:
            found.loglikelihoods[task] = [[float(each) for each in row] for row in answers]
    return found
