"""Values that leave the machine of a run with a bundle, or stand in its chain: no secrets, no paths, no prompts."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any

_KEYS = (
    *("secret", "passw", "passphrase", "credential", "bearer", "authorization", "cookie", "^token$", "^dsn$"),
    *(r"(api|access|private|signing|ssh|encryption)_?key", r"(^|[_-])(auth|access|api|refresh|session|hf|hub)_?token$"),
)
SECRET = re.compile("|".join(_KEYS), re.IGNORECASE)
"""keys of options whose values no bundle has"""
VALUES = re.compile(
    r"\b(sk-|hf_|gh[pousr]_|github_pat_|glpat-|xox[abpr]-|AKIA|eyJ)[\w.-]{12,}|-----BEGIN [A-Z ]*PRIVATE KEY"
)
"""values that look like tokens of well-known services"""
PROMPTS = ("system_prompt", "rubric", "env_config", "chat_template_options")
"""keys whose values may be prompts, which a bundle without data does not have"""
PLACE = re.compile(r"(file:)?(~|/|[A-Za-z]:[\\/])[^\n]*[\\/]")
"""beginning of an absolute path with a folder in it"""
UNKEPT = ("imports", "reward", "test_data", "rollout", "trainer")
"""groups whose texts decide nothing about a step that is made again, and may be secrets of any form"""
REMOVED = "(removed)"
MIN_SECRET = 8
"""characters of the shortest value of a secret variable that is looked for in texts"""


def public(tree: Any, has_prompts: bool, key: str = "") -> Any:
    """Return options without secrets, by their keys, their form and the environment, and without folders."""
    if SECRET.search(key) and tree not in (None, "", {}, []):
        return REMOVED
    if key in PROMPTS and tree and not has_prompts:
        return {} if isinstance(tree, Mapping) else REMOVED
    if isinstance(tree, Mapping):
        return {name: public(value, has_prompts, str(name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [public(value, has_prompts) for value in tree]
    if not isinstance(tree, str):
        return tree
    return PureWindowsPath(tree).name if PLACE.match(tree) else _without_credentials(tree)


def public_command(arguments: Sequence[str]) -> str:
    """Return a command line without secrets, by the keys and the form of its arguments."""
    program, *rest = arguments or ("",)
    shown = ["rlite" if Path(program).name in ("rlite", "cli.py") else Path(program).name]
    for argument in rest:
        key, sign, _ = argument.partition("=")
        is_secret = bool(sign) and SECRET.search(key.split(".")[-1]) is not None
        shown.append(f"{key}={REMOVED}" if is_secret else _without_credentials(argument))
    return shlex.join(shown)


def masked(text: str, variables: Collection[str] = ()) -> str:
    """Return a text without secrets of the environment, and without tokens of well-known services."""
    known = {value.strip() for name, value in os.environ.items() if name in variables or _is_secret(name)}
    for secret in sorted((value for value in known if len(value) >= MIN_SECRET), key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    return VALUES.sub(REMOVED, text)


def is_shown(key: str, source: str, value: Any) -> bool:
    """Return whether the chain of a run may have the value of an interpolation: it is needed, and no secret."""
    group, name = key.split(".")[0], key.split(".")[-1]
    if SECRET.search(name) or any(map(_is_secret, re.findall(r"\w+", source))):
        return False
    if isinstance(value, str):
        return group not in UNKEPT and _without_credentials(value) == value
    return isinstance(value, bool | int | float | None)


def _is_secret(variable: str) -> bool:
    return SECRET.search(variable) is not None or variable.endswith(("_KEY", "_TOKEN"))


def _without_credentials(text: str) -> str:
    secrets = [value for name, value in os.environ.items() if _is_secret(name)]
    if VALUES.search(text) or any(len(value) >= MIN_SECRET and value in text for value in secrets):
        return REMOVED
    without_user = re.sub(r"(?<=://)[^/@\s]+@", f"{REMOVED}@", text)
    return re.sub(r"(://[^\s?]*)\?\S+", rf"\1?{REMOVED}", without_user)
