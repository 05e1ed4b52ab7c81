"""Ray Data's actors score their batches on the engine that is running."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cluster import Client, EngineUnavailable, InvalidRequest
from cluster.ray_data import Scorer
from tests.engine.conftest import ENGINE, in_time

PLACE = {"name": "shared", "namespace": ENGINE["namespace"]}


def column(values: list[Any]) -> np.ndarray[Any, Any]:
    made = np.empty(len(values), object)
    for index, value in enumerate(values):
        made[index] = value
    return made


@pytest.mark.slow
def test_a_dataset_gets_columns_of_scores(client: Client) -> None:
    pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    from ray import data

    rows = [{"question": f"What is {i}?", "answer": f" {i * i}", "key": i} for i in range(40)]
    rows[7]["answer"] = ""
    scored = data.from_items(rows).map_batches(
        Scorer,
        fn_constructor_kwargs={
            "context": "question",
            "continuation": "answer",
            "echo_tokens": True,
            **PLACE,
        },
        batch_size=16,
        concurrency=1,
        num_cpus=0.1,
    )
    found = sorted(in_time(scored.take_all), key=lambda row: row["key"])
    assert [row["key"] for row in found] == list(range(40))
    for row in found:
        if row["key"] == 7:
            assert row["error"].startswith("InvalidRequest: ")
            assert np.isnan(row["logprob"])
            assert row["num_tokens"] == 0
            continue
        expected = client.score(row["question"], row["answer"])
        assert row["error"] is None
        assert (row["logprob"], row["num_tokens"]) == (expected.logprob, expected.num_tokens)
        assert list(row["token_ids"]) == expected.token_ids
        arrays = expected.token_logprobs.arrays
        assert list(row["token_logprobs"]) == arrays.logprobs[:, 0].tolist()


def test_a_batch_of_token_ids_and_of_texts(client: Client) -> None:
    scorer = Scorer(prompt="ids", prefix="score_", **PLACE)
    ids = [[3, 1, 4], [3], [1, 5, 9, 2], [3, 1, 4]]
    batch = scorer({"ids": column(ids), "logprob": np.zeros(4)})
    assert batch["logprob"].tolist() == [0.0] * 4
    assert batch["score_num_tokens"].tolist() == [2, 0, 3, 2]
    assert (
        batch["score_logprob"][0] == client.score([3], [1, 4]).logprob == batch["score_logprob"][3]
    )
    square = scorer({"ids": np.array([[3, 1, 4]])})
    assert square["score_logprob"][0] == batch["score_logprob"][0]
    scorer.close()
    texts = Scorer(text="text", **PLACE)
    answer = texts({"text": column(["a text", None])})
    assert answer["logprob"][0] == client.score_rolling("a text").logprob
    assert answer["error"][1].startswith("InvalidRequest: ")
    texts.close()


def test_what_is_wrong_is_said(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="columns: "):
        Scorer(**PLACE)
    with pytest.raises(InvalidRequest, match="continuation"):
        Scorer(context="question", **PLACE)
    with pytest.raises(InvalidRequest, match="on_error"):
        Scorer(text="text", on_error="ignore", **PLACE)
    with pytest.raises(EngineUnavailable):
        Scorer(text="text", name="nobody", namespace=ENGINE["namespace"])
    scorer = Scorer(text="text", on_error="raise", **PLACE)
    with pytest.raises(InvalidRequest, match="no column 'text'; there are txt"):
        scorer({"txt": column(["a"])})
    with pytest.raises(InvalidRequest, match="'logprob' already: give a prefix"):
        scorer({"text": column(["a"]), "logprob": np.zeros(1)})
    with pytest.raises(InvalidRequest, match="row 1 of the batch: "):
        scorer({"text": column(["a", "", "b"])})
    scorer.close()
