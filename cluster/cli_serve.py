"""`haversack serve`: the endpoint on a running engine, or on one started for it."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from cluster.api_settings import ApiSettings, Limits, key_digests
from cluster.cli_common import (
    Config,
    Json,
    Model,
    Name,
    Ranks,
    Trace,
    Workers,
    engine,
    show,
    told_errors,
    traced,
    until_interrupted,
)
from cluster.config import EngineConfig


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
    trace: Trace = None,
    config: Config = None,
    model: Model = None,
    num_workers: Workers = None,
    tensor_parallel_size: Ranks = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Answer OpenAI's API over HTTP, from the running engine or one started for this.

    Runs until Ctrl-C.
    """
    with told_errors():
        limits = Limits(max_body_bytes, max_prompts, max_n, max_logprobs, max_logprob_entries)
        digests = key_digests([] if api_key is None else api_key.split(","))
    chosen: dict[str, Any] = {
        "model": model,
        "num_workers": num_workers,
        "tensor_parallel_size": tensor_parallel_size,
        "name": name,
    }
    with engine(config, **chosen) as client:
        # Serve takes seconds to import, which other commands need not wait for.
        from cluster.serving import Endpoint

        running: dict[str, Any] = {**client.info.settings}
        settings = ApiSettings(
            engine=EngineConfig(**running),
            served_names=tuple(served_model_name or [client.info.model]),
            key_digests=digests,
            limits=limits,
        )
        with traced(client, trace, everybody=True), until_interrupted() as interruption:
            endpoint = Endpoint(settings, host=host, port=port, route_prefix=route_prefix)
            try:
                facts = {"url": endpoint.url, "model": settings.served_names[0]}
                shown = f"{facts['model']} is served at {endpoint.url}/v1 (Ctrl-C ends it)"
                show(facts, as_json, shown)
                sys.stdout.flush()
                interruption.wait()
            finally:
                endpoint.stop()
