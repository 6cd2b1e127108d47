"""One program for every launcher: `program.py MODEL NUM_DEVICES LAUNCHER OUT.json [wait]`. Says what it computed."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import rlite
from rlite import NeedParallel, RliteInferenceEngine, RliteTrainEngine
from rlite.errors import ConfigError
from tests.integration.modules import Qwen2Policy, make_batch, num_counted, on_meta, token_loss


def main(model: str, num_devices: int, launcher: str, out: str, *more: str) -> None:
    rlite.init(device="cpu", num_devices=num_devices, launcher=launcher, num_threads=1)  # type: ignore[arg-type]
    try:
        rlite.init()
    except ConfigError as error:
        second_init = str(error)
    serve = RliteInferenceEngine(model)
    serve.build(tensor_parallel_size=num_devices, data_parallel_size=1, max_model_len=64, max_num_seqs=4)
    train = RliteTrainEngine(on_meta(Qwen2Policy, model))
    train.build(tensor_parallel_size=num_devices, data_parallel_size=1, colocate_with=serve)
    if more:
        Path(out).write_text("ready")
        time.sleep(600)
    losses = [train.train_batch(make_batch([9, 5, 7], seed), token_loss, num_counted)["loss"] for seed in range(3)]
    train.p2p_weight_sync(serve)
    outputs = serve.generate(["Hello", [1, 2, 3]], {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True})
    result = {
        "losses": losses,
        "tokens": [output.outputs[0].token_ids for output in outputs],
        "rows": train.first_tokens(NeedParallel([[i] for i in range(5)])),
        "second_init": second_init,
    }
    rlite.shutdown()
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
