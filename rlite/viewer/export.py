"""The page as one file: the answers to its questions are in it, so it opens from disk and needs no server.

The page is one HTML file, style sheets and modules; a server sends its parts. Modules import each other by the bare
names of an import map (`viewer/dom`), so that the same files work at an address and, as `data:` URLs, in a file.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlite import files
from rlite.errors import ConfigError, writing
from rlite.services.record.reader import Place
from rlite.viewer.answers import Query, answer, sample_answer, steps_of
from rlite.viewer.run import ViewedRun
from rlite.wording import counted

STATIC = Path(__file__).parent / "static"
STYLES = ("vendor/uplot.css", "style.css")
CHARTS = "vendor/uplot.js"
MAIN = 'import "viewer/main";'
TYPES = {".js": "text/javascript", ".css": "text/css"}
_ALWAYS = "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'"


def assets() -> dict[str, bytes]:
    """Return the files that the page loads, by their names."""
    found = [path for path in sorted(STATIC.rglob("*")) if path.suffix in TYPES]
    return {path.relative_to(STATIC).as_posix(): path.read_bytes() for path in found}


def served_page() -> tuple[str, str]:
    """Return the page for a server, and its Content-Security-Policy."""
    modules = _import_map({name: f"/static/{name}.js" for name in _modules()})
    styles = "".join(f'<link rel="stylesheet" href="/static/{name}">' for name in STYLES)
    scripts = f'<script type="importmap">{modules}</script><script src="/static/{CHARTS}"></script>'
    scripts += f'<script type="module">{MAIN}</script>'
    others = f"style-src 'self'; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; {_ALWAYS}"
    policy = f"default-src 'none'; script-src 'self' {_hashes(modules, MAIN)}; {others}"
    return _filled(styles, scripts), policy


def single_page(packed: bytes) -> str:
    """Return the page as one file that needs no server.

    Args:
        packed: the answers to all questions of the page, as gzipped JSON.
    """
    code = {name: base64.b64encode(text.encode()).decode() for name, text in _modules().items()}
    modules = _import_map({name: f"data:text/javascript;base64,{text}" for name, text in code.items()})
    charts, style = _read(CHARTS), "\n".join(map(_read, STYLES))
    others = f"style-src {_hashes(style)}; img-src data:; {_ALWAYS}"
    policy = f"default-src 'none'; script-src data: {_hashes(modules, charts, MAIN)}; {others}"
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{style}</style>'
    data = f'<script type="text/plain" id="answers">{base64.b64encode(packed).decode()}</script>'
    scripts = f'{data}<script type="importmap">{modules}</script><script>{charts}</script>'
    return _filled(head, f'{scripts}<script type="module">{MAIN}</script>')


def _filled(head: str, scripts: str) -> str:
    return _read("index.html").replace("<!-- head -->", head).replace("<!-- scripts -->", scripts)


def _modules() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(STATIC.glob("*.js"))}


def _import_map(addresses: Mapping[str, str]) -> str:
    return json.dumps({"imports": {f"viewer/{name}": address for name, address in addresses.items()}})


def _hashes(*texts: str) -> str:
    """Return the sources of a policy that allow inline texts."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def _read(name: str) -> str:
    return (STATIC / name).read_text(encoding="utf-8")


MEGABYTE = 1_000_000


def export(runs: Sequence[ViewedRun], path: Path, steps: Sequence[int], limit_mb: int) -> dict[str, Any]:
    """Write the page to a file.

    Metrics are always there. Chosen steps come next, with their rows, texts and tokens. Rows and the ledger take up to
    half of the limit, the newest steps first. Without chosen steps, texts and tokens take the rest.

    Args:
        runs: the runs.
        path: the file; an older file is replaced.
        steps: steps whose texts and tokens the file has; empty: the newest, as many as fit.
        limit_mb: limit of rows, texts and tokens before compression, in megabytes.

    Returns:
        The number of rollouts, of rollouts with text, and of bytes; and what is left out, in words.

    Raises:
        ConfigError: the runs have no such steps, or these do not fit.
        StorageError: the file cannot be written.
    """
    answers = Answers(runs)
    answers.ask_overview()
    limit = limit_mb * MEGABYTE
    size, num_texts = answers.ask_steps(steps, limit) if steps else (0, 0)
    own, left_out = answers.ask_rows(min(limit // 2, limit - size))
    if not steps:
        num_texts = answers.ask_samples(limit - own)
    for number, about in enumerate(answers.ask("runs")):  # once more: it names the files that could not be read
        about["problems"] += left_out.get(number, [])
    content = single_page(gzip.compress(json.dumps(answers.found, allow_nan=False).encode(), mtime=0)).encode()
    with writing(path):
        files.replace(path, content)
    rollouts = sum(run.record.table(source).num_rows for run in runs for source in run.record.sources)
    told = [f"{runs[number].name}: {text}" for number, own in left_out.items() for text in own]
    return {"rollouts": rollouts, "texts": num_texts, "left_out": told, "bytes": len(content)}


class Answers:
    """Answers by question, as `static/api.js` looks them up.

    Args:
        runs: the runs.
    """

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self.found: dict[str, Any] = {}
        self._runs = runs

    def ask(self, name: str, **parameters: Any) -> Any:
        """Return the answer to a question, and keep it."""
        made = answer(self._runs, name, Query((key, str(value)) for key, value in parameters.items()))
        self.found[_question(name, **parameters)] = made
        return made

    def ask_overview(self) -> None:
        """Keep everything but rows, texts and tokens."""
        for number, run in enumerate(self.ask("runs")):
            for name in ("overview", "config", "timeline"):
                self.ask(name, run=number)
            self.ask("items", run=number, text="")
            if run["is_tinker"]:
                self.ask("tinker", run=number)
            for name in run["metrics"]:
                self.ask("series", run=number, names=name)
            for source in run["sources"]:
                self.ask("ledger", run=number, source=source)

    def ask_rows(self, limit: int) -> tuple[int, dict[int, list[str]]]:
        """Keep the rows of the newest steps, of the ledger and of the prompts, as far as they fit.

        Args:
            limit: limit in bytes.

        Returns:
            The size in bytes, and by run what is left out.
        """
        size, left_out = 0, defaultdict[int, list[str]](list)
        rows = (("rows", place) for place in self._places(()) if _question("rows", **place) not in self.found)
        parts: list[tuple[str, str, Iterable[tuple[str, dict[str, Any]]], int]]
        parts = [("the rows of {}", "step", rows, limit // 2)]
        parts += [("{} of the ledger", "list", self._ledger_questions(), limit // 4)]
        parts += [("the answers to {}", "prompt", self._item_questions(), limit // 4)]
        for what, noun, questions, own_limit in parts:
            own, missing = self._ask_within(questions, own_limit)
            size += own
            for run, number in missing.items():
                left_out[run].append(f"this file leaves out {what.format(counted(number, noun))}; raise export_mb")
        return size, left_out

    def _ask_within(self, questions: Iterable[tuple[str, dict[str, Any]]], limit: int) -> tuple[int, Counter[int]]:
        """Keep answers until they reach a limit.

        Args:
            questions: names and parameters of the questions.
            limit: limit in bytes.

        Returns:
            The size of the answers in bytes, and by run the number of those that are left out.
        """
        size, missing, is_full = 0, Counter[int](), False
        for name, parameters in questions:
            own = 0 if is_full else len(json.dumps(self.ask(name, **parameters)))
            if is_full := is_full or size + own > limit:
                self.found.pop(_question(name, **parameters), None)
                missing[parameters["run"]] += 1
            else:
                size += own
        return size, missing

    def _ledger_questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for run, viewed in enumerate(self._runs):
            for source in viewed.record.sources:
                for kind in self.ask("ledger", run=run, source=source)["kinds"]:
                    place = {"run": run, "source": source, "status": kind["status"], "offset": 0}
                    yield "ledger_reasons", (own := {**place, "kind": kind["kind"]})
                    for reason in self.found.get(_question("ledger_reasons", **own), {}).get("reasons", ()):
                        yield "ledger_rows", {**place, "reason": reason["reason"]}

    def _item_questions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for run in range(len(self._runs)):
            while (answer := self.ask("items", run=run, text=""))["is_partial"]:
                pass  # each time it reads more prompts
            items = answer["items"]
            for set_, item in zip(items.get("set", ()), items.get("item", ()), strict=True):
                yield "item", {"run": run, "set": set_, "item": item}

    def ask_steps(self, steps: Sequence[int], limit: int) -> tuple[int, int]:
        """Keep rows, texts and tokens of chosen steps.

        Args:
            steps: the steps.
            limit: limit in bytes.

        Returns:
            Their size in bytes, and the number of rollouts.

        Raises:
            ConfigError: there are no such steps, or they do not fit.
        """
        chosen = self._places(steps)
        if not chosen:
            raise ConfigError(f"export_steps={list(steps)}: the record has none of these steps")
        size = number = 0
        for place in chosen:
            size += len(json.dumps([self.ask("rows", **place), self.ask("texts", **place)]))
            for question, made in self._samples(**place):
                size += len(json.dumps(made))
                number += 1
                if size <= limit:  # else only the size is of interest
                    self.found[question] = made
        if size > limit:
            told = f"more than export_mb={limit // MEGABYTE}; raise export_mb, or choose fewer steps"
            raise ConfigError(f"export_steps={list(steps)}: these steps take {math.ceil(size / MEGABYTE)} MB, {told}")
        return size, number

    def ask_samples(self, limit: int) -> int:
        """Keep texts and tokens of the newest steps, as far as they fit.

        Args:
            limit: limit in bytes.

        Returns:
            The number of rollouts.
        """
        size = number = 0
        for place in self._places(()):
            size += len(json.dumps(self.ask("texts", **place)))
            for question, made in self._samples(**place):
                size += len(json.dumps(made))
                if size > limit:
                    return number
                self.found[question] = made
                number += 1
        return number

    def _places(self, steps: Sequence[int]) -> list[dict[str, Any]]:
        """Return run, source and step of some steps, or of all steps, the newest first."""
        sources = [(number, source) for number, run in enumerate(self._runs) for source in run.record.sources]
        found = [(run, source, step) for run, source in sources for step in steps_of(self._runs[run], source)]
        places = [{"run": run, "source": source, "step": step} for run, source, step in found]
        chosen = (place for place in places if not steps or place["step"] in steps)
        return sorted(chosen, key=lambda place: -place["step"])

    def _samples(self, run: int, source: str, step: int) -> Iterator[tuple[str, Any]]:
        """Yield question and answer for each rollout of a step."""
        record = self._runs[run].record
        sequences: dict[Place, list[Any]] = defaultdict(list)
        for sequence in record.tokens(source, step):
            sequences[sequence["group"], sequence["sample"]].append(sequence)
        for row in record.rollouts(source, step):
            group, sample = row["group"], row["sample"]
            question = _question("sample", run=run, source=source, step=step, group=group, sample=sample)
            yield question, sample_answer(row, sequences[group, sample])


def _question(name: str, **parameters: Any) -> str:
    """Return a question in the form in which `static/api.js` looks up its answer."""
    texts = sorted((key, str(value)) for key, value in parameters.items())
    return json.dumps([name, texts], ensure_ascii=False, separators=(",", ":"))
