"""Questions that need a search: the model calls an asynchronous tool as often as it likes, then answers.

    SEARCH_CORPUS=passages.jsonl rlite ppo --import examples/environments/search.py rollout.workflow=search \\
        actor.model_name=MODEL train_data.path=rows.jsonl

`passages.jsonl` has rows {"title": "...", "text": "..."}. A row of the data has messages and an answer, a text or a
list of texts. The reward is 1 if the last <answer>...</answer> is one of them, but for case, articles and punctuation,
as in Search-R1. The chat template of the model has to show tools.

`search` runs in the event loop beside all other episodes, so a tool that waits costs no process. To ask a service
instead of a file, await its client in `search`.
"""

import asyncio
import collections
import functools
import json
import math
import os
import re
import string

from rlite.rollout import ToolUseWorkflow
from rlite.rollout.registry import register_workflow

NUM_PASSAGES, MAX_TURNS = 3, 6


def words(text):
    return re.findall(r"\w+", text.lower())


class Corpus:
    """Passages, ranked by BM25 (Robertson and Zaragoza 2009)."""

    def __init__(self, passages, k1=1.2, b=0.75):
        self.passages, self.k1, self.b = passages, k1, b
        self.counts = [collections.Counter(words(f"{each['title']} {each['text']}")) for each in passages]
        self.lengths = [sum(counts.values()) for counts in self.counts]
        self.mean_length = sum(self.lengths) / len(passages)
        self.frequency = collections.Counter(word for counts in self.counts for word in counts)

    def score(self, number, query):
        counts, length = self.counts[number], self.lengths[number] / self.mean_length
        return sum(
            math.log(1 + (len(self.passages) - self.frequency[word] + 0.5) / (self.frequency[word] + 0.5))
            * (counts[word] * (self.k1 + 1) / (counts[word] + self.k1 * (1 - self.b + self.b * length)))
            for word in query
            if word in counts
        )

    def best(self, query):
        scores = {number: self.score(number, words(query)) for number in range(len(self.passages))}
        ranked = sorted((number for number in scores if scores[number] > 0), key=lambda number: -scores[number])
        return [self.passages[number] for number in ranked[:NUM_PASSAGES]]


@functools.cache
def corpus():
    if "SEARCH_CORPUS" not in os.environ:
        raise SystemExit('set SEARCH_CORPUS to a JSONL file of passages: {"title": ..., "text": ...}')
    with open(os.environ["SEARCH_CORPUS"], encoding="utf-8") as file:
        return Corpus([json.loads(line) for line in file])


async def search(query: str) -> str:
    """Searches for passages about a topic.

    Args:
        query: what to look for, in a few words
    """
    found = await asyncio.to_thread(corpus().best, query)
    return "\n\n".join(f"{each['title']}\n{each['text']}" for each in found) or "nothing found"


def normalised(text):
    plain = "".join(character for character in text.lower() if character not in string.punctuation)
    return " ".join(word for word in plain.split() if word not in ("a", "an", "the"))


def is_answered(prompt, completions, prompt_ids, completion_ids, answer, **row):
    _, mark, last = completions.rpartition("<answer>")
    accepted = [answer] if isinstance(answer, str) else answer
    return float(bool(mark) and normalised(last.partition("</answer>")[0]) in map(normalised, accepted))


@register_workflow("search")
def search_workflow(gconfig, tokenizer):
    corpus()  # a missing file ends the run before anything starts
    return ToolUseWorkflow([search], is_answered, gconfig, tokenizer, max_turns=MAX_TURNS)
