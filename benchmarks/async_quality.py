"""Rollouts that run one update ahead of training learn as much as those that wait for it.

    python -m benchmarks.async_quality              needs what `python -m benchmarks.learning sft` leaves

The task, the model and the settings are those of Dr. GRPO in benchmarks/learning.py. Each seed is trained twice:
synchronously on one device, and with rollout.max_head_offpolicyness=1 on two, where generation never waits. The figure
is the reward of held-out words, answered greedily: the mean over the seeds of the last tenth of the steps. It must
differ by at most 0.03, and be at least 0.3 above the start for both.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.learning import PPO_STEPS, ppo_findings, runs

MAX_DIFFERENCE = 0.03
MIN_RISE = 0.3
MODES = {
    "synchronous": ["num_devices=1"],
    "one update ahead": ["num_devices=2", "launcher=ray", "rollout.max_head_offpolicyness=1"],
}


def main() -> None:
    """Train, compare, print; exits with 1 if the two do not learn alike."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=Path("runs/learning"), help="where benchmarks/learning.py wrote")
    parser.add_argument("--report", action="store_true", help="of the runs that are there, without making any")
    args = parser.parse_args()
    if not (args.folder / "sft" / "latest").exists():
        parser.error(f"{args.folder}/sft/latest is not there: run `python -m benchmarks.learning sft` first")
    before: dict[str, list[float]] = {mode: [] for mode in MODES}
    after: dict[str, list[float]] = {mode: [] for mode in MODES}
    ages: list[float] = []
    for seed in args.seeds:
        for mode, own in MODES.items():
            folder = args.folder / f"{mode.replace(' ', '_')}_{seed}"
            settings = [
                *runs(args.folder)["dr_grpo"].settings,
                *own,
                f"trainer.seed={seed}",
                f"trainer.save_dir={folder}",
            ]
            if not args.report:
                print(f"\npython -m rlite.trainer.ppo {shlex.join(settings)}\n", flush=True)
                subprocess.run([sys.executable, "-m", "rlite.trainer.ppo", *settings], check=True)
            lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            metrics = [json.loads(line) for line in lines]
            found = ppo_findings(metrics)[0]
            before[mode].append(metrics[0]["accuracy"])
            after[mode].append(found.after)
            if mode != "synchronous":
                ages += [row["rollout/staleness"] for row in metrics if "rollout/staleness" in row]
    means = {mode: statistics.mean(values) for mode, values in after.items()}
    print(
        f"\n{PPO_STEPS} steps, seeds {args.seeds}; mean age of what was trained on ahead: {statistics.mean(ages):.2f}"
    )
    for mode in MODES:
        each = ", ".join(f"{value:.3f}" for value in after[mode])
        print(f"{mode:18} {statistics.mean(before[mode]):.3f} -> {means[mode]:.3f}  ({each})")
    difference = abs(means["synchronous"] - means["one update ahead"])
    rise = min(means[mode] - statistics.mean(before[mode]) for mode in MODES)
    print(f"difference {difference:.3f} (at most {MAX_DIFFERENCE}), smallest rise {rise:.3f} (at least {MIN_RISE})")
    raise SystemExit(difference > MAX_DIFFERENCE or rise < MIN_RISE)


if __name__ == "__main__":
    main()
