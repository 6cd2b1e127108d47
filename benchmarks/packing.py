"""Fill rate of packs, time of planning, and time that ranks wait for each other.

    python -m benchmarks.packing --rows 10000

Rows have log-normal lengths, as texts have. Ranks wait for the slowest one at every microbatch, whose time is taken as
its estimated FLOPs. These grow with the square of a row's length, so a plan that knows only lengths waits longer than
one that balances costs.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from rlite.runtime.parallel.microbatch_plan import Plan, plan_microbatches, sequence_flops
from rlite.types import PackingMethod

MIN_FILL = 0.97
MAX_SECONDS = 1.0


def measure(
    lengths: list[int], costs: list[float], num_ranks: int, capacity: int, by: str, method: PackingMethod, repeats: int
) -> dict[str, Any]:
    """One line of the table; the time is the median of `repeats` plans."""
    seconds = []
    plan: Plan = []
    for _ in range(repeats):
        begin = time.perf_counter()
        plan = plan_microbatches(lengths, num_ranks, capacity, costs=costs if by == "flops" else None, method=method)
        seconds.append(time.perf_counter() - begin)
    loads = np.array([[sum(costs[row] for row in pack) for pack in share] for share in plan])
    num_microbatches = len(plan[0])
    return {
        "ranks": num_ranks,
        "balanced by": by,
        "method": method,
        "microbatches": num_microbatches,
        "fill": sum(lengths) / (num_ranks * num_microbatches * capacity),
        # The same number on every rank rounds up: on few microbatches per rank no plan can be full.
        "best possible": sum(lengths) / (num_ranks * -(-sum(lengths) // (num_ranks * capacity)) * capacity),
        "imbalance": float(loads.sum(1).max() / loads.sum(1).mean() - 1),
        "waiting": float(loads.max(0).sum() * num_ranks / loads.sum() - 1),
        "seconds": float(np.median(seconds)),
    }


def main() -> None:
    """Parse, plan, print; exits with 1 if a plan is neither full enough nor as full as can be, or takes too long."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--capacity", type=int, default=8192, help="tokens in one microbatch")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--hidden-size", type=int, default=1024, help="of the model whose FLOPs are estimated")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.2, 0.9, size=args.rows).clip(1, args.capacity).astype(int).tolist()
    costs = [sequence_flops(length, args.hidden_size, args.layers) for length in lengths]
    methods: tuple[PackingMethod, ...] = ("first_fit_decreasing", "karmarkar_karp")
    table = [
        measure(lengths, costs, num_ranks, args.capacity, by, method, args.repeats)
        for num_ranks in args.ranks
        for by in ("tokens", "flops")
        for method in methods
    ]
    is_good = all(row["fill"] >= min(MIN_FILL, row["best possible"]) and row["seconds"] < MAX_SECONDS for row in table)
    settings = {**vars(args), "tokens": sum(lengths), "longest": max(lengths)}
    if args.json:
        print(json.dumps({"settings": settings, "plans": table, "is_good": is_good}))
    else:
        print(f"settings: {settings}")
        print(f"{'ranks':>5} {'balanced by':12} {'method':21} {'packs/rank':>10} {'fill':>8} {'possible':>8} "
              f"{'imbalance':>10} {'waiting':>8} {'seconds':>8}")  # fmt: skip
        for row in table:
            print(
                f"{row['ranks']:>5} {row['balanced by']:12} {row['method']:21} {row['microbatches']:>10} "
                f"{row['fill']:>8.2%} {row['best possible']:>8.2%} {row['imbalance']:>10.3%} {row['waiting']:>8.2%} "
                f"{row['seconds']:>8.3f}"
            )
        print(
            f"limits: fill {MIN_FILL:.0%} or the best possible, {MAX_SECONDS:.0f} s: {'kept' if is_good else 'MISSED'}"
        )
    raise SystemExit(0 if is_good else 1)


if __name__ == "__main__":
    main()
