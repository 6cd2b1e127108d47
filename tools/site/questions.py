"""Ask the site's own search the questions of new users, in headless Chromium: python -m tools.site.questions

Needs the site (`make docs`) and Playwright. Prints the place of the first result that answers each question. The exit
status is 1 if fewer than 23 of 25 questions are answered among the first results, or if a page asks another machine.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from tests.browser.chromium import browser

SITE = Path(__file__).parents[2] / "site"
FIRST = 5
"""pages in the results that a reader looks at"""
FIRST_LINKS = "all => all.map((each) => each.querySelector('a').href)"
MIN_ANSWERED = 23


class Question(NamedTuple):
    """A question, the words that its asker types, and the pages that answer it."""

    asker: str
    question: str
    words: str
    answers: tuple[str, ...]


QUESTIONS = [
    Question(
        "researcher", "How do I give the trainer a policy loss of my own?", "own policy loss", ("own-algorithms",)
    ),
    Question(
        "researcher",
        "What does my loss function receive, in which shapes?",
        "loss inputs shapes",
        ("own-algorithms", "reference/rlite.algorithms", "batches"),
    ),
    Question(
        "researcher",
        "How do I train with DAPO's higher clip and no KL?",
        "dapo clip higher",
        ("cookbook", "algorithms"),
    ),
    Question(
        "researcher",
        "How do I change the KL coefficient over the steps?",
        "kl coefficient schedule",
        ("cookbook", "callbacks"),
    ),
    Question(
        "researcher",
        "How do I log a number of my own from a callback?",
        "callback log metric",
        ("callbacks", "own-code", "cookbook", "reference/rlite.trainer.callbacks"),
    ),
    Question(
        "engineer", "How do I start one run on two nodes without Ray?", "two nodes torchrun", ("cookbook", "trainers")
    ),
    Question(
        "engineer", "How do I start it on a Ray cluster?", "ray cluster", ("cookbook", "trainers", "programming-model")
    ),
    Question(
        "engineer",
        "What happens when a worker dies in the middle of a run?",
        "worker dies",
        ("control", "resume", "programming-model"),
    ),
    Question(
        "engineer", "Will a 72B model fit on my devices?", "plan memory", ("parallelism", "memory-and-optimizers")
    ),
    Question(
        "engineer",
        "How do I generate on other GPUs than those that train?",
        "separate rollout devices",
        ("rollouts", "cookbook"),
    ),
    Question(
        "product", "Can I train an agent that already uses OpenAI's SDK?", "train openai agent", ("agents", "contracts")
    ),
    Question("product", "How do I reward an answer with an LLM judge?", "llm judge", ("judges",)),
    Question("product", "How do tools with state per episode work?", "tool state database", ("environments",)),
    Question(
        "product",
        "Can reward code read my API keys?",
        "reward secrets environment variables",
        ("sandbox", "known-failures", "rewards"),
    ),
    Question(
        "product", "How do I serve the trained model to OpenAI clients?", "serve trained model", ("serving", "cookbook")
    ),
    Question("student", "How do I install it on a laptop without a GPU?", "install cpu", ("install",)),
    Question(
        "student",
        "It runs out of memory. What do I change?",
        "out of memory",
        ("reading-a-run", "memory-and-optimizers"),
    ),
    Question(
        "student",
        "My reward does not go up. What do I check?",
        "reward does not increase",
        ("reading-a-run", "known-failures"),
    ),
    Question("student", "How do I go on after I pressed Ctrl-C?", "resume after ctrl-c", ("resume",)),
    Question("student", "How do I set the project and name of the run in wandb?", "wandb project name", ("logging",)),
    # of a person who did six tasks with the site alone
    Question("student", "My run does not learn. Which metric tells why?", "run does not learn", ("reading-a-run",)),
    Question(
        "student",
        "How do I learn only the assistant's words?",
        "learn only assistant",
        ("data", "chat-templates", "trainers"),
    ),
    Question("student", "Where is what my reward printed?", "print inside reward", ("rewards", "callbacks")),
    Question("researcher", "How do I read an episode turn by turn?", "text of an episode", ("record", "viewer")),
    Question("product", "How do I ask the served model by curl?", "curl chat completions", ("serving",)),
]


class Quiet(SimpleHTTPRequestHandler):
    """Serve files without a log."""

    def log_message(self, format: str, *arguments: object) -> None:
        return


@contextmanager
def served() -> Iterator[str]:
    """Serve the site at an address of this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def main() -> int:
    """Ask all questions, print a table, and return the exit status."""
    answered = 0
    with served() as url, browser() as chromium:
        page = chromium.page()
        for asked in QUESTIONS:
            page.goto(f"{url}/?q={quote(asked.words)}")
            page.wait_for_selector(".md-search-result__item")
            links = page.eval_on_selector_all(".md-search-result__item", FIRST_LINKS)
            found = [urlsplit(link).path.strip("/") for link in links[:FIRST]]
            place = next((number for number, name in enumerate(found, 1) if name in asked.answers), None)
            answered += place is not None
            print(f"| {asked.asker} | {asked.question} | {asked.words} | {place or '-'} | {', '.join(found)} |")
        print(f"{answered} of {len(QUESTIONS)} among the first {FIRST}")
        print(f"asked other machines: {chromium.strangers or 'no'}")
    return answered < MIN_ANSWERED or bool(chromium.strangers)


if __name__ == "__main__":
    sys.exit(main())
