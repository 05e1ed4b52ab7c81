"""A batch that was interrupted anywhere goes on, and its output is that of one that was not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster import batch_input
from cluster import intake as intake_module
from cluster import scorer as scorer_module
from cluster.batches import Batch, BatchOptions, BatchProgress, BatchWatcher
from cluster.scoring import ScoringParams
from scheduler.errors import (
    EngineUnavailable,
    HaversackError,
    InvalidRequest,
    OutputConflict,
    RequestTooLarge,
)
from tests.scoring_engine import Engine, ScoringClient, scoring_client
from tests.tiny_models import BOS, byte_tokenizer

WINDOW = 8
TOO_LARGE = 77
ROWS: list[Any] = [
    {"prompt": "abc"},
    {"prompt": [3, 1, 4, 1], "id": "pi"},
    {"context": "ab ", "continuation": "c", "label": {"not": ["looked at"]}},
    {"context": [3], "continuation": [0, 0], "id": 7},
    {"text": "a text"},
    {"prompt": "a"},
    {"text": list(range(40))},
    "",
    {"prompt": []},
    {"promt": "abc"},
    {"prompt": [3, TOO_LARGE]},
    b'{"prompt": "half',
    b'{"prompt": "\\ud800"}',
    b"\xff\xfe",
    [1, 2],
    {"context": "ab"},
    {"prompt": "a", "text": "b"},
    {"prompt": True},
    {"prompt": [3, 2**31]},
    {"prompt": "äöü\u2028\x85"},
]
NUM_BAD = 11
FULL = BatchOptions(params=ScoringParams(logprobs=2))


def jsonl(rows: list[Any]) -> bytes:
    lines = [
        row if isinstance(row, bytes) else b"" if row == "" else json.dumps(row).encode()
        for row in rows
    ]
    return b"\n".join(lines) + b"\n"


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(intake_module, "load_tokenizer", lambda name: byte_tokenizer())
    monkeypatch.setattr(scorer_module, "_MIN_WINDOW", WINDOW)
    made = Engine()
    made.refused_tokens[TOO_LARGE] = RequestTooLarge("too large", limit=7)
    return made


@pytest.fixture
def client(engine: Engine) -> Iterator[ScoringClient]:
    with scoring_client(engine) as made:
        yield made


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(jsonl(ROWS))
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "scores.jsonl"


def run(
    client: ScoringClient, source: Path, out: Path, options: BatchOptions = FULL, **changes: Any
) -> BatchProgress:
    return Batch(source, out, replace(options, **changes)).run(client)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


class Killed(BaseException):
    """The process ends here."""


class Watch(BatchWatcher):
    """Calls a function at the beginning and after each row."""

    def __init__(self, look: Callable[[BatchProgress], None]) -> None:
        self.began = self.advanced = look  # type: ignore[method-assign]


def run_until(
    client: ScoringClient, source: Path, out: Path, num_rows: int, **changes: Any
) -> None:
    def watch(progress: BatchProgress) -> None:
        if progress.num_done >= num_rows:
            raise Killed

    with pytest.raises(Killed):
        Batch(source, out, replace(FULL, **changes)).run(client, Watch(watch))


# --------------------------------------------------------------------------------- what is written


def test_each_row_has_a_line_with_what_the_client_says_of_it(
    client: ScoringClient, source: Path, out: Path
) -> None:
    progress = run(client, source, out)
    found = {record["index"]: record for record in records(out)}
    assert list(found) == [i for i, row in enumerate(ROWS) if row != ""]
    assert (progress.num_done, progress.num_rows) == (len(found), len(found))
    params = ScoringParams(logprobs=2)
    ids = client.tokenizer("abc").input_ids
    expected = {
        0: client.score(ids[:1], ids[1:], params),
        1: client.score([3], [1, 4, 1], params),
        2: client.score("ab ", "c", params),
        3: client.score([3], [0, 0], params),
        4: client.score_rolling("a text", params),
        6: client.score_rolling(list(range(40)), params),
    }
    for index, score in expected.items():
        record = found[index]
        first = 1 if index in (0, 1) else 0
        assert record["logprob"] == score.logprob
        assert record["num_tokens"] == score.num_tokens
        assert record["is_greedy"] == score.is_greedy
        assert record["token_ids"][first:] == score.token_ids
        assert record["tokens"][first:] == score.tokens
        arrays = score.token_logprobs.arrays
        assert record["token_logprobs"] == [None] * first + arrays.logprobs[:, 0].tolist()
        assert record["token_ranks"] == [None] * first + arrays.ranks[:, 0].tolist()
        told = [[a["token_id"] for a in entry or ()] for entry in record["top_logprobs"]]
        assert told == [[]] * first + arrays.token_ids[:, 1:].tolist()
    assert found[1]["token_ids"] == [3, 1, 4, 1]
    assert (found[1]["id"], found[3]["id"]) == ("pi", 7)
    assert "id" not in found[0]


def test_a_prompt_of_one_token_has_nothing_to_score_and_is_no_error(
    client: ScoringClient, source: Path, out: Path, engine: Engine
) -> None:
    run(client, source, out)
    (record,) = (r for r in records(out) if r["index"] == 5)
    assert (record["logprob"], record["num_tokens"]) == (0.0, 0)
    assert record["token_ids"] == client.tokenizer("a").input_ids
    assert (record["token_logprobs"], record["tokens"]) == ([None], ["a"])
    assert all(len(submission.prompt_token_ids) > 1 for submission in engine.seen)


def test_sums_only_are_written_where_nobody_asked_for_tokens(
    client: ScoringClient, source: Path, out: Path
) -> None:
    run(client, source, out, BatchOptions())
    keys = {key for record in records(out) for key in record}
    assert keys == {"index", "id", "logprob", "num_tokens", "is_greedy", "error"}
    run(client, source, out, BatchOptions(echo_tokens=True, restart=True))
    assert "top_logprobs" not in records(out)[0]
    assert "token_logprobs" in records(out)[0]


def test_a_bad_row_is_told_in_its_place_and_harms_no_other(
    client: ScoringClient, source: Path, out: Path
) -> None:
    progress = run(client, source, out)
    bad = {r["index"]: r["error"] for r in records(out) if "error" in r}
    assert len(bad) == progress.finished.num_failed == NUM_BAD
    assert bad[10] == {"type": "RequestTooLarge", "message": "too large"}
    assert "empty" in bad[8]["message"]
    assert '"prompt"' in bad[9]["message"]
    assert "continuation" in bad[15]["message"]
    assert str(2**31) in bad[18]["message"]
    assert {error["type"] for i, error in bad.items() if i != 10} == {"InvalidRequest"}
    good = [r for r in records(out) if "error" not in r]
    assert progress.finished.num_tokens == sum(r["num_tokens"] for r in good)
    assert progress.finished.logprob == sum(r["logprob"] for r in good)


def test_or_it_is_raised_before_it_is_written(
    client: ScoringClient, source: Path, out: Path, engine: Engine
) -> None:
    with pytest.raises(InvalidRequest, match=r"row 8 \(line 9\): ") as caught:
        run(client, source, out, strict=True)
    assert caught.value.details["row_index"] == 8
    assert [r["index"] for r in records(out)] == list(range(7))
    assert engine.live() == []
    run(client, source, out)
    assert len(records(out)) == len(ROWS) - 1
    with pytest.raises(InvalidRequest, match="earlier run"):
        run(client, source, out, strict=True)


def test_a_line_of_text_is_a_prompt(client: ScoringClient, tmp_path: Path, out: Path) -> None:
    source = tmp_path / "prompts.txt"
    source.write_bytes(b"\xef\xbb\xbfabc\r\n\n  \n ab \xff\n c d ")
    run(client, source, out)
    found = records(out)
    assert [r["index"] for r in found] == [0, 3, 4]
    assert "".join(found[0]["tokens"]) == "abc"
    assert "UTF-8" in found[1]["error"]["message"]
    assert "".join(found[2]["tokens"]) == " c d "


def test_a_line_that_is_too_long_is_a_bad_row(
    client: ScoringClient, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_input, "_MAX_LINE_BYTES", 20)
    source = tmp_path / "prompts.txt"
    for length in range(15, 65):
        source.write_bytes(b"ab\n" + b"a" * length + b"\nabc")
        run(client, source, out, restart=True)
        found = records(out)
        assert [r["index"] for r in found] == [0, 1, 2]
        assert ("error" in found[1]) == (length >= 20), length
        assert "".join(found[2]["tokens"]) == "abc"


def test_results_as_they_come(
    client: ScoringClient, source: Path, out: Path, engine: Engine
) -> None:
    engine.held_tokens = {client.tokenizer("c").input_ids[0]}

    def watch(progress: BatchProgress) -> None:
        if progress.num_done == len(ROWS) - 3:
            assert not {0, 2} & {r["index"] for r in records(out)}
            engine.release()

    Batch(source, out, replace(FULL, ordered=False)).run(client, Watch(watch))
    assert {r["index"] for r in records(out)} == {i for i, r in enumerate(ROWS) if r != ""}
    shuffled = out.read_bytes().splitlines()
    run(client, source, out, restart=True)
    assert sorted(shuffled) == sorted(out.read_bytes().splitlines())


@pytest.mark.parametrize("ordered", [True, False])
def test_a_text_of_many_windows_is_one_row(
    client: ScoringClient, tmp_path: Path, out: Path, ordered: bool
) -> None:
    limit = client.info.limits.max_model_len
    text = [i % 7 for i in range(2 * limit + 3)]
    bad = [*text[:-1], TOO_LARGE]
    source = tmp_path / "rows.jsonl"
    source.write_bytes(jsonl([{"prompt": "ab"}, {"text": text}, {"text": bad}, {"prompt": "ab"}]))
    run(client, source, out, ordered=ordered)
    found = sorted(records(out), key=lambda record: record["index"])
    expected = client.score_rolling(text, FULL.params)
    assert found[1]["token_ids"] == text
    assert found[1]["logprob"] == expected.logprob
    assert found[1]["tokens"] == expected.tokens
    assert found[2]["error"]["type"] == "RequestTooLarge"
    assert [record["index"] for record in found] == [0, 1, 2, 3]


# ------------------------------------------------------------------------------------- going on


def test_an_output_that_was_cut_anywhere_is_completed_to_the_same_bytes(
    client: ScoringClient, tmp_path: Path, out: Path, engine: Engine
) -> None:
    """Killed, or out of power, while it wrote: the file may end after any byte."""
    source = tmp_path / "rows.jsonl"
    source.write_bytes(jsonl([{"prompt": "ab"}, "", {"prompt": []}, {"text": "b", "id": "\n"}]))
    options = BatchOptions(echo_tokens=True)
    run(client, source, out, options)
    whole = out.read_bytes()
    assert len(whole) > 300
    for length in range(len(whole) + 1):
        out.write_bytes(whole[:length])
        num_seen = len(engine.seen)
        progress = run(client, source, out, options)
        assert out.read_bytes() == whole, length
        num_kept = whole[:length].count(b"\n")
        assert progress.num_resumed == num_kept
        # The second row is a bad one: no request is made for it.
        assert len(engine.seen) - num_seen == (num_kept < 1) + (num_kept < 3)


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize(
    "junk", [bytes(700), b"\n\n", b'{"index": 0}\n', b'{"index": 99}\nx', b"[]\n"]
)
def test_whatever_is_behind_the_good_lines_is_cut_off(
    client: ScoringClient, source: Path, out: Path, junk: bytes, ordered: bool
) -> None:
    """A power cut may leave zeros where a line was to be, and good lines behind them."""
    run(client, source, out, ordered=ordered)
    whole = out.read_bytes()
    lines = whole.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:4]) + junk + b"".join(lines[4:]))
    assert run(client, source, out, ordered=ordered).num_resumed == 4
    found = out.read_bytes().splitlines(keepends=True)
    assert found[:4] == lines[:4]
    assert found == lines if ordered else sorted(found) == sorted(lines)


def test_a_row_is_in_an_output_once(client: ScoringClient, source: Path, out: Path) -> None:
    """Where any row may come next, one that is there already is none of them."""
    run(client, source, out, ordered=False)
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join([*lines[:4], lines[1], *lines[4:]]))
    assert run(client, source, out, ordered=False).num_resumed == 4
    assert sorted(out.read_bytes().splitlines(keepends=True)) == sorted(lines)


@pytest.mark.parametrize("ordered", [True, False])
def test_a_run_that_ends_after_any_row_is_gone_on_with(
    client: ScoringClient, source: Path, out: Path, engine: Engine, ordered: bool
) -> None:
    run(client, source, out, ordered=ordered)
    whole = out.read_bytes()
    num_requests = len(engine.seen)
    for num_rows in range(len(ROWS) - 1):
        run_until(client, source, out, num_rows, ordered=ordered, restart=True)
        assert engine.live() == []
        assert len(records(out)) == num_rows
        kept = out.read_bytes()
        num_seen = len(engine.seen)
        progress = run(client, source, out, ordered=ordered)
        assert progress.num_resumed == num_rows
        assert progress.finished.num_failed == NUM_BAD
        assert len(engine.seen) - num_seen <= num_requests
        found = out.read_bytes()
        assert found.startswith(kept)
        assert sorted(found.splitlines()) == sorted(whole.splitlines())
        assert not ordered or found == whole
    num_seen = len(engine.seen)
    assert run(client, source, out, ordered=ordered).num_resumed == len(ROWS) - 1
    assert len(engine.seen) == num_seen, "what is complete is left alone"


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("max_live", [1, 2], ids=["no room", "no result"])
def test_a_run_can_be_ended_while_it_waits(
    client: ScoringClient, tmp_path: Path, out: Path, engine: Engine, max_live: int, ordered: bool
) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_bytes(jsonl([{"prompt": [3, 1]}, {"prompt": [3, 4]}, {"prompt": [5, 4]}]))
    engine.held_tokens, engine.max_live = {4}, max_live

    class Ends(BatchWatcher):
        def goes_on(self) -> None:
            # Each of them is so from when everything is submitted that can be.
            if len(engine.live()) == 2 or (max_live == 1 and engine.num_overloaded > 3):
                raise Killed

    with pytest.raises(Killed):
        Batch(source, out, replace(FULL, ordered=ordered)).run(client, Ends())
    assert engine.live() == []
    engine.release()
    engine.max_live = 10**9
    assert run(client, source, out, ordered=ordered).num_done == 3


def test_the_engines_end_leaves_an_output_that_is_gone_on_with(
    client: ScoringClient, source: Path, out: Path, engine: Engine
) -> None:
    engine.held_tokens = {client.tokenizer("t").input_ids[0]}  # the text's last one

    def watch(progress: BatchProgress) -> None:
        if progress.num_done == 4:
            engine.closed = EngineUnavailable("shut down")

    with pytest.raises(EngineUnavailable, match="shut down"):
        Batch(source, out, FULL).run(client, Watch(watch))
    assert [r["index"] for r in records(out)] == [0, 1, 2, 3]
    again = Engine()
    again.refused_tokens = engine.refused_tokens
    other = ScoringClient(again)
    assert run(other, source, out).num_resumed == 4
    other.close()
    assert len(records(out)) == len(ROWS) - 1


@pytest.mark.parametrize("name", ["scores.csv", "scores.txt", "scores.jsonl.gz"])
def test_an_output_that_would_not_be_what_its_name_says_is_refused(
    source: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(InvalidRequest, match=r"\.jsonl.*\.parquet"):
        Batch(source, tmp_path / name, FULL)
    Batch(source, tmp_path / "scores", FULL)


# ------------------------------------------------------------------------------ what must not mix

OTHERS: dict[str, BatchOptions] = {
    "logprobs is 1 and was 2": replace(FULL, params=ScoringParams(logprobs=1)),
    "truncate is True and was False": replace(
        FULL, params=ScoringParams(logprobs=2, truncate=True)
    ),
    "ordered is False and was True": replace(FULL, ordered=False),
    "input_format is 'text' and was 'jsonl'": replace(FULL, input_format="text"),
}


@pytest.mark.parametrize("story", OTHERS)
def test_an_output_of_other_options_is_left_alone(
    client: ScoringClient, source: Path, out: Path, story: str
) -> None:
    run_until(client, source, out, 3)
    kept = out.read_bytes()
    with pytest.raises(OutputConflict, match=story) as caught:
        run(client, source, out, OTHERS[story])
    assert "--restart" in str(caught.value)
    assert out.read_bytes() == kept
    run(client, source, out, replace(OTHERS[story], restart=True))
    assert len(records(out)) == len(ROWS) - 1


def test_options_that_change_no_result_may_change(
    client: ScoringClient, source: Path, out: Path
) -> None:
    run_until(client, source, out, 3)
    assert run(client, source, out, max_in_flight=2, rows_per_part=5).num_resumed == 3


def test_an_output_of_another_input_or_model_is_left_alone(
    client: ScoringClient, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_until(client, source, out, 3)
    content = source.read_bytes()
    source.write_bytes(content.replace(b"abc", b"abd"))
    with pytest.raises(OutputConflict, match="input_digest is "):
        run(client, source, out)
    source.write_bytes(content)
    monkeypatch.setattr(client._connection.info.__class__, "model", "another", raising=False)
    with pytest.raises(OutputConflict, match="model is 'another' and was 'fake'"):
        run(client, source, out)


def test_a_file_that_nobody_knows_is_left_alone(
    client: ScoringClient, source: Path, out: Path
) -> None:
    sidecar = out.with_name("scores.jsonl.progress")
    out.write_bytes(b"my notes\n")
    for content in (None, b"{}", b"\x00"):
        if content is not None:
            sidecar.write_bytes(content)
        with pytest.raises(OutputConflict, match="not empty"):
            run(client, source, out)
        assert out.read_bytes() == b"my notes\n"
    out.write_bytes(b"")
    run(client, source, out)
    assert len(records(out)) == len(ROWS) - 1


def test_only_one_run_at_a_time_writes_an_output(
    client: ScoringClient, source: Path, out: Path
) -> None:
    def watch(progress: BatchProgress) -> None:
        with pytest.raises(OutputConflict, match="another process"):
            run(client, source, out, restart=True)

    Batch(source, out, FULL).run(client, Watch(watch))
    assert len(records(out)) == len(ROWS) - 1


def test_what_is_wrong_is_said_before_an_engine_is_needed(tmp_path: Path, source: Path) -> None:
    unnamed = tmp_path / "rows"
    unnamed.write_bytes(b"")
    cases: list[tuple[Any, Any, type[HaversackError], str]] = [
        (tmp_path / "none.jsonl", tmp_path / "out", InvalidRequest, "no file"),
        (tmp_path, "-", InvalidRequest, "format"),
        (unnamed, "-", InvalidRequest, "input format"),
        (source, tmp_path / "none" / "out.jsonl", OutputConflict, "no folder"),
        (source, source, OutputConflict, "is the input"),
    ]
    for given, output, kind, story in cases:
        with pytest.raises(kind, match=story):
            Batch(given, output)
    for wrong in ({"max_in_flight": 0}, {"rows_per_part": 0}, {"input_format": "csv"}):
        with pytest.raises(InvalidRequest) as refusal:
            BatchOptions(**wrong)  # type: ignore[arg-type]
        assert refusal.value.details["param"] in wrong


def test_a_full_disk_is_said_and_the_same_call_goes_on(
    client: ScoringClient, source: Path, out: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cluster.batch_output import JsonlOutput

    written, write = [], JsonlOutput.write

    def fail(self: JsonlOutput, record: dict[str, Any]) -> None:
        written.append(record)
        if len(written) == 5:
            self._file.write(b'{"index": 4, "lo')
            self._file.flush()
            raise OSError(28, "No space left on device")
        write(self, record)

    with monkeypatch.context() as patch:
        patch.setattr(JsonlOutput, "write", fail)
        with pytest.raises(OutputConflict, match="No space left"):
            run(client, source, out)
    assert engine.live() == []
    assert run(client, source, out).num_resumed == 4
    assert len(records(out)) == len(ROWS) - 1


def test_no_more_rows_are_under_way_than_was_asked_for(
    client: ScoringClient, source: Path, out: Path, engine: Engine
) -> None:
    most = 0

    def watch(progress: BatchProgress) -> None:
        nonlocal most
        most = max(most, len(engine.seen) - progress.num_done)

    source.write_bytes(jsonl([{"prompt": "ab"}] * 50))
    Batch(source, out, replace(FULL, max_in_flight=3)).run(client, Watch(watch))
    assert 1 <= most <= 3
    assert BOS not in records(out)[0]["token_ids"]
