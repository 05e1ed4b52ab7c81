"""From token ids to text, exactly and as it comes, and where stop strings end it.

Rules:
- A token is bytes; text is those bytes read as UTF-8. The first bytes of a character are held back
  until the rest is there, so joined pieces are the text. Bytes that are no UTF-8 become U+FFFD.
- Text is a continuation: the space in front of a first word is kept.
- Generation ends with the character that completes a stop string, whichever is complete first (the
  longest of those that end there). The text is cut before it, or behind it with
  `include_stop_str_in_output`; token ids keep the token that brought the character. Text that may
  be the beginning of a stop string is held back. A stop string that is complete within the first
  `min_tokens` tokens is no reason to stop.
- The text of a token id that ended generation is left out, unless `include_stop_str_in_output`.
The module knows tokenizers, and no request, no model and no Ray.
"""

from __future__ import annotations

import bisect
import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from scheduler.sampling_params import SamplingParams

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the printable stand-in of each byte in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    alphabet = {chr(b): b for b in printable}
    alphabet.update({chr(256 + i): b for i, b in enumerate(others)})
    return alphabet


_ALPHABET = _byte_level_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[c] for c in token)
    except KeyError:
        return token.encode()


def _byte_fallback_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\u2581", " ").encode()


class TokenTable:
    """Bytes and text of each token id of one tokenizer."""

    def __init__(self, tokenizer: Callable[[], Any]) -> None:
        """Ask for the tokenizer (of transformers) when a token is first looked at."""
        self._ask = tokenizer
        self._bytes: dict[int, bytes] = {}

    @cached_property
    def tokenizer(self) -> Any:
        """What the tokens are of."""
        return self._ask()

    @cached_property
    def _to_bytes(self) -> Callable[[str], bytes] | None:
        return _bytes_rule(self.tokenizer)

    @cached_property
    def _added(self) -> dict[int, str]:
        return {int(i): str(token.content) for i, token in self._added_tokens().items()}

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(int(i) for i, token in self._added_tokens().items() if token.special)

    def _added_tokens(self) -> dict[Any, Any]:
        return dict(getattr(self.tokenizer, "added_tokens_decoder", {}))

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return token_id in self._special

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's bytes, none for an id that the tokenizer does not use."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def token_text(self, token_id: int) -> str:
        """Return the token's bytes as text, U+FFFD where they are none by themselves."""
        return self.token_bytes(token_id).decode(errors="replace")

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added and self._to_bytes is _byte_level_bytes:
            return self._added[token_id].encode()
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._to_bytes is not None:
            return self._to_bytes(token)
        return self._bytes_by_decoding(token_id)

    def _bytes_by_decoding(self, token_id: int) -> bytes:
        """Ask the tokenizer for the text that the token adds behind another one."""
        alone = self.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
        doubled = self.tokenizer.decode([token_id] * 2, clean_up_tokenization_spaces=False)
        return str(doubled[len(alone) :]).encode()


def _bytes_rule(tokenizer: Any) -> Callable[[str], bytes] | None:
    """Return how a vocabulary entry becomes bytes; None where only the tokenizer itself knows."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.decoder is None:
        return None
    spec = json.loads(backend.decoder.__getstate__())
    kinds = {part["type"] for part in spec.get("decoders", [spec])}
    if "ByteLevel" in kinds:
        return _byte_level_bytes
    if "ByteFallback" in kinds:
        return _byte_fallback_bytes
    return None


class StopStrings:
    """Looks for strings in a text as it grows, and takes hardly longer for many than for one."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._known = frozenset(strings)
        self._in_order = sorted(self._known)
        self._lengths = sorted({len(s) for s in self._known}, reverse=True)

    def __bool__(self) -> bool:
        return bool(self._known)

    def ending_at(self, text: str, end: int) -> str | None:
        """Return the longest string that ends at `end` of the text."""
        for length in self._lengths:
            if length <= end and (found := text[end - length : end]) in self._known:
                return found
        return None

    def num_begun(self, text: str) -> int:
        """Return the length of the longest end of `text` that is less than a string it begins."""
        longest = self._lengths[0] if self._lengths else 0
        for length in range(min(longest - 1, len(text)), 0, -1):
            begun = text[-length:]
            next_one = bisect.bisect_right(self._in_order, begun)
            if next_one < len(self._in_order) and self._in_order[next_one].startswith(begun):
                return length
        return 0


class Detokenizer:
    """Text of one continuation, fed with token ids as they come."""

    def __init__(self, table: TokenTable, params: SamplingParams) -> None:
        self._table = table
        self._params = params
        self._stops = StopStrings(params.stop)
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._searched = ""
        self._parts: list[str] = []
        self.num_tokens = 0
        """Tokens that belong to the continuation; later ones are ignored."""
        self.stop_string: str | None = None
        """The stop string that ended it."""

    @property
    def text(self) -> str:
        """All text returned so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def append(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> str:
        """Take in new tokens and return the text that can be shown because of them.

        Args:
            token_ids: the tokens after those of the previous call.
            ends_with_stop_token: the last one ended generation and is no text.
        """
        shown: list[str] = []
        for position, token_id in enumerate(token_ids):
            if self.stop_string is not None:
                break
            self.num_tokens += 1
            silent = (
                ends_with_stop_token
                and position == len(token_ids) - 1
                and not self._params.include_stop_str_in_output
            ) or (self._params.skip_special_tokens and self._table.is_special(token_id))
            if not silent:
                new = self._utf8.decode(self._table.token_bytes(token_id))
                shown.append(self._take(new))
        return self._show("".join(shown))

    def finish(self) -> str:
        """Return what was held back; nothing more will come."""
        if self.stop_string is not None:
            return ""
        shown = self._take(self._utf8.decode(b"", final=True))
        if self.stop_string is None:
            shown += self._searched
            self._searched = ""
        return self._show(shown)

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    def _take(self, new: str) -> str:
        """Search `new` for the end of a stop string and return what can be shown."""
        if not self._stops:
            return new
        searchable = self.num_tokens > self._params.min_tokens
        held = self._searched + new
        for end in range(len(self._searched) + 1, len(held) + 1):
            stop = self._stops.ending_at(held, end) if searchable else None
            if stop is not None:
                self.stop_string = stop
                keep_stop = self._params.include_stop_str_in_output
                return held[: end if keep_stop else end - len(stop)]
        num_held = self._stops.num_begun(held)
        self._searched = held[len(held) - num_held :]
        return held[: len(held) - num_held]
