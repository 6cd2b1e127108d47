"""The table of trainers."""

from __future__ import annotations

import importlib

import pytest

from rlite.cli import COMMANDS
from rlite.trainer.presets import TRAINERS


@pytest.mark.parametrize("name", TRAINERS)
def test_an_entry_names_a_trainer_with_its_options_and_its_command(name: str) -> None:
    entry = TRAINERS[name]
    module = importlib.import_module(entry.module)
    trainer = getattr(module, entry.trainer)
    assert (trainer.name, trainer.config_class) == (name, COMMANDS[name].find_options())
    assert callable(module.main)
