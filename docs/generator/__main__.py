"""`python -m docs.generator`: write the generated files, and say which have changed."""

from __future__ import annotations

from docs.generator import DOCS, PAGES


def main() -> None:
    """Write what differs from what is there."""
    for name, write in PAGES.items():
        path, text = DOCS / name, write()
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote docs/{name}")


if __name__ == "__main__":
    main()
