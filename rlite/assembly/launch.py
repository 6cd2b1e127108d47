"""Start of the processes of a trainer that is run as a command."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

import rlite
from rlite import config
from rlite.runtime.cluster.session import has_session
from rlite.trainer.options import LaunchOptions


def main(cls: type[Any], argv: Sequence[str]) -> None:
    """Run the trainer from the command line."""
    cls.train(config.load(cls.config_class, argv, aliases=cls.config_class.aliases))


def init_devices(options: LaunchOptions) -> None:
    """Call `rlite.init` with the trainers' default: one device under plain python on CPU, else as `init` chooses."""
    num_devices = options.num_devices
    is_plain = options.launcher is None and "TORCHELASTIC_RUN_ID" not in os.environ
    if is_plain and num_devices is None and not torch.cuda.is_available():
        num_devices = 1
    rlite.init(launcher=options.launcher, num_devices=num_devices)


@contextmanager
def session_of(options: LaunchOptions) -> Iterator[None]:
    """Hold a session inside the `with` block: the program's own, or one that ends with the block.

    The end of the block releases the engines that were built inside.
    """
    if not has_session():
        init_devices(options)
        try:
            yield
        finally:
            rlite.shutdown()
        return
    session = rlite.current_session()
    before = session.owners
    try:
        yield
    finally:
        for owner in reversed([name for name in session.owners if name not in before]):
            session.release(owner)


def has_waiting_ranks(options: LaunchOptions) -> bool:
    """Return whether ranks of torchrun serve the next session of this process, and wait until it begins."""
    is_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and options.launcher in (None, "torchrun")
    return is_torchrun and int(os.environ.get("WORLD_SIZE", "1")) > 1


def serve_if_worker(options: LaunchOptions) -> None:
    """Under torchrun, let ranks other than 0 serve and exit: only rank 0 reads data."""
    if int(os.environ.get("RANK", "0")) > 0 and options.launcher in (None, "torchrun"):
        init_devices(options)
