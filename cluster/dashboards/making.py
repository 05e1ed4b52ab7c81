"""Turns the tables into files: Grafana's JSON, Prometheus' YAML and a page of Markdown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from cluster.dashboards.alerts import ALERTS
from cluster.dashboards.panels import ROWS, Panel
from cluster.series import ENGINE_LABEL, PREFIX, RAY_PREFIX, Series
from cluster.series_table import GROUPS

FOLDER = Path(__file__).parent
DASHBOARD_FILE = "haversack_grafana_dashboard.json"
ALERTS_FILE = "haversack_alerts.yml"

_UID = "haversack"
_ROW_WIDTH, _PANEL_WIDTH, _PANEL_HEIGHT = 24, 12, 8
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    described = {
        "uid": _UID,
        "title": "Haversack",
        "description": "What engines do, as they tell it to Ray's metrics.",
        "tags": ["haversack", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": _variables()},
        "panels": _panels(),
    }
    return json.dumps(described, indent=1) + "\n"


def alerts() -> str:
    """Return the alert rules as Prometheus reads them."""
    rules = [
        {
            "alert": alert.name,
            "expr": alert.query,
            "for": alert.lasts,
            "labels": {"severity": alert.severity},
            "annotations": {
                "summary": f"Engine {{{{ $labels.{ENGINE_LABEL} }}}}: {alert.summary}",
                "description": alert.advice,
            },
        }
        for alert in ALERTS
    ]
    content = {"groups": [{"name": "haversack", "rules": rules}]}
    written: str = yaml.safe_dump(content, sort_keys=False, width=96, allow_unicode=True)
    return f"# Made by `python -m cluster.dashboards` from the table in alerts.py.\n{written}"


def _variables() -> list[dict[str, Any]]:
    engines = f"label_values({RAY_PREFIX}{PREFIX}workers, {ENGINE_LABEL})"
    return [
        {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
        {
            "name": "engine",
            "label": "Engine",
            "type": "query",
            "datasource": _DATASOURCE,
            "query": {"query": engines, "refId": "engine"},
            "definition": engines,
            "refresh": 2,
            "multi": True,
            "includeAll": True,
            "allValue": ".*",
            "current": {"text": ["All"], "value": ["$__all"]},
        },
    ]


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        place = {"h": 1, "w": _ROW_WIDTH, "x": 0, "y": y}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        y += 1
        for index, panel in enumerate(row):
            x = index * _PANEL_WIDTH % _ROW_WIDTH
            place = {"h": _PANEL_HEIGHT, "w": _PANEL_WIDTH, "x": x, "y": y}
            made.append({"id": len(made) + 1, **_panel(panel), "gridPos": place})
            if x + _PANEL_WIDTH == _ROW_WIDTH or index == len(row) - 1:
                y += _PANEL_HEIGHT
    return made


def _panel(panel: Panel) -> dict[str, Any]:
    custom: dict[str, Any] = {"lineWidth": 1, "showPoints": "never", "fillOpacity": 10}
    if panel.stack:
        custom |= {"fillOpacity": 40, "stacking": {"mode": "normal", "group": "A"}}
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": _DATASOURCE,
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": custom},
            "overrides": [],
        },
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + i), "expr": query, "legendFormat": legend}
            for i, (legend, query) in enumerate(panel.queries.items())
        ],
    }


# --------------------------------------------------------------------------------- the page

_INTRODUCTION = f"""\
<!-- Made by `python -m cluster.dashboards` from the tables in cluster/series_table.py and
cluster/dashboards/. -->

# Metrics

An engine tells what it counts in two places:

- **Ray**, once a second. Every node of the cluster has a page that Prometheus reads, and Ray writes
  where they all are to `/tmp/ray/prom_metrics_service_discovery.json`. There the names below have
  `{RAY_PREFIX}` before them: `{RAY_PREFIX}{PREFIX}requests_running`.
- **`/metrics` of the HTTP endpoint**, for an engine that is served: the names as they stand below.

Read one of them, or everything is there twice. The label `{ENGINE_LABEL}` is the engine's name, and
no label has a value per request. `haversack status --json` and `Client.stats()` tell the same
counts without Prometheus.

Ray's page is written anew every 10 s, or as `RAY_metrics_report_interval_ms` says where Ray is
started. There the parts of a histogram are of the type gauge, which makes no difference to a query.

## Prometheus and Grafana

A cluster that `ray start --head` or `ray up` has started writes a configuration for each:

    prometheus --config.file=/tmp/ray/session_latest/metrics/prometheus/prometheus.yml
    grafana-server --config /tmp/ray/session_latest/metrics/grafana/grafana.ini web

An engine that is started on the head node puts its dashboard beside Ray's own ones, where that
Grafana finds it, and the alert rules beside Prometheus' configuration. To have Prometheus use the
rules, add to that configuration:

    rule_files:
    - /tmp/ray/session_latest/metrics/prometheus/{ALERTS_FILE}

Elsewhere, import [{DASHBOARD_FILE}](../cluster/dashboards/{DASHBOARD_FILE}) into Grafana, and
give Prometheus [{ALERTS_FILE}](../cluster/dashboards/{ALERTS_FILE}). Both ask for Ray's names;
where Prometheus reads the endpoint instead, let it rename what it finds:

    metric_relabel_configs:
    - source_labels: [__name__]
      regex: ({PREFIX}.+)
      target_label: __name__
      replacement: {RAY_PREFIX}$1

## When the scheduler is restarted

Counters begin at 0 again, as `rate()` and `increase()` expect, and
`{PREFIX}scheduler_start_time_seconds` says when that was. Nothing is counted twice: what the
journal brings back is in `{PREFIX}requests_restored_total`, its prompt is not accepted again, and
as it is not known any more when it was submitted, it is in no latency but that between tokens.

## Series

"vLLM" names the series there that means the same.
"""


def page() -> str:
    """Return docs/metrics.md."""
    parts = [_INTRODUCTION]
    for title, group in GROUPS.items():
        parts.append(f"### {title}\n\n| Series | Type | Labels | | vLLM |\n|---|---|---|---|---|")
        parts[-1] += "".join(f"\n{_series_row(series)}" for series in group) + "\n"
    rows = "".join(f"\n| `{a.name}` | {a.severity} | {a.summary} | {a.advice} |" for a in ALERTS)
    parts.append(f"## Alerts\n\n| Alert | | When | What to do |\n|---|---|---|---|{rows}\n")
    return "\n".join(parts)


def _series_row(series: Series) -> str:
    labels = ", ".join(f"`{label}`" for label in series.labels)
    other = f"`{series.vllm}`" if series.vllm else ""
    return (
        f"| `{series.name}` | {series.kind.value}, {series.unit} | {labels} | {series.help} "
        f"| {other} |"
    )
