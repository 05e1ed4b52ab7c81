"""Log-likelihoods by the default model, as evaluation harnesses compute them with transformers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster import Client
from tests.engine.conftest import ENGINE
from workers.model_store import DEFAULT_MODEL, resolve_model

PAIRS = [
    *(("Question: What is the capital of France?\nAnswer:", f" {c}") for c in ("Paris", "Berlin")),
    ("Question: What is the capital of France?\nAnswer: ", "Paris"),
    *(("The cat sat on the", f" {end}") for end in ("mat.", "theory of relativity.")),
    ("", "Once upon a time, there was a little girl"),
    ("1, 2, 3, 4, 5, 6,", " 7, 8, 9, 10"),
    ("def add(a, b):\n", "    return a + b\n"),
    ("naïve ", "café Ω 漢字"),
]
TOLERANCE = 1e-4
"""Of a row in single precision."""


@pytest.fixture(scope="module")
def client(local_cluster: None) -> Iterator[Client]:
    settings = ENGINE | {"num_workers": 1, "block_size": 16}
    with Client(model=DEFAULT_MODEL, name="scoring", **settings) as made:
        yield made


class Judge:
    """Transformers' own model, used as evaluation harnesses do."""

    def __init__(self) -> None:
        folder = resolve_model(DEFAULT_MODEL)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        if not context:
            return [self.tokenizer.bos_token_id], self.tokenizer.encode(continuation)
        num_spaces = len(context) - len(context.rstrip())
        if num_spaces:
            continuation = context[-num_spaces:] + continuation
            context = context[:-num_spaces]
        before = self.tokenizer.encode(context)
        return before, self.tokenizer.encode(context + continuation)[len(before) :]

    def logprobs(self, before: list[int], after: list[int]) -> np.ndarray:
        """Logprobs [len(after), vocab] at the places of the tokens `after`."""
        with torch.no_grad():
            logits = self._model(torch.tensor([(before + after)[:-1]])).logits[0, -len(after) :]
        return torch.log_softmax(logits, dim=-1).numpy()

    def own(self, before: list[int], after: list[int]) -> np.ndarray:
        """Logprobs [len(after)] of the tokens `after`."""
        return self.logprobs(before, after)[np.arange(len(after)), after]


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge()


@pytest.mark.slow
def test_scores_are_those_of_evaluation_harnesses(client: Client, judge: Judge) -> None:
    scores = list(client.score_many(PAIRS))
    for pair, score in zip(PAIRS, scores, strict=True):
        context, tokens = judge.encode(*pair)
        logprobs, own = judge.logprobs(context, tokens), judge.own(context, tokens)
        assert score.token_ids == tokens, pair
        assert np.abs(score.token_logprobs.arrays.logprobs[:, 0] - own).max() < TOLERANCE
        assert abs(score.logprob - own.sum(dtype=np.float64)) < len(tokens) * TOLERANCE
        runner_up = np.sort(logprobs, axis=1)[:, -2:]
        assert (runner_up[:, 1] - runner_up[:, 0]).min() > 2 * TOLERANCE, "too close to compare"
        assert score.is_greedy == (logprobs.argmax(axis=1) == tokens).all()
    assert {score.is_greedy for score in scores} == {True, False}
    paris, berlin, moved = scores[:3]
    assert paris.logprob > berlin.logprob
    assert moved.token_logprobs == paris.token_logprobs


@pytest.mark.slow
def test_a_document_is_scored_in_windows(client: Client, judge: Judge) -> None:
    document = judge.tokenizer.encode(" ".join(context + rest for context, rest in PAIRS))[:100]
    bos = judge.tokenizer.bos_token_id
    windows = [
        ([bos], document[:39]),
        (document[38:39], document[39:78]),
        (document[60:78], document[78:]),
    ]
    expected = np.concatenate([judge.own(*window) for window in windows])
    score = client.score_rolling(document, max_window_tokens=40)
    assert score.token_ids == document
    assert np.abs(score.token_logprobs.arrays.logprobs[:, 0] - expected).max() < TOLERANCE
    whole = client.score_rolling(judge.tokenizer.decode(document))
    assert whole.token_ids == document
    own = judge.own([bos], document)
    assert np.abs(whole.token_logprobs.arrays.logprobs[:, 0] - own).max() < TOLERANCE
