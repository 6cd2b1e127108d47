"""Memory of the divergence from a teacher over a whole vocabulary: computed in blocks, and with logits.

    python -m benchmarks.divergence_memory [--tokens 1024] [--width 256]

Each side runs in a process of its own, forward and backward, at a vocabulary of 151,936 in float32. Its memory is the
peak of the process less what hidden states, heads and accumulated gradients take. `materialised` keeps the logits of
both models and lets autograd differentiate the reverse KL.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time

import torch
from torch import Tensor

from rlite.algorithms.divergence import Divergence
from rlite.backends.models.head_divergence import Head, linear_divergence

VOCAB = 151_936


def materialised(student: Head, teacher: Head) -> Tensor:
    """Return the reverse KL of each row by logits."""
    log_s, log_t = ((head.hidden @ head.weight.T).log_softmax(-1) for head in (student, teacher))
    return (log_s.exp() * (log_s - log_t)).sum(-1)


def in_blocks(student: Head, teacher: Head) -> Tensor:
    """Return the reverse KL of each row by the library's kernel."""
    return linear_divergence(student.hidden, student.weight, teacher, Divergence())


SIDES = {"materialised": materialised, "in_blocks": in_blocks}


def measure(side: str, num_tokens: int, width: int) -> None:
    """Print the peak of memory in MiB, and the CPU time in seconds, of one side."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(num_tokens, width), (VOCAB, width)] * 2
    tensors = [torch.randn(*shape, generator=generator) / width**0.25 for shape in shapes]
    student, teacher = Head(*(x.requires_grad_() for x in tensors[:2])), Head(*tensors[2:])
    for x in tensors[:2]:
        x.grad = torch.zeros_like(x)  # in place beforehand: every loss has these gradients
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    SIDES[side](student, teacher).mean().backward()
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(peak, time.process_time() - began)


def main() -> None:
    """Measure both sides, and print their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--side", choices=SIDES)
    arguments = parser.parse_args()
    if arguments.side is not None:
        measure(arguments.side, arguments.tokens, arguments.width)
        return
    found = {}
    for side in SIDES:
        command = [sys.executable, "-m", "benchmarks.divergence_memory", "--side", side]
        sizes = ["--tokens", str(arguments.tokens), "--width", str(arguments.width)]
        done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=True)
        found[side] = [float(number) for number in done.stdout.split()]
        print(f"{side}: {found[side][0]:.0f} MiB, {found[side][1]:.1f} s of CPU")
    print(f"ratio of memory: {found['in_blocks'][0] / found['materialised'][0]:.3f}")


if __name__ == "__main__":
    main()
