"""Rewards for the commands of docs/known-failures.md, most of them broken on purpose."""

import time


def digits(prompt, completions, prompt_ids, completion_ids, **row):
    return sum(map(str.isdigit, completions)) / max(len(completions), 1)


def equal(prompt, completions, prompt_ids, completion_ids, **row):
    return 0.7


def raising(prompt, completions, prompt_ids, completion_ids, **row):
    return float(completions == row["gold"])  # the column is called "answer"


def hanging(prompt, completions, prompt_ids, completion_ids, **row):
    time.sleep(3600)


def undefined(prompt, completions, prompt_ids, completion_ids, **row):
    return float("nan")
