"""Room for workers of several processes: placement groups, one for each such worker.

A group has a bundle for each process, in the order of ranks, and is there only as a whole. It stays
until it is given back, whoever asked for it, as the worker in it does. Its name, which tells the
engine's namespace as well, is how it is found. Giving it back ends what is still in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

_GONE = "REMOVED"


def in_new_group(
    name: str, size: int, bundle: dict[str, float], nodes: list[dict[str, float]]
) -> PlacementGroupSchedulingStrategy:
    """Ask for a group, which may wait for room; return what puts an actor first in it. Blocks.

    Args:
        name: of the group, which nobody else has.
        size: how many bundles.
        bundle: the resources of each.
        nodes: the resources of each node: where one has enough, all bundles are on one.
    """
    fits_one = any(
        all(amount * size <= node.get(kind, 0) for kind, amount in bundle.items()) for node in nodes
    )
    group = placement_group(
        [bundle] * size,
        strategy="STRICT_PACK" if fits_one else "PACK",
        name=name,
        lifetime="detached",
    )
    return PlacementGroupSchedulingStrategy(group, 0)


def give_back(is_theirs: Callable[[str], bool]) -> None:
    """Remove the groups of some names, and whatever is in them. Blocks."""
    for group_id, group in placement_group_table().items():
        if group["state"] != _GONE and is_theirs(group["name"]):
            remove_placement_group(PlacementGroup(_id(group_id)))


def _id(group_id: str) -> Any:
    return ray.PlacementGroupID(bytes.fromhex(group_id))
