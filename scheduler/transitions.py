"""The life of a request as a table: which status may follow which, and why.

`change_status` is the only place that changes a request's status. The documentation's state
diagram is drawn from `TRANSITIONS`.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.errors import InvalidTransition
from scheduler.request import Request, RequestStatus

_S = RequestStatus

TRANSITIONS: dict[tuple[RequestStatus, RequestStatus], str] = {
    (_S.WAITING, _S.LOADING): "admitted to a worker; the offload store may have its blocks",
    (_S.WAITING, _S.RUNNING): "admitted to a worker; nothing to ask the offload store for",
    (_S.WAITING, _S.FINISHED): "aborted, or no worker can take it",
    (_S.LOADING, _S.RUNNING): "the offload store has supplied what it could",
    (_S.LOADING, _S.WAITING): "evicted, or its worker was lost",
    (_S.LOADING, _S.FINISHED): "aborted, or no worker is left",
    (_S.RUNNING, _S.SAVING): "evicted; its full blocks go to the offload store",
    (_S.RUNNING, _S.WAITING): "evicted with nothing to save, or its worker was lost",
    (_S.RUNNING, _S.FINISHED): "stop, length, abort or error",
    (_S.SAVING, _S.WAITING): "saved, or the save failed, or its worker was lost",
    (_S.SAVING, _S.FINISHED): "aborted, or no worker is left",
}


def change_status(request: Request, to: RequestStatus, story: Iterable[str]) -> None:
    """Move `request` to status `to`.

    Args:
        request: the request to change.
        to: the status wanted.
        story: what happened to it so far, oldest first.

    Raises:
        InvalidTransition: the table has no such edge; the message tells the story.
    """
    if (request.status, to) not in TRANSITIONS:
        told = "; ".join(story) or "nothing happened to it yet"
        raise InvalidTransition(
            f"request {request.request_id!r} can't go from {request.status.value} to {to.value}. "
            f"Its story: {told}",
            request_id=request.request_id,
            source=request.status.value,
            target=to.value,
        )
    request.status = to
