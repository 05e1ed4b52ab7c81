"""The most likely tokens of rows of logits on CPU, compiled at run time by numba.

A row is looked at once for the largest numbers of groups of neighbours; only groups that have a
number which may be among the k largest so far are gone through one by one. The rules of
`workers.kernels` hold here too.
"""

from __future__ import annotations

from typing import Any

from workers.compiled import helper, kernel
from workers.kernel_arithmetic import EXACT, max_of
from workers.kernel_team import on_team
from workers.kernels import logprob, part_of_row

MAX_K = 256
"""A row keeps its k in order by moving them, which takes longer than sorting where k is large."""
_GROUP = 128


@kernel
def most_likely(
    threads: Any, parts: Any, like: Any, largest: Any, log_sums: Any, values: Any, ids: Any
) -> None:
    """Find the k largest logprobs of each row, descending, equal ones by ascending id.

    Args:
        threads: how many to use.
        parts: see `kernels.normalise`, as are `like`, `largest` and `log_sums`; at least k numbers
            a row. What is found in a row with a NaN means nothing.
        values: fp32 [rows, k], written.
        ids: int64 [rows, k], written.
    """
    on_team(_most_likely, threads, ids.shape[0], (parts, like, largest, log_sums, values, ids))


@helper(EXACT)
def _most_likely(
    parts: Any,
    like: Any,
    largest: Any,
    log_sums: Any,
    values: Any,
    ids: Any,
    first: Any,
    end: Any,
) -> None:
    """Do it for some rows."""
    k = ids.shape[1]
    for i in range(first, end):
        own_values, own_ids = values[i], ids[i]
        found, first_id = 0, 0
        for part in range(parts.shape[0]):
            numbers = part_of_row(parts, part, i, like)
            for begins in range(0, numbers.shape[0], _GROUP):
                group = numbers[begins : begins + _GROUP]
                most = logprob(max_of(group), largest[i], log_sums[i])
                # Of equal ones the first stay: what comes later must be larger.
                if found == k and not most > own_values[k - 1]:
                    continue
                for j in range(group.shape[0]):
                    value = logprob(group[j], largest[i], log_sums[i])
                    if found == k:
                        if not value > own_values[k - 1]:
                            continue
                    else:
                        found += 1
                    place = found - 1
                    while place > 0 and value > own_values[place - 1]:
                        own_values[place] = own_values[place - 1]
                        own_ids[place] = own_ids[place - 1]
                        place -= 1
                    own_values[place] = value
                    own_ids[place] = first_id + begins + j
            first_id += numbers.shape[0]
