"""Hints in messages on a config: keys that are probably meant, and who has set an option."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence

from rlite.errors import did_you_mean

MAX_SHOWN = 3
COMMAND_LINE, PROGRAM, PRESET = "command line", "argument", "the default of this preset"
"""sources of values, beside files"""
ELSEWHERE: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("steps", "max_steps", "num_steps", "total_training_steps"), ("n_epochs", "total_steps")),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), ("n_epochs", "total_steps")),
    **dict.fromkeys(("save_steps", "save_interval"), ("save_freq",)),
    **dict.fromkeys(("eval_steps", "eval_freq", "eval_interval", "test_interval"), ("test_freq",)),
    **dict.fromkeys(("output_dir", "default_local_dir"), ("save_dir",)),
    **dict.fromkeys(("n", "num_generations", "rollouts_per_example"), ("responses_per_prompt",)),
    **dict.fromkeys(("max_completion_length", "max_response_length", "max_tokens"), ("max_new_tokens",)),
    **dict.fromkeys(("train_batch_size", "per_device_train_batch_size"), ("batch_size", "prompts_per_rollout")),
    **dict.fromkeys(("num_iterations", "ppo_epochs"), ("update_per_rollout",)),
    "report_to": ("sinks",),
    "kl_coef": ("coef",),
    "model": ("model_name",),
}
"""names of options in TRL, verl and prime-rl -> the last parts of the keys that they mean here, the best first"""

OTHER_COMMANDS: Mapping[str, str] = {
    "data": "train_data",
    "train_data": "data",
    "n_epochs": "total_steps",
    "total_steps": "n_epochs",
}
"""parts of keys of one command -> the parts with the same purpose in another command"""


def nearest_key(key: str, known: Sequence[str], usual: Collection[str] = ()) -> str:
    """Return a hint for the end of a message: the keys that are probably meant, or all keys of the group.

    Args:
        key: the unknown key.
        known: the keys that exist.
        usual: keys that are preferred among several that contain the words of the unknown key.
    """
    same = ".".join(OTHER_COMMANDS.get(part, part) for part in key.split("."))
    if same != key and (meant := [path for path in (same, f"{same}.path") if path in known]):
        return _any_of(meant)
    group, _, leaf = key.rpartition(".")
    for name in ELSEWHERE.get(leaf, ()):
        if meant := _same_leaf(name, known):
            return _any_of([path for path in meant if path in usual] or meant)
    siblings = [path for path in known if path.rpartition(".")[0] == group]
    if close := _short_for(leaf, siblings) or _with_words(leaf, siblings, usual) or _short_for(leaf, known)[:MAX_SHOWN]:
        return _any_of(close)
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.75) or _same_leaf(leaf, known):
        return _any_of(close)
    prefix = f"{group}." if group and any(path.startswith(f"{group}.") for path in known) else ""
    names = {path.removeprefix(prefix).split(".")[0] for path in known if path.startswith(prefix)}
    return did_you_mean(key, {f"{prefix}{name}" for name in names})


def set_by(message: str, group: str, sources: Mapping[str, str]) -> str:
    """Return which options of a message a file or a preset has set, as its end; "" if the user's command has.

    Args:
        message: text that names options by their key, or `name=value` in their own group.
        group: key of the group that the message is about.
        sources: source of each value, by its key.
    """
    found = []
    for key, source in sorted(sources.items()):
        own = f"({re.escape(key)}\\b|{re.escape(key.removeprefix(f'{group}.'))}=)"
        if source not in (COMMAND_LINE, PROGRAM) and re.search(rf"(?<![\w.]){own}", message):
            found.append(f"{key}: {'' if source == PRESET else 'set by '}{source}")
    return f" ({'; '.join(found)})" if found else ""


def _any_of(keys: Sequence[str]) -> str:
    return f"did you mean {' or '.join(map(repr, keys))}?"


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _same_leaf(leaf: str, known: Sequence[str]) -> list[str]:
    return [path for path in known if _leaf(path) == leaf][:MAX_SHOWN]


def _with_words(leaf: str, known: Sequence[str], usual: Collection[str]) -> list[str]:
    """Return the keys whose words include those of a name, as `total_steps` includes `steps`; the usual ones if any."""
    words = set(leaf.split("_"))
    found = [path for path in known if words < set(_leaf(path).split("_"))]
    return ([path for path in found if path in usual] or found)[:MAX_SHOWN]


def _short_for(leaf: str, known: Sequence[str]) -> list[str]:
    """Return the keys that abbreviate a name by the initials of its words, as `lr` does, or that it abbreviates."""
    return [path for path in known if _is_short_for(_leaf(path), leaf) or _is_short_for(leaf, _leaf(path))]


def _is_short_for(short: str, long: str) -> bool:
    return "_" in long and short == "".join(word[:1] for word in long.split("_"))
