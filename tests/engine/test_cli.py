"""The command prints one JSON line for programs, and one line of text where a user erred."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from typer.testing import CliRunner

from cluster import Client, SamplingParams
from cluster.cli import app
from tests.engine.conftest import DEADLINE_S, ENGINE, wait_for


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


COMMANDS = [
    *("version", "status", "requests", "evict", "migrate", "drain", "pull", "generate", "score", "serve")
]


@pytest.mark.parametrize("command", COMMANDS)
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
    shown = shell.invoke(app, ["status"])
    assert shown.exit_code == 0
    for word in (tiny_model.split("/")[1], "worker-0", "serving", "evictions"):
        assert word in shown.stdout


def test_an_operator_sees_and_moves_a_request(shell: CliRunner, client: Client) -> None:
    params = SamplingParams(max_tokens=500, temperature=0.0, ignore_eos=True)
    handle = client.submit([40, 41, 42], params, request_id="moved")
    wait_for(lambda: any(i.num_output_tokens for i in client.requests()), "it is decoded")
    (row,) = answer(shell, "requests")["requests"]
    assert (row["request_id"], row["num_prompt_tokens"]) == ("moved", 3)
    assert "moved" in shell.invoke(app, ["requests"]).stdout
    target = "worker-1" if row["worker_id"] == "worker-0" else "worker-0"
    assert answer(shell, "migrate", "moved", target) == {"migrating": "moved", "worker": target}
    assert answer(shell, "evict", "moved") == {"evicted": "moved"}
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


def test_the_version_is_the_installed_one(shell: CliRunner) -> None:
    assert answer(shell, "version")["version"].count(".") == 2


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["pull", "/no-such-folder"], "ModelNotFound"),
        (["generate", ""], "InvalidRequest"),
        (["generate", "a", "--temperature", "-1"], "InvalidRequest"),
        (["status", "--name", "nobody"], "EngineUnavailable"),
        (["requests", "--name", "nobody"], "EngineUnavailable"),
        (["evict", "nobody"], "UnknownRequest"),
        (["migrate", "nobody", "worker-0"], "UnknownRequest"),
        (["drain", "worker-77"], "UnknownWorker"),
        (["drain", "worker-0", "--deadline", "-1"], "InvalidRequest"),
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
