"""Names of groups of options, of which a single one needs no name: `reward.path=...`, `reward.NAME.path=...`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping
from typing import Any

from rlite.errors import ConfigError

UNNAMED = ""
"""name of a group that its user did not name"""
_NAME = re.compile(r"\w[\w-]*")


def single_or_named(schema: dict[str, Any]) -> None:
    """Let the JSON schema of groups by name also take the options of a single group, as `json_schema_extra`.

    The single group has the name UNNAMED. Its keys are those of the option itself: `test_data.path`.
    """
    named = next(form for form in schema["anyOf"] if "additionalProperties" in form)
    schema["anyOf"].insert(0, named["additionalProperties"])


def check_name(key: str, name: str, options: Collection[str] = ()) -> None:
    """Check the name of one of several groups.

    Args:
        key: key of the groups, for messages.
        name: the name; UNNAMED is one.
        options: names of the options of a group.

    Raises:
        ConfigError: the name has other characters, begins with a hyphen, or is that of an option.
    """
    if name in options or (name != UNNAMED and not _NAME.fullmatch(name)):
        raise ConfigError(
            f"{key}.{name}: a name has letters, digits, _ and -, and does not begin with -"
            + (f"; it is none of its options ({', '.join(options)})" if options else "")
        )


def by_name(given: Any, key: str, is_plain: Mapping[str, bool], group: type) -> Any:
    """Return groups by name. The options of a single group get the name UNNAMED.

    Args:
        given: value of the option that holds the groups.
        key: name of this option.
        is_plain: whether an option of a group takes no mapping, by its name; each group needs the first option.
        group: class of all groups.

    Raises:
        ConfigError: some options have the name of a group and others have none, or a name cannot be one.
    """
    first = next(iter(is_plain))
    if isinstance(given, str):
        raise ConfigError(f"{key}={given}: expected {key}.{first}={given}")
    if not isinstance(given, Mapping):
        return given
    named = [name for name, value in given.items() if isinstance(value, Mapping | group) and is_plain.get(name, True)]
    single = [name for name in given if name not in named]
    for name in single:
        is_first = ":" in str(given[name]) and not difflib.get_close_matches(str(name), [first])
        if is_first and name not in is_plain:
            raise ConfigError(f"{key}.{name}={given[name]}: expected {key}.{name}.{first}={given[name]}")
    if named and single:
        raise ConfigError(
            f"{key}.{single[0]} is of a group without a name, and {key}.{named[0]} has one: give each its name, as in "
            f"{key}.NAME.{single[0]}"
        )
    for name in named:
        check_name(key, str(name), is_plain)
    if len(named) > 1 and UNNAMED in named:
        raise ConfigError(f"{key}: one of several has no name; expected {key}.NAME.{first} of each")
    return {UNNAMED: given} if single else given
