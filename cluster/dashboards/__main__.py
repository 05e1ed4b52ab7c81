"""`python -m cluster.dashboards`: writes what is made from the tables, in a checkout."""

from __future__ import annotations

from cluster.dashboards.making import ALERTS_FILE, DASHBOARD_FILE, FOLDER, alerts, dashboard, page


def main() -> None:
    """Write all three files, and say where."""
    written = {
        FOLDER / DASHBOARD_FILE: dashboard(),
        FOLDER / ALERTS_FILE: alerts(),
        FOLDER.parent.parent / "docs" / "metrics.md": page(),
    }
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
