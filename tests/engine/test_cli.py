"""The command prints one JSON line for programs, and one line of text where a user erred."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray._private import worker as ray_worker
from ray._private.utils import publish_error_to_driver
from typer.testing import CliRunner

from cluster import Client, SamplingParams, cli_common, cli_tools
from cluster.batch_output import StreamOutput
from cluster.cli import app
from tests.engine.conftest import DEADLINE_S, ENGINE, LASTING, NUM_CPUS, actors_of, wait_for


@pytest.fixture
def shell(client: Client, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setenv("HAVERSACK_NAMESPACE", ENGINE["namespace"])
    monkeypatch.setenv("HAVERSACK_NAME", "shared")
    return CliRunner()


def answer(shell: CliRunner, *arguments: str, **keywords: Any) -> Any:
    """Return what a command printed as its one JSON line."""
    done = shell.invoke(app, [*arguments, "--json"], **keywords)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout
    return json.loads(lines[0])


COMMANDS = [
    *("version", "status", "top", "requests", "evict", "migrate", "drain", "pull", "generate"),
    *("logprobs", "score", "bench", "serve", "start", "stop"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    done = CliRunner().invoke(app, [command, "--help"])
    assert done.exit_code == 0
    for part in ("--json", f"Example: haversack {command}", "Exit codes: 0 done"):
        assert part in done.output


@pytest.mark.usefixtures("local_cluster")
def test_what_ray_warns_of_does_not_mix_with_what_a_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen = {"out": "", "err": ""}

    def has_come() -> bool:
        publish_error_to_driver("any", "WARNING: of a node", ray_worker.global_worker.gcs_client)
        read = capsys.readouterr()
        seen["out"] += read.out
        seen["err"] += read.err
        return "WARNING: of a node" in seen["out"] + seen["err"]

    wait_for(has_come, "Ray's warning is printed")
    assert "WARNING" not in seen["out"]


def test_a_prompt_is_scored(shell: CliRunner, client: Client) -> None:
    facts = answer(shell, "logprobs", "Hi there")
    rows = (
        client.submit("Hi there", SamplingParams(prompt_logprobs=0, max_tokens=0))
        .result()
        .prompt_logprobs
    )
    assert rows is not None
    assert facts["logprobs"] == [None, *rows.arrays.logprobs[:, 0].tolist()]
    assert facts["ranks"] == [None, *rows.arrays.ranks[:, 0].tolist()]
    assert facts["perplexity"] == pytest.approx(math.exp(-facts["sum_logprob"] / 7))
    shown = shell.invoke(app, ["logprobs", "-", "-k", "2"], input="Hi there")
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
    handle = client.submit([40, 41, 42], LASTING, request_id="moved")
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
        (["logprobs", "a", "--num-workers", "7"], "InvalidConfig"),
        (["logprobs", "a", "-k", "-2"], "InvalidRequest"),
        (["top", "--interval", "0"], "InvalidRequest"),
        (["top", "--count", "0"], "InvalidRequest"),
        (["top", "--name", "nobody"], "EngineUnavailable"),
        (["score", "/no-such-file.jsonl"], "InvalidRequest"),
        (["score", "/etc/hostname"], "InvalidRequest"),
        (["score", ""], "InvalidRequest"),
        (["score", "."], "InvalidRequest"),
        (["score", "-", "--html", "."], "OutputConflict"),
        (["score", "-", "-k", "301"], "InvalidRequest"),
        (["score", "-", "-o", "/no-such-folder/out.jsonl"], "OutputConflict"),
        (["score", "-", "-k", "-2"], "InvalidRequest"),
        (["score", "-", "--input-format", "csv"], "InvalidRequest"),
        (["bench", "no-such-bench"], "InvalidRequest"),
        (["start", "--num-workers", "7"], "InvalidConfig"),
        (["stop", "--name", "nobody"], "EngineUnavailable"),
    ],
)
def test_what_a_user_did_wrong_is_said(shell: CliRunner, arguments: list[str], error: str) -> None:
    done = shell.invoke(app, arguments)
    assert done.exit_code == 1
    assert done.stderr.startswith(f"{error}: ")
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_bytes_that_are_no_text_are_said_to_be_none(
    shell: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = shell.invoke(app, ["generate", "-"], input=b"\xff\xfe")
    assert (done.exit_code, done.stderr.split(":")[0]) == (1, "InvalidRequest")
    assert "UTF-8" in done.stderr
    monkeypatch.setattr("sys.argv", ["haversack", "generate", "\udcff"])
    done = shell.invoke(app, ["generate", "\udcff"])
    assert (done.exit_code, done.stderr.split(":")[0]) == (1, "InvalidRequest")
    assert "UTF-8" in done.stderr


def test_a_stdout_that_takes_no_more_is_said_to(
    shell: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(cli_common.out, "print", full)
    done = shell.invoke(app, ["status"])
    assert done.exit_code == 1
    assert done.stderr == "OutputConflict: stdout can't be written: No space left on device\n"


def test_whoever_reads_no_further_is_told_nothing(
    shell: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in `haversack score - | head -1`."""

    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(StreamOutput, "write", closed)
    done = shell.invoke(app, ["score", "-"], input='{"prompt": "Hi there"}\n')
    assert done.exit_code == 1
    assert done.stderr == ""


@pytest.fixture
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal where all of a table is seen: one's width is fixed where COLUMNS says it."""
    monkeypatch.setattr(cli_common.out, "_width", 2000)


@pytest.mark.usefixtures("_wide")
def test_names_of_requests_are_shown_as_they_are(shell: CliRunner, client: Client) -> None:
    """Whatever somebody calls a request is no markup and no order to an operator's terminal."""
    name = "[/b][red]x :skull: \x1b[2J"
    handle = client.submit([40, 41, 42], LASTING, request_id=name)
    try:
        wait_for(lambda: bool(client.requests()), "it is there")
        for command in (["requests"], ["top", "--count", "1"]):
            done = shell.invoke(app, command)
            assert done.exit_code == 0, done.output
            assert r"[/b][red]x :skull: \x1b[2J" in done.stdout
            assert "\x1b[2J" not in done.stdout
    finally:
        handle.cancel()
    handle.result(timeout=DEADLINE_S)


@pytest.mark.usefixtures("_wide")
def test_tokens_are_no_markup(shell: CliRunner) -> None:
    done = shell.invoke(app, ["logprobs", "[/b]", "-k", "20"])
    assert done.exit_code == 0, done.output
    assert "'['" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["evict", "nobody"], "haversack requests"),
        (["drain", "worker-77"], "haversack status"),
        (["status", "--name", "nobody"], "--name"),
        (["pull", "/no-such-folder"], "pypi:PACKAGE"),
    ],
)
def test_and_what_to_do_is_said(shell: CliRunner, arguments: list[str], hint: str) -> None:
    _, told = shell.invoke(app, arguments).stderr.splitlines()
    assert told.startswith("Try: ")
    assert hint in told


def test_the_engine_is_watched(shell: CliRunner, client: Client, tiny_model: str) -> None:
    handle = client.submit([40, 41, 42], LASTING, request_id="seen")
    wait_for(lambda: any(i.num_output_tokens for i in client.requests()), "it is decoded")
    looks = ["top", "--count", "2", "--interval", "0.01"]
    done = shell.invoke(app, [*looks, "--json"])
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["requests"][0]["request_id"] == "seen"
    assert first["scheduler"]["num_steps"] <= second["scheduler"]["num_steps"]
    shown = shell.invoke(app, looks)
    for word in (tiny_model.split("/")[1], "worker-0", "seen", "tokens/s", "1 live"):
        assert word in shown.stdout
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


# ------------------------------------------------------------------------------------- score FILE


def test_a_file_is_scored_into_a_file(shell: CliRunner, client: Client, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "Hi there"}\n{"context": "Hi", "continuation": " there"}\n')
    facts = answer(shell, "score", str(source))
    out = tmp_path / "rows.scores.jsonl"
    assert facts["output"] == str(out)
    first, second = map(json.loads, out.read_text().splitlines())
    assert second["logprob"] == client.score("Hi", " there").logprob
    whole = answer(shell, "logprobs", "Hi there")
    assert first["logprob"] == whole["sum_logprob"]
    total = first["logprob"] + second["logprob"]
    assert (facts["num_rows"], facts["num_tokens"], facts["logprob"]) == (2, 13, total)
    assert facts["perplexity"] == pytest.approx(math.exp(-total / 13))
    assert answer(shell, "score", str(source))["num_resumed"] == 2
    refused = shell.invoke(app, ["score", str(source), "-k", "1"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith("OutputConflict: ")
    assert "logprobs is 1 and was 0" in refused.stderr
    shown = shell.invoke(app, ["score", str(source), "-k", "1", "--restart"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith(f"{out}: 2 rows, of which 0 were done and 0 are bad")
    assert "top_logprobs" in out.read_text()


def test_bad_rows_are_told_and_the_exit_code_says_so(shell: CliRunner, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"prompt": "Hi there"}\n' + "{}\n" * 12)
    done = shell.invoke(app, ["score", str(source), "--json"])
    assert done.exit_code == 3
    assert json.loads(done.stdout)["num_failed"] == 12
    told = done.stderr.splitlines()
    assert told[0].startswith("row 1 (line 2): InvalidRequest: a row has exactly one of ")
    assert len(told) == 11
    assert "in the output only" in told[10]
    strict = shell.invoke(app, ["score", str(source), "--restart", "--strict", "--unordered"])
    assert strict.exit_code == 1
    assert "row 1 (line 2): a row has" in strict.stderr


def test_rows_come_through_a_pipe_and_go_into_one(shell: CliRunner, client: Client) -> None:
    rows = '{"text": "Hi there"}\n\n{"prompt": []}\n'
    done = shell.invoke(app, ["score", "-", "--json"], input=rows)
    assert done.exit_code == 3
    first, second = map(json.loads, done.stdout.splitlines())
    assert first["logprob"] == client.score_rolling("Hi there").logprob
    assert second["index"] == 2
    assert json.loads(done.stderr.splitlines()[-1])["num_rows"] == 2


# -------------------------------------------------------------------------------------- bench


def test_the_benchmarks_are_listed() -> None:
    facts = answer(CliRunner(), "bench")
    assert {"memory", "resilience", "evaluation"} <= set(facts["benchmarks"])
    assert "What evictions, migrations" in CliRunner().invoke(app, ["bench"]).stdout


def test_where_no_benchmark_is_installed_it_is_said_where_they_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cli_tools, "_BENCHES", tmp_path)
    done = CliRunner().invoke(app, ["bench", "score"])
    assert done.exit_code == 1
    assert "clone it, run `make install`" in done.stderr


def test_what_follows_a_benchmarks_name_goes_to_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "bench"
    folder.mkdir()
    (folder / "__init__.py").touch()
    code = "import sys, json; print('noise'); print(json.dumps({'result': sys.argv[1:]}))"
    (folder / "echo.py").write_text(f'"""Echoes."""\nif __name__ == "__main__":\n    {code}\n')
    (folder / "fails.py").write_text(
        '"""Fails."""\nif __name__ == "__main__":\n    raise SystemExit(9)'
    )
    (folder / "silent.py").write_text('"""Says nothing."""\nif __name__ == "__main__":\n    pass\n')
    monkeypatch.setattr(cli_tools, "_BENCHES", folder)
    said = answer(CliRunner(), "bench", "echo", "--num-rows", "3", "--help")
    assert said == {"result": ["--num-rows", "3", "--help"]}
    done = CliRunner().invoke(app, ["bench", "silent", "--json"])
    assert (done.exit_code, done.stderr.split(":")[0]) == (1, "InvalidRequest")
    assert CliRunner().invoke(app, ["bench", "fails"]).exit_code == 1


def engine_file(folder: Path, model: str, **settings: Any) -> str:
    """Write the settings of an engine of one worker."""
    file = folder / "engine.yaml"
    settings = ENGINE | {"model": model, "num_workers": 1} | settings
    file.write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
    return str(file)


@pytest.fixture
def gone(shell: CliRunner) -> Iterator[None]:
    """Engines that stay are ended after a test that failed as well: others need their CPUs."""
    yield
    for name in ("waits", "stays"):
        shell.invoke(app, ["stop", "--name", name])


@pytest.mark.slow
@pytest.mark.usefixtures("gone")
def test_a_start_that_need_not_wait_does_not_wait_for_room(
    shell: CliRunner, tiny_model: str, tmp_path: Path
) -> None:
    """`ray up` starts an engine before there is room for it. Here another one's workers have it."""
    file = engine_file(tmp_path, tiny_model, cpus_per_worker=NUM_CPUS)
    where = ("--name", "waits", "--config", file)
    assert answer(shell, "start", "--no-wait", *where)["started"]
    assert answer(shell, "stop", *where) == {"ended": "waits"}
    assert actors_of("waits") == []


@pytest.mark.slow
@pytest.mark.usefixtures("gone")
def test_an_engine_is_started_to_stay_and_stopped(
    shell: CliRunner, tiny_model: str, tmp_path: Path
) -> None:
    where = ("--name", "stays", "--config", engine_file(tmp_path, tiny_model))
    facts = {"engine": "stays", "namespace": ENGINE["namespace"]}
    assert answer(shell, "start", "--no-wait", *where) == facts | {"started": True}
    assert answer(shell, "start", *where) == facts | {"started": False}
    assert answer(shell, "status", *where)["scheduler"]["num_workers"] == 1
    done = shell.invoke(app, ["start", *where, "--num-workers", "2"])
    assert (done.exit_code, done.stderr.partition(":")[0]) == (1, "InvalidConfig")
    assert answer(shell, "stop", *where) == {"ended": "stays"}
    assert actors_of("stays") == []
