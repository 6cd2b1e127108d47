"""Count the source lines that hold each promise of the library: what a reader would have to check to believe it.

    python -m benchmarks.promises                the table of docs/why-rlite.md
    python -m benchmarks.promises FOLDER ...     source lines of other packages, such as site-packages/trl

A source line has code: no blank line, no comment, no docstring. Each file of rlite counts once.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.sloc import source_lines

ROOT = Path(__file__).parents[1]
PROMISES: Mapping[str, tuple[str, ...]] = {
    "The loops of all trainers, PPO and GRPO among them": ("trainer",),
    "Losses, advantages and KL estimators as functions of tensors": ("algorithms",),
    "One program in a process, under torchrun and on Ray": ("runtime", "runtime/cluster"),
    "Sharded training: FSDP2, tensor, context and expert parallel": ("backends/fsdp2", "runtime/parallel", "engine"),
    "Models of transformers train and serve unchanged": ("backends/models", "nn"),
    "A built-in inference engine, also on CPU": ("backends/embedded", "backends/serving"),
    "vLLM, SGLang and servers of your own": ("backends/vllm", "backends/sglang", "backends/remote"),
    "Lost replicas are replaced; requests go on": ("runtime/replicas",),
    "Asynchronous rollouts with a bound on their age": ("rollout/collector",),
    "A reward or an environment that hangs or crashes costs itself alone": ("runtime/sandbox", "rollout/rewards"),
    "Environments, tools and contracts of other libraries": ("rollout", "services/environments"),
    "Unmodified agents over OpenAI's and Anthropic's interfaces": ("services/endpoint",),
    "Templates, masks and data formats are checked": ("data",),
    "A stopped run resumes, bit for bit on CPU": ("trainer/run", "runtime/storage", "services/recovery"),
    "What became of every rollout is recorded": ("services/record",),
    "A recorded step can be made again, and a run audited": ("assembly/proof",),
    "The cause is named if engine and trainer disagree": ("assembly/why",),
    "Evaluations have errors and paired comparisons": ("evaluation", "assembly/evaluate"),
    "Other settings of an asynchronous run can be simulated": ("assembly/simulate",),
    "Runs can be read: console, metrics, viewer": ("services/console", "viewer", "observability"),
    "Jobs of several roles are restarted": ("control",),
    "Clients of the Tinker API train here": ("services/tinker",),
    "Options are checked before work starts; commands": ("", "assembly", "assembly/commands", "assembly/quickstart"),
}
"""promises, each with the folders of rlite that hold it; a file belongs to the deepest folder that is named"""


def lines_of(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the path, relative to the folder, and the number of source lines of each module in a folder."""
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(folder)), len(source_lines(path.read_text(encoding="utf-8")))


def promise_of(file: str) -> str:
    """Return the promise that a file of rlite belongs to."""
    holders = {folder: promise for promise, folders in PROMISES.items() for folder in folders}
    return holders[max((folder for folder in holders if not folder or file.startswith(f"{folder}/")), key=len)]


def main(others: list[str]) -> None:
    """Print the table of the promises, or the sizes of other packages."""
    for other in others:
        sizes = dict(lines_of(Path(other)))
        print(f"{other}: {sum(sizes.values()):,} source lines in {len(sizes)} files")
    if others:
        return
    lines: Counter[str] = Counter()
    for file, number in lines_of(ROOT / "rlite"):
        lines[promise_of(file)] += number
    print("| promise | source lines | in |\n|---|---|---|")
    for promise, folders in PROMISES.items():
        places = ", ".join(f"`{folder}/`" for folder in folders if folder)
        print(f"| {promise} | {lines[promise]:,} | {places} |")
    print(f"| the whole library | {lines.total():,} | |")


if __name__ == "__main__":
    main(sys.argv[1:])
