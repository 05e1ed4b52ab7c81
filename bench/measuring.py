"""Runs workloads over sides, in turns, and keeps what was measured.

Rules:
- Sides take turns within each repeat, every other repeat in the opposite order, so that a change of
  the machine's speed meets all of them; figures are compared repeat by repeat.
- A peer that can't be had, or fails in a workload, is noted as absent with the reason, and the rest
  goes on. A wrong result of the engine ends the run.
- Sides start when a workload first needs them, and do a little of everything before they are timed.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.inputs import Inputs
from bench.peers.catalogue import PeerUnavailable, Show
from bench.peers.protocol import Job, Outcome
from bench.processes import peak_bytes, reset_peaks, resident_bytes
from bench.sides import Engine, PeerSide, Side
from bench.workloads import ANSWERS, GROWTH, OURS, PEAK, RESULT, TTFT, Sizes, Workload, paced

_MIB = 2**20
_WARM_UP_PROMPTS = 4
_WARM_UP_TOKENS = 4
_WARM_UP_SEED = 1


@dataclass
class Measured:
    """What one workload gave."""

    workload: Workload
    figures: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(list))
    )
    """Figure -> side -> one value per repeat (of TTFT one in all)."""
    peaks_mib: dict[str, dict[str, float]] = field(default_factory=lambda: defaultdict(dict))
    """Side -> process -> its highest peak."""
    differences: dict[str, float] = field(default_factory=dict)
    """Peer -> the largest difference of a prompt's mean logprob from ours; or, where tokens were
    generated, the share of requests whose first token differs."""
    absent: dict[str, str] = field(default_factory=dict)
    """Peer -> why it has no figures."""
    cached: list[float] = field(default_factory=list)
    """Of our prompt tokens, the share that caches supplied, per repeat."""

    def median(self, figure: str, side: str) -> float | None:
        """Return a side's figure."""
        values = self.figures[figure].get(side)
        return statistics.median(values) if values else None

    def ratio(self, figure: str, side: str) -> float | None:
        """Return ours over another side's, the median over the repeats."""
        ours, theirs = self.figures[figure].get(OURS), self.figures[figure].get(side)
        if not ours or not theirs or len(ours) != len(theirs):
            return None
        return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))

    def goals(self) -> list[tuple[str, bool | None]]:
        """Return the goals, and whether each is met; None where the other side is absent."""
        found: list[tuple[str, bool | None]] = []
        for goal in self.workload.goals:
            ours, theirs = self.median(goal.figure, OURS), self.median(goal.figure, goal.side)
            is_met = None if ours is None or theirs is None else goal.is_met(ours, theirs)
            found.append((f"{goal.figure} {goal}", is_met))
        return found

    def report(self) -> dict[str, Any]:
        """Return it as one JSON object."""
        sides = {side for figure in self.figures.values() for side in figure}
        return {
            "workload": self.workload.name,
            "story": self.workload.story,
            "figures": {
                figure: {side: rounded(self.median(figure, side)) for side in values}
                for figure, values in self.figures.items()
            },
            "ratios": {
                figure: {side: rounded(self.ratio(figure, side)) for side in values if side != OURS}
                for figure, values in self.figures.items()
            },
            "goals": dict(self.goals()),
            "repeats": {
                figure: {side: [rounded(v) for v in all_] for side, all_ in values.items()}
                for figure, values in self.figures.items()
            },
            "peaks_mib": {s: self.peaks_mib[s] for s in sorted(self.peaks_mib) if s in sides},
            "differences": {s: rounded(value) for s, value in self.differences.items()},
            "absent": self.absent,
            "cached_share": rounded(statistics.median(self.cached)) if self.cached else None,
        }


class Arena:
    """The sides that are there, and the workloads' turns."""

    def __init__(
        self,
        model: str,
        peers: list[str],
        repeats: int,
        sizes: Sizes,
        threads: int,
        workers: int,
        peer_dtype: str,
        show: Show,
    ) -> None:
        """Start the engine.

        Args:
            model: see `workers.model_store`.
            peers: names of `bench.peers.catalogue.PEERS`.
            repeats: of each workload.
            sizes: of the workloads; here, of what warms a side up.
            threads: of each side.
            workers: of the engine, which share its threads.
            peer_dtype: of the peers' weights.
            show: told how it goes.
        """
        self._model, self._peer_names = model, peers
        self._threads, self._workers, self._peer_dtype = threads, workers, peer_dtype
        self._repeats, self._sizes, self._show = repeats, sizes, show
        self.abouts: dict[str, dict[str, Any]] = {}
        """Side -> what it said of itself."""
        self.missing: dict[str, str] = {}
        """Peer -> why it can't be had at all."""
        self._peers: dict[str, PeerSide] = {}
        self._used: set[str] = set()
        """Sides that have been measured since they were started."""
        self.engine = Engine(model, threads, workers)
        self._inputs = Inputs(self.engine.vocab_size)
        self._warm_up(self.engine)

    def close(self) -> None:
        """End all sides."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        self.engine.close()

    def measure(self, workload: Workload) -> Measured:
        """Run one workload, all its repeats."""
        self._show(f"{workload.name}: {workload.story}")
        measured = Measured(workload)
        sides = self._sides(workload, measured)
        idle = {part: resident_bytes(pid) for part, pid in self.engine.pids().items()}
        for repeat in range(self._repeats):
            job = workload.make(self._inputs)
            outcomes: dict[str, Outcome] = {}
            for side in _in_turn(sides, repeat):
                try:
                    outcomes[side.name] = self._turn(side, job, measured, idle)
                except PeerUnavailable as error:
                    self._drop(side, str(error), measured)
                    sides.remove(side)
            _compare(job, outcomes, measured)
            self._show(f"  {repeat + 1}/{self._repeats}: {_told(measured)}")
        if workload.load_share is not None:
            self._measure_waits(workload, sides, measured)
        return measured

    # ---------------------------------------------------------------------------------- turns

    def _turn(self, side: Side, whole: Job, measured: Measured, idle: dict[str, int]) -> Outcome:
        """Have one side do a job, and note what it took."""
        workload = measured.workload
        job = whole if side.name == OURS else whole.first(workload.peer_prompts)
        if workload.is_primed:
            side.run(job)
        pids = side.pids()
        reset_peaks(pids.values())
        outcome = side.run(job)
        peaks = {part: peak_bytes(pid) for part, pid in pids.items()}
        _check(side, job, outcome)
        if side.name == OURS and job.kind != "serve":
            measured.cached.append(outcome.num_cached / sum(map(len, job.prompts)))
        count = len(job.prompts) if workload.rate == ANSWERS else job.num_tokens
        measured.figures[workload.rate][side.name].append(count / outcome.seconds)
        if workload.shows_peak and side.name != "linear":
            measured.figures[PEAK][side.name].append(sum(peaks.values()) / _MIB)
        if any(goal.side == RESULT for goal in workload.goals):
            growths = [peaks[part] - idle[part] for part in peaks]
            measured.figures[GROWTH][side.name].append(max(growths) / _MIB)
            measured.figures[GROWTH][RESULT].append(outcome.result_bytes / _MIB)
        highest = measured.peaks_mib[side.name]
        for part, peak in peaks.items():
            highest[part] = max(highest.get(part, 0.0), round(peak / _MIB, 1))
        return outcome

    def _measure_waits(self, workload: Workload, sides: list[Side], measured: Measured) -> None:
        """Let prompts arrive at a share of what the slowest side can do, and note waits."""
        rates = [rate for side in sides if (rate := measured.median(workload.rate, side.name))]
        waits: dict[str, list[float]] = defaultdict(list)
        for repeat in range(self._repeats):
            job = workload.make(self._inputs)
            span_s = job.num_tokens / (min(rates) * (workload.load_share or 1.0))
            job = paced(job, span_s, repeat)
            for side in _in_turn(sides, repeat):
                try:
                    waits[side.name] += side.run(job).ttft_s
                except PeerUnavailable as error:
                    self._drop(side, str(error), measured)
                    sides.remove(side)
        for side in sides:
            p99_s = float(np.percentile(waits[side.name], 99))
            measured.figures[TTFT][side.name] = [p99_s]
        self._show(f"  arrivals: {_told(measured)}")

    # ---------------------------------------------------------------------------------- sides

    def _sides(self, workload: Workload, measured: Measured) -> list[Side]:
        """Return the sides of a workload, the engine first; start those that are needed."""
        if workload.is_fresh and OURS in self._used:
            self.engine.close()
            self.engine = Engine(self._model, self._threads, self._workers)
            self._warm_up(self.engine)
        sides: list[Side] = [self.engine]
        for name in workload.peers:
            if name not in self._peer_names:
                continue
            if name in self.missing:
                measured.absent[name] = self.missing[name]
                continue
            try:
                sides.append(self._peer(name, workload))
            except PeerUnavailable as error:
                self._show(f"  {name} is absent: {error}")
                self.missing[name] = measured.absent[name] = str(error)
        self._used |= {side.name for side in sides}
        return sides

    def _peer(self, name: str, workload: Workload) -> PeerSide:
        """Return a running peer of the kind that the workload needs."""
        peer = self._peers.get(name)
        if peer is not None:
            is_stale = workload.is_fresh and name in self._used
            if peer.is_serving == workload.is_served and not is_stale:
                return peer
            self._peers.pop(name).close()
        self._show(f"  starting {name}")
        peer = PeerSide(
            name,
            self.engine,
            self._model,
            self._threads,
            self._peer_dtype,
            is_serving=workload.is_served,
            max_logprobs=self._sizes.long_k,
            show=self._show,
        )
        self._peers[name] = peer
        self.abouts[f"{name} serving" if workload.is_served else name] = peer.about
        self._warm_up(peer)
        return peer

    def _warm_up(self, side: Side) -> None:
        """Do a little of everything that the side can do, once after its start."""
        # Prompts that no workload has: caches keep what was computed here.
        sizes, inputs = self._sizes, Inputs(self.engine.vocab_size, _WARM_UP_SEED)
        count = min(sizes.requests, _WARM_UP_PROMPTS)
        prompts = inputs.unique(count, sizes.prompt_tokens)
        if isinstance(side, PeerSide) and side.is_serving:
            wanted = [_WARM_UP_TOKENS * (i % 2) for i in range(count)]
            side.run(Job("", "serve", prompts, max_tokens=wanted, at_s=[0.0] * count))
            return
        side.run(Job.score("", prompts))
        if side.name != "linear":
            side.run(Job.generate("", prompts, _WARM_UP_TOKENS))

    def _drop(self, side: Side, reason: str, measured: Measured) -> None:
        """End a peer that has failed; a later workload may start it again."""
        self._show(f"  {side.name} failed: {reason}")
        measured.absent[side.name] = reason
        for values in measured.figures.values():
            values.pop(side.name, None)
        self._peers.pop(side.name).close()


def _in_turn(sides: list[Side], repeat: int) -> list[Side]:
    return list(reversed(sides)) if repeat % 2 else list(sides)


def _check(side: Side, job: Job, outcome: Outcome) -> None:
    """Raise where a result is not whole, since its time then says nothing."""
    if side.name == "linear":
        return
    due: list[int] = []
    if job.kind == "score":
        due = [len(p) - start for p, start in zip(job.prompts, job.starts, strict=True)]
    generated = sum(job.max_tokens) if job.kind == "generate" else 0
    if outcome.num_rows != due or outcome.num_generated != generated:
        kind = RuntimeError if side.name == OURS else PeerUnavailable
        raise kind(
            f"{side.name} brought {sum(outcome.num_rows)} rows and {outcome.num_generated} tokens "
            f"where {sum(due)} and {generated} were due"
        )


def _compare(job: Job, outcomes: dict[str, Outcome], measured: Measured) -> None:
    """Note how far peers are from our results."""
    ours = outcomes[OURS]
    for name, theirs in outcomes.items():
        if name == OURS:
            continue
        pairs = zip(ours.logprob_sums, theirs.logprob_sums, ours.num_rows, strict=False)
        apart = [abs(a - b) / rows for a, b, rows in pairs if rows]
        firsts = zip(ours.first_token_ids, theirs.first_token_ids, strict=False)
        differ = [a != b for a, b in firsts]
        if not apart and not differ:
            continue
        found = max(apart) if apart else sum(differ) / len(differ)
        measured.differences[name] = max(found, measured.differences.get(name, 0.0))


def _told(measured: Measured) -> str:
    """Return the latest values in a line of text."""
    return "; ".join(
        f"{figure}: " + ", ".join(f"{side} {values[-1]:,.4g}" for side, values in sides.items())
        for figure, sides in measured.figures.items()
    )


def rounded(value: float | None) -> float | None:
    """Return a figure with four digits that count."""
    return None if value is None else float(f"{value:.4g}")
