"""Completion in a shell: commands, the keys of their options, and values that are enumerated. No torch here.

The program that a shell reads holds all of them, so that a Tab starts no Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlite import config
from rlite.errors import ConfigError, did_you_mean
from rlite.help import help_topic
from rlite.registry import algorithms
from rlite.trainer.rl.options import EPISODE, OWN, OWN_ESTIMATORS

# both functions set `reply`: to the words of a command without "=", or to the values of a key of a command
_TABLE = """\
_rlite_words() {{
  case "$1" in
    '') reply="{commands} --help --version" ;;
    completion) reply="{shells}" ;;
    schema) reply="{commands}" ;;
{cases}
    *) reply="" ;;
  esac
}}
_rlite_values() {{
  case "$1 $2" in
{values}
    *) reply="" ;;
  esac
}}
"""
# bash splits words at "=", so the word under the cursor is taken from the line
_BASH = """\
_rlite() {
  local reply each IFS=$' \\t\\n' line="${COMP_LINE:0:COMP_POINT}" command="${COMP_WORDS[1]}"
  local word="${line##*[[:space:]]}"
  COMPREPLY=()
  if [[ $COMP_CWORD -le 1 ]]; then _rlite_words ''
  elif [[ $word == *=* ]]; then _rlite_values "$command" "${word%%=*}"; word="${word#*=}"
  else _rlite_words "$command"
  fi
  for each in $reply; do
    [[ $each == "$word"* ]] || continue
    [[ $each == *= ]] && COMPREPLY+=("$each") || COMPREPLY+=("$each ")
  done
}
complete -o nospace -o default -F _rlite rlite
"""
_ZSH = """\
_rlite() {
  local reply missed=1 command="${words[2]}" word="${words[CURRENT]}"
  if (( CURRENT == 2 )); then _rlite_words ''
  elif [[ $word == *=* ]]; then _rlite_values "$command" "${word%%=*}"; compset -P 1 '*='
  else _rlite_words "$command"
  fi
  compadd -S '' -- ${(M)${=reply}:#*=} && missed=0
  compadd -- ${${=reply}:#*=} && missed=0
  (( missed )) && _files
}
compdef _rlite rlite
"""
SHELLS = {"bash": _BASH, "zsh": _ZSH}
FLAGS = ("--help", "--config")


HELP = f"""usage: rlite completion {"|".join(SHELLS)}

Completion of commands, keys and values. For this shell, or in ~/.bashrc or ~/.zshrc for later ones:

    eval "$(rlite completion bash)"                 a second at each start of the shell, always up to date
    rlite completion bash > ~/.rlite-completion     once for each version; then: source ~/.rlite-completion

In zsh, `autoload -U compinit && compinit` stands before it."""


def main(arguments: Sequence[str], options: Mapping[str, type[config.Options]], others: Sequence[str]) -> None:
    """Print the program of the shell that the arguments name, or with `--help` its use."""
    if help_topic(arguments) is not None:
        print(HELP)
        return
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        given = " ".join(["completion", *arguments])
        raise ConfigError(f"{given}: expected one shell; {did_you_mean(' '.join(arguments[:1]), SHELLS)}")
    print(script(arguments[0], options, others))


def script(shell: str, options: Mapping[str, type[config.Options]], others: Sequence[str]) -> str:
    """Return the program of a shell."""
    words, values = dict[str, str](), dict[str, list[str]]()
    for command, cls in options.items():
        choices = {key: own or _registered(key) for key, own in config.choices(cls).items()}
        flags = [*FLAGS, *(["--json"] if cls.prints_json else []), *(["--import"] if config.IMPORTS in choices else [])]
        words[command] = " ".join([*(f"{key}=" for key in choices), *flags])
        for key, own in choices.items():
            if own:
                values.setdefault(" ".join(own), []).append(f'"{command} {key}"')
    table = _TABLE.format(
        commands=" ".join([*options, *others]),
        shells=" ".join(SHELLS),
        cases="\n".join(f'    {command}) reply="{own}" ;;' for command, own in words.items()),
        values="\n".join(f'    {"|".join(keys)}) reply="{own}" ;;' for own, keys in values.items()),
    )
    return f"# completion of rlite: rlite completion {shell}\n{table}{SHELLS[shell]}"


def _registered(key: str) -> list[str]:
    """Return the names of the algorithms that a key takes; [] if it takes none."""
    kinds = {
        "actor.policy_loss.name": ("policy loss", ()),
        "actor.preference_loss.name": ("preference loss", ()),
        "adv.estimator": ("advantage", OWN_ESTIMATORS),
        "adv.credit": ("credit", (EPISODE, OWN)),
    }
    if key not in kinds:
        return []
    kind, own = kinds[key]
    return [*own, *algorithms(kind)]
