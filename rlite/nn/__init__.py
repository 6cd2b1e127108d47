"""Modules that users subclass: they carry an algorithm."""

from rlite.nn.base import BaseTrainModule
from rlite.nn.huggingface import HuggingFaceFsdp2TrainModule
from rlite.nn.logprobs import linear_logprobs
from rlite.nn.lora import LoraOptions, LoraTrainModule

__all__ = ["BaseTrainModule", "HuggingFaceFsdp2TrainModule", "LoraOptions", "LoraTrainModule", "linear_logprobs"]
