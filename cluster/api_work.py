"""What an endpoint does with texts, tokens and bytes, and the process for what is much of it.

Rules:
- A piece of work is a plain function whose first argument is `Texts`. A small one runs in a thread
  of the endpoint, a large one in a process beside it: a thread that holds the interpreter for long
  keeps the event loop from answering anybody.
- The process starts when it is first needed, ends with the endpoint, and is started again where it
  died; what it was doing then fails.
The module knows a model's tokenizer and Ray, and nothing of HTTP.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.api_text import TokenStrings
from cluster.detokenizer import TokenTable
from scheduler.config import SchedulerConfig
from scheduler.errors import EngineUnavailable, HaversackError, ModelNotFound
from workers.model_store import load_tokenizer

LARGE = 50_000
"""Beyond this many characters, bytes, tokens or logprobs work is large. Each of them holds the
interpreter for less than a microsecond, or not much more."""
AT_ONCE = 4
"""Pieces of work that the process does at once; tokenising leaves the interpreter to others."""

Found = TypeVar("Found")


class Texts:
    """A model's tokenizer and limits, for work that needs no engine."""

    def __init__(self, tokenizer: Any, limits: SchedulerConfig) -> None:
        """Read the tokenizer's vocabulary.

        Args:
            tokenizer: of transformers; None where the model has none.
            limits: what a request may ask for.
        """
        self._tokenizer = tokenizer
        self._table = None if tokenizer is None else TokenTable(lambda: tokenizer)
        self.strings = TokenStrings(self._table)
        """Of the model's tokens."""
        self.vocab_size = limits.vocab_size
        self.max_model_len = limits.max_model_len
        """Tokens that a request may have."""

    @property
    def has_tokenizer(self) -> bool:
        return self._table is not None

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (of transformers).

        Raises:
            ModelNotFound: it has none.
        """
        self.check_tokenizer()
        return self._tokenizer

    def check_tokenizer(self) -> None:
        """Raise `ModelNotFound` where the model has no tokenizer."""
        if self._table is None:
            raise ModelNotFound("the model served here has no tokenizer: give token ids")

    def token_ids(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's token ids.

        Raises:
            ModelNotFound: the model has no tokenizer.
        """
        return list(self.tokenizer(text, add_special_tokens=add_special_tokens).input_ids)


class Helper:
    """The process for large work, of one endpoint. It may be used from several threads."""

    def __init__(self, model: str, limits: SchedulerConfig) -> None:
        """Start nothing yet.

        Args:
            model: whose tokenizer the process loads; see `workers.model_store`.
            limits: what a request may ask for.
        """
        self._args = (model, limits)
        self._lock = threading.Lock()
        self._actor: Any = None

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Have some work done, and return what it returns.

        Bytes, also those in a tuple, come as arrays of them, which are not copied.

        Raises:
            HaversackError: as the work does.
            EngineUnavailable: the process died.
        """
        with self._lock:
            if self._actor is None:
                self._actor = _start(self._args)
        try:
            found = ray.get(self._actor.run.remote(work, *args))
        except RayTaskError:
            raise  # a bug, told as one
        except RayError as error:
            raise EngineUnavailable(
                f"the process that does large work here was lost ({error}): send less at once, or "
                "try again"
            ) from error
        if isinstance(found, HaversackError):
            raise found
        return found

    def close(self) -> None:
        """End the process, whatever it is doing."""
        with self._lock:
            if self._actor is not None:
                ray.kill(self._actor)


class HelperActor:
    """What runs in the process."""

    def __init__(self, model: str, limits: SchedulerConfig) -> None:
        """Load the model's tokenizer, where it has one."""
        try:
            tokenizer = load_tokenizer(model)
        except ModelNotFound:
            tokenizer = None
        self._texts = Texts(tokenizer, limits)

    def run(self, work: Callable[..., Any], *args: Any) -> Any:
        """Do some work; its error, if it is one of ours, is returned."""
        try:
            found = work(self._texts, *args)
        except HaversackError as error:
            return error
        return _uncopied(found)


def _uncopied(found: Any) -> Any:
    """Return what was found with its bytes as arrays, which Ray hands on without a copy."""
    if type(found) is tuple:
        return tuple(map(_uncopied, found))
    return np.frombuffer(found, np.uint8) if isinstance(found, bytes) else found


def _start(args: tuple[Any, ...]) -> Any:
    # Where the endpoint is, so that the model's files are at hand and memory is shared.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    kind: Any = ray.remote(HelperActor)
    settings = {"num_cpus": 0, "max_restarts": -1, "max_concurrency": AT_ONCE}
    return kind.options(scheduling_strategy=here, **settings).remote(*args)
