"""The command prints one JSON line for programs, and one line of text where a user erred."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import Client, SamplingParams
from cluster.cli import app
from tests.engine.conftest import ENGINE


@pytest.fixture
def shell(client: Client, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("HAVERSACK_NAMESPACE", ENGINE["namespace"])
    monkeypatch.setenv("HAVERSACK_NAME", "shared")
    return CliRunner()


def answer(shell: CliRunner, *arguments: str, **keywords: Any) -> Any:
    """Return what a command printed as its one JSON line."""
    done = shell.invoke(app, [*arguments, "--json"], **keywords)
    assert done.exit_code == 0, done.output
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.mark.parametrize("command", ["version", "status", "pull", "generate", "score"])
def test_every_command_explains_itself(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    assert "--json" in done.output


def test_a_prompt_is_scored(shell: CliRunner, client: Client) -> None:
    facts = answer(shell, "score", "Hi there")
    rows = (
        client.submit("Hi there", SamplingParams(prompt_logprobs=0, max_tokens=0))
        .result()
        .prompt_logprobs
    )
    assert rows is not None
    assert facts["logprobs"] == [None, *rows.arrays.logprobs[:, 0].tolist()]
    assert facts["ranks"] == [None, *rows.arrays.ranks[:, 0].tolist()]
    assert facts["perplexity"] == pytest.approx(math.exp(-facts["sum_logprob"] / 7))
    shown = shell.invoke(app, ["score", "-", "--logprobs", "2"], input="Hi there")
    assert "perplexity" in shown.stdout


def test_a_prompt_is_continued(shell: CliRunner, client: Client) -> None:
    facts = answer(shell, "generate", "Hi there", "--max-tokens", "5")
    expected = client.submit("Hi there", SamplingParams(max_tokens=5, temperature=0.0)).result()
    assert facts["token_ids"] == expected.outputs[0].token_ids
    assert facts["finish_reason"] == expected.outputs[0].finish_reason
    shown = shell.invoke(app, ["generate", "-", "--max-tokens", "5"], input="Hi there")
    assert shown.stdout == expected.outputs[0].text + "\n"


def test_the_status_names_model_workers_and_counters(shell: CliRunner, tiny_model: str) -> None:
    facts = answer(shell, "status")
    assert facts["model"] == tiny_model
    assert [worker["worker_id"] for worker in facts["workers"]] == ["worker-0", "worker-1"]
    assert facts["scheduler"]["num_workers"] == 2
    assert shell.invoke(app, ["status"]).exit_code == 0


def test_the_version_is_the_installed_one(shell: CliRunner) -> None:
    assert answer(shell, "version")["version"].count(".") == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["pull", "/no-such-folder"], "ModelNotFound"),
        (["generate", ""], "InvalidRequest"),
        (["generate", "a", "--temperature", "-1"], "InvalidRequest"),
        (["status", "--name", "nobody"], "EngineUnavailable"),
        (["status", "--config", "/no-such-file.yaml"], "InvalidConfig"),
        (["score", "a", "--num-workers", "7"], "InvalidConfig"),
    ],
)
def test_what_a_user_did_wrong_is_one_line(
    shell: CliRunner, arguments: list[str], error: str
) -> None:
    done = shell.invoke(app, arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"{error}: ")
    assert "Traceback" not in done.output
