"""The layering rules, read off the source of all four packages.

Imports point leftwards, Ray and torch stay where they belong, and the scheduling core reads no
clock, no randomness and no environment.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

LAYERS = ["offload_store", "scheduler", "workers", "cluster", "tests", "bench"]
PACKAGES = LAYERS[:4]
ROOT = Path(__file__).resolve().parents[2]

# What workers may know of the scheduler: the messages, and what these are made of.
WORKERS_MAY_USE = {"request", "messages", "errors", "codec", "logprobs", "sampling_params"}
# Modules of the scheduler that act on the core's decisions; the core itself knows none of them.
SCHEDULER_SHELL = {
    "actor",
    "calls",
    "clients",
    "fleet",
    "inbox",
    "intake",
    "journal",
    "journal_calls",
    "lifetime",
    "loop",
    "places",
    "store_calls",
    "supervisor",
    "worker_calls",
}
# Sources of time, chance and hidden settings: all of these come in on an event.
FORBIDDEN_IN_CORE = {
    "time",
    "datetime",
    "random",
    "secrets",
    "uuid",
    "os",
    "threading",
    "asyncio",
    "socket",
    "subprocess",
}


class Import(NamedTuple):
    """One imported name and where it stands."""

    path: Path
    line: int
    name: str
    """Dotted; for `from a import b` both "a" and "a.b" are listed."""

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    def __str__(self) -> str:
        return f"{self.path}:{self.line} imports {self.name}"


def imports_of(source: str, path: Path) -> Iterator[Import]:
    """Every import of a module, those inside functions and under TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(path, node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = path.with_suffix("").parts[: -node.level]
                base = ".".join([*parents, *filter(None, [base])])
            yield Import(path, node.lineno, base)
            for alias in node.names:
                yield Import(path, node.lineno, f"{base}.{alias.name}")
        elif isinstance(node, ast.Call):
            yield from _dynamic_import(node, path)


def _dynamic_import(node: ast.Call, path: Path) -> Iterator[Import]:
    called = ast.unparse(node.func)
    if called in ("__import__", "importlib.import_module", "import_module") and node.args:
        argument = node.args[0]
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield Import(path, node.lineno, argument.value)


def all_imports(package: str) -> list[Import]:
    return [
        found
        for file in sorted((ROOT / package).rglob("*.py"))
        for found in imports_of(file.read_text(), file.relative_to(ROOT))
    ]


def points_right(found: Import) -> bool:
    own = LAYERS.index(found.path.parts[0])
    return found.top in LAYERS and LAYERS.index(found.top) > own


def ray_out_of_place(found: Import) -> bool:
    allowed = found.path.name == "actor.py" or found.path.parts[0] == "cluster"
    return found.top == "ray" and not allowed


def torch_out_of_place(found: Import) -> bool:
    return found.top == "torch" and found.path.parts[0] not in ("workers", "tests", "bench")


def worker_knows_too_much(found: Import) -> bool:
    parts = found.name.split(".")
    if found.path.parts[0] != "workers" or parts[0] != "scheduler":
        return False
    return len(parts) > 1 and parts[1] not in WORKERS_MAY_USE


def in_core(path: Path) -> bool:
    return path.parts[0] == "scheduler" and path.stem not in SCHEDULER_SHELL


def core_reads_the_world(found: Import) -> bool:
    numpy_random = found.name.startswith("numpy.random")
    return in_core(found.path) and (found.top in FORBIDDEN_IN_CORE or numpy_random)


def core_knows_its_shell(found: Import) -> bool:
    parts = found.name.split(".")
    to_shell = parts[0] == "scheduler" and bool(SCHEDULER_SHELL & set(parts[1:2]))
    return in_core(found.path) and to_shell


RULES = [
    points_right,
    ray_out_of_place,
    torch_out_of_place,
    worker_knows_too_much,
    core_reads_the_world,
    core_knows_its_shell,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_breaks_the_layering(package: str, rule: object) -> None:
    assert callable(rule)
    found = all_imports(package)
    assert found, f"no import found in {package}: the walk itself is broken"
    broken = [str(each) for each in found if rule(each)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("path", "source", "rule"),
    [
        ("scheduler/state.py", "import workers.sampler", points_right),
        ("offload_store/store.py", "from scheduler.errors import HaversackError", points_right),
        ("workers/actor.py", "def f():\n    from cluster import config", points_right),
        ("cluster/client.py", "import tests.helpers", points_right),
        ("workers/model_runner.py", "import ray", ray_out_of_place),
        ("offload_store/store.py", "from ray.util import metrics", ray_out_of_place),
        ("scheduler/policy.py", "__import__('ray')", ray_out_of_place),
        ("cluster/client.py", "import torch.nn as nn", torch_out_of_place),
        ("scheduler/actor.py", "if TYPE_CHECKING:\n    import torch", torch_out_of_place),
        ("workers/sampler.py", "from scheduler.state import S", worker_knows_too_much),
        ("workers/sampler.py", "from scheduler import policy", worker_knows_too_much),
        ("scheduler/state.py", "from scheduler.loop import X", core_knows_its_shell),
        ("scheduler/state.py", "from scheduler import actor", core_knows_its_shell),
        ("scheduler/state.py", "import time", core_reads_the_world),
        ("scheduler/policy.py", "from datetime import datetime", core_reads_the_world),
        ("scheduler/live.py", "from numpy.random import default_rng", core_reads_the_world),
        ("scheduler/live.py", "from numpy import random", core_reads_the_world),
        (
            "scheduler/live.py",
            "import importlib\nimportlib.import_module('os')",
            core_reads_the_world,
        ),
    ],
)
def test_each_rule_sees_what_it_forbids(path: str, source: str, rule: object) -> None:
    """A rule that can't fail protects nothing."""
    assert callable(rule)
    assert any(rule(found) for found in imports_of(source, Path(path)))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("scheduler/actor.py", "import ray\nimport time"),
        ("workers/actor.py", "import ray\nfrom scheduler.messages import Chunk"),
        (
            "workers/loader.py",
            "import torch\nimport os\nfrom scheduler.errors import ModelNotFound",
        ),
        ("cluster/launch.py", "import ray\nfrom workers.actor import WorkerActor\nimport time"),
        (
            "scheduler/policy.py",
            "from .errors import InvalidRequest\nfrom offload_store import keys",
        ),
    ],
)
def test_what_belongs_together_may_meet(path: str, source: str) -> None:
    found = list(imports_of(source, Path(path)))
    assert found
    assert not [str(each) for each in found for rule in RULES if rule(each)]


def test_the_core_takes_no_random_numbers_through_numpy() -> None:
    """`np.random` needs no import of its own, so the attribute itself is looked for."""
    for file in sorted((ROOT / "scheduler").rglob("*.py")):
        if not in_core(file.relative_to(ROOT)):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "random":
                assert ast.unparse(node.value) not in ("np", "numpy"), f"{file}:{node.lineno}"


def test_importing_the_user_interface_and_the_actors_loads_no_torch() -> None:
    """A process that is handed a worker's handle imports its class: no 300 MB for that."""
    code = "import sys, cluster, workers.actor, offload_store.actor; print('torch' in sys.modules)"
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert answer.stdout.strip() == "False"
