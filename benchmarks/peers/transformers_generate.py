"""Generation speed of `transformers`' own `generate`: one left-padded batch, the baseline that needs nothing installed.

    python benchmarks/peers/transformers_generate.py MODEL_DIR PROMPTS.json --threads 1

PROMPTS.json is a list of lists of token ids. The last line of standard output is one JSON object: the settings,
`tokens_per_second` (the median over the repeats, generated tokens only), the same per second of CPU time, and every
repeat. A busy machine disturbs CPU time less than wall time, but only at one thread: waiting OpenMP threads spin.
After the end token of a row nothing counts, although the batch goes on until its last row ends.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import transformers


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--honour-eos", action="store_true", help="let completions end at the end token")
    args = parser.parse_args()
    print(json.dumps(measure(args)))


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Settings and figures of `args.repeats` runs after a short warm-up."""
    torch.set_num_threads(args.threads)
    prompts = json.loads(args.prompts.read_text())
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    end = model.config.eos_token_id
    width = max(map(len, prompts))
    input_ids = torch.tensor([[model.config.pad_token_id] * (width - len(row)) + row for row in prompts])
    attention_mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    options = {
        "do_sample": args.temperature > 0,
        "temperature": args.temperature or None,
        "top_k": 0,
        "eos_token_id": end if args.honour_eos else None,
        "pad_token_id": model.config.pad_token_id,
    }
    # the folder's generation config would bring the end token back
    model.generation_config = transformers.GenerationConfig()

    def generate(max_new_tokens: int) -> dict[str, float]:
        start, cpu_start = time.perf_counter(), time.process_time()
        rows = model.generate(input_ids, attention_mask=attention_mask, max_new_tokens=max_new_tokens, **options)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        tokens = rows[:, width:].numel()
        if args.honour_eos:
            ended = (rows[:, width:] == end).int().cumsum(-1)
            tokens = int((ended.cumsum(-1) <= 1).sum())  # up to and with the first end token
        return {"tokens": tokens, "seconds": seconds, "cpu_seconds": cpu_seconds}

    generate(4)
    runs = [generate(args.max_new_tokens) for _ in range(args.repeats)]
    return {
        "engine": f"transformers {transformers.__version__} generate, left-padded",
        "torch": torch.__version__,
        "model": str(args.model),
        "num_prompts": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "ignore_eos": not args.honour_eos,
        "dtype": "float32",
        "threads": torch.get_num_threads(),
        "tokens_per_second": statistics.median(run["tokens"] / run["seconds"] for run in runs),
        "tokens_per_cpu_second": statistics.median(run["tokens"] / run["cpu_seconds"] for run in runs),
        "runs": runs,
    }


if __name__ == "__main__":
    main()
