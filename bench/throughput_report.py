"""The throughput benchmark's table, its Markdown page and its chart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
from rich.table import Table

from bench.measuring import Measured
from bench.peers.catalogue import PEERS
from bench.workloads import OURS, RESULT

matplotlib.use("Agg")

_HEADINGS = ["workload", "figure"]


def table(measured: list[Measured]) -> Table:
    """Return the figures as a table for a terminal."""
    sides = _sides(measured)
    shown = Table(title=f"medians; in brackets {OURS} over the other side")
    for heading in [*_HEADINGS, *sides, "to reach"]:
        shown.add_column(heading, justify="right" if heading in sides else "left")
    for row in _rows(measured, sides):
        shown.add_row(*row)
    return shown


def markdown(report: dict[str, Any], measured: list[Measured]) -> str:
    """Return the figures, and what they were measured with, as a page."""
    sides = _sides(measured)
    headings = [*_HEADINGS, *sides, "to reach"]
    aligned = ["--:" if heading in sides else "---" for heading in headings]
    turns = "one turn" if report["repeats"] == 1 else f"{report['repeats']} turns"
    chart = ["![tokens per second](throughput.png)", ""] if has_chart(measured) else []
    lines = [
        "# Throughput beside other engines",
        "",
        f"Medians of {turns} of each side, "
        f"{report['threads']} threads each; in brackets {OURS} over the other side. `make bench` "
        f"makes this page.",
        "",
        *(_line(cells) for cells in (headings, aligned, *_rows(measured, sides))),
        "",
        *chart,
        *(f"- `{m.workload.name}`: {m.workload.story}." for m in measured),
        "",
        "Tokens of a scored prompt count whether or not they had to be computed.",
        "",
        "## Measured with",
        "",
        *(_named("machine", report["machine"])),
        *(_named("versions", report["versions"])),
        *(_named(OURS, report["engine"])),
        *(line for name, about in report["peers"].items() for line in _named(name, about)),
        *(f"- {name} is absent: {reason}" for name, reason in report["absent"].items()),
    ]
    failed = [(m.workload.name, *each) for m in measured for each in m.absent.items()]
    lines += [
        f"- {name} has no figures in `{workload}`: {reason}"
        for workload, name, reason in failed
        if name not in report["absent"]
    ]
    return "\n".join(lines) + "\n"


def has_chart(measured: list[Measured]) -> bool:
    """Return whether there is a workload that `draw` has a point for."""
    return any(each.workload.point is not None for each in measured)


def draw(measured: list[Measured], path: Path) -> None:
    """Draw tokens/s against prompt length and against batch size."""
    from matplotlib import pyplot

    panels = {"prompt tokens": "scoring, k=1", "requests in a batch": "greedy generation"}
    figure, all_axes = pyplot.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for axes, (quantity, title) in zip(all_axes, panels.items(), strict=True):
        lines: dict[str, list[tuple[int, float]]] = {}
        for each in measured:
            if each.workload.point is None or each.workload.point[0] != quantity:
                continue
            for side in each.figures[each.workload.rate]:
                median = each.median(each.workload.rate, side)
                if median is not None:
                    lines.setdefault(side, []).append((each.workload.point[1], median))
        for side in sorted(lines, key=lambda name: (name != OURS, name)):
            xs, ys = zip(*sorted(lines[side]), strict=True)
            axes.plot(xs, ys, marker="o", linewidth=2.5 if side == OURS else 1.5, label=side)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axes.set(xlabel=quantity, ylabel="tokens/s", title=title, ylim=(0, None))
        if lines:
            axes.set_xticks(sorted({x for points in lines.values() for x, _ in points}))
            axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _sides(measured: list[Measured]) -> list[str]:
    """Return all sides that have a figure, ours first."""
    found = {side for m in measured for values in m.figures.values() for side in values}
    return [side for side in (OURS, *PEERS, RESULT) if side == OURS or side in found]


def _rows(measured: list[Measured], sides: list[str]) -> list[list[str]]:
    rows = []
    for each in measured:
        for figure in each.figures:
            cells = [_cell(each, figure, side) for side in sides]
            goals = [
                f"{text.removeprefix(figure).strip()}: {_verdict(is_met)}"
                for text, is_met in each.goals()
                if text.startswith(figure)
            ]
            rows.append([each.workload.name, figure, *cells, "; ".join(goals)])
    return rows


def _cell(measured: Measured, figure: str, side: str) -> str:
    median, ratio = measured.median(figure, side), measured.ratio(figure, side)
    if median is None:
        return "absent" if side in measured.absent else ""
    shown = f"{median:,.0f}" if median >= 100 else f"{median:.3g}"
    return shown if side == OURS or ratio is None else f"{shown} ({ratio:.2f})"


def _verdict(is_met: bool | None) -> str:
    return {True: "met", False: "not met", None: "not compared"}[is_met]


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _named(name: str, values: dict[str, Any]) -> list[str]:
    told = ", ".join(f"{key} {value}" for key, value in values.items())
    return [f"- {name}: {told}"]
