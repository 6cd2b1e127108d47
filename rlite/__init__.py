"""rlite: reinforcement learning and post-training of large language models.

Importing this package imports neither torch, nor Ray, nor vLLM; each name is loaded when it is first used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlite import imports

# Defaults for the native libraries under torch on CPU, which read them when they are first used.
# How long OpenMP's idle threads spin before they sleep. Its default is either 3 ms, which on a busy machine made two
# threads seven times slower than one, or next to nothing, which makes every small operation wait for a thread to wake.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "ACTIVE"
    os.environ["GOMP_SPINCOUNT"] = "20000"  # of GNU's OpenMP: some 0.2 milliseconds
    os.environ["KMP_BLOCKTIME"] = "1"  # of LLVM's and Intel's: milliseconds
# oneDNN keeps a compiled primitive for each of the last 1,024 shapes. Packs have a new shape at every step, and the
# host's memory grew by gigabytes.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "384")
os.environ.setdefault("LRU_CACHE_CAPACITY", "384")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlite.api import evaluate, train
    from rlite.data.dispatch import NeedParallel, gathered
    from rlite.engine.inference import RliteInferenceEngine
    from rlite.engine.inference import RliteInferenceEngine as RLiteInferenceEngine
    from rlite.engine.registry import init, register_executor, session
    from rlite.engine.train import RliteTrainEngine
    from rlite.engine.train import RliteTrainEngine as RLiteTrainEngine
    from rlite.observability import stats_tracker
    from rlite.runtime.cluster.session import current_session, shutdown

__all__, __getattr__, __dir__ = imports.exports(
    __name__,
    {
        "rlite.api": "evaluate train",
        "rlite.data.dispatch": "NeedParallel gathered",
        "rlite.engine.inference": "RliteInferenceEngine RLiteInferenceEngine=RliteInferenceEngine",
        "rlite.engine.registry": "register_executor init session",
        "rlite.engine.train": "RliteTrainEngine RLiteTrainEngine=RliteTrainEngine",
        "rlite.observability": "stats_tracker",
        "rlite.runtime.cluster.session": "current_session shutdown",
    },
    submodules=("algorithms", "data", "engine", "errors", "nn", "rollout", "types"),
)
__all__ += ["__version__"]
