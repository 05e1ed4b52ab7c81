"""Programs that run on a host, as `python -m tests.hosts.scenarios NAME JSON`.

A scenario tells the test what happens as JSON lines on stdout, so that the test acts when something
has happened and not after some time. Each line has a field "event"; the last one is "done".
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from cluster import Client, RequestOutput, SamplingParams

_PATIENCE_S = 120.0


def say(event: str, **facts: Any) -> None:
    """Tell the test."""
    print(json.dumps({"event": event, **facts}), flush=True)


def bits(output: RequestOutput) -> str:
    """Everything about a result that must not depend on what the request went through, as hex."""
    found = [np.asarray(output.prompt_token_ids, np.int32).tobytes()]
    for view in (output.prompt_logprobs, output.outputs[0].logprobs):
        assert view is not None
        arrays = view.arrays
        found += [arrays.token_ids.tobytes(), arrays.logprobs.tobytes(), arrays.ranks.tobytes()]
    found.append(np.asarray(output.outputs[0].token_ids, np.int32).tobytes())
    return b"".join(found).hex()


def addresses() -> dict[str, str]:
    """Return each node's address by its id."""
    nodes: Any = ray.nodes
    return {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}


def long_prompts(settings: dict[str, Any]) -> None:
    """Run long prompts undisturbed, then again while the test takes a host away from them.

    Settings: `engine` (of the client), `num_requests`, `num_tokens`, `victim` (an address), and
    `num_computed_tokens`: "prefilling" is said once a request on the victim has so many, and none
    of its prompt's end.
    """
    rng = np.random.default_rng(11)
    prompts = [
        rng.integers(0, 250, settings["num_tokens"]).tolist()
        for _ in range(settings["num_requests"])
    ]
    params = [
        SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=8, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with Client(**settings["engine"]) as client:
        address_of = addresses()
        where = {each.worker_id: address_of[each.node_id] for each in client.info.workers}
        say("started", workers=where)
        undisturbed = [bits(output) for output in client.generate(prompts, params)]
        say("undisturbed", stats=_stats(client))
        handles = client.submit_many(prompts, params)
        victim = next(name for name, address in where.items() if address == settings["victim"])
        _wait_for_prefill(client, victim, settings["num_computed_tokens"])
        outputs = [handle.result(timeout=_PATIENCE_S) for handle in handles]
        say(
            "finished",
            same=[
                bits(output) == before for output, before in zip(outputs, undisturbed, strict=True)
            ],
            stats=_stats(client),
        )
    say("done")


def _wait_for_prefill(client: Client, worker_id: str, num_computed_tokens: int) -> None:
    """Say "prefilling" when a request on the worker is so far."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s:
        for info in client.requests():
            if (
                info.worker_id == worker_id
                and num_computed_tokens <= info.num_computed_tokens < info.num_prompt_tokens
            ):
                say("prefilling", num_computed_tokens=info.num_computed_tokens)
                return
    raise TimeoutError(f"no request on {worker_id} was found in mid-prefill")


def _stats(client: Client) -> dict[str, Any]:
    stats = client.stats()
    scheduler = {name: getattr(stats.scheduler, name) for name in stats.scheduler.__struct_fields__}
    return {"scheduler": scheduler, "store": stats.store}


SCENARIOS: dict[str, Callable[[dict[str, Any]], None]] = {"long_prompts": long_prompts}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](json.loads(sys.argv[2]))
