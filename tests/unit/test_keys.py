"""Block hashes: equal exactly where the KV is interchangeable, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_store.keys import HashChain, next_hash, root_hash

TOKENS = np.arange(1000, 1100, dtype=np.int32)


def tokens_of(array: np.ndarray):
    return lambda start, end: array[start:end]


def chain(tokens: np.ndarray, namespace="model", salt=None, block_size=4) -> list[bytes]:
    return HashChain(namespace, salt, block_size).hashes(len(tokens), tokens_of(tokens))


def test_a_hash_covers_every_token_before_it():
    changed = TOKENS.copy()
    changed[5] += 1
    before, after = chain(TOKENS), chain(changed)
    assert before[0] == after[0]
    assert not set(before[1:]) & set(after[1:])


def test_equal_blocks_at_different_positions_differ():
    hashes = chain(np.zeros(40, dtype=np.int32))
    assert len(set(hashes)) == 10


def test_only_full_blocks_have_a_hash():
    assert chain(TOKENS[:3]) == []
    assert len(chain(TOKENS[:4])) == 1
    assert len(chain(TOKENS[:7])) == 1
    assert chain(TOKENS[:7]) == chain(TOKENS[:4])


def test_a_growing_chain_equals_one_made_at_once_and_asks_for_no_token_twice():
    asked: list[int] = []

    def source(start: int, end: int) -> np.ndarray:
        asked.extend(range(start, end))
        return TOKENS[start:end]

    growing = HashChain("model", "salt", 4)
    for num_tokens in range(len(TOKENS) + 1):
        assert growing.hashes(num_tokens, source) == chain(TOKENS[:num_tokens], salt="salt")
    assert asked == list(range(100))
    assert len(growing) == 25


def test_a_chain_can_be_asked_for_fewer_tokens_than_it_has_hashed():
    growing = HashChain("model", None, 4)
    growing.extend(100, tokens_of(TOKENS))
    assert growing.hashes(9, tokens_of(TOKENS)) == chain(TOKENS)[:2]


def test_a_chain_is_made_of_next_hash_over_little_endian_int32():
    first = next_hash(root_hash("model", None), TOKENS[:4].astype("<i4").tobytes())
    second = next_hash(first, memoryview(TOKENS[4:8].astype("<i4").tobytes()))
    assert chain(TOKENS[:8]) == [first, second]
    assert [len(block_hash) for block_hash in (first, second)] == [16, 16]


def test_tokens_of_any_memory_layout_and_byte_order_hash_the_same():
    spread = np.repeat(TOKENS, 2)[::2]
    big_endian = TOKENS.astype(">i4")
    assert chain(spread) == chain(big_endian) == chain(TOKENS)


def test_tokens_that_are_not_int32_are_refused():
    with pytest.raises(TypeError):
        chain(TOKENS.astype(np.int64))


@pytest.mark.parametrize("given_tokens", [TOKENS[:3], TOKENS[:5], TOKENS[:4].reshape(2, 2)])
def test_a_source_that_gives_the_wrong_tokens_is_refused(given_tokens):
    with pytest.raises(ValueError, match="tokens"):
        HashChain("model", None, 4).extend(4, lambda start, end: given_tokens)


def test_a_block_size_below_one_is_refused():
    with pytest.raises(ValueError, match="block_size=0"):
        HashChain("model", None, 0)


def test_salts_and_namespaces_that_look_alike_never_collide():
    """An unset salt is not the empty one; delimiters and other fields' values change nothing."""
    fields = [
        "",
        "a",
        "b",
        "ab",
        "a|b",
        "|",
        "\x00",
        "\x01",
        "None",
        "model",
        "a\x00",
        "é",
        "\ud800",
    ]
    roots = {root_hash(name, salt) for name in fields for salt in [None, *fields]}
    assert len(roots) == len(fields) * (len(fields) + 1)


@given(*[st.tuples(st.text(), st.none() | st.text())] * 2)
def test_roots_are_equal_only_for_equal_fields(one, other):
    assert (root_hash(*one) == root_hash(*other)) == (one == other)


def test_no_block_is_shared_across_salts_or_namespaces():
    variants = [
        chain(TOKENS, namespace, salt)
        for namespace in ("model", "other")
        for salt in (None, "", "a", "model")
    ]
    assert len({block_hash for hashes in variants for block_hash in hashes}) == 8 * 25


def test_processes_with_different_hash_seeds_make_equal_keys():
    """Workers and stores are separate processes, and nobody sets PYTHONHASHSEED."""
    script = (
        "import numpy as np; from offload_store.keys import HashChain;"
        "chain = HashChain('model', 'salt', 4); tokens = np.arange(1000, 1100, dtype=np.int32);"
        "print(hash('x'), b''.join(chain.hashes(100, lambda s, e: tokens[s:e])).hex())"
    )
    answers = []
    for seed in (None, "1", "2"):
        env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
        env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
        env |= {} if seed is None else {"PYTHONHASHSEED": seed}
        out = subprocess.run(
            [sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True
        ).stdout
        answers.append(out.split())
    assert len({string_hash for string_hash, _ in answers}) == 3
    assert {keys for _, keys in answers} == {b"".join(chain(TOKENS, salt="salt")).hex()}
