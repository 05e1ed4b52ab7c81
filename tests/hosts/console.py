"""A client's program on a host, as `python -m tests.hosts.console JSON`: it does as the test says.

It starts an engine, or joins it, and then reads orders as JSON lines on stdin: `order`, a method of
`Console`, and its arguments. Each one is answered by a line on stdout, with what was found or with
an `error`; the first line tells that the engine is there. When stdin closes it leaves the engine.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import msgspec
import numpy as np
import ray
from ray.util.placement_group import placement_group_table

from cluster import Client, RequestOutput, SamplingParams
from cluster.fleet import find_parts, part_name

PATIENCE_S = 180.0
_LOOK_S = 0.02


def bits(output: RequestOutput) -> str:
    """Everything about a result that must not depend on what the request went through, as hex."""
    found = [np.asarray(output.prompt_token_ids, np.int32).tobytes()]
    for view in (output.prompt_logprobs, output.outputs[0].logprobs):
        assert view is not None
        arrays = view.arrays
        found += [arrays.token_ids.tobytes(), arrays.logprobs.tobytes(), arrays.ranks.tobytes()]
    found.append(np.asarray(output.outputs[0].token_ids, np.int32).tobytes())
    return b"".join(found).hex()


class Console:
    """What the test may order."""

    def __init__(self, client: Client, num_requests: int, num_tokens: int) -> None:
        """Use a client for `num_requests` requests with prompts of `num_tokens` tokens."""
        rng = np.random.default_rng(11)
        self._client = client
        self._prompts = [rng.integers(0, 250, num_tokens).tolist() for _ in range(num_requests)]
        self._params = [
            SamplingParams(
                prompt_logprobs=2,
                logprobs=1,
                max_tokens=100,
                seed=i,
                ignore_eos=True,
                skip_reading_prefix_cache=True,
            )
            for i in range(num_requests)
        ]

    def submit(self, name: str, detached: bool = False) -> dict[str, Any]:
        """Submit all prompts, as NAME-0 and so on."""
        ids = [f"{name}-{index}" for index in range(len(self._prompts))]
        self._client.submit_many(self._prompts, self._params, request_ids=ids, detached=detached)
        return {"request_ids": ids}

    def results(self, request_ids: list[str]) -> dict[str, Any]:
        """Wait for results; return the bits of each and what the request went through."""
        outputs = [self._client.result(name, timeout=PATIENCE_S) for name in request_ids]
        stats = [msgspec.to_builtins(output.stats) for output in outputs]
        return {"bits": [bits(output) for output in outputs], "stats": stats}

    def wait_for_prefill(self, address: str, num_computed_tokens: int) -> dict[str, Any]:
        """Wait until a request on this host has so many tokens, and none of its prompt's end.

        The `worker_id` is None where all requests have come to their end unseen.
        """
        where = self._workers()
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            live = self._client.requests()
            if not live:
                return {"worker_id": None}
            for info in live:
                if (
                    info.worker_id is not None
                    and where[info.worker_id]["address"] == address
                    and num_computed_tokens <= info.num_computed_tokens < info.num_prompt_tokens
                ):
                    return {"worker_id": info.worker_id}
        raise TimeoutError(f"no request on {address} was found in mid-prefill")

    def wait_until_idle(self, num_workers: int) -> dict[str, Any]:
        """Wait until so many workers are there and nothing is kept of any request."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            found = self.look()
            store, scheduler = found["store"] or {}, found["scheduler"]
            held = [store.get(name) for name in ("num_pins", "num_owned_segments", "num_requests")]
            if (
                len(found["workers"]) == num_workers
                and held == [0, 0, 0]
                and scheduler["num_used_blocks"] == 0
                and not self._client.requests()
            ):
                return found
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"not idle with {num_workers} workers: {found}")
            time.sleep(_LOOK_S)

    def look(self) -> dict[str, Any]:
        """Return the counters, and the workers by id."""
        stats = msgspec.to_builtins(self._client.stats())
        return {**stats, "workers": self._workers()}

    def parts(self) -> dict[str, Any]:
        """Return the host and the process of each actor of the engine: "scheduler", "store", ..."""
        settings = self._client.info.settings
        namespace, name = str(settings["namespace"]), str(settings["name"])
        asked = {
            part: ray.get_actor(part_name(name, part), namespace=namespace).__ray_call__.remote(
                lambda _: (os.uname().nodename, os.getpid())
            )
            for part in find_parts(namespace, name)
        }
        found = {part: ray.get(answer, timeout=PATIENCE_S) for part, answer in asked.items()}
        return {part: {"host": host, "pid": pid} for part, (host, pid) in found.items()}

    def ranks(self) -> dict[str, Any]:
        """Return the addresses of the hosts of each rank of each worker that has several."""
        address_of = _addresses()
        nodes = [
            group["bundles_to_node_id"]
            for group in placement_group_table().values()
            if group["state"] == "CREATED"
        ]
        return {"addresses": [[address_of[own[rank]] for rank in sorted(own)] for own in nodes]}

    def nodes(self) -> dict[str, Any]:
        """Return the nodes that Ray takes for alive: address -> id."""
        ask: Any = ray.nodes
        alive = [node for node in ask() if node["Alive"]]
        return {node["NodeManagerAddress"]: node["NodeID"] for node in alive}

    def _workers(self) -> dict[str, dict[str, Any]]:
        address_of = _addresses()
        return {
            each.worker_id: {"address": address_of[each.node_id], "pid": each.pid}
            for each in self._client.workers()
        }


def _addresses() -> dict[str, str]:
    nodes: Any = ray.nodes
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}


def _say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def main(engine: dict[str, Any], num_requests: int, num_tokens: int) -> None:
    """Start or join an engine, and do as told until stdin closes."""
    with Client(**engine) as client:
        console = Console(client, num_requests, num_tokens)
        _say(ready=True)
        for line in sys.stdin:
            order = json.loads(line)
            try:
                _say(**getattr(console, order.pop("order"))(**order))
            except Exception as error:
                _say(error=repr(error))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
