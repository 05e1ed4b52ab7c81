"""`docs/reference.md`: every public name with its signature, units and errors, from docstrings.

A public name is one of `cluster.__all__`, or the type of something that such a name returns. Errors
and settings have pages of their own.
"""

from __future__ import annotations

import ast
import enum
import inspect
from typing import Any, NamedTuple

import cluster
from cluster import pairs, prompts, ray_data
from cluster.handle import DeltaStream
from cluster.scorer import Scorer
from docs.generator.source import (
    alias_text,
    fields_of,
    is_property,
    markdown,
    members_of,
    methods_of,
    parsed_class,
    signature,
)
from scheduler.errors import HaversackError
from scheduler.life import Span, SpanKind
from scheduler.messages import Lives, RequestInfo, RequestLife, SchedulerStats, WorkerReport
from scheduler.outbox import EngineInfo, EngineStats
from scheduler.outputs import PromptLogprobsView, SampleLogprobsView, _LogprobsView
from scheduler.request import RequestStats

_HEAD = """\
# Python reference

<!-- Written by `python -m docs.generator` from the docstrings. -->

Names are imported from `cluster` where nothing else is said; what only comes back from calls needs
no import. [The Python API](python.md) shows how the parts go together, [errors](errors.md) lists
what is raised, and [settings](settings.md) the fields of `EngineConfig`. Times are in seconds,
sizes in bytes, logprobs natural logarithms in fp32.
"""


class _Group(NamedTuple):
    title: str
    text: str
    members: list[Any]


def _groups() -> list[_Group]:
    return [
        _Group("Connecting", "", [cluster.Client, cluster.submit]),
        _Group("Requests", "", [cluster.SamplingParams, cluster.RequestHandle, DeltaStream]),
        _Group(
            "Results",
            "",
            [
                cluster.RequestOutput,
                cluster.CompletionOutput,
                cluster.CompletionDelta,
                cluster.Logprob,
                PromptLogprobsView,
                SampleLogprobsView,
                RequestStats,
            ],
        ),
        _Group("Scores", "", [cluster.ScoringParams, cluster.Score]),
        _Group(
            "Batches",
            "Files of rows; see [batches](batches.md).",
            [
                cluster.Batch,
                cluster.BatchOptions,
                cluster.BatchProgress,
                cluster.BatchWatcher,
                ray_data.Scorer,
            ],
        ),
        _Group("Settings", "", [cluster.EngineConfig]),
        _Group(
            "Looking after an engine",
            "What `Client.info`, `workers`, `requests`, `stats` and `lives` return.",
            [
                EngineInfo,
                WorkerReport,
                RequestInfo,
                EngineStats,
                SchedulerStats,
                Lives,
                RequestLife,
                Span,
                SpanKind,
            ],
        ),
    ]


_WHERE = {ray_data.Scorer: "cluster.ray_data"}
"""What has to be imported from elsewhere."""
_WITHOUT_FIELDS: tuple[type, ...] = (cluster.EngineConfig,)
"""Classes whose fields have a page of their own."""
_BASES = (Scorer, _LogprobsView)
"""Classes whose methods are those of the public classes that are made from them."""
_NOT_MADE_BY_USERS: tuple[type, ...] = (
    cluster.RequestHandle,
    DeltaStream,
    PromptLogprobsView,
    SampleLogprobsView,
)
_NOT_FOR_USERS = {
    "EngineConfig": {"scheduler_config"},
    "RequestHandle": {"feed", "fail", "abandon", "unwanted_ids"},
    "SamplingParams": {
        "needs_token_history",
        "num_prompt_logprobs",
        "skips_reading_prefix_cache",
        "without_prompt_logprobs",
    },
    "BatchOptions": {"tells_tokens"},
    "ScoringParams": {"sampling_params", "num_logprobs"},
    "Client": {"outcomes", "token_text"},
}
"""Methods that the engine's own parts call, by class."""


def reference_page() -> str:
    """Return the page.

    Raises:
        LookupError: a public name has no place in it, or nothing says what it is.
    """
    groups = _groups()
    shown = {member.__name__ for group in groups for member in group.members}
    missing = [n for n in cluster.__all__ if n not in shown and not _is_error(n)]
    if missing:
        raise LookupError(f"give these a place in {__name__}: {', '.join(missing)}")
    parts = [_HEAD]
    for group in groups:
        parts.append(f"## {group.title}\n")
        if group.text:
            parts.append(f"{group.text}\n")
        parts += [_entry(member) for member in group.members]
    parts.append(_aliases())
    return "\n".join(parts)


def _is_error(name: str) -> bool:
    found = getattr(cluster, name)
    return inspect.isclass(found) and issubclass(found, HaversackError)


def _entry(member: Any) -> str:
    if not inspect.isclass(member):
        (node,) = ast.parse(inspect.getsource(member)).body
        assert isinstance(node, ast.FunctionDef)
        return _callable(f"### {node.name}", node.name, node)
    title = f"### {member.__name__}" + (f" (`{_WHERE[member]}`)" if member in _WHERE else "")
    parts: list[str | None] = [title, "", markdown(ast.get_docstring(parsed_class(member))), ""]
    if member not in _WITHOUT_FIELDS:
        parts.append(_fields_table(member))
    for owner in (member, *(base for base in member.__bases__ if base in _BASES)):
        parts += [_method(member, name, node) for name, node in methods_of(owner)]
    return "\n".join(part for part in parts if part is not None)


def _method(cls: type, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    text = ast.get_docstring(node)
    is_made_elsewhere = name == "__init__" and cls in _NOT_MADE_BY_USERS
    if is_made_elsewhere or name in _NOT_FOR_USERS.get(cls.__name__, ()):
        return None
    if text is None:
        raise LookupError(f"{cls.__name__}.{name} is public and has no docstring")
    if name == "__init__":
        return _callable(f"#### {cls.__name__}(...)", cls.__name__, node)
    title = f"#### {cls.__name__}.{name}"
    if is_property(node):
        kind = ast.unparse(node.returns) if node.returns else "Any"
        return f"{title}\n\n`{kind}`: {markdown(text)}\n"
    return _callable(title, f"{_prefix(cls)}{name}", node)


def _prefix(cls: type) -> str:
    return {"Client": "client.", "RequestHandle": "handle."}.get(cls.__name__, f"{cls.__name__}.")


def _callable(title: str, name: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    text = markdown(ast.get_docstring(node))
    return f"{title}\n\n```py\n{signature(name, node)}\n```\n\n{text}\n"


def _fields_table(cls: type) -> str | None:
    if issubclass(cls, enum.Enum):
        return "\n".join(f"- `{value}`: {text}" for value, text in members_of(cls)) + "\n"
    fields = [field for field in fields_of(cls) if not field.name.startswith("_")]
    if not fields:
        return None
    rows = ["| Field | Type | Default | |", "|---|---|---|---|"]
    for field in fields:
        default = "" if field.default is None else _code(field.default)
        rows.append(f"| `{field.name}` | {_code(field.type)} | {default} | {field.text} |")
    return "\n".join(rows) + "\n"


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|")


def _aliases() -> str:
    prompt = alias_text(prompts, "Prompt")
    scorable = alias_text(pairs, "Scorable")
    return (
        "## Types\n\n"
        f"- `Prompt`: {prompt[0].lower()}{prompt[1:]}\n"
        f"- `Scorable`: {scorable[0].lower()}{scorable[1:]} Token ids are a list or a "
        "one-dimensional integer array.\n"
    )
