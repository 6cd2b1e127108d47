"""A trained model and its optimizer in words, for the plan of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlite.engine.train import RliteTrainEngine
from rlite.errors import shortened
from rlite.trainer.model.options import OptimizerOptions, ParameterGroupOptions
from rlite.trainer.options import TableOptions

OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon and AdamW"}


def model_plan(name: str, engine: RliteTrainEngine, max_grad_norm: float) -> dict[str, str]:
    """Return the size of a model, its optimizer, and the parameters that are trained otherwise, by topic.

    Args:
        name: folder or hub name of the checkpoint.
        engine: the engine of the model.
        max_grad_norm: norm to which gradients are clipped.
    """
    module: Any = engine.module
    options: OptimizerOptions = module.optimizer_options
    plan = {
        "model": f"{name}, {engine.num_parameters / 1e6:.2f} M parameters{_trained(engine)}",
        "optimizer": f"{OPTIMIZERS[options.name]}, {_rate(options)}, weight decay {options.weight_decay:g}, gradients "
        f"clipped to norm {max_grad_norm:g}",
    }
    if module.lora is not None:
        plan["adapters"] = (
            f"rank {module.lora.rank}, alpha {module.lora.alpha:g}, {', '.join(module.lora.target_modules)}"
        )
    if groups := options.parameter_groups:
        plan["parameter groups"] = "; ".join(_group(*each) for each in groups.items())
    return plan


def data_plan(data: TableOptions) -> dict[str, str]:
    """Return the system prompt and the options of the chat template, by topic, as far as they are set."""
    said: Mapping[str, Any] = {"system prompt": data.system_prompt, "chat template": data.chat_template_options}
    return {topic: shortened(value) for topic, value in said.items() if value}


def _trained(engine: RliteTrainEngine) -> str:
    trained = sum(parameter.numel() for parameter in engine.module.parameters() if parameter.requires_grad)
    if trained == engine.num_parameters:
        return ", all trained"
    return f", {trained / engine.num_parameters:.2%} trained"


def _rate(options: OptimizerOptions) -> str:
    warmup = f" after {options.warmup_steps} steps of warm-up" if options.warmup_steps else ""
    end = "" if options.scheduler == "constant" else f" to {options.lr_end:g}"
    return f"lr {options.lr:g} ({options.scheduler}{end}{warmup})"


def _group(name: str, group: ParameterGroupOptions) -> str:
    decay = "" if group.weight_decay is None else f", weight decay {group.weight_decay:g}"
    how = "frozen" if group.freeze else f"lr x {group.lr_factor:g}{decay}"
    return f"{name} ({group.pattern}): {how}"
