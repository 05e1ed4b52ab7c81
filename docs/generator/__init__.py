"""Writes the parts of the documentation that say what the code says, from the code.

    python -m docs.generator

makes each file of `PAGES` anew. A test compares them with what is committed, so that a new setting,
parameter, public name, error or status can't go without its entry. The other pages of `docs/` are
written by hand.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.generator.errors_page import errors_page
from docs.generator.reference_page import reference_page
from docs.generator.settings_page import settings_page
from docs.generator.state_diagram import state_diagram

DOCS = Path(__file__).resolve().parents[1]
PAGES: dict[str, Callable[[], str]] = {
    "reference.md": reference_page,
    "settings.md": settings_page,
    "errors.md": errors_page,
    "images/state-diagram.svg": state_diagram,
}
"""Files in `docs/`, and what writes them."""
