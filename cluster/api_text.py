r"""Tokens and logprobs as JSON has them: exact text, places in it, and numbers that are valid.

Rules:
- A token's string is its text where its bytes are whole characters; else `bytes:` and each byte as
  `\xe2`, as OpenAI writes it. So two tokens with different bytes have different strings.
- A token's offset is the number of characters that the tokens before it complete. A character that
  several tokens make up counts behind the last of them.
- JSON has no infinities: a logprob of minus infinity, or below -9999, is -9999.0. NaN never comes
  here, since the engine fails a request that has one.
The module knows a tokenizer's tokens and rows of logprobs, and no request.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

import numpy as np
from typing_extensions import TypedDict

from cluster.detokenizer import TokenTable
from scheduler.logprobs import Logprobs

LOWEST_LOGPROB = -9999.0


class CompletionLogprobs(TypedDict):
    """Of a completion: lists with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """None where the prompt has no row: at its first token, and before `prompt_logprobs_start`."""
    top_logprobs: list[dict[str, float] | None]
    """The token and the likeliest ones, by their strings; of equal strings the first one counts."""
    text_offset: list[int]


class TopLogprob(TypedDict):
    """A token that was likely at some place."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """A token of a chat's answer."""

    top_logprobs: list[TopLogprob]


class PromptEntry(TypedDict):
    """A token at one place of a prompt."""

    logprob: float
    rank: int
    decoded_token: str | None


class TokenStrings:
    """The strings of one tokenizer's tokens; without a tokenizer they are `token_id:N`."""

    def __init__(self, table: TokenTable | None) -> None:
        self._table = table
        self._found: dict[int, str] = {}

    def string(self, token_id: int) -> str:
        """Return the token's string."""
        found = self._found.get(token_id)
        if found is None:
            found = self._found[token_id] = self._string(token_id)
        return found

    def bytes_of(self, token_id: int) -> bytes | None:
        """Return the token's bytes; None without a tokenizer."""
        return None if self._table is None else self._table.token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""
        return self._table is not None and self._table.is_special(token_id)

    def _string(self, token_id: int) -> str:
        if self._table is None:
            return f"token_id:{token_id}"
        data = self._table.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class Offsets:
    """Where tokens stand in a text, as they come."""

    def __init__(self, skip_special_tokens: bool, start: int = 0) -> None:
        """Begin with `start` characters in front."""
        self._skips = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.num_chars = start
        """Characters that are complete."""

    def take(self, strings: TokenStrings, token_ids: Sequence[int]) -> list[int]:
        """Return the offset of each token."""
        found = []
        for token_id in token_ids:
            found.append(self.num_chars)
            if not (self._skips and strings.is_special(token_id)):
                data = strings.bytes_of(token_id) or b""
                self.num_chars += len(self._utf8.decode(data))
        return found


def prompt_text(strings: TokenStrings, token_ids: Sequence[int], *, skip_special: bool) -> str:
    """Return the text of a prompt's tokens."""
    kept = (t for t in token_ids if not (skip_special and strings.is_special(t)))
    return b"".join(strings.bytes_of(t) or b"" for t in kept).decode(errors="replace")


def echo_of(
    strings: TokenStrings, token_ids: Sequence[int], given: str | None, *, skip_special: bool
) -> tuple[str, list[int]]:
    """Return the text that an echo begins with, and the offset of each token of the prompt.

    Args:
        given: the prompt as text, which is what is echoed then. A tokenizer may put special tokens
            around a text, or read some out of it; the offsets are those under which the tokens
            make up the text. Where nothing does, since the tokenizer changes texts, the offsets
            are at most the text's length.
        skip_special: whether a prompt of token ids is echoed without special tokens.
    """
    for skips in (True, False) if given is not None else (skip_special,):
        text = prompt_text(strings, token_ids, skip_special=skips)
        if given is None or text == given:
            return text, Offsets(skips).take(strings, token_ids)
    offsets = Offsets(True).take(strings, token_ids)
    return given or "", [min(offset, len(given or "")) for offset in offsets]


def as_json(logprobs: np.ndarray[Any, Any]) -> Any:
    """Return logprobs as numbers that JSON has, in lists of the array's shape."""
    return np.maximum(logprobs, np.float32(LOWEST_LOGPROB)).tolist()


def completion_logprobs(
    strings: TokenStrings,
    token_ids: Sequence[int],
    rows: Logprobs,
    num_logprobs: int,
    offsets: list[int],
) -> CompletionLogprobs:
    """Return the logprobs of some tokens in a row.

    Args:
        token_ids: [N]
        rows: of the last of them, at most N.
        num_logprobs: how many of a row's alternatives to show; -1 shows all.
        offsets: [N]
    """
    num_rows = rows.num_rows
    width = _width(rows, num_logprobs)
    values = as_json(rows.logprobs[:, :width])
    ids = rows.token_ids[:, :width].tolist()
    tops: list[dict[str, float] | None] = [None] * (len(token_ids) - num_rows)
    for row_ids, row_values in zip(ids, values, strict=True):
        top: dict[str, float] = {}
        for token_id, value in zip(row_ids, row_values, strict=True):
            top.setdefault(strings.string(token_id), value)
        tops.append(top)
    leading: list[float | None] = [None] * (len(token_ids) - num_rows)
    return {
        "tokens": [strings.string(token_id) for token_id in token_ids],
        "token_logprobs": leading + [row[0] for row in values],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


def chat_logprobs(strings: TokenStrings, rows: Logprobs) -> list[TokenLogprob]:
    """Return the logprobs of tokens of an answer; a row's alternatives are its `top_logprobs`."""
    found: list[TokenLogprob] = []
    for row_ids, values in zip(rows.token_ids.tolist(), as_json(rows.logprobs), strict=True):
        entries = [
            _top(strings, token_id, value) for token_id, value in zip(row_ids, values, strict=True)
        ]
        found.append({**entries[0], "top_logprobs": entries[1:]})
    return found


def prompt_entries(
    strings: TokenStrings, num_tokens: int, rows: Logprobs, num_logprobs: int
) -> list[dict[str, PromptEntry] | None]:
    """Return what each token of a prompt has: None without a row, else entries by token id.

    Args:
        rows: of the last tokens, at most `num_tokens`.
        num_logprobs: how many of a row's alternatives to show; -1 shows all.
    """
    width = _width(rows, num_logprobs)
    columns = zip(
        rows.token_ids[:, :width].tolist(),
        as_json(rows.logprobs[:, :width]),
        rows.ranks[:, :width].tolist(),
        strict=True,
    )
    found: list[dict[str, PromptEntry] | None] = [None] * (num_tokens - rows.num_rows)
    for row in columns:
        entry: dict[str, PromptEntry] = {}
        for token_id, value, rank in zip(*row, strict=True):
            text = strings.string(token_id)
            made: PromptEntry = {"logprob": value, "rank": rank, "decoded_token": text}
            entry.setdefault(str(token_id), made)
        found.append(entry)
    return found


def _width(rows: Logprobs, num_logprobs: int) -> int:
    return rows.width if num_logprobs < 0 else min(num_logprobs + 1, rows.width)


def _top(strings: TokenStrings, token_id: int, value: float) -> TopLogprob:
    data = strings.bytes_of(token_id)
    return {
        "token": strings.string(token_id),
        "logprob": value,
        "bytes": None if data is None else list(data),
    }
