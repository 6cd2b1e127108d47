"""Environments of openreward: the share of letters "e" in a text."""

from typing import Any

from openreward.environments import Environment, TextBlock, ToolOutput, terminal, tool
from pydantic import BaseModel


class Answer(BaseModel):
    text: str


class Letters(Environment):
    @classmethod
    def list_splits(cls) -> list[str]:
        return ["train", "test"]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, Any]]:
        return [{"word": f"{split}{number}"} for number in range(4)]

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"Say many e, {self.task_spec['word']}.")]

    @terminal
    @tool
    def done(self, params: Answer) -> ToolOutput:
        """End the episode."""
        return ToolOutput(blocks=[TextBlock(text="end")], reward=self.share(params.text), finished=True)

    @tool
    def answer(self, params: Answer) -> ToolOutput:
        """Answer with a text."""
        return ToolOutput(blocks=[TextBlock(text="seen")], reward=self.share(params.text), finished=True)

    @staticmethod
    def share(text: str) -> float:
        return text.count("e") / max(len(text), 1)


class Ranked(Letters):
    def score_group(self, candidates: list[Any]) -> list[float]:
        return [10.0 * place for place in range(len(candidates))]
