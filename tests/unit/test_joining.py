"""Whether a running engine is the one that was asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cluster.config import EngineConfig
from cluster.joining import check_agreement, chosen_settings
from scheduler.errors import InvalidConfig
from scheduler.outbox import EngineInfo


def info(**settings: Any) -> EngineInfo:
    """What an engine of these settings says of itself."""
    config = EngineConfig(**settings)
    return EngineInfo("m", msgspec.structs.asdict(config), config.scheduler_config, [])


def agree(engine: EngineInfo, config: EngineConfig | None = None, **settings: Any) -> None:
    """Ask for an engine as a client does."""
    check_agreement(*chosen_settings(config, settings), engine)


def test_a_number_of_workers_that_was_left_open_agrees_with_the_one_that_was_found() -> None:
    """The engine tells how many it began with, and never None."""
    agree(info(num_workers=4), EngineConfig())
    agree(info(num_workers=4), num_workers=None)
    agree(info(num_workers=4), num_workers=4)
    agree(info(num_workers=4))
    with pytest.raises(InvalidConfig, match="num_workers=3 was asked for and it has 4"):
        agree(info(num_workers=4), num_workers=3)


def test_all_of_a_config_is_asked_for_and_of_settings_those_that_are_given() -> None:
    engine = info(num_workers=1, journal_path="/j", max_workers=2)
    with pytest.raises(InvalidConfig, match=r"journal_path=None .*max_workers=None"):
        agree(engine, EngineConfig())
    agree(engine, max_workers=2)
