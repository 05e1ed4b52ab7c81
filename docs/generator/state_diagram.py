"""`docs/images/state-diagram.svg`: a request's life, drawn from `scheduler.transitions`.

Where the boxes stand is told here; which edges there are, and why, is the table's business. A
status without a place stops the script.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

from scheduler.request import RequestStatus
from scheduler.transitions import TRANSITIONS

_S = RequestStatus
_WIDTH = 900
_BOX_WIDTH, _BOX_HEIGHT = 132, 44
_PLACES = {
    _S.WAITING: (130, 190),
    _S.LOADING: (410, 70),
    _S.RUNNING: (560, 190),
    _S.SAVING: (410, 310),
    _S.FINISHED: (800, 190),
}
"""Centres of the boxes, in pixels."""
_BENDS = {
    (_S.WAITING, _S.FINISHED): -390.0,
    (_S.LOADING, _S.FINISHED): 60.0,
    (_S.SAVING, _S.FINISHED): -60.0,
    (_S.RUNNING, _S.FINISHED): 0.0,
}
"""How far edges leave the straight line to their left, where the usual would cross a box."""
_USUAL_BEND = 34.0
_LEGEND_TOP, _LINE_HEIGHT = 440, 24
_STYLE = """\
  text { font: 14px system-ui, sans-serif; fill: #1f2328; }
  .box { fill: #ddf4ff; stroke: #0969da; stroke-width: 1.5; }
  .end { fill: #f6f8fa; stroke: #59636e; }
  .edge { fill: none; stroke: #59636e; stroke-width: 1.5; marker-end: url(#tip); }
  .tip { fill: #59636e; }
  .mark { fill: #ffffff; stroke: #59636e; }
  .name { font-weight: 600; text-anchor: middle; }
  .number { font-size: 12px; text-anchor: middle; }
  @media (prefers-color-scheme: dark) {
    text { fill: #f0f6fc; }
    .box { fill: #10243e; stroke: #4493f8; }
    .end { fill: #161b22; stroke: #9198a1; }
    .edge { stroke: #9198a1; }
    .tip { fill: #9198a1; }
    .mark { fill: #0d1117; stroke: #9198a1; }
  }
"""


class _Point(NamedTuple):
    x: float
    y: float

    def towards(self, other: _Point, share: float) -> _Point:
        return _Point(self.x + (other.x - self.x) * share, self.y + (other.y - self.y) * share)


def state_diagram() -> str:
    """Return the picture."""
    height = _LEGEND_TOP + _LINE_HEIGHT * len(TRANSITIONS)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img" '
        'aria-labelledby="title">',
        '<title id="title">The statuses of a request, and what leads from one to another</title>',
        f"<style>\n{_STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        'markerHeight="8" orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>',
        _entrance(),
    ]
    parts += [_edge(n, *edge) for n, edge in enumerate(TRANSITIONS, start=1)]
    parts += [_box(status) for status in RequestStatus]
    parts += [_line(n, *item) for n, item in enumerate(TRANSITIONS.items(), start=1)]
    return "\n".join([*parts, "</svg>", ""])


def _box(status: RequestStatus) -> str:
    x, y = _PLACES[status]
    kind = "box" if any(source is status for source, _ in TRANSITIONS) else "box end"
    return (
        f'<rect class="{kind}" x="{x - _BOX_WIDTH // 2}" y="{y - _BOX_HEIGHT // 2}" '
        f'width="{_BOX_WIDTH}" height="{_BOX_HEIGHT}" rx="8"/>'
        f'<text class="name" x="{x}" y="{y + 5}">{status.name}</text>'
    )


def _entrance() -> str:
    x, y = _PLACES[_S.WAITING]
    left = x - _BOX_WIDTH // 2
    return f'<path class="edge" d="M{left - 50} {y} L{left} {y}"/>'


def _edge(number: int, source: RequestStatus, target: RequestStatus) -> str:
    begin, end = _Point(*_PLACES[source]), _Point(*_PLACES[target])
    bend = _BENDS.get((source, target), _USUAL_BEND)
    length = ((end.x - begin.x) ** 2 + (end.y - begin.y) ** 2) ** 0.5
    middle = begin.towards(end, 0.5)
    # To the left of who goes from source to target, so that there and back are two curves.
    control = _Point(
        middle.x + bend * (end.y - begin.y) / length, middle.y - bend * (end.x - begin.x) / length
    )
    first, last = _at_border(begin, control), _at_border(end, control)
    mark = first.towards(control, 0.5).towards(control.towards(last, 0.5), 0.5)
    return (
        f'<path class="edge" d="M{first.x:.1f} {first.y:.1f} Q{control.x:.1f} {control.y:.1f} '
        f'{last.x:.1f} {last.y:.1f}"/>{_number(mark, number)}'
    )


def _at_border(centre: _Point, other: _Point) -> _Point:
    """Return where the line from a box's centre to another point leaves the box."""
    dx, dy = abs(other.x - centre.x), abs(other.y - centre.y)
    share = min(
        _BOX_WIDTH / 2 / dx if dx else float("inf"), _BOX_HEIGHT / 2 / dy if dy else float("inf")
    )
    return centre.towards(other, share)


def _number(place: _Point, number: int) -> str:
    return (
        f'<circle class="mark" cx="{place.x:.1f}" cy="{place.y:.1f}" r="10"/>'
        f'<text class="number" x="{place.x:.1f}" y="{place.y + 4:.1f}">{number}</text>'
    )


def _line(number: int, edge: tuple[RequestStatus, RequestStatus], reason: str) -> str:
    y = _LEGEND_TOP + _LINE_HEIGHT * (number - 1)
    names = f"{edge[0].name} → {edge[1].name}"
    return (
        f"{_number(_Point(60, y - 5), number)}"
        f'<text x="84" y="{y}">{names}</text><text x="290" y="{y}">{escape(reason)}</text>'
    )
