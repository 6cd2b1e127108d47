"""Options of models, their layout on devices and their optimizers. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from rlite.config import ByMemory, CompiledParts, Count, FinitePositive, Options, Positive, Rate, Share
from rlite.errors import ConfigError
from rlite.imports import lacking
from rlite.nn.options import LoraOptions, check_liger_installed
from rlite.runtime.parallel.dims import ParallelDims
from rlite.types import Aggregation, BalanceBy, ExpertsImplementation, KLEstimator, PackingMethod, Schedule

OptimizerName = Literal["adamw", "muon"]
BUILD_OPTIONS = (
    *("tp_size", "sp_size", "ep_size", "balance_by", "packing_method", "share_prefixes", "max_grad_norm"),
    *("gradient_checkpointing", "use_liger_kernel", "offload_optimizer", "drop_untrained"),
    *("reshard_after_forward", "compile", "fused_head", "flash_attention_3"),
    *("experts_implementation", "router_aux_loss_coef", "router_bias_update_rate"),
)
"""options of a model that the engine's build takes under the same names"""


class ParameterGroupOptions(Options):
    """Parameters that are trained in another way than the rest."""

    pattern: str
    """regular expression, searched in the names of the parameters; the first group that matches a name has it"""
    lr_factor: Rate = 1.0
    """factor of the learning rate"""
    weight_decay: Rate | None = None
    """weight decay; null is that of the rest"""
    freeze: bool = False
    """do not train these parameters"""

    def problems(self) -> Iterator[str]:
        """Yield a message for a pattern that is no regular expression, and for options that freezing leaves unused."""
        try:
            re.compile(self.pattern)
        except re.error as error:
            yield f"pattern={self.pattern}: no regular expression: {error}"
        if self.freeze and (self.lr_factor != 1 or self.weight_decay is not None):
            yield "freeze=true: lr_factor and weight_decay are options of parameters that are trained; leave them out"


@dataclass(frozen=True, kw_only=True)
class OptimizerOptions:
    """AdamW or Muon with a schedule over `total_steps` optimizer steps."""

    name: OptimizerName = "adamw"
    lr: float
    weight_decay: float
    scheduler: Schedule
    warmup_steps: int
    total_steps: int
    lr_end: float = 0.0
    """rate at the last step"""
    power: float = 1.0
    """exponent of the schedule "polynomial" """
    parameter_groups: Mapping[str, ParameterGroupOptions] = field(default_factory=dict)


class LayoutOptions(Options):
    """A model and its layout on the devices: world = ddp_size x fsdp x sp_size x tp_size."""

    model_name: str
    """folder or hub name of a Hugging Face checkpoint"""
    ddp_size: Count = 1
    """copies of the model; each is sharded over world / ddp_size devices"""
    tp_size: Count = 1
    """devices that share each matrix (tensor parallel)"""
    sp_size: Count = 1
    """devices that share the tokens of a sequence (context parallel)"""
    ep_size: Count = 1
    """devices that share the experts of each layer (expert parallel); divides fsdp x sp_size x tp_size"""
    max_length_per_device: Count = 16384
    """tokens of one microbatch on a device; the longest sequence is tp_size x sp_size times as long"""

    def dims(self, world_size: int) -> ParallelDims:
        """Return the division of a world of `world_size` devices."""
        return ParallelDims.of_world(world_size, self.ddp_size, self.sp_size, self.tp_size, self.ep_size)


class ModelOptions(LayoutOptions):
    """A model that is trained."""

    balance_by: BalanceBy = "tokens"
    """quantity that devices share evenly: tokens, or estimated operations, in which long sequences count for more"""
    packing_method: PackingMethod = "first_fit_decreasing"
    """method that packs a device's rows into microbatches: the fewest, each as full as possible, or as many of even
    size, which lowers the peak of memory"""
    share_prefixes: bool = True
    """compute tokens with which sequences of a microbatch begin alike (a group's prompt, earlier turns) once; gradients
    are those of whole sequences, up to rounding"""
    use_liger_kernel: bool = False
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    compile: CompiledParts | None = None
    """layers: compile each layer by torch.compile; null: run layers as they are"""
    fused_head: bool = False
    """log-probabilities and their gradient by Triton kernels of one pass over the logits (package triton); GPUs only"""
    flash_attention_3: bool = False
    """on Hopper GPUs, attention by FlashAttention 3 (package flash_attn_3)"""
    gradient_checkpointing: ByMemory = "auto"
    """recompute activations in the backward pass; auto: if memory is short"""
    offload_optimizer: ByMemory = "auto"
    """keep the optimizer's state in host memory between optimizer steps; auto: if memory is short"""
    reshard_after_forward: ByMemory = "auto"
    """gather a layer's weights for its forward pass and again for its backward pass; auto: if memory is short"""
    drop_untrained: bool = False
    """leave tensors of the checkpoint that are not trained (vision parts, heads for further tokens) out of exports; by
    default exports copy them from the checkpoint, which has to be there then"""
    experts_implementation: ExpertsImplementation = "auto"
    """transformers' computation of a mixture's experts; auto: grouped_mm on GPUs, eager on CPU"""
    router_aux_loss_coef: Rate = 0.0
    """factor of the auxiliary loss that spreads tokens evenly over experts; 0 is off. It costs one more forward pass"""
    router_bias_update_rate: Rate = 0.0
    """change of the routers' correction biases in each optimizer step, towards an even load; 0 is off"""
    avg_level: Aggregation = "token"
    """mean of the loss over: all tokens; sequences' means; tokens divided by a constant length (Dr. GRPO's paper). A
    sequence is a row: a trajectory of several rows has as many means, not one"""
    optimizer: OptimizerName = "adamw"
    """muon orthogonalises the updates of matrices inside of layers, and leaves embeddings, heads, norms and biases to
    AdamW; both take the same learning rate and weight decay"""
    lr: Rate = 5e-6
    """peak learning rate"""
    weight_decay: Rate = 1e-2
    """weight decay"""
    parameter_groups: dict[str, ParameterGroupOptions] = {}
    """optimizer overrides by named group, such as {norms: {pattern: norm, weight_decay: 0}}; keys:
    pattern (a regular expression), lr_factor, weight_decay, freeze"""
    max_grad_norm: Positive = 1.0
    """global norm to which gradients are clipped"""
    scheduler: Schedule = "cosine"
    """schedule of the learning rate after the warm-up"""
    warmup_ratio: Share = 0.1
    """share of all optimizer steps in which the rate rises"""
    lr_end: Rate = 0.0
    """rate at the last step, to which linear, cosine and polynomial fall"""
    power: FinitePositive = 1.0
    """exponent of scheduler=polynomial: the rate falls as (share of steps left)^power"""
    disable_dropout: bool = True
    """train without the dropout of the checkpoint's config, which exports keep; passes that only infer never have it"""
    lora: LoraOptions | None = None
    """train adapters beside the weights, which stay as they are; null trains the weights"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each rule of the kernels and of the schedule that does not hold."""
        if self.use_liger_kernel:
            check_liger_installed()
        if self.lora is not None and (message := lacking("adapters need", "lora", "peft")):
            yield message
        yield from schedule_problems(self.scheduler, self.lr, self.lr_end, self.power)

    def optimizer_options(self, total_steps: int) -> OptimizerOptions:
        """Return the optimizer's options for a run of `total_steps` optimizer steps."""
        names = {each.name for each in fields(OptimizerOptions)}
        own = {name: value for name, value in self if name in names}
        warmup_steps = round(self.warmup_ratio * total_steps)
        return OptimizerOptions(name=self.optimizer, warmup_steps=warmup_steps, total_steps=total_steps, **own)

    def build_options(self, world_size: int, seed: int) -> dict[str, Any]:
        """Return the keywords of `RliteTrainEngine.build` for a world of `world_size` devices."""
        dims = self.dims(world_size)
        return {
            **{name: value for name, value in self if name in BUILD_OPTIONS},
            "tensor_parallel_size": world_size // dims.copies,
            "data_parallel_size": dims.copies,
            "max_tokens_per_microbatch": self.max_length_per_device,
            "seed": seed,
        }


def frozen_build_options(build_options: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the build options of a frozen model: parameters are stored in the dtype that it computes in.

    Float32 master weights serve the small steps of an optimizer; without one, nothing reads their low bits. The options
    that balance a mixture's experts are options of training.
    """
    unbalanced = dict.fromkeys({"router_aux_loss_coef", "router_bias_update_rate"} & build_options.keys(), 0.0)
    return {**build_options, **unbalanced, "param_dtype": "bfloat16" if device == "cuda" else "float32"}


def schedule_problems(scheduler: Schedule | None, lr: float, lr_end: float, power: float | None) -> Iterator[str]:
    """Yield a message for each rule of a learning-rate schedule that does not hold.

    `scheduler`: the schedule; None if it is another model's. `power`: exponent of the polynomial schedule; None if it
    is another model's.
    """
    if scheduler is not None and power not in (None, 1.0) and scheduler != "polynomial":
        yield f"power={power} is an option of scheduler=polynomial, not of scheduler={scheduler}"
    if lr_end and scheduler == "constant":
        yield f"lr_end={lr_end}: scheduler=constant never falls; use linear, cosine or polynomial"
    elif lr_end and lr_end >= lr:
        yield f"lr_end={lr_end}: expected less than lr={lr}, the peak from which the rate falls"


K1_IS_NO_LOSS = (
    "loss_estimator=k1: its gradient is that of log pi, which is 0 in expectation, so that it would add noise and no "
    "penalty. Use k2, whose gradient is that of the KL, or kl.type=reward, where k1 is unbiased"
)


def check_kl_loss(estimator: KLEstimator) -> None:
    """Check that an estimator of the KL can be a loss."""
    if estimator == "k1":
        raise ConfigError(f"kl.{K1_IS_NO_LOSS}")


class FrozenModelOptions(Options):
    """A model beside the actor that is not trained; options that are not set are the actor's."""

    model_name: str | None = None
    """folder or hub name of a Hugging Face checkpoint; default: the actor's, before training. With actor.lora, and if
    nothing else is set here, the actor itself is the reference, with its adapters switched off"""
    use_liger_kernel: bool | None = None
    """RMSNorm, rotary embedding and SwiGLU as Triton kernels (package liger-kernel); GPUs only"""
    offload_model: bool | None = None
    """leave the device to the other models while it is not used"""

    def problems(self) -> Iterator[str]:
        """Yield a message for missing kernels."""
        if self.use_liger_kernel:
            check_liger_installed()
        yield from ()
