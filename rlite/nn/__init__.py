"""What users subclass: modules that carry an algorithm."""

from rlite.nn.base import BaseTrainModule
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule
from rlite.nn.logprobs import linear_logprobs

__all__ = ["BaseTrainModule", "HuggingFaceFsdp2TrainModule", "linear_logprobs"]
