"""Options of `@trainer_invocation` are checked where they are written."""

from __future__ import annotations

from typing import Any

import pytest

from rlite.control.role_group import DEFAULT, Invocation, invocation_of, trainer_invocation
from rlite.errors import ConfigError, UnknownOptionError


def test_a_decorated_method_keeps_its_options_and_another_has_the_defaults() -> None:
    @trainer_invocation(is_async=True, timeout=30, target="RANK0", auto_shard=False)
    def method() -> None: ...

    assert invocation_of(method) == Invocation(is_async=True, timeout=30, target="RANK0", auto_shard=False)
    assert invocation_of(lambda: None) is DEFAULT
    assert (DEFAULT.blocking, DEFAULT.is_async, DEFAULT.timeout, DEFAULT.target, DEFAULT.auto_shard) == (
        True,
        False,
        10,
        "ALL",
        True,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "RANK1"}, "target='RANK1'.*'ALL' or 'RANK0'"),
        ({"target": "all"}, "target='all'.*'ALL' or 'RANK0'"),
        ({"timeout": 0}, "timeout=0.*above 0"),
        ({"timeout": -3}, "timeout=-3"),
        ({"timeout": "10"}, "timeout='10'"),
        ({"timeout": True}, "timeout=True"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"blocking": 1}, "blocking=1.*True or False"),
        ({"pre_func": 3}, "pre_func=3.*a function"),
        ({"blocking": False, "is_async": True}, "blocking=False, is_async=True"),
        ({"blocking": False, "post_func": len}, "blocking=False, post_func"),
    ],
)
def test_an_invalid_option_is_refused_at_decoration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_invocation(**options)


def test_the_misprint_of_the_seed_is_refused_with_the_right_name() -> None:
    with pytest.raises(UnknownOptionError, match=r"pre_function=.*'pre_func'"):
        trainer_invocation(pre_function=len)
    with pytest.raises(UnknownOptionError, match=r"time_out=.*'timeout'"):
        trainer_invocation(time_out=3)
