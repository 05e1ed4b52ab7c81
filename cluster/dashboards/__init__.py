"""The Grafana dashboard, the alert rules and the page about metrics, all made from Python tables.

`python -m cluster.dashboards` writes the files that lie beside this one, and docs/metrics.md.
"""
