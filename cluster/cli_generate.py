"""`haversack generate` and `logprobs`: one prompt, continued or looked at token by token."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer
from rich.table import Table

from cluster.cli_common import (
    Config,
    Json,
    Model,
    Name,
    Prompt,
    Trace,
    Workers,
    engine,
    json_text,
    perplexity_of,
    prompt_text,
    show,
    traced,
)
from scheduler.sampling_params import SamplingParams


def generate(
    prompt: Prompt,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random stream.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends it.")] = None,
    trace: Trace = None,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, on the running engine or on one started for this."""
    with (
        engine(config, model=model, num_workers=num_workers, name=name) as client,
        traced(client, trace),
    ):
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop or ())
        )
        handle = client.submit(prompt_text(prompt), params)
        if not as_json:
            for delta in handle.stream():
                print(delta.text, end="", flush=True)
            print()
        output = handle.result()
    if as_json:
        completion = output.outputs[0]
        facts = {
            "text": completion.text,
            "token_ids": completion.token_ids,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
        }
        print(json_text(facts))


def logprobs(
    prompt: Prompt,
    top_logprobs: Annotated[
        int, typer.Option("--top-logprobs", "-k", help="Alternatives per token.")
    ] = 0,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Show the log-probability of each token of a prompt, and its perplexity."""
    with engine(config, model=model, num_workers=num_workers, name=name) as client:
        params = SamplingParams(max_tokens=0, prompt_logprobs=top_logprobs)
        output = client.submit(prompt_text(prompt), params).result()
        texts = [client.tokenizer.decode([token]) for token in output.prompt_token_ids]
    own = [
        (entry or {}).get(token)
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    ]
    known = [found.logprob for found in own if found is not None]
    total = math.fsum(known)
    perplexity = perplexity_of(total, len(known))
    facts: dict[str, Any] = {
        "token_ids": output.prompt_token_ids,
        "logprobs": [found and found.logprob for found in own],
        "ranks": [found and found.rank for found in own],
        "sum_logprob": total,
        "perplexity": perplexity,
    }
    table = Table("token", "logprob", "rank", "likeliest")
    for text, found, entry in zip(texts, own, output.prompt_logprobs or (), strict=True):
        alternatives = sorted((entry or {}).values(), key=lambda e: e.rank)[:top_logprobs]
        table.add_row(
            repr(text),
            f"{found.logprob:.4f}" if found else "",
            str(found.rank) if found else "",
            "  ".join(f"{e.decoded_token!r} {e.logprob:.2f}" for e in alternatives),
        )
    table.caption = f"{len(known)} tokens scored, sum {total:.4f}" + (
        f", perplexity {perplexity:.4f}" if perplexity is not None else ""
    )
    show(facts, as_json, table)
