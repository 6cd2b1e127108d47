"""Generation speed on CPU: rlite, its bare worker, left-padded `transformers.generate` and vLLM, in one run.

    make bench-vllm-env                                                             # once, for vLLM
    python -m benchmarks.generation --threads 1 --vllm-python .venv-vllm/bin/python
    python -m benchmarks.generation --width 512 --layers 8 --vocab-size 32768 --vllm-python .venv-vllm/bin/python
    .venv-vllm/bin/python -m benchmarks.generation --executor vllm --vllm-python .venv-vllm/bin/python

Every side serves the same checkpoint (`benchmarks.model`) and the same prompts in float32, samples at temperature 1 and
ignores the end token. Two cases: `uniform`, the same number of new tokens for every prompt; `ragged`, one drawn for
each. `transformers` cannot give rows different lengths: it goes on until the longest is done, and what was asked for
counts.

    rlite          RliteInferenceEngine in this process, a call of generate or one agenerate per prompt
    worker         the worker behind it, without engine and driver
    transformers   generate in this process
    vllm           LLM.generate in a process of its own, from `benchmarks/peers/vllm_generate.py`

With `--replicas 2 --threads 2`, rlite serves with two replicas of one thread each, in worker processes. The operations
of a small model are too short to be shared by threads.

With `--executor vllm`, rlite serves with vLLM, and the sides worker and transformers are left out: the cost of rlite's
executor beside the same vLLM that is called directly.

Each is warmed up, then measured in turns; figures are medians. A busy machine disturbs CPU time less than wall time,
but only at one thread: waiting OpenMP threads spin. rlite returns the log-probability of every token; vLLM does not
have to, unless `--vllm-logprobs` asks for it. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers

import rlite
from benchmarks.model import build_model
from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.types import GenerationHyperparameters, LLMRequest, SequenceRequest

OURS = "rlite"
PEER = Path(__file__).parent / "peers" / "vllm_generate.py"
OPENMP = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""variables that `import rlite` sets for this process; vLLM keeps its own values"""


@dataclass(frozen=True)
class Run:
    """One measurement: generated tokens that were asked for, and what they took."""

    tokens: int
    seconds: float
    cpu_seconds: float


class Side(Protocol):
    """One way to generate. `generate` makes `num_new[i]` tokens for prompt i."""

    settings: dict[str, Any]

    def generate(self, num_new: list[int]) -> Run: ...

    def close(self) -> None: ...


def measure(work: Callable[[], int]) -> Run:
    """Time `work`, which returns the number of tokens it made."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    tokens = work()
    return Run(tokens, time.perf_counter() - begin, time.process_time() - cpu_begin)


def gconfig_of(num_new: int) -> GenerationHyperparameters:
    """Sample `num_new` tokens from the whole distribution."""
    return GenerationHyperparameters(max_new_tokens=num_new, ignore_eos=True)


class Engine:
    """The inference engine with the in-process launcher."""

    def __init__(
        self, executor: str, model: Path, prompts: list[list[int]], max_model_len: int, max_num_seqs: int
    ) -> None:
        self.prompts = prompts
        self.engine = rlite.RliteInferenceEngine(model, executor=executor)
        # the repeats send the same prompts
        options = {"enable_prefix_caching": False} if executor == "vllm" else {}
        self.engine.build(max_model_len=max_model_len, max_num_seqs=max_num_seqs, dtype="float32", **options)
        self.settings = {"version": rlite.__version__, "torch": torch.__version__, "executor": executor}

    def generate(self, num_new: list[int]) -> Run:
        if len(set(num_new)) == 1:
            return measure(lambda: sum(len(r.outputs[0].token_ids) for r in self._generate_all(num_new[0])))
        return measure(lambda: asyncio.run(self._generate_each(num_new)))

    def _generate_all(self, num_new: int) -> list[Any]:
        return self.engine.generate(self.prompts, gconfig_of(num_new))

    async def _generate_each(self, num_new: list[int]) -> int:
        requests = [
            LLMRequest(input_ids=prompt, gconfig=gconfig_of(num))
            for prompt, num in zip(self.prompts, num_new, strict=True)
        ]
        responses = await asyncio.gather(*(self.engine.agenerate(request) for request in requests))
        return sum(len(response.output_tokens) for response in responses)

    def close(self) -> None:
        rlite.shutdown()


class Worker:
    """The embedded worker alone, pumped to the end."""

    STEPS = 64

    def __init__(self, model: Path, prompts: list[list[int]], max_model_len: int, max_num_seqs: int) -> None:
        self.prompts = prompts
        options = EmbeddedOptions(max_model_len=max_model_len, max_num_seqs=max_num_seqs, dtype="float32")
        self.worker = EmbeddedWorker(str(model), options, torch.device("cpu"))
        self.settings = {"torch": torch.__version__, "steps_per_call": self.STEPS}

    def generate(self, num_new: list[int]) -> Run:
        return measure(lambda: self._pump(num_new))

    def _pump(self, num_new: list[int]) -> int:
        requests = [
            SequenceRequest(request_id=i, input_ids=prompt, gconfig=gconfig_of(num), seed=i)
            for i, (prompt, num) in enumerate(zip(self.prompts, num_new, strict=True))
        ]
        chunks, made = self.worker.advance(requests, [], self.STEPS), 0
        while chunks:
            made += sum(len(chunk.token_ids) for chunk in chunks)
            chunks = self.worker.advance([], [], self.STEPS)
        return made

    def close(self) -> None:
        self.worker.to_meta()


class Transformers:
    """`generate` on left-padded batches of `max_num_seqs` rows."""

    def __init__(self, model: Path, prompts: list[list[int]], max_num_seqs: int) -> None:
        self.prompts, self.max_num_seqs = prompts, max_num_seqs
        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        # the folder's own would bring the end token back
        self.model.generation_config = transformers.GenerationConfig()
        self.settings = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "attention": self.model.config._attn_implementation,
        }

    def generate(self, num_new: list[int]) -> Run:
        return measure(lambda: self._generate(num_new))

    def _generate(self, num_new: list[int]) -> int:
        for first in range(0, len(self.prompts), self.max_num_seqs):
            rows = self.prompts[first : first + self.max_num_seqs]
            longest = max(num_new[first : first + self.max_num_seqs])
            width = max(map(len, rows))
            out = self.model.generate(
                torch.tensor([[0] * (width - len(row)) + row for row in rows]),
                attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows]),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                max_new_tokens=longest,
                eos_token_id=None,
                pad_token_id=0,
            )
            if out.shape[1] != width + longest:
                raise RuntimeError(f"transformers made {out.shape[1] - width} tokens, {longest} were asked for")
        return sum(num_new)

    def close(self) -> None:
        del self.model


class Vllm:
    """The real vLLM, in an environment of its own; it generates when it is sent a line."""

    def __init__(self, python: Path, model: Path, max_new_tokens: int, args: argparse.Namespace) -> None:
        command = [str(python), str(PEER), str(model), str(model / "prompts.json"), "--serve"]
        command += ["--threads", str(args.threads), "--max-new-tokens", str(max_new_tokens)]
        command += ["--max-num-seqs", str(args.max_num_seqs)]
        command += ["--logprobs"] if args.vllm_logprobs else []
        command += ["--compile"] if args.vllm_compile else []
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115  # lives as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={key: value for key, value in os.environ.items() if key not in OPENMP},
        )
        self.settings = self._answer()

    def generate(self, num_new: list[int]) -> Run:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(num_new) + "\n")
        self._process.stdin.flush()
        return Run(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        self._log.seek(0)
        raise RuntimeError(f"vLLM ended with {self._process.wait()}:\n{self._log.read()[-2000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def compare(sides: dict[str, Side], num_new: list[int], repeats: int) -> dict[str, list[Run]]:
    """One warm-up, then `repeats` runs of every side, in turns."""
    runs: dict[str, list[Run]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            run = side.generate(num_new)
            if run.tokens != sum(num_new):
                raise RuntimeError(f"{name} made {run.tokens} tokens, {sum(num_new)} were asked for")
            if repeat > 0:
                runs[name].append(run)
    return runs


def summary(runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Medians of every side, and what rlite is beside each: the median over the turns of the two runs' ratio."""
    figures: dict[str, Any] = {}
    for name, taken in runs.items():
        turns = list(zip(runs[OURS], taken, strict=True))
        figures[name] = {
            "tokens_per_second": statistics.median(r.tokens / r.seconds for r in taken),
            "tokens_per_cpu_second": statistics.median(r.tokens / r.cpu_seconds for r in taken),
            "rlite_by_wall_time": statistics.median(theirs.seconds / ours.seconds for ours, theirs in turns),
            "rlite_by_cpu_time": statistics.median(theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in turns),
            "runs": [asdict(run) for run in taken],
        }
    return figures


def report(case: str, figures: dict[str, Any]) -> None:
    """A table for people."""
    print(f"\n{case:<14}{'tokens/s':>10}{'/CPU-s':>10}   rlite is faster: by wall time, by CPU time")
    for name, f in figures.items():
        line = f"{name:<14}{f['tokens_per_second']:>10.0f}{f['tokens_per_cpu_second']:>10.0f}"
        if name != OURS:
            line += f"{f['rlite_by_wall_time']:>30.2f} x{f['rlite_by_cpu_time']:>13.2f} x"
        print(line)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--replicas", type=int, default=1, help="rlite's; they share the threads, more than one on Ray")
    parser.add_argument("--executor", default="torch", choices=["torch", "vllm"], help="rlite's executor")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment with vLLM; default: leave it out")
    parser.add_argument("--vllm-logprobs", action="store_true", help="let vLLM return log-probabilities too")
    parser.add_argument("--vllm-compile", action="store_true", help="let vLLM compile the model: a C++ compiler")
    parser.add_argument("--vocab-size", type=int, help="default: the byte tokenizer's 259")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--max-num-seqs", type=int, default=128)
    parser.add_argument("--uniform", type=int, default=256, metavar="N", help="new tokens; 0 leaves the case out")
    parser.add_argument("--ragged", type=int, nargs=2, default=(32, 256), metavar=("MIN", "MAX"), help="0 0: leave out")
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Build, measure, print."""
    args = parse()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        model = build_model(Path(folder) / "model", args.vocab_size, width=args.width, layers=args.layers)
        prompts = json.loads((model / "prompts.json").read_text())
        cases = {"uniform": [args.uniform] * len(prompts), "ragged": [draw.randint(*args.ragged) for _ in prompts]}
        cases = {case: num_new for case, num_new in cases.items() if max(num_new) > 0}
        longest = max(map(max, cases.values()))
        max_model_len = max(map(len, prompts)) + longest
        rlite.init(device="cpu", num_devices=args.replicas, num_threads=args.threads // args.replicas)
        torch.set_num_threads(args.threads)
        sides: dict[str, Side] = {OURS: Engine(args.executor, model, prompts, max_model_len, args.max_num_seqs)}
        if args.executor == "torch":
            sides["worker"] = Worker(model, prompts, max_model_len, args.max_num_seqs)
            sides["transformers"] = Transformers(model, prompts, args.max_num_seqs)
        if args.vllm_python is None or not args.vllm_python.exists():
            found = "--vllm-python was not given" if args.vllm_python is None else f"{args.vllm_python} is not there"
            print(f"vllm is left out: {found} (make bench-vllm-env makes an environment)")
        else:
            sides["vllm"] = Vllm(args.vllm_python, model, longest, args)
        settings = {
            "threads": torch.get_num_threads(),
            "replicas": args.replicas,
            "dtype": "float32",
            "model": f"Qwen3, {args.width} wide, {args.layers} layers",
            "vocab_size": args.vocab_size or 259,
            "num_prompts": len(prompts),
            "prompt_lengths": [min(map(len, prompts)), max(map(len, prompts))],
            "new_tokens": {case: [min(n), max(n), sum(n)] for case, n in cases.items()},
            "max_num_seqs": args.max_num_seqs,
            "repeats": args.repeats,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[0],
        }
        print("settings:", json.dumps(settings))
        for name, side in sides.items():
            print(f"  {name}: {json.dumps(side.settings)}")
        results = {}
        for case, num_new in cases.items():
            results[case] = summary(compare(sides, num_new, args.repeats))
            report(case, results[case])
        for side in sides.values():
            side.close()
    sides_settings = {name: side.settings for name, side in sides.items()}
    print(json.dumps({"settings": settings, "sides": sides_settings, "cases": results}))


if __name__ == "__main__":
    main()
