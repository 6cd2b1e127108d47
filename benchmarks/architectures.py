"""Compare rlite with transformers for every causal language model: equal, refused, or not built.

    python -m benchmarks.architectures --write docs/architectures.md --results outputs/architectures

For each class of transformers' mapping, small models with random weights are built on two CPU processes: from configs
shaped like released checkpoints (`benchmarks/released.py`), or from the default config where there are none. The
columns are the comparisons of `benchmarks/architecture_columns.py`. If the engines accept a model and compute it
wrongly, the command ends with an error.

The comparisons run in child processes. A config that takes longer than `--limit` seconds ends its child, and the next
child continues with the class after it. Results are files, by a hash of rlite's source and the config, so a command
that was stopped continues where it was, and several commands can share one folder (`--only`).

`--earlier CHECKOUT` counts the classes that an earlier commit trains and serves, with the same configs, and keeps the
counts in `benchmarks/architectures_earlier.json`. The page states them beside those of today.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from benchmarks.architecture_columns import COLUMNS, EQUAL, NOT_BUILT, NOTHING, REFUSED, WRONG, Verdict
from benchmarks.released import classes, configs, current_file, result_file
from rlite.wording import counted

ROOT = Path(__file__).parents[1]
EARLIER = Path(__file__).with_name("architectures_earlier.json")
"""counts of an earlier commit: its name, the number of configs, and the classes that train and serve"""
HEAD = """# Models

Both engines run unmodified Hugging Face models with rlite's own attention, and pack several sequences into one forward.
For some models, this gives wrong results. They mix tokens by other means than attention, or compute masks or positions
themselves. `build` therefore checks a small copy of the model in the driver, before any process starts, in a fraction
of a second. The copy has every kind of layer that the config gives. Modules of one kind have equal types, sizes and
attributes. If the config does not list the kinds layer by layer, the copy has all layers. `build` raises ConfigError if

- a token reaches other tokens by other means than attention and known mixers. Attention is switched off, each token is
  a document for the mixers, and the embeddings of one token are NaN: the NaN must stay at this token.
- a mixer lets documents of a pack reach each other, again found by NaN.
- the config names a kind of layer that rlite does not know.
- the logits of a pack or the gradients of a parameter differ from those of transformers. They are compared in float64,
  and gradients of mixtures of experts and of mixers in training mode.
- experts are no fused matrices, or a tensor does not survive the way from a checkpoint into the model and back.
- the log-probabilities of served tokens differ from those of transformers.
- on GPUs in 16 bits, heads are wider than 256 or scores have a soft cap. torch's flash attention takes neither.

Sinks, soft caps, values of another width than keys, heads that differ from layer to layer, and layers that read an
earlier layer's keys and values are computed as the model asks, in packs and in the KV cache. The cache holds the keys
and values that attention is given. For latent attention (DeepSeek-V3, MiniCPM3) these are all heads, not the latents.

The table below is the output of `python -m benchmarks.architectures --write docs/architectures.md`,
made with transformers {version}: one row for every class in transformers' causal language mapping. The models have
the shape of released checkpoints, which `benchmarks/released.py` lists: windows, mixtures of layers, rotary scaling,
partial rotary embeddings, tied embeddings. A class without such checkpoints there has its default config with at most
8 layers. An entry holds for all configs of the class. The entries mean:

- **equal**: log-probabilities equal the unmodified model's in float32 in evaluation mode, and gradients are equal
  (compared in float64 if the class can compute in it).
- **refused**: `build` raises ConfigError. The last column gives the reason, after the config's name.
- **not built**: no small model could be built from a config, so there was nothing to compare. `build` refuses
  such a model too, unless the comparison works with the checkpoint's own config.
- **-**: the model has no experts.

| column | what is compared |
|---|---|
| train, serve | training and generation on one device |
| tp 2 | matrices split over two devices (`tp_size=2`) |
| sp 2 | tokens of a sequence split over two devices (`sp_size=2`) |
| ep 2 | experts divided over two devices (`ep_size=2`), by transformers' expert parallel plan |
| serve tp 2 | an inference engine with `tensor_parallel_size=2` |
| replay | chosen experts are replayed (`actor.routing_replay`), and the own choice gives the same logits bit for bit |
| round trip | a checkpoint that is read and exported again has the same names and bytes |
| LoRA | a trained adapter, which PEFT loads, and its merged export, which transformers loads |

Encoders are built with `is_decoder=true`. Multimodal models are read from the checkpoint of the whole model, and their
text model is trained and served.

- A checkpoint may differ from its class's default config, for instance by a sliding window. `build` checks the
  checkpoint's config.
- Sliding windows are applied layer by layer as the model's config states, in training and in serving.
- A *mixer* is a layer that carries a state from token to token: a gated delta net, Kimi delta attention, Mamba or a
  short convolution. rlite knows it by its parts: a convolution, the number of its layer, hidden states and a cache as
  arguments. Training computes it for each document of a pack. Serving keeps one state of it for each sequence.
- If rotary angles depend on the longest sequence (`longrope`, `dynamic`), the length of sequences is limited to the
  range in which the angles are constant.

A module with its own forward can skip the comparison by overriding `check_architecture()`. Other executors of the
inference engine do their own checks.

{summary}

"""


NOT_COMPARED = "not compared"


class Row(NamedTuple):
    """Verdicts of one class by column."""

    model_type: str
    name: str
    """name of the class"""
    verdicts: dict[str, Verdict]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page to write; default: print it")
    parser.add_argument("--only", nargs="*", help="model types; default: all")
    parser.add_argument("--results", type=Path, help="folder that keeps results; default: a temporary one")
    parser.add_argument("--limit", type=float, default=600, help="most seconds of one config; default: %(default)s")
    parser.add_argument("--partial", action="store_true", help="compare nothing; make the page of the results so far")
    parser.add_argument("--tree", help="subfolder of the results; default: a hash of rlite's source")
    parser.add_argument("--earlier", type=Path, help="count the classes of this checkout of an earlier commit instead")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.results or Path(temporary)
        if args.earlier:
            count_earlier(args.earlier.resolve(), folder, args.limit, args.only)
            return
        folder = folder / (args.tree or tree_hash(ROOT))
        for devices in () if args.partial else COLUMNS:
            command = child_command("-m", "benchmarks.architecture_columns")
            compare(command, ROOT, folder, devices, args.limit, args.only)
        rows = [Row(*names, joined_row(folder, names[0])) for names in classes_by_type(args.only)]
    page = render(rows)
    if args.write:
        args.write.write_text(page)
    else:
        print(page)
    if wrong := [row for row in rows if any(verdict.name == WRONG for verdict in row.verdicts.values())]:
        raise SystemExit(f"accepted and computed wrongly: {wrong}")


def tree_hash(root: Path) -> str:
    """Return a hash of what results depend on besides the config: rlite's source, the comparisons, and versions."""
    files = sorted((root / "rlite").rglob("*.py")) + sorted((root / "rlite").rglob("*.c"))
    files.append(Path(__file__).with_name("architecture_columns.py"))
    text = b"".join(file.read_bytes() for file in files) + f"{transformers.__version__} {torch.__version__}".encode()
    return hashlib.sha256(text).hexdigest()[:12]


def classes_by_type(only: Sequence[str] | None) -> list[tuple[str, str]]:
    """Return model types with the names of their classes."""
    return [(each.model_type, MODEL_FOR_CAUSAL_LM_MAPPING[each].__name__) for each in classes(only)]


def child_command(*program: str) -> list[str]:
    return [sys.executable, "-W", "ignore", *program]


def compare(
    command: Sequence[str], tree: Path, folder: Path, devices: int, limit: float, only: Sequence[str] | None
) -> None:
    """Run a program over all classes until each config has a result in the folder.

    Args:
        command: the program; it takes `--out`, `--devices` and model types, and calls `benchmarks.released.compare`.
        tree: checkout whose packages it imports.
        folder: folder of the results.
        devices: number of devices of the columns.
        limit: most seconds of one config.
        only: model types; None for all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {(kind, name): result_file(folder, kind, name, devices) for kind, name, _ in configs(only)}
    while missing := [key for key, file in files.items() if not file.exists()]:
        types = list(dict.fromkeys(kind for kind, _ in missing))
        print(
            f"{counted(devices, 'device')}: {len(missing)} of {len(files)} configs to compare, from {types[0]}",
            flush=True,
        )
        program = [*command, "--out", str(folder), "--devices", str(devices), *types]
        reason = f"takes longer than {limit:.0f} s" if run_child(program, tree, folder, limit) else "ends the process"
        current = tuple(current_file(folder, os.getpid()).read_text().split("\n", 1))
        if current not in files:
            raise SystemExit("the comparing process ended before it compared a config; see its output above")
        if not files[current].exists():
            files[current].write_text(json.dumps(dict.fromkeys(COLUMNS[devices], Verdict(NOT_BUILT, reason))))


def run_child(command: Sequence[str], tree: Path, folder: Path, limit: float) -> bool:
    """Run a child until it ends, or until one config takes longer than `limit` seconds.

    Returns:
        True if it was ended.
    """
    current = current_file(folder, os.getpid())
    current.write_text("")
    child = subprocess.Popen(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, start_new_session=True)
    try:
        while child.poll() is None:
            time.sleep(1)
            if time.time() - current.stat().st_mtime > limit:
                return True
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    return False


def joined_row(folder: Path, model_type: str) -> dict[str, Verdict]:
    """Return the verdicts of a class by column, over all of its configs."""
    row = {}
    for devices, columns in COLUMNS.items():
        files = [result_file(folder, kind, name, devices) for kind, name, _ in configs([model_type])]
        found = [json.loads(file.read_text()) for file in files if file.exists()]
        is_whole = len(found) == len(files)
        for column in columns:
            verdicts = [Verdict(*each[column]) for each in found if column in each]
            row[column] = joined(verdicts if is_whole and verdicts else [*verdicts, Verdict(NOT_COMPARED)])
    return row


def joined(found: Sequence[Verdict]) -> Verdict:
    """Return the verdict of a class: the worst of its configs'."""
    order = (WRONG, REFUSED, NOT_BUILT, NOT_COMPARED, EQUAL, NOTHING)
    return min(found, key=lambda verdict: order.index(verdict.name))


def count_earlier(checkout: Path, folder: Path, limit: float, only: Sequence[str] | None) -> None:
    """Count the classes that an earlier commit trains and serves, with the configs of today."""
    folder = folder / tree_hash(checkout)
    program = Path(__file__).with_name("architecture_columns_earlier.py")
    compare(child_command(str(program)), checkout, folder, 1, limit, only)
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = {kind: joined_row(folder, kind) for kind, _ in classes_by_type(only)}
    trained = [kind for kind, row in rows.items() if row["train"].name == EQUAL]
    served = [kind for kind in trained if rows[kind]["serve"].name == EQUAL]
    counts = {"commit": commit, "transformers": transformers.__version__, "train": trained, "serve": served}
    EARLIER.write_text(json.dumps(counts, indent=1) + "\n")
    print(f"{commit}: of {len(rows)} classes, {len(trained)} train and {len(served)} serve")


def render(rows: list[Row]) -> str:
    """Return the page."""
    titles = ["type", "class", *(title for columns in COLUMNS.values() for title in columns), "reason"]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for model_type, name, verdicts in rows:
        prefix = re.compile(rf"{name} \('[\w-]+'\) ")
        reasons = dict.fromkeys(prefix.sub("", verdict.reason) for verdict in verdicts.values() if verdict.reason)
        text = "; ".join(dict.fromkeys(map(shorten, reasons)))
        lines.append(f"| {model_type} | {name} | {' | '.join(v.name for v in verdicts.values())} | {text} |")
    return HEAD.format(version=transformers.__version__, summary=summary_of(rows)) + "\n".join(lines) + "\n"


def summary_of(rows: list[Row]) -> str:
    """Return the sentence with the counts, of this commit and of the earlier one."""
    count = {which: sum(row.verdicts["train"].name == which for row in rows) for which in (EQUAL, REFUSED, NOT_BUILT)}
    num_served = sum(row.verdicts["train"].name == row.verdicts["serve"].name == EQUAL for row in rows)
    text = (
        f"Of {len(rows)} entries, {count[EQUAL]} can be trained and {num_served} of them can also be served. "
        f"{count[REFUSED]} are refused, and {count[NOT_BUILT]} are not built."
    )
    if not EARLIER.exists():
        return text
    earlier = json.loads(EARLIER.read_text())
    return (
        f"{text}\nWith the same configs, commit {earlier['commit']}, before mixtures of experts, mixers and converted "
        f"checkpoints, trained {len(earlier['train'])} and served {len(earlier['serve'])}."
    )


def shorten(reason: str) -> str:
    """Return a reason as a table's cell: one sentence, no remedy, no folder."""
    reason = reason.split(". Use another model")[0].replace("|", "/").replace("\n", " ")
    reason = re.sub(r"\S*/tmp\w+: (\w+ \('[\w-]+'\) )?", "", reason)
    return reason if len(reason) <= 200 else reason[:197] + "..."


if __name__ == "__main__":
    main()
