"""A program of the real client, of any release: steps, and what it has learnt as JSON in its last line."""

from __future__ import annotations

import json
import sys
import warnings

import tinker
from tinker import types

warnings.simplefilter("ignore")
model, num_steps, begin = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def datum(start: int) -> types.Datum:
    tokens = [(start + place) % 50 for place in range(6)]
    inputs = {
        "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[5]),
        "weights": types.TensorData(data=[1.0] * 5, dtype="float32", shape=[5]),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


client = tinker.ServiceClient().create_lora_training_client(model, rank=4, seed=1)
client = client.result() if hasattr(client, "result") else client
for step in range(num_steps):
    forward = client.forward_backward([datum(begin + step + row) for row in range(4)], "cross_entropy")
    if step + 1 == num_steps:
        forward.result()
        print("waiting", flush=True)
        sys.stdin.readline()
    optim = client.optim_step(types.AdamParams(learning_rate=1e-2))
    forward.result()
    optim.result()
sampler = client.save_weights_and_get_sampling_client()
sampler = sampler.result() if not hasattr(sampler, "sample") else sampler
params = types.SamplingParams(max_tokens=4, temperature=0.1, seed=3)
drawn = sampler.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result().sequences[0]
found = client.forward([datum(begin)], "cross_entropy").result()
print(json.dumps({"loss": found.metrics["loss:sum"], "tokens": list(drawn.tokens)}), flush=True)
