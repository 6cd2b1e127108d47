"""vLLM's own reload of a checkpoint on CPU, as the other side of `benchmarks/vllm_reload.py`.

    .venv-vllm/bin/python benchmarks/peers/vllm_reload.py MODEL_DIR

Runs in vLLM's own environment and imports nothing of rlite. It prints its settings as a JSON line, then reloads the
weights for each line on standard input and answers with a JSON line: seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    """Start, then reload when asked to."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }
    import vllm

    engine = vllm.LLM(
        model=sys.argv[1], dtype="float32", enforce_eager=True, kv_cache_memory_bytes=64 << 20, max_model_len=128
    )
    print(json.dumps({"vllm": vllm.__version__}), flush=True)
    for _ in sys.stdin:
        begin = time.perf_counter()
        engine.collective_rpc("reload_weights")
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main()
