"""An ordinary script for torchrun: linear regression with DistributedDataParallel, with a checkpoint to resume from.

    torchrun --nproc_per_node=2 ddp_script.py FOLDER [STEPS]

It knows nothing of rlite. `torchrun_script.py` runs it under the control plane.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SAVE_FREQ = 5


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, checkpoint = dist.get_rank(), folder / "checkpoint.pt"
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    done = 0
    if checkpoint.exists():
        state = torch.load(checkpoint)
        done = state["step"]
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    print(f"rank {rank}: from step {done}", flush=True)
    for step in range(done, steps):
        numbers = torch.Generator().manual_seed(1000 * step + rank)
        x = torch.randn(8, 4, generator=numbers)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.02)  # real training takes longer
        if rank == 0 and (step + 1) % SAVE_FREQ == 0:
            state = {"step": step + 1, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, folder / "checkpoint.partial")
            os.replace(folder / "checkpoint.partial", checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["50"])[0]))
