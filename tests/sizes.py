"""How much the containers of an object hold, and those of all that it consists of."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from typing import Any

PACKAGES = ("scheduler.", "offload_store.")
BOUNDED = {"BlockPool", "Histogram", "PrefixIndex", "Roster", "RowCache", "SchedulerStats"}
"""Containers of these can't outgrow the workers and their pools, a number of bytes or a list of
reasons or bounds. Nor can a deque of a given length outgrow that."""


def sizes(root: Any) -> dict[str, int]:
    """Return how much all containers of each kind hold, "class.attribute" -> items.

    Those that are bounded, or replaced with each step of a worker, are left out.
    """
    found: Counter[str] = Counter()
    for owner, name, value in _containers(root, set()):
        if owner not in BOUNDED and name != "told_released_ids":
            found[f"{owner}.{name}"] += len(value)
    return dict(found)


def _containers(thing: Any, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    """Yield every container inside of an object, with the class and the name that has it."""
    kind = type(thing)
    if id(thing) in seen or not kind.__module__.startswith(PACKAGES):
        return
    seen.add(id(thing))
    slots = [name for each in kind.__mro__ for name in getattr(each, "__slots__", ())]
    for name in [*slots, *getattr(thing, "__dict__", {})]:
        value = getattr(thing, name, None)
        if isinstance(value, deque) and value.maxlen is not None:
            continue
        if isinstance(value, (dict, list, set, deque)):
            yield kind.__name__, name, value
            for item in list(value.values() if isinstance(value, dict) else value):
                yield from _containers(item, seen)
        else:
            yield from _containers(value, seen)
