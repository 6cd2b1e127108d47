"""Options of the train executor "fsdp2". No torch here: options are checked in the driver."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from rlite.config import ByMemory, CompiledParts, Count, Options, Positive, Rate
from rlite.types import BalanceBy, ExpertsImplementation, PackingMethod


def _refuse_float16(value: Any) -> Any:
    if value == "float16":
        problem = "small gradients are lost in float16, and losses are not scaled here"
        raise ValueError(f"{problem}. Use bfloat16, which needs no scaling")
    return value


Dtype = Annotated[Literal["float32", "float64", "bfloat16"], BeforeValidator(_refuse_float16)]


class Fsdp2Options(Options):
    """Options of `RliteTrainEngine.build` beside placement."""

    max_tokens_per_microbatch: Count = 16384
    """maximum tokens in one forward for each worker. Workers that share a microbatch (tp_size x sp_size) take as many
    times this number. The longest sequence must fit"""
    balance_by: BalanceBy = "tokens"
    """quantity that ranks share evenly: tokens, or estimated FLOPs (`sequence_flops`). Attention FLOPs grow with the
    square of the length, so "flops" helps if some sequences are longer than 12 times the model's width"""
    packing_method: PackingMethod = "first_fit_decreasing"
    """method that packs a rank's rows into microbatches: "first_fit_decreasing" fills one after the other;
    "karmarkar_karp" makes the same number of microbatches of even size, which lowers peak memory"""
    share_prefixes: bool = True
    """compute tokens with which sequences of a microbatch begin alike (the prompt of a group, earlier turns) once.
    Gradients are those of whole sequences, up to rounding. Not with dropout, recurrent layers or deterministic=true"""
    param_dtype: Dtype = "float32"
    """dtype of master weights and optimizer state"""
    compute_dtype: Dtype | None = None
    """dtype of forward and backward; default: bfloat16 on CUDA, `param_dtype` on CPU"""
    max_grad_norm: Positive = 1.0
    """optimizer steps scale gradients down to this global norm; infinity is off"""
    tp_size: Count = 1
    """workers that share each matrix (tensor and sequence parallel); divides the workers that hold one copy"""
    sp_size: Count = 1
    """workers that share the tokens of each microbatch (context parallel); divides the workers that hold one copy"""
    ep_size: Count = 1
    """workers that share the experts of each layer (expert parallel); divides the workers that hold one copy, and the
    number of experts"""
    experts_implementation: ExpertsImplementation = "auto"
    """transformers' computation of experts: "eager" loops over experts, "grouped_mm" multiplies all by one kernel,
    "batched_mm" copies the matrices of each token's experts; "auto" is grouped_mm on GPUs and eager on CPU"""
    router_aux_loss_coef: Rate = 0.0
    """factor of the auxiliary loss that spreads tokens evenly over experts; 0 is off. It costs one more forward pass"""
    router_bias_update_rate: Rate = 0.0
    """change of the routers' correction biases in each optimizer step, towards an even load; 0 is off"""
    gradient_checkpointing: ByMemory = False
    """recompute activations in the backward pass; "auto" does so if memory is short"""
    reshard_after_forward: ByMemory = "auto"
    """free each layer's gathered weights after its forward pass and gather them again for its backward pass; "auto"
    does so if memory is short, and never if one worker holds all weights"""
    compile: CompiledParts | None = None
    """"layers" compiles each layer by torch.compile. The first steps take minutes. Without a compiler, or for a layer
    that cannot be compiled, layers run as they are"""
    fused_head: bool = False
    """compute log-probabilities, entropies and their gradient by Triton kernels of one pass over the logits (package
    triton, GPUs only); elsewhere torch's operations compute them"""
    flash_attention_3: bool = False
    """on Hopper GPUs, attention by FlashAttention 3 (package flash_attn_3), in the whole process; elsewhere torch's"""
    deterministic: bool = False
    """log-probabilities whose bits depend on the sequence alone, not on its batch, packing or shards: for Llama, Qwen2,
    Qwen3 and Qwen3-MoE in float32 on CPU. They equal those that executor "torch" serves with deterministic=true.
    Slower"""
    use_liger_kernel: bool = False
    """compute RMSNorm, rotary embedding and SwiGLU with Triton kernels (package liger-kernel); GPUs only"""
    offload_optimizer: ByMemory = False
    """keep the optimizer state in host memory except during a step; on CPU slots it is always there. "auto" does so if
    memory is short"""
    drop_untrained: bool = False
    """leave tensors of the checkpoint that are not trained (vision parts, heads for further tokens) out of exports. By
    default exports copy them from the checkpoint, which has to be there then. Without vision parts the export is a text
    model"""
    seed: int = 0
    """seed of torch's generator in each worker's process when the engine is built; the data rank is added"""

    def problems(self) -> Iterator[str]:
        """Yield a message for each option that contradicts deterministic=true."""
        if not self.deterministic:
            return
        if (dtype := self.compute_dtype or self.param_dtype) != "float32":
            yield f"deterministic=true computes in float32, not in {dtype}; leave param_dtype and compute_dtype out"
        if self.compile or self.fused_head:
            yield "deterministic=true: compiled code rounds in another way; leave compile and fused_head out"
        if self.ep_size > 1:
            yield f"deterministic=true cannot send tokens to experts on ep_size={self.ep_size} workers; use ep_size=1"
        if self.sp_size > 1:
            yield f"deterministic=true cannot divide sequences over sp_size={self.sp_size} workers; use sp_size=1"
