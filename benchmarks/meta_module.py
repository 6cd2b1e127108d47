"""Memory and time of a 7-billion-parameter train module in the driver, made under `init_empty_weights`.

    python -m benchmarks.meta_module

The folder holds the config of Qwen2-7B, and in place of its weights a sparse file of their size, which takes no room on
the disk. Every byte that the process reads is counted by the kernel (/proc/self/io, Linux): a driver that read weights
would have read gigabytes. Beside it, the same for transformers' own `from_config` on meta, which reads nothing either.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from rlite.nn import HuggingFaceFsdp2TrainModule

LIMIT_MB = 50.0
SHAPE = {
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}


class Policy(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """Only its size matters here."""


def build_folder(path: Path) -> Path:
    """A config, and a file of the weights' size without a byte in it."""
    Qwen2Config(**SHAPE).save_pretrained(path)
    with (path / "model.safetensors").open("wb") as file:
        file.truncate(15 * 10**9)
    return path


def bytes_read() -> int:
    """Bytes that this process has read from anywhere."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["rchar"])


def cost(make: Callable[[], Any]) -> dict[str, float]:
    """Make a module, and return the memory it adds in 10**6 bytes, its seconds and its parameters."""
    process = psutil.Process()
    resident, read, begin = process.memory_info().rss, bytes_read(), time.perf_counter()
    with init_empty_weights():
        module = make()
    return {
        "seconds": time.perf_counter() - begin,
        "resident_mb": (process.memory_info().rss - resident) / 1e6,
        "read_mb": (bytes_read() - read) / 1e6,
        "parameters": sum(parameter.numel() for parameter in module.parameters()),
        "on_meta": all(parameter.is_meta for parameter in module.parameters()),
    }


def main() -> None:
    """Parse, build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        path = build_folder(Path(folder) / "qwen2-7b")
        small = Qwen2Config(**{**SHAPE, "num_hidden_layers": 1, "hidden_size": 56, "vocab_size": 64})
        AutoModelForCausalLM.from_config(small)  # imports are nobody's cost
        results = {
            "train module": cost(lambda: Policy.from_pretrained(path)),
            "from_config": cost(lambda: AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE))),
        }
    ours = results["train module"]
    ratio = ours["resident_mb"] * 1e6 / (2 * ours["parameters"])
    settings = {"shape": SHAPE, "transformers": transformers.__version__, "limit_mb": LIMIT_MB}
    if args.json:
        print(json.dumps({"settings": settings, "results": results, "ratio": ratio}))
        return
    print(f"settings: {settings}")
    for name, result in results.items():
        print(
            f"{name:>12}: {result['parameters'] / 1e9:.2f} billion parameters, on meta: {result['on_meta']}, "
            f"{result['seconds']:.2f} s, {result['resident_mb']:.1f} MB resident, {result['read_mb']:.2f} MB read"
        )
    print(
        f"the driver grows by {ours['resident_mb']:.1f} MB (limit {LIMIT_MB:.0f}), "
        f"{ratio:.2%} of the weights in bfloat16"
    )


if __name__ == "__main__":
    main()
