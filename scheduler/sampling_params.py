"""What a user asks of one request: `SamplingParams`, with vLLM's names and meanings.

Everything is checked here, once, for every entry point; only what depends on the model (its
vocabulary and context) is checked where the model is known, in `scheduler.policy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import msgspec

from scheduler.errors import InvalidRequest

SEED_LIMIT = 2**63
INT_LIMIT = 2**31
"""Counts and token ids are below this: they travel, and are compared, as int32."""
ALL_LOGPROBS = -1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to continue a prompt and what to report of it.

    Raises:
        InvalidRequest: a value is out of its range; `details["param"]` names it.
    """

    n: int = 1
    """Completions per prompt (>= 1), each with a random stream of its own."""
    max_tokens: int | None = 16
    """Tokens to generate at most; 0 only scores the prompt, None fills the context."""
    min_tokens: int = 0
    """Generated tokens before which no stop condition applies."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Sample among the k most likely tokens; 0 or -1 is all of them."""
    top_p: float = 1.0
    """Sample among the most likely tokens that hold this share of probability, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one, in [0, 1]."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each generated token, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a generated token's logit once per occurrence, in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 0."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids, each clamped to [-100, 100]."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these token ids can be sampled."""
    seed: int | None = None
    """Seed of the random stream, 0 <= seed < 2**63; None draws one at submission."""
    stop: tuple[str, ...] = ()
    """Strings that end generation; the text ends before the first one found."""
    include_stop_str_in_output: bool = False
    """Whether the text ends behind the stop string instead."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end generation, beside the model's end-of-sequence ids."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token (it can still be sampled)."""
    logprobs: int | None = None
    """Alternatives per generated token; 0 gives the sampled token's own, -1 all of them."""
    prompt_logprobs: int | None = None
    """Alternatives per prompt token; 0 gives the actual token's own, -1 all of them."""
    prompt_logprobs_start: int = 0
    """First prompt index that needs a row, at most the prompt's length (which asks for none); 0 and
    1 both are all rows, since index 0 has none. Entries before it are None."""
    prompt_logprob_token_ids: tuple[int, ...] | None = None
    """Prompt rows hold the actual token, then exactly these, in this order; `prompt_logprobs`, the
    most likely ones, is None or 0 then, and reads as 0."""
    skip_reading_prefix_cache: bool | None = None
    """Take nothing from any prefix cache; None is False."""
    detokenize: bool = True
    """Whether the output has text; without it there are token ids alone, and no stop strings."""
    skip_special_tokens: bool = True
    """Whether the text leaves special tokens out."""

    def __post_init__(self) -> None:
        self._normalise()
        self._check_ints()
        self._check_floats()
        self._check_combinations()

    @property
    def skips_reading_prefix_cache(self) -> bool:
        """`skip_reading_prefix_cache` with its default filled in."""
        return bool(self.skip_reading_prefix_cache)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Columns of a prompt row beside the actual token's; None where no rows are asked for.

        -1 is all of the vocabulary.
        """
        if self.prompt_logprob_token_ids is not None:
            return len(self.prompt_logprob_token_ids)
        return self.prompt_logprobs

    def without_prompt_logprobs(self) -> SamplingParams:
        """Return the same parameters for a request that needs no prompt row."""
        return msgspec.structs.replace(
            self, prompt_logprobs=None, prompt_logprobs_start=0, prompt_logprob_token_ids=None
        )

    @property
    def needs_token_history(self) -> bool:
        """Whether sampling depends on which tokens came before."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )

    def _normalise(self) -> None:
        """Accept what vLLM accepts (a lone stop string, lists) and keep one form of it."""
        stop: Any = self.stop
        if stop is None:
            stop = ()
        elif isinstance(stop, str):
            stop = (stop,)
        self._set("stop", _tuple_of(str, stop, "stop"))
        stop_ids: Any = () if self.stop_token_ids is None else self.stop_token_ids
        self._set("stop_token_ids", _tuple_of(int, stop_ids, "stop_token_ids"))
        if self.allowed_token_ids is not None:
            ids = _tuple_of(int, self.allowed_token_ids, "allowed_token_ids")
            self._set("allowed_token_ids", ids)
        if self.prompt_logprob_token_ids is not None:
            ids = _tuple_of(int, self.prompt_logprob_token_ids, "prompt_logprob_token_ids")
            self._set("prompt_logprob_token_ids", ids)
            if self.prompt_logprobs is None:
                self._set("prompt_logprobs", 0)
        if self.logit_bias is not None:
            self._set("logit_bias", _checked_bias(self.logit_bias))
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
        ):
            value = getattr(self, name)
            if type(value) is int:
                self._set(name, _as_float(value))

    def _check_ints(self) -> None:
        _int_in("n", self.n, 1, 1024)
        if self.max_tokens is not None:
            _int_in("max_tokens", self.max_tokens, 0)
        _int_in("min_tokens", self.min_tokens, 0)
        _int_in("top_k", self.top_k, -1)
        _int_in("prompt_logprobs_start", self.prompt_logprobs_start, 0)
        if self.seed is not None:
            _int_in("seed", self.seed, 0, SEED_LIMIT - 1)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                _int_in(name, value, ALL_LOGPROBS)

    def _check_floats(self) -> None:
        _float_in("temperature", self.temperature, 0.0, 100.0)
        _float_in("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            _refuse("top_p", self.top_p, "a number in (0, 1]")
        _float_in("min_p", self.min_p, 0.0, 1.0)
        _float_in("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _float_in("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _float_in("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0.0 or math.isinf(self.repetition_penalty):
            _refuse("repetition_penalty", self.repetition_penalty, "a finite number > 0")

    def _check_combinations(self) -> None:
        if "" in self.stop:
            _refuse("stop", "", "non-empty strings")
        if self.stop and not self.detokenize:
            _refuse("stop", list(self.stop), "no stop strings where detokenize=False")
        if self.allowed_token_ids == ():
            _refuse("allowed_token_ids", [], "at least one token id, or None for all")
        self._check_prompt_rows()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            if type(getattr(self, name)) is not bool:
                _refuse(name, getattr(self, name), "True or False")
        skip: object = self.skip_reading_prefix_cache
        if skip is not None and type(skip) is not bool:
            _refuse("skip_reading_prefix_cache", skip, "True, False or None")

    def _check_prompt_rows(self) -> None:
        ids = self.prompt_logprob_token_ids
        if ids is not None and (not ids or len(set(ids)) < len(ids)):
            _refuse("prompt_logprob_token_ids", list(ids), "at least one token id, none twice")
        if ids is not None and self.prompt_logprobs != 0:
            allowed = "None or 0 with prompt_logprob_token_ids, which say what the rows hold"
            _refuse("prompt_logprobs", self.prompt_logprobs, allowed)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            allowed = "0 where no prompt_logprobs are asked for"
            _refuse("prompt_logprobs_start", self.prompt_logprobs_start, allowed)

    def _set(self, name: str, value: Any) -> None:
        msgspec.structs.force_setattr(self, name, value)


def _refuse(param: str, value: object, allowed: str) -> NoReturn:
    raise InvalidRequest(f"{param}={value!r} is not allowed: give {allowed}", param=param)


def _int_in(param: str, value: object, low: int, high: int = INT_LIMIT - 1) -> None:
    if type(value) is not int or not low <= value <= high:
        _refuse(param, value, f"an integer from {low} to {high}")


def _as_float(value: int) -> float:
    """Return the nearest float; an infinite one, which every range refuses, for what is larger."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _float_in(param: str, value: object, low: float, high: float) -> None:
    if type(value) is not float or not low <= value <= high:
        _refuse(param, value, f"a number from {low} to {high}")


def _tuple_of(kind: type, values: Iterable[Any], param: str) -> tuple[Any, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        _refuse(param, values, f"a list of {kind.__name__}")
    found = tuple(values)
    for value in found:
        if type(value) is not kind:
            _refuse(param, value, f"a list of {kind.__name__}")
        if kind is int:
            _int_in(param, value, 0)
        elif not _is_unicode(str(value)):
            _refuse(param, value, "text that can be encoded as UTF-8")
    return found


def _is_unicode(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, dict):
        _refuse("logit_bias", bias, "a mapping from token id to a number")
    for token, value in bias.items():
        if type(token) is not int or type(value) not in (int, float) or value != value:
            _refuse("logit_bias", {token: value}, "a mapping from token id to a number")
        _int_in("logit_bias", token, 0)
    return {token: float(max(-100, min(100, value))) for token, value in bias.items()}
