"""Text is the tokens' bytes, whatever way the tokens arrive, and ends where a stop string says."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from cluster.detokenizer import Detokenizer, StopStrings, TokenTable
from scheduler.sampling_params import SamplingParams


class FastTokenizer:
    """What `TokenTable` uses of a transformers tokenizer."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)

    def decode(self, token_ids: list[int], **_: Any) -> str:
        return self.backend_tokenizer.decode(token_ids, skip_special_tokens=False)


def byte_level() -> TokenTable:
    """One token per byte (id = byte), then longer words, an end token and a user's added one."""
    alphabet = {}
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    for byte in range(256):
        alphabet[byte] = chr(byte) if byte in printable else chr(next(spare))
    words = ["hello", " world", "STOP", "ST", "OP", "aSTOPb", "€", "é!"]
    vocab = {alphabet[byte]: byte for byte in range(256)}
    for word in words:
        vocab["".join(alphabet[b] for b in word.encode())] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<end>", special=True)])
    backend.add_tokens([AddedToken("é added", special=False)])
    return TokenTable(lambda: FastTokenizer(backend))


WORDS = {"hello": 256, " world": 257, "STOP": 258, "ST": 259, "OP": 260, "aSTOPb": 261}
EURO, END, ADDED = 262, 264, 265


def byte_fallback() -> TokenTable:
    """A vocabulary in the manner of SentencePiece: ids 0..255 are <0x00>..<0xFF>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁the", "▁▁", "cat", "ß"):
        vocab[word] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return TokenTable(lambda: FastTokenizer(backend))


BYTES = byte_level()


def text_of(ids: list[int], table: TokenTable = BYTES, **params: Any) -> str:
    """Return the whole text of tokens that arrive at once."""
    detokenizer = Detokenizer(table, SamplingParams(max_tokens=None, **params))
    return detokenizer.append(ids) + detokenizer.finish()


@given(st.binary(max_size=60), st.data())
def test_joined_pieces_are_the_text_wherever_the_tokens_are_cut(
    data: bytes, choices: st.DataObject
) -> None:
    """Bytes that are no UTF-8 become U+FFFD, those of a split character never do."""
    detokenizer = Detokenizer(BYTES, SamplingParams())
    ids, pieces = list(data), []
    while ids:
        count = choices.draw(st.integers(1, len(ids)))
        pieces.append(detokenizer.append(ids[:count]))
        del ids[:count]
    pieces.append(detokenizer.finish())
    assert "".join(pieces) == data.decode(errors="replace") == detokenizer.text


@given(st.text(max_size=30))
def test_a_character_is_shown_when_its_last_byte_is_there_and_not_before(text: str) -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams())
    for character in text:
        *first, last = character.encode()
        assert detokenizer.append(first) == ""
        assert detokenizer.append([last]) == character


def test_bytes_left_over_at_the_end_become_one_replacement_character() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams())
    assert detokenizer.append([0xE2, 0x82]) == ""
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.text == "\ufffd"


def test_each_token_keeps_its_raw_bytes() -> None:
    assert BYTES.token_bytes(0xFF) == b"\xff"
    assert BYTES.token_bytes(EURO) == "€".encode()
    assert BYTES.token_bytes(WORDS[" world"]) == b" world"
    assert BYTES.token_bytes(ADDED) == "é added".encode()
    assert BYTES.token_text(0xFF) == "\ufffd"


def test_an_id_that_the_tokenizer_does_not_use_has_no_text() -> None:
    """Vocabularies are padded: the model can sample ids that name nothing."""
    assert text_of([WORDS["hello"], 9999]) == "hello"


def test_special_tokens_are_left_out_unless_they_are_wanted() -> None:
    ids = [WORDS["hello"], END, ADDED]
    assert text_of(ids) == "helloé added"
    assert text_of(ids, skip_special_tokens=False) == "hello<end>é added"


def test_a_sentencepiece_vocabulary_keeps_the_space_of_the_first_word() -> None:
    table = byte_fallback()
    ids = [256, 258, 257, *"ß€".encode(), 259]
    assert text_of(ids, table) == " thecat  ß€ß"
    assert table.token_bytes(0xC3) == b"\xc3"


def test_a_vocabulary_of_another_kind_is_asked_for_its_own_text() -> None:
    backend = Tokenizer(models.WordPiece({"un": 0, "##able": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    assert text_of([0, 1], TokenTable(lambda: FastTokenizer(backend))) == " unable"


# ------------------------------------------------------------------------------- stop strings


def run(ids: list[int], step: int, **params: Any) -> Detokenizer:
    """Feed tokens `step` at a time until a stop string is found or they end."""
    detokenizer = Detokenizer(BYTES, SamplingParams(max_tokens=None, **params))
    for start in range(0, len(ids), step):
        detokenizer.append(ids[start : start + step])
    detokenizer.finish()
    return detokenizer


@pytest.mark.parametrize("step", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("ids", "num_tokens"),
    [
        ([*b"say ", WORDS["STOP"], *b" later"], 5),
        ([*b"say ", WORDS["ST"], WORDS["OP"], *b" later"], 6),
        ([*b"say STOP later"], 8),
        ([*b"say S", ord("T"), WORDS["OP"], *b" later"], 7),
    ],
)
def test_a_stop_string_across_tokens_cuts_text_and_counts_tokens(
    ids: list[int], num_tokens: int, step: int
) -> None:
    """Ids and logprobs keep the token that completed it; the text ends before its first letter."""
    detokenizer = run(ids, step, stop=["STOP"])
    assert detokenizer.text == "say "
    assert detokenizer.num_tokens == num_tokens
    assert detokenizer.stop_string == "STOP"


@pytest.mark.parametrize("step", [1, 2, 100])
def test_a_stop_string_inside_a_token_cuts_the_token(step: int) -> None:
    ids = [WORDS["hello"], WORDS["aSTOPb"], *b"more"]
    assert run(ids, step, stop=["STOP"]).text == "helloa"
    kept = run(ids, step, stop=["STOP"], include_stop_str_in_output=True)
    assert kept.text == "helloaSTOP"
    assert kept.num_tokens == 2


@pytest.mark.parametrize("step", [1, 2, 100])
def test_the_stop_string_that_is_complete_first_wins(step: int) -> None:
    ids = list(b"xabcdx")
    assert run(ids, step, stop=["abcd", "bc"]).text == "xa"
    assert run(ids, step, stop=["abcd", "bc"]).stop_string == "bc"
    assert run(ids, step, stop=["c", "abc"]).stop_string == "abc"


def test_text_that_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=["STOP", "\n\n"]))
    shown = [detokenizer.append([token]) for token in b"a STxS\nb"]
    assert shown == ["a", " ", "", "", "STx", "", "S", "\nb"]
    assert detokenizer.append(list(b"ST")) == ""
    assert detokenizer.finish() == "ST"


@given(st.text("ab\n", max_size=12), st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3))
def test_pieces_never_show_what_a_stop_string_takes_back(text: str, stops: list[str]) -> None:
    """Token by token, all at once, or by an independent search: one text."""
    ids = list(text.encode())
    pieces = Detokenizer(BYTES, SamplingParams(stop=tuple(stops), max_tokens=None))
    shown = "".join([pieces.append([token]) for token in ids] + [pieces.finish()])
    expected = text
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            expected = text[: end - max(map(len, ending))]
            break
    assert shown == expected == text_of(ids, stop=tuple(stops))


@pytest.mark.parametrize(
    ("min_tokens", "text"), [(0, ""), (3, ""), (4, "STOPx"), (9, "STOPxSTOPy")]
)
def test_no_stop_string_applies_before_min_tokens_generated_tokens(
    min_tokens: int, text: str
) -> None:
    """The fourth token completes it: it may when 3 tokens were wanted first, not when 4 were."""
    ids = list(b"STOPxSTOPy")
    assert run(ids, 1, stop=["STOP"], min_tokens=min_tokens).text == text
    assert run(ids, 100, stop=["STOP"], min_tokens=min_tokens).text == text


class Looked(str):
    """Counts how often it is looked at."""

    times = 0

    def startswith(self, *arguments: Any) -> bool:
        Looked.times += 1
        return super().startswith(*arguments)

    def __eq__(self, other: object) -> bool:
        Looked.times += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_of_many_stop_strings_few_are_looked_at() -> None:
    stops = StopStrings([Looked(f"<stop {i}>") for i in range(10_000)])
    text = "and so on <stop 9999>"
    Looked.times = 0
    assert [stops.num_begun(text[:end]) for end in (10, 11, 20)] == [0, 1, 10]
    assert stops.ending_at(text, 20) is None
    assert stops.ending_at(text, 21) == "<stop 9999>"
    assert Looked.times < 100


def test_nothing_is_taken_after_a_stop_string() -> None:
    detokenizer = Detokenizer(BYTES, SamplingParams(stop=["\n"]))
    detokenizer.append([*b"a\n"])
    assert detokenizer.append([*b"b"]) == ""
    assert detokenizer.finish() == ""
    assert (detokenizer.text, detokenizer.num_tokens) == ("a", 2)


def test_the_text_of_a_token_that_ends_generation_is_left_out() -> None:
    for include, text in ((False, "a"), (True, "ab")):
        params = SamplingParams(include_stop_str_in_output=include)
        detokenizer = Detokenizer(BYTES, params)
        detokenizer.append([*b"ab"], ends_with_stop_token=True)
        assert detokenizer.text == text
        assert detokenizer.num_tokens == 2
