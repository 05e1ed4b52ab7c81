"""From what a user gives, checked and complete, to handles that are ready to be submitted.

The module knows the model's tokenizer and vocabulary, which it asks the connection for, and sends
nothing.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from cluster.connection import Connection
from cluster.detokenizer import TokenTable
from cluster.handle import RequestHandle
from cluster.otel import current_traceparent
from cluster.prompts import Prompt, check_arguments, parse_prompt, seed_for
from scheduler.errors import InvalidRequest, ModelNotFound
from scheduler.messages import Submission
from scheduler.sampling_params import SamplingParams
from workers.model_store import load_tokenizer


class Options(NamedTuple):
    """What goes with a prompt, beside its id and parameters; see `Client.submit`."""

    priority: int = 0
    cache_salt: str | None = None
    timeout_s: float | None = None
    detached: bool = False
    traceparent: str | None = None
    """None: what `cluster.otel` finds that the caller is doing."""


@dataclass(frozen=True)
class _TokenizerOf:
    """Loads a model's tokenizer. It may go to another process along with a result."""

    model: str

    def __call__(self) -> Any:
        return load_tokenizer(self.model)


class Intake:
    """Makes the handles of one client."""

    def __init__(
        self, connection: Connection, follow: Callable[[RequestHandle], None] | None = None
    ) -> None:
        """Make the handles of requests that go over a connection.

        Args:
            follow: is given each of them when it is made.
        """
        self._connection = connection
        self._follow = follow
        self._counter = itertools.count()
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer (of transformers), loaded when it is first asked for."""
        with self._lock:
            return self._table.tokenizer

    @functools.cached_property
    def _table(self) -> TokenTable:
        return TokenTable(_TokenizerOf(self._connection.info.model))

    def _loaded_table(self) -> TokenTable:
        """Return the table, with what is wrong with the tokenizer raised here and not later."""
        _ = self.tokenizer
        return self._table

    def handle(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None,
        request_id: str | None,
        options: Options,
    ) -> RequestHandle:
        """Return a handle of a new submission.

        Raises:
            InvalidRequest: the prompt or something that goes with it is wrong.
        """
        params = SamplingParams() if sampling_params is None else sampling_params
        check_arguments(params, request_id, *options)
        vocab_size = self._connection.info.limits.vocab_size
        token_ids, text = parse_prompt(prompt, vocab_size, self._tokenize)
        submission = Submission(
            request_id=request_id or f"{self._connection.client_id}-{next(self._counter)}",
            prompt_token_ids=token_ids,
            sampling_params=params,
            seed=seed_for(params, request_id),
            priority=options.priority,
            cache_salt=options.cache_salt,
            timeout_s=None if options.timeout_s is None else float(options.timeout_s),
            detached=options.detached,
            traceparent=options.traceparent or current_traceparent(),
        )
        return self.handle_of(submission, text)

    def handles(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        request_ids: Sequence[str] | None,
        options: Options,
    ) -> list[RequestHandle]:
        """Return a handle for each prompt, in order.

        Raises:
            InvalidRequest: one of them is wrong, and `details["prompt_index"]` says which; or the
                numbers of prompts, params and ids differ.
        """
        params = _one_each(sampling_params, len(prompts), "sampling_params")
        ids = _one_each(request_ids, len(prompts), "request_ids")
        handles = []
        for index, (prompt, param, request_id) in enumerate(zip(prompts, params, ids, strict=True)):
            try:
                handles.append(self.handle(prompt, param, request_id, options))
            except InvalidRequest as error:
                raise type(error)(
                    f"prompt {index}: {error.message}", **error.details, prompt_index=index
                ) from None
        return handles

    def handle_of(self, submission: Submission, text: str | None = None) -> RequestHandle:
        """Return a handle of a submission.

        Args:
            text: the prompt, where it was given as text.
        """
        params = submission.sampling_params
        # What is generated needs the tokenizer; a prompt's rows do if their text is asked for.
        is_needed = params.detokenize and params.max_tokens != 0
        table = self._loaded_table() if is_needed else self._table if params.detokenize else None
        handle = RequestHandle(submission, text, table, self._connection.tell_cancel)
        if self._follow is not None:
            self._follow(handle)
        return handle

    def token_text(self) -> Callable[[int], str] | None:
        """Return what gives a token's own text; None where the model comes without a tokenizer."""
        try:
            return self._loaded_table().token_text
        except ModelNotFound:
            return None

    def _tokenize(self, text: str) -> list[int]:
        return list(self.tokenizer(text).input_ids)


def _one_each(values: Any, count: int, param: str) -> list[Any]:
    if values is None or isinstance(values, SamplingParams):
        return [values] * count
    found = list(values)
    if len(found) != count:
        raise InvalidRequest(
            f"{len(found)} {param} were given for {count} prompts: give one for each", param=param
        )
    return found
