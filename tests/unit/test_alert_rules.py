"""Alerts fire when they should, and not before: Prometheus' own promtool runs them over a story."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.dashboards.alerts import ALERTS
from cluster.dashboards.making import ALERTS_FILE, FOLDER

ENGINE = '{engine="e"}'
BY_STATE = {
    state: f'{{engine="e",worker="w",state="{state}"}}' for state in ("compute", "dispatch")
}
BY_REASON = {reason: f'{{engine="e",reason="{reason}"}}' for reason in ("stop", "error")}
COMPUTED, AGAIN = "computed_tokens_total", "recomputed_tokens_total"
QUEUE = "request_queue_time_seconds_bucket"

# Alert -> what is told each minute before it holds, and then when it does.
STORIES: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "HaversackNoWorkers": ({f"workers{ENGINE}": "2x60"}, {f"workers{ENGINE}": "0x60"}),
    "HaversackEngineIsGone": ({f"workers{ENGINE}": "2x60"}, {f"workers{ENGINE}": "2x30 _x29"}),
    "HaversackWorkersAreLost": (
        {f"workers_lost_total{ENGINE}": "0x30 1x29"},
        {f"workers_lost_total{ENGINE}": "0x45 1 2 3 4 5 6x8"},
    ),
    "HaversackSchedulerRestarted": (
        {f"scheduler_start_time_seconds{ENGINE}": "1000x60"},
        {f"scheduler_start_time_seconds{ENGINE}": "1000x50 4000x9"},
    ),
    "HaversackRequestsFail": (
        {
            f"requests_finished_total{BY_REASON[r]}": n
            for r, n in (("stop", "0+99x60"), ("error", "0+1x60"))
        },
        {
            f"requests_finished_total{BY_REASON[r]}": n
            for r, n in (("stop", "0+90x60"), ("error", "0+10x60"))
        },
    ),
    "HaversackRequestsRefused": (
        {f"requests_refused_total{ENGINE}": "7x60"},
        {f"requests_refused_total{ENGINE}": "7+1x60"},
    ),
    "HaversackRequestsQueueForLong": (
        {
            f'{QUEUE}{{engine="e",le="{le}"}}': n
            for le, n in (("1.0", "0+9x60"), ("+Inf", "0+9x60"))
        },
        {
            f'{QUEUE}{{engine="e",le="{le}"}}': n
            for le, n in (("50.0", "0+8x60"), ("100.0", "0+10x60"), ("+Inf", "0+10x60"))
        },
    ),
    "HaversackMuchIsRecomputed": (
        {f"{COMPUTED}{ENGINE}": "0+100x60", f"{AGAIN}{ENGINE}": "0+5x60"},
        {f"{COMPUTED}{ENGINE}": "0+100x60", f"{AGAIN}{ENGINE}": "0+20x60"},
    ),
    "HaversackRowsAreRecomputed": (
        {f"recomputed_prompt_logprob_rows_total{ENGINE}": "0x60"},
        {f"recomputed_prompt_logprob_rows_total{ENGINE}": "0x30 1x29"},
    ),
    "HaversackRequestsAreEvictedOften": (
        {
            f"evictions_total{ENGINE}": "0+1x60",
            f"requests_finished_total{BY_REASON['stop']}": "0+9x60",
        },
        {
            f"evictions_total{ENGINE}": "0+9x60",
            f"requests_finished_total{BY_REASON['stop']}": "0+1x60",
        },
    ),
    "HaversackDispatchIsSlow": (
        {
            f"worker_seconds_total{BY_STATE[s]}": n
            for s, n in (("compute", "0+50x60"), ("dispatch", "0+5x60"))
        },
        {
            f"worker_seconds_total{BY_STATE[s]}": n
            for s, n in (("compute", "0+30x60"), ("dispatch", "0+25x60"))
        },
    ),
    "HaversackStoreIsLost": (
        {f"stores_lost_total{ENGINE}": "0x30 1x29"},
        {f"stores_lost_total{ENGINE}": "0x20 1x20 2x18"},
    ),
    "HaversackJournalLags": (
        {f"journal_lag_seconds{ENGINE}": "0.2x60"},
        {f"journal_lag_seconds{ENGINE}": "0.2x50 30x9"},
    ),
    "HaversackJournalDropsResults": (
        {f"journal_dropped_results_total{ENGINE}": "0x60"},
        {f"journal_dropped_results_total{ENGINE}": "0x50 4x9"},
    ),
}


def test_every_alert_has_a_story() -> None:
    assert set(STORIES) == {alert.name for alert in ALERTS}


@pytest.mark.parametrize("name", STORIES)
def test_an_alert_fires_when_it_should_and_not_before(name: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("there is no promtool here: apt-get install prometheus")
    calm, trouble = STORIES[name]
    alert = next(alert for alert in ALERTS if alert.name == name)
    annotations = {"summary": f"Engine e: {alert.summary}", "description": alert.advice}
    fired = {
        "exp_labels": {"engine": "e", "severity": alert.severity},
        "exp_annotations": annotations,
    }
    tests = {
        "rule_files": [str(FOLDER / ALERTS_FILE)],
        "evaluation_interval": "1m",
        "tests": [story(name, calm, []), story(name, trouble, [fired])],
    }
    file = tmp_path / "rules_test.yml"
    file.write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [promtool, "test", "rules", str(file)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def story(name: str, told: dict[str, str], expected: list[dict[str, Any]]) -> dict[str, Any]:
    series = [{"series": f"ray_haversack_{key}", "values": values} for key, values in told.items()]
    check = {"eval_time": "59m", "alertname": name, "exp_alerts": expected}
    return {"interval": "1m", "input_series": series, "alert_rule_test": [check]}
