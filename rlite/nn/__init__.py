"""What users subclass: modules that carry an algorithm."""

from rlite.nn.base import BaseTrainModule
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule

__all__ = ["BaseTrainModule", "HuggingFaceFsdp2TrainModule"]
