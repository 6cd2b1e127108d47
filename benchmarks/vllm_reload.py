"""Time of a weight sync into vLLM on CPU, compared with vLLM's own reload of the same checkpoint.

    make bench-vllm-env                                     # once: .venv-vllm
    .venv-vllm/bin/python -m benchmarks.vllm_reload

A train engine and an inference engine with executor="vllm" share a CPU slot. `p2p_weight_sync` and vLLM's
`reload_weights` are timed in turns; vLLM reads the checkpoint (`benchmarks.model`, 256 wide, 4 layers) from the page
cache. vLLM is called directly, in a process of its own (`benchmarks/peers/vllm_reload.py`). The ratio is that of the
medians. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import rlite
from benchmarks.model import build_model
from tests.integration.modules import Qwen3Policy, on_meta

PEER = Path(__file__).parent / "peers" / "vllm_reload.py"
MOST = 3.0
"""ratio to vLLM's own reload that a sync has to stay below"""


class Vllm:
    """vLLM in a process of its own. It reloads its weights when it is sent a line."""

    def __init__(self, model: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(PEER), str(model)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.settings = self._answer()

    def reload(self) -> float:
        """Return the seconds of one reload."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._answer()["seconds"]

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"vLLM ended with {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> None:
    """Build, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model")
        rlite.init(num_devices=1, num_threads=1, device="cpu")
        serve = rlite.RliteInferenceEngine(model, executor="vllm")
        serve.build(max_model_len=128, max_num_seqs=8)
        train = rlite.RliteTrainEngine(on_meta(Qwen3Policy, model))
        train.build(colocate_with=serve)
        vllm = Vllm(model)
        syncs, reloads = [], []
        for number in range(1 + args.rounds):
            report, seconds = train.p2p_weight_sync(serve), vllm.reload()
            if number > 0:
                syncs.append(report.seconds)
                reloads.append(seconds)
        settings = {"megabytes": report.num_bytes / 2**20, "tensors": report.num_tensors, **vllm.settings}
        vllm.close()
        rlite.shutdown()
    ratio = statistics.median(syncs) / statistics.median(reloads)
    print(f"sync {1e3 * statistics.median(syncs):.1f} ms, vLLM's reload {1e3 * statistics.median(reloads):.1f} ms")
    print(f"sync / reload = {ratio:.2f} (at most {MOST})")
    load = os.getloadavg()[0]
    print(
        json.dumps({"settings": {**settings, "load_average": load}, "ratio": ratio, "syncs": syncs, "reloads": reloads})
    )


if __name__ == "__main__":
    main()
