"""Completions through OpenAI's own client: what comes is what `Client` gives, number by number."""

from __future__ import annotations

import openai
import pytest

from cluster import Client, SamplingParams
from tests.http.conftest import ids

PROMPT = ids("Hi there")
A, B = ids("AB")


def test_a_greedy_completion_is_the_engines(api: openai.OpenAI, engine: Client) -> None:
    found = api.completions.create(model="tiny", prompt="Hi there", max_tokens=6, temperature=0)
    params = SamplingParams(max_tokens=6, temperature=0.0)
    wanted = engine.submit("Hi there", params).result().outputs[0]
    assert found.object == "text_completion"
    assert found.model == "tiny"
    assert found.choices[0].text == wanted.text
    assert found.choices[0].finish_reason == wanted.finish_reason
    assert found.choices[0].logprobs is None
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (8, 6)


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["Hi there", PROMPT])
def test_echo_tells_the_logprob_of_every_token(
    api: openai.OpenAI, engine: Client, prompt: str | list[int], max_tokens: int
) -> None:
    """Evaluation harnesses read log-likelihoods off an echo: the first is null, the rest exact."""
    found = api.completions.create(
        model="tiny", prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens, temperature=0
    )
    params = SamplingParams(prompt_logprobs=1, logprobs=1, max_tokens=max_tokens, temperature=0.0)
    wanted = engine.submit(prompt, params).result()
    (choice,) = found.choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert wanted.prompt_logprobs is not None
    own = wanted.prompt_logprobs.arrays.logprobs[:, 0].tolist()
    if max_tokens:
        assert wanted.outputs[0].logprobs is not None
        own += wanted.outputs[0].logprobs.arrays.logprobs[:, 0].tolist()
    assert logprobs.token_logprobs == [None, *own]
    assert logprobs.top_logprobs[0] is None
    assert len(logprobs.tokens) == len(logprobs.top_logprobs) == 8 + max_tokens
    for token, value, top in zip(logprobs.tokens[1:], own, logprobs.top_logprobs[1:], strict=True):
        assert top[token] == value
        assert len(top) in (1, 2)
        assert max(top.values()) >= value
    assert choice.text == "Hi there" + wanted.outputs[0].text
    assert logprobs.text_offset == list(range(8 + max_tokens))
    assert choice.finish_reason == "length"


def test_a_prompt_of_one_token_has_one_null(api: openai.OpenAI) -> None:
    found = api.completions.create(
        model="tiny", prompt=ids("H"), echo=True, logprobs=1, max_tokens=0
    )
    logprobs = found.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs == [None]
    assert found.choices[0].text == "H"


def test_scoring_alone_makes_no_token(api: openai.OpenAI, engine: Client) -> None:
    before = engine.stats().scheduler.num_generated_tokens
    found = api.completions.create(model="tiny", prompt="Hi there", max_tokens=0)
    assert (found.choices[0].text, found.choices[0].finish_reason) == ("", "length")
    assert engine.stats().scheduler.num_generated_tokens == before


@pytest.mark.parametrize("prompts", [["Hi", "there"], [ids("Hi"), PROMPT[3:]]])
def test_several_prompts_have_their_choices_in_order(
    api: openai.OpenAI, engine: Client, prompts: list[str] | list[list[int]]
) -> None:
    found = api.completions.create(
        model="tiny", prompt=prompts, n=2, seed=7, max_tokens=4, echo=True, logprobs=0
    )
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    params = SamplingParams(n=2, seed=7, max_tokens=4)
    outputs = [handle.result() for handle in engine.submit_many(prompts, params)]
    texts = ["Hi" + c.text for c in outputs[0].outputs]
    texts += ["there"[-len(prompts[1]) :] + c.text for c in outputs[1].outputs]
    assert [choice.text for choice in found.choices] == texts
    for choice in found.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        assert None not in choice.logprobs.token_logprobs[1:]
    assert found.usage is not None
    assert found.usage.completion_tokens == 16


def test_a_prompts_rows_come_with_ranks(api: openai.OpenAI, engine: Client) -> None:
    extra = {"prompt_logprobs": 2, "prompt_logprobs_start": 3, "return_token_ids": True}
    found = api.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=2, temperature=0, extra_body=extra
    )
    params = SamplingParams(
        prompt_logprobs=2, prompt_logprobs_start=3, max_tokens=2, temperature=0.0
    )
    wanted = engine.submit(PROMPT, params).result()
    assert wanted.prompt_logprobs is not None
    told = found.choices[0].model_extra
    assert told is not None
    assert told["prompt_token_ids"] == PROMPT
    assert told["token_ids"] == wanted.outputs[0].token_ids
    assert told["prompt_logprobs"][:3] == [None, None, None]
    for entry, row in zip(told["prompt_logprobs"][3:], wanted.prompt_logprobs[3:], strict=True):
        assert row is not None
        assert {int(token): (e["logprob"], e["rank"]) for token, e in entry.items()} == {
            token: (e.logprob, e.rank) for token, e in row.items()
        }


def test_rows_of_named_tokens(api: openai.OpenAI) -> None:
    extra = {"prompt_logprob_token_ids": [1, 2, 3]}
    found = api.completions.create(model="tiny", prompt=PROMPT, max_tokens=0, extra_body=extra)
    assert found.choices[0].model_extra is not None
    rows = found.choices[0].model_extra["prompt_logprobs"]
    assert [list(row) for row in rows[1:]] == [[str(t), "1", "2", "3"] for t in PROMPT[1:]]


def test_parameters_reach_the_engine(api: openai.OpenAI) -> None:
    """A bias that forces a token, ids that are allowed, a stop string, and the fewest tokens."""
    forced = api.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=3,
        logit_bias={str(A): 100},
        temperature=0,
        extra_body={"allowed_token_ids": [A, B], "ignore_eos": True},
    )
    assert forced.choices[0].text == "AAA"
    stopped = api.completions.create(
        model="tiny",
        prompt="a",
        max_tokens=9,
        stop=["AA"],
        temperature=0,
        extra_body={"allowed_token_ids": [A], "min_tokens": 4},
    )
    assert stopped.choices[0].finish_reason == "stop"
    assert stopped.choices[0].text == "AAA"
    assert stopped.choices[0].model_extra == {"stop_reason": "AA"}


def test_the_same_seed_makes_the_same_tokens(api: openai.OpenAI) -> None:
    texts = {
        api.completions.create(model="tiny", prompt="x", max_tokens=12, seed=seed).choices[0].text
        for seed in (3, 3, 4)
    }
    assert len(texts) == 2


def test_the_likeliest_tokens_of_the_whole_vocabulary(api: openai.OpenAI) -> None:
    """0 gives the token's own; what the endpoint's limit forbids says how much it allows."""
    for k, count in ((0, 1), (20, 20), (100, 100)):
        found = api.completions.create(
            model="tiny",
            prompt="x",
            max_tokens=1,
            temperature=0,
            logprobs=k,
            extra_body={"allowed_token_ids": [A]},
        )
        logprobs = found.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.top_logprobs is not None
        assert len(logprobs.top_logprobs[0]) in (count, count + 1)
    with pytest.raises(openai.BadRequestError, match="0 to 100"):
        api.completions.create(model="tiny", prompt="x", logprobs=-1)
