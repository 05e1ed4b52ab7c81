"""What is scored: a context and its continuation as token ids, by evaluation harnesses' rules.

Rules, those of lm-evaluation-harness, so that its figures can be compared with:
- Two texts are encoded as one, and what goes beyond the context's own tokens is the continuation: a
  tokenizer may merge across the seam. White space at the context's end goes to the continuation
  before that, where most tokenizers would have put it.
- An empty context stands for one token, the prefix: what a document begins with. A continuation
  that begins with that token is conditioned on it and not on two of them.
- A document longer than the model's context is cut into windows, each as long as it may be; each
  token is scored once.
The module knows a tokenizer (of transformers) where there is text, and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from cluster.prompts import is_text
from scheduler.errors import InvalidRequest, ModelNotFound

Scorable: TypeAlias = "str | Sequence[int] | np.ndarray[Any, Any]"
"""Text, or token ids."""


class TokenPair(NamedTuple):
    """Token ids of which the second part is scored."""

    context: list[int]
    """What the continuation is conditioned on, at least one token."""
    continuation: list[int]
    """At least one token."""


class PairEncoder:
    """Turns texts and token ids into pairs, for one model."""

    def __init__(
        self,
        tokenizer: Callable[[], Any],
        *,
        add_special_tokens: bool = True,
        prefix_token_id: int | None = None,
    ) -> None:
        """Remember how to encode.

        Args:
            tokenizer: returns the tokenizer; called where one is needed.
            add_special_tokens: whether a context that is text begins with what the tokenizer puts
                in front of a text. One that spells it out gets no second one.
            prefix_token_id: what an empty context stands for; None is the tokenizer's
                beginning-of-sequence token, or where it has none its end-of-sequence token.
        """
        self._tokenizer = tokenizer
        self._add_special_tokens = add_special_tokens
        self._prefix_token_id = prefix_token_id
        self._last_context: tuple[str, list[int]] = ("", [])
        """What was encoded last: the choices of a question come one after the other."""

    def pair(self, context: Scorable, continuation: Scorable) -> TokenPair:
        """Return the token ids of a context and its continuation.

        Raises:
            InvalidRequest: one is of another form, or there is no token to score.
            ModelNotFound: there is text, and the model comes without a tokenizer.
        """
        _check_form("context", context)
        _check_form("continuation", continuation)
        if not isinstance(context, str):
            pair = TokenPair(list(context), self._continuation_ids(continuation))
        elif not isinstance(continuation, str):
            pair = TokenPair(self._context_ids(context), list(continuation))
        else:
            pair = self._pair_of_texts(context, continuation)
        if not pair.context:
            pair = self._after_prefix(pair.continuation)
        if not pair.continuation:
            raise InvalidRequest(
                "the continuation adds no token to the context: give at least one",
                param="continuation",
            )
        return pair

    def windows(self, document: Scorable, max_tokens: int) -> Iterator[TokenPair]:
        """Yield pairs that together score each token of a document once.

        The first window is conditioned on the prefix. Each further one is conditioned on the token
        before it, and the last one, where fewer tokens are left than it could score, on as many as
        it has room for.

        Args:
            document: text, encoded without special tokens, or token ids.
            max_tokens: tokens of a window, those that it is conditioned on included; >= 2.

        Raises:
            InvalidRequest: it is of another form, or empty.
            ModelNotFound: see `pair`.
        """
        first = self.pair([], document)
        token_ids = first.context + first.continuation
        end = 1
        while end < len(token_ids):
            scored_from, end = end, min(end + max_tokens - 1, len(token_ids))
            start = max(end - max_tokens, 0)
            yield TokenPair(token_ids[start:scored_from], token_ids[scored_from:end])

    def _pair_of_texts(self, context: str, continuation: str) -> TokenPair:
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        if not stripped:
            return TokenPair([], self._continuation_ids(continuation))
        ids = self._context_ids(stripped)
        return TokenPair(ids, self._encode(stripped + continuation)[len(ids) :])

    def _context_ids(self, context: str) -> list[int]:
        if context != self._last_context[0]:
            self._last_context = (context, self._encode(context))
        return self._last_context[1]

    def _encode(self, text: str) -> list[int]:
        """Encode a text that is, or begins with, a context."""
        tokenizer = self._tokenizer()
        begins = tokenizer.bos_token
        is_begun = isinstance(begins, str) and text.startswith(begins)
        adds = self._add_special_tokens and not is_begun
        return list(tokenizer(text, add_special_tokens=adds).input_ids)

    def _continuation_ids(self, continuation: Scorable) -> list[int]:
        if not isinstance(continuation, str):
            return list(continuation)
        if not continuation:
            return []
        return list(self._tokenizer()(continuation, add_special_tokens=False).input_ids)

    def _after_prefix(self, continuation: list[int]) -> TokenPair:
        prefix = self._prefix()
        if continuation[:1] == [prefix]:
            continuation = continuation[1:]
        return TokenPair([prefix], continuation)

    def _prefix(self) -> int:
        if self._prefix_token_id is not None:
            return self._prefix_token_id
        try:
            tokenizer = self._tokenizer()
        except ModelNotFound:
            tokenizer = None
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(tokenizer, name, None)
            if token is not None:
                return int(token)
        raise InvalidRequest(
            "the context is empty, and the model has no token that a text begins or ends with: "
            "give prefix_token_id",
            param="context",
        )


def with_room(pair: TokenPair, max_tokens: int) -> TokenPair:
    """Return the pair without the first tokens of its context, so that it has `max_tokens`.

    One whose continuation alone is too long is left as it is, since there is nothing to condition
    it on.
    """
    room = max_tokens - len(pair.continuation)
    if room < 1 or len(pair.context) <= room:
        return pair
    return TokenPair(pair.context[-room:], pair.continuation)


def _check_form(param: str, value: Any) -> None:
    forms = "give text, or one list of token ids"
    if isinstance(value, str):
        if not is_text(value):
            raise InvalidRequest(
                f"the {param} holds half of a character (a lone surrogate)", param=param
            )
        return
    if isinstance(value, np.ndarray):
        if value.ndim != 1 or value.dtype.kind not in "iu":
            raise InvalidRequest(
                f"the {param} is an array of {value.dtype} with shape {value.shape}: {forms}",
                param=param,
            )
        return
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray)):
        raise InvalidRequest(f"the {param} is a {type(value).__name__}: {forms}", param=param)
