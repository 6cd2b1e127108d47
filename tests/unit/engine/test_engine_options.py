"""`rlite.init(engine_options=...)`: defaults of `build` by the name of the executor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rlite
from rlite.errors import ConfigError, RliteError, UnknownOptionError
from tests.tiny import build_model_dir


@pytest.fixture(autouse=True)
def no_session_is_left() -> Iterator[None]:
    yield
    rlite.shutdown()


def test_build_takes_the_defaults_and_its_arguments_win(tmp_path: Path) -> None:
    model = build_model_dir(tmp_path / "model", hidden=64)
    rlite.init("cpu", 1, engine_options={"torch": {"max_num_seqs": 4, "max_model_len": 64}, "fsdp2": {"seed": 3}})
    engine = rlite.RliteInferenceEngine(model)
    engine.build(max_num_seqs=2)
    assert (engine.options.max_num_seqs, engine.options.max_model_len, engine.options.seed) == (2, 64, 0)
    engine.release()
    engine.build()
    assert engine.options.max_num_seqs == 4


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tortch": {}}, ConfigError, r"unknown executor 'tortch'; did you mean 'torch'\?"),
        ({"torch": {"max_num_seq": 4}}, UnknownOptionError, r"\['torch'\].*'max_num_seq'; did you mean 'max_num_seqs'"),
        ({"fsdp2": {"max_num_seqs": 4}}, UnknownOptionError, r"\['fsdp2'\] does not know the option 'max_num_seqs'"),
        ({"fsdp2": {"tensor_parallel_size": 2}}, UnknownOptionError, "give it to that engine's `build`"),
        ({"torch": {"max_num_seqs": -1}}, ConfigError, r"\['torch'\]: max_num_seqs=-1: expected .*at least 1"),
        ({"torch": 4}, ConfigError, r"\['torch'\]=4: expected a mapping"),
    ],
)
def test_mistakes_are_refused_before_a_session_starts(
    options: dict[str, Any], error: type[RliteError], message: str
) -> None:
    with pytest.raises(error, match=message):
        rlite.init("cpu", 1, engine_options=options)
    with pytest.raises(RliteError, match=r"call rlite\.init\(\) first"):
        rlite.current_session()
