"""Workloads and trainers of the control plane's unit tests."""

from __future__ import annotations

from rlite.control import BaseTrainer, BaseWorkload, trainer_invocation


class Actor(BaseWorkload):
    def update(self, x: object) -> object:
        return x

    @trainer_invocation(pre_func=lambda value: max(value, 0), post_func=sum)
    def add_one(self, value: int) -> int:
        return value + 1

    @trainer_invocation(target="RANK0")
    def save(self, path: str) -> str:
        return f"{path} {self.rank}"

    async def later(self) -> None:
        return None


class Rollout(BaseWorkload):
    def generate(self, prompts: list[str]) -> list[str]:
        return prompts


class Trainer(BaseTrainer):
    def init(self) -> None: ...

    def fit(self) -> None: ...


class Unfinished(BaseTrainer):
    def init(self) -> None: ...
