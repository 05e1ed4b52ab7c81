"""Fused loops on CPU over rows of numbers, compiled at run time by numba.

The module knows arrays and formulas; it knows no torch, model or request. Numbers are fp32, or
bfloat16 as its bits in uint16; all arithmetic is fp32. Rules:
- A row (or an element) is computed by a loop of its own, so its bits do not depend on the rest of
  the batch, on alignment or on threads: there is one piece of code for it, whoever runs it
  (`workers.kernel_team`).
- Elementwise formulas allow the compiler no freedom, so that numbers in whole vectors and those
  left over are rounded alike. Sums may be put into vectors, in an order that depends on the row's
  length (and on the machine: see `workers.fused.signature`).
- Arrays are C-contiguous: a loop over strided numbers would be another loop.
- What several files of kernels use is in `workers.kernel_arithmetic`.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from workers.compiled import helper, kernel
from workers.kernel_arithmetic import (
    EXACT,
    HIGHEST,
    INF,
    ONE,
    ZERO,
    exp,
    max_of,
    narrow,
    number_at,
    place_of,
    pointer_to,
    sum_of_exp,
    sum_of_squares,
    widen,
)
from workers.kernel_team import on_team


@kernel
def rms_norm(threads: Any, x: Any, scale: Any, eps: Any, rounds_first: Any, out: Any) -> None:
    """Write x / sqrt(mean(x^2) + eps) * scale to `out`.

    Args:
        threads: how many to use.
        x: [rows, width]; `out` likewise, of the same type.
        scale: fp32 [width].
        eps: fp32.
        rounds_first: whether the quotient is rounded to the array's type before it is scaled.
        out: another array than x.
    """
    on_team(rms_norm_part, threads, x.shape[0], (x, scale, eps, rounds_first, out))


@helper(EXACT)
def rms_norm_part(
    x: Any, scale: Any, eps: Any, rounds_first: Any, out: Any, first: Any, end: Any
) -> None:
    """Do it for some rows."""
    width = np.float32(x.shape[1])
    for i in range(first, end):
        row, result = x[i], out[i]
        factor = ONE / np.sqrt(sum_of_squares(row) / width + eps)
        if rounds_first:
            for j in range(row.shape[0]):
                quotient = narrow(widen(row[j]) * factor, row[j])
                result[j] = narrow(widen(quotient) * scale[j], row[j])
        else:
            for j in range(row.shape[0]):
                result[j] = narrow(widen(row[j]) * factor * scale[j], row[j])


@kernel
def gate_silu(threads: Any, both: Any, out: Any) -> None:
    """Write silu(gate) * up to `out`; silu is rounded to the arrays' type first.

    Args:
        threads: how many to use.
        both: [rows, 2 * width]: gate, then up.
        out: [rows, width].
    """
    on_team(gate_silu_part, threads, out.shape[0], (both, out))


@helper(EXACT)
def gate_silu_part(both: Any, out: Any, first: Any, end: Any) -> None:
    """Do it for some rows."""
    width = out.shape[1]
    for i in range(first, end):
        gate, up, result = both[i, :width], both[i, width:], out[i]
        for j in range(width):
            x = widen(gate[j])
            power = INF if -x > HIGHEST else exp(-x)
            active = narrow(x / (ONE + power), gate[j])
            result[j] = narrow(widen(active) * widen(up[j]), gate[j])


@kernel
def rotate(
    threads: Any, address: Any, stride_bytes: Any, like: Any, cos: Any, sin: Any, out: Any
) -> None:
    """Write x * cos + (-second half of x, first half of x) * sin to `out`.

    Args:
        threads: how many to use.
        address: of x, [tokens, heads, width], of which a token's numbers are side by side.
        stride_bytes: from token to token.
        like: a number of the type of x.
        cos: [tokens, width]; `sin` likewise. Each product is rounded to the arrays' type.
        out: [tokens, heads, width], another array than x.
    """
    on_team(rotate_part, threads, out.shape[0], (address, stride_bytes, like, cos, sin, out))


@helper(EXACT)
def rotate_part(
    address: Any, stride_bytes: Any, like: Any, cos: Any, sin: Any, out: Any, first: Any, end: Any
) -> None:
    """Do it for some rows."""
    heads, width = out.shape[1], out.shape[2]
    half = width // 2
    crossed = np.empty(width, np.float32)
    for token in range(first, end):
        cosines, sines = cos[token], sin[token]
        own = numba.carray(pointer_to(address + token * stride_bytes, like), (heads, width))
        for head in range(heads):
            row, result = own[head], out[token, head]
            for j in range(half):
                crossed[j] = -widen(row[half + j])
            for j in range(half):
                crossed[half + j] = widen(row[j])
            for j in range(width):
                straight = narrow(widen(row[j]) * widen(cosines[j]), row[j])
                across = narrow(crossed[j] * widen(sines[j]), row[j])
                result[j] = narrow(widen(straight) + widen(across), row[j])


@helper(EXACT)
def part_of_row(parts: Any, part: Any, i: Any, like: Any) -> Any:
    """Return the numbers that row i has in a part; see `normalise`."""
    address, stride_bytes, width = parts[part]
    return numba.carray(pointer_to(address + i * stride_bytes, like), (width,))


@helper(EXACT)
def logprob(x: Any, largest: Any, log_sum: Any) -> Any:
    """Return what a logit, or one that was widened, comes to."""
    return (widen(x) - largest) - log_sum


@kernel
def normalise(
    threads: Any, parts: Any, like: Any, largest: Any, log_sums: Any, best_ids: Any
) -> None:
    """Find what makes logprobs of rows of logits: logprob = (logit - largest) - log_sum.

    Args:
        threads: how many to use.
        parts: int64 [parts, 3]: address, bytes from row to row and width of each matrix of
            logits; side by side these are the vocabulary.
        like: a number of the matrices' type.
        largest: fp32 [rows], written.
        log_sums: fp32 [rows], written: log(sum(exp(logit - largest))), NaN where the row is spoilt.
        best_ids: int64 [rows], written: the lowest id of those with the largest logprob.
    """
    on_team(_normalise, threads, largest.shape[0], (parts, like, largest, log_sums, best_ids))


@helper(EXACT)
def _normalise(
    parts: Any, like: Any, largest: Any, log_sums: Any, best_ids: Any, first: Any, end: Any
) -> None:
    """Do it for some rows."""
    count = parts.shape[0]
    maxima, sums = np.empty(count, np.float32), np.empty(count, np.float32)
    for i in range(first, end):
        top = -INF
        for part in range(count):
            numbers = part_of_row(parts, part, i, like)
            maximum = max_of(numbers)
            maxima[part] = maximum
            sums[part] = ZERO if maximum == -INF else sum_of_exp(numbers, maximum)
            top = maximum if maximum > top else top
        total = ZERO
        for part in range(count):
            share = ZERO if sums[part] == ZERO else sums[part] * exp(maxima[part] - top)
            total += share
        # A logarithm in double precision is the same number on every machine once rounded.
        log_sum = np.float32(np.log(np.float64(total)))
        largest[i], log_sums[i] = top, log_sum
        best_ids[i] = _first_of(parts, i, like, maxima, top, log_sum)


@helper(EXACT)
def _first_of(parts: Any, i: Any, like: Any, maxima: Any, largest: Any, log_sum: Any) -> Any:
    """Return the lowest id whose logprob is the largest one; 0 in a spoilt row."""
    best = (largest - largest) - log_sum
    first_id = 0
    for part in range(parts.shape[0]):
        if (maxima[part] - largest) - log_sum == best:
            numbers = part_of_row(parts, part, i, like)
            for j in range(numbers.shape[0]):
                if logprob(numbers[j], largest, log_sum) == best:
                    return first_id + j
        first_id += parts[part, 2]
    return 0


@kernel
def count_greater(
    threads: Any, parts: Any, like: Any, largest: Any, log_sums: Any, values: Any, counts: Any
) -> None:
    """Count in each row the logprobs that are greater than some.

    Args:
        threads: how many to use.
        parts: see `normalise`, as are `like`, `largest` and `log_sums`.
        values: fp32 [rows, values]: logprobs.
        counts: int64 [rows, values], written.
    """
    on_team(
        _count_greater, threads, values.shape[0], (parts, like, largest, log_sums, values, counts)
    )


@helper(EXACT)
def _count_greater(
    parts: Any,
    like: Any,
    largest: Any,
    log_sums: Any,
    values: Any,
    counts: Any,
    first: Any,
    end: Any,
) -> None:
    """Do it for some rows."""
    for i in range(first, end):
        for column in range(values.shape[1]):
            total = 0
            for part in range(parts.shape[0]):
                numbers = part_of_row(parts, part, i, like)
                total += _count(numbers, largest[i], log_sums[i], values[i, column])
            counts[i, column] = total


@helper(EXACT)
def _count(numbers: Any, largest: Any, log_sum: Any, value: Any) -> Any:
    count = np.int32(0)
    for j in range(numbers.shape[0]):
        count = np.int32(count + (logprob(numbers[j], largest, log_sum) > value))
    return count


@kernel
def logprobs_of(
    parts: Any, like: Any, largest: Any, log_sums: Any, token_ids: Any, found: Any
) -> None:
    """Write the logprobs of some tokens of each row.

    Args:
        parts: see `normalise`, as are `like`, `largest` and `log_sums`.
        token_ids: int64 [rows, tokens], within the vocabulary.
        found: fp32 [rows, tokens], written.
    """
    for i in range(found.shape[0]):
        for column in range(found.shape[1]):
            part, place = 0, token_ids[i, column]
            while place >= parts[part, 2]:
                place -= parts[part, 2]
                part += 1
            number = part_of_row(parts, part, i, like)[place]
            found[i, column] = logprob(number, largest[i], log_sums[i])


@kernel
def argmax(threads: Any, parts: Any, like: Any, largest: Any, ids: Any) -> None:
    """Find the largest logit of each row and the lowest id that has it.

    Args:
        threads: how many to use.
        parts: see `normalise`, as is `like`.
        largest: fp32 [rows], written; NaN where the row has one.
        ids: int64 [rows], written.
    """
    on_team(_argmax, threads, ids.shape[0], (parts, like, largest, ids))


@helper(EXACT)
def _argmax(parts: Any, like: Any, largest: Any, ids: Any, first: Any, end: Any) -> None:
    """Do it for some rows."""
    nan = np.float32(np.nan)
    least = place_of(narrow(-INF, like))
    for i in range(first, end):
        first_id, top_part, top_first_id = 0, 0, 0
        top = least
        spoilt = False
        for part in range(parts.shape[0]):
            lowest, highest = _lowest_and_highest_place(part_of_row(parts, part, i, like))
            # A NaN's place is above an infinity's or, with its sign bit set, below.
            spoilt = spoilt or lowest < least
            if highest > top:
                top, top_part, top_first_id = highest, part, first_id
            first_id += parts[part, 2]
        ids[i] = 0
        numbers = part_of_row(parts, top_part, i, like)
        for j in range(numbers.shape[0]):
            if place_of(numbers[j]) == top:
                ids[i] = top_first_id + j
                break
        largest[i] = nan if spoilt else widen(number_at(top, like))


@helper(EXACT)
def _lowest_and_highest_place(numbers: Any) -> Any:
    lowest = highest = place_of(numbers[0])
    for j in range(1, numbers.shape[0]):
        place = place_of(numbers[j])
        lowest = place if place < lowest else lowest
        highest = place if place > highest else highest
    return lowest, highest
