"""The comparisons of `benchmarks.architectures`, and the program that runs them for some classes.

    python -m benchmarks.architecture_columns --out FOLDER --devices 1 TYPE...

For each config of a class, a small model with random weights is built on one or two CPU processes. The engines compute
log-probabilities of several sequences in one pack. They are compared with those of the unmodified model, which reads
one sequence at a time. Each config's result is a file in FOLDER; a config that has one already is left out.

A column of the table is an entry of ALONE or PAIRED: a comparison that returns an error. It raises rlite's own error if
the model is refused, and `NotApplicable` if the column does not concern it.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import peft
import torch
import transformers
from accelerate import init_empty_weights
from safetensors.torch import load_file
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, PreTrainedModel

from benchmarks.released import Maker, compare
from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.architecture import TOLERANCE, alone, difference, miniature, packed, saved, sequences
from rlite.backends.models.experts import experts_of, use_implementation
from rlite.backends.models.mixers import install_mixers
from rlite.backends.models.replay import replay_refusal
from rlite.backends.models.stored import container_class, own_shapes, places, stored_buffers
from rlite.errors import ConfigError, RliteError
from rlite.nn import HuggingFaceFsdp2TrainModule, LoraOptions
from rlite.nn.pretrained import causal_config, causal_lm_class, summary
from rlite.trainer.model.modules import policy_module
from rlite.trainer.model.options import OptimizerOptions
from tests import forked_python
from tests.integration.modules import num_counted, token_loss
from tests.integration.worlds import world

EQUAL, REFUSED, WRONG, NOT_BUILT, NOTHING = "equal", "refused", "WRONG", "not built", "-"
SMALLEST = 1e-3
"""smallest scale of a parameter's gradient, in the largest gradient of all: some gradients are zero but for rounding"""


class NotApplicable(Exception):
    """The column does not concern the model."""


class Module(HuggingFaceFsdp2TrainModule):
    """Train module without an optimizer, for forward passes alone."""


class Verdict(NamedTuple):
    """Result of one config or class in one column of the table, with the reason."""

    name: str
    reason: str = ""


class Case(NamedTuple):
    """A small model of one config."""

    folder: str
    """its checkpoint"""
    model: PreTrainedModel
    """the model that the checkpoint holds: for a multimodal config the container"""
    text: PreTrainedModel
    """the causal language model: the same, or the text model in the container"""
    expected: Tensor
    """its logits of `sequences`"""


Compare = Callable[[Case], float]
ALONE: dict[str, Compare] = {
    "train": lambda case: train_error(case) + gradient_error(case.text),
    "serve": lambda case: served_error(case),
    "replay": lambda case: replay_error(case),
    "round trip": lambda case: round_trip_error(case),
    "LoRA": lambda case: lora_error(case),
}
PAIRED: dict[str, Compare] = {
    "tp 2": lambda case: train_error(case, tensor_parallel_size=2, tp_size=2),
    "sp 2": lambda case: train_error(case, tensor_parallel_size=2, sp_size=2),
    "ep 2": lambda case: experts_error(case),
    "serve tp 2": lambda case: served_error(case, tensor_parallel_size=2),
}
COLUMNS = {1: ALONE, 2: PAIRED}
"""comparisons by the number of their devices and the title of their column"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--devices", type=int, default=1, choices=list(COLUMNS), help="default: %(default)s")
    parser.add_argument("types", nargs="+", help="model types")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        forked_python.prepare(Path(folder))  # which starts the ranks
        stack.enter_context(world(args.devices))
        compare(args.out, args.types, args.devices, partial(verdicts_of, COLUMNS[args.devices]))


def verdicts_of(columns: Mapping[str, Compare], name: str, make: Maker) -> dict[str, Verdict]:
    """Return the verdicts of one config in some columns."""
    try:
        config = make()
        text = causal_config(config)
        cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        is_text_class = text is not config and cls is MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
        model = miniature(container_class(config) if is_text_class else cls, config)
        inner = model if text is config else text_model(model)
        expected = alone(model).detach()
    except Exception as error:
        return dict.fromkeys(columns, Verdict(NOT_BUILT, named(name, summary(error))))
    with saved(model) as folder:
        byte_tokenizer().save_pretrained(folder)
        case = Case(folder, model, inner, expected)
        found = {column: verdict(partial(compare, case)) for column, compare in columns.items()}
    return {column: Verdict(each.name, each.reason and named(name, each.reason)) for column, each in found.items()}


def named(name: str, reason: str) -> str:
    return f"{name}: {reason}" if name else reason


def text_model(container: PreTrainedModel) -> PreTrainedModel:
    """Return the text model inside a container as a causal language model of its own, with the same weights."""
    text = causal_config(container.config)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]._from_config(text, dtype=torch.float32).eval()
    theirs, own = (
        {**dict(each.named_parameters(remove_duplicate=False)), **stored_buffers(each)} for each in (container, model)
    )
    with torch.no_grad():
        for there, here in places(container, model, own_shapes(model)).items():
            if here in own:
                own[here].copy_(theirs[there])
    return model


def verdict(error_of: Callable[[], float]) -> Verdict:
    """Run one comparison. rlite's own errors are refusals. Any other error counts as a wrong result."""
    try:
        return Verdict(EQUAL) if (error := error_of()) <= TOLERANCE else Verdict(WRONG, f"differs by {error:.1g}")
    except NotApplicable:
        return Verdict(NOTHING)
    except RliteError as error:
        return Verdict(REFUSED, str(error))
    except Exception as error:
        return Verdict(WRONG, summary(error))


def train_error(case: Case, **sizes: int) -> float:
    """Return the difference of the logits of one pack on the train engine."""
    with init_empty_weights():
        module = causal_lm_class(case.folder, Module).from_pretrained(case.folder)
    with built(module, **sizes) as engine:
        return difference(case.expected, pack_logits(engine))


@contextmanager
def built(module: Any, **sizes: int) -> Iterator[RliteTrainEngine]:
    """Build a train engine in float32, and release it after the block."""
    engine = RliteTrainEngine(module)
    engine.build(data_parallel_size=1, compute_dtype="float32", **sizes)
    try:
        yield engine
    finally:
        engine.release()


def batch() -> dict[str, Tensor]:
    rows = sequences()
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "loss_mask": mask}


def pack_logits(engine: RliteTrainEngine) -> Tensor:
    """Return the logits of one pack."""
    engine.eval()
    found = engine.forward(batch(), logits_of)
    return torch.cat([row[: len(ids)] for row, ids in zip(found, sequences(), strict=True)])


def logits_of(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    return logits


def gradient_error(model: PreTrainedModel) -> float:
    """Return the largest difference of a pack's gradients, each relative to the largest element of its tensor.

    They are compared in float64 if the class computes in it: a sum of many terms is rounded by more than TOLERANCE.
    """
    model = copy.deepcopy(model)
    use_implementation(model, "eager")  # the others do not compute in float64
    install_mixers(model)
    try:
        shape = alone(model.double()).shape
    except Exception:  # of any kind: the class's own code
        shape = alone(model.float()).shape
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for compute in (alone, packed):
        model.zero_grad()
        (compute(model) * weights).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    expected, found = gradients
    if expected.keys() != found.keys():
        return float("inf")
    sizes = {name: float(gradient.abs().max()) for name, gradient in expected.items()}
    smallest = SMALLEST * max(sizes.values())
    return max(float((expected[name] - found[name]).abs().max()) / max(sizes[name], smallest) for name in expected)


def experts_error(case: Case) -> float:
    """Return the difference of the logits of one pack if two ranks hold half of the experts each."""
    if not experts_of(case.text):
        raise NotApplicable
    return train_error(case, tensor_parallel_size=2, ep_size=2)


def replay_error(case: Case) -> float:
    """Return 0 if chosen experts can be replayed.

    Raises:
        ConfigError: they cannot; the message gives the reason.
    """
    if not experts_of(case.text):
        raise NotApplicable
    if (reason := replay_refusal(type(case.text), case.text.config)) is not None:
        raise ConfigError(f"routing replay: {reason}")
    return 0.0


def served_error(case: Case, **sizes: int) -> float:
    """Return the difference of generated tokens' log-probabilities from the model's own.

    A container replaces tokens that stand for images, so its text model computes what follows the generated ones.
    """
    engine, model = RliteInferenceEngine(case.folder), case.text
    engine.build(data_parallel_size=1, max_model_len=32, dtype="float32", **sizes)
    try:
        prompts = [ids.tolist() for ids in sequences()]
        outputs = engine.generate(prompts, {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True})
    finally:
        engine.release()
    errors = []
    for prompt, output in zip(prompts, outputs, strict=True):
        made = output.outputs[0]
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *made.token_ids]]), use_cache=False).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1).gather(1, torch.tensor(made.token_ids)[:, None])[:, 0]
        errors.append(difference(expected, torch.tensor(made.logprobs)) * float(expected.std() / logits.std()))
    return max(errors)


def round_trip_error(case: Case) -> float:
    """Return 0 if the engine exports a checkpoint as it was stored, else infinity."""
    with init_empty_weights():
        module = causal_lm_class(case.folder, Module).from_pretrained(case.folder)
    with built(module) as engine, tempfile.TemporaryDirectory() as out:
        engine.save(out)
        stored, exported = tensors_of(case.folder), tensors_of(out)
    is_same = stored.keys() == exported.keys() and all(torch.equal(stored[name], exported[name]) for name in stored)
    return 0.0 if is_same else float("inf")


def tensors_of(folder: str) -> dict[str, Tensor]:
    return {name: tensor for file in Path(folder).glob("*.safetensors") for name, tensor in load_file(file).items()}


def lora_error(case: Case) -> float:
    """Return the difference of an adapted model from PEFT's and from the merged one; infinite if it learnt nothing."""
    steps = {"weight_decay": 0.0, "scheduler": "constant", "warmup_steps": 0, "total_steps": 2}
    module = policy_module(case.folder, OptimizerOptions(lr=1e-2, **steps), LoraOptions(rank=4))
    with built(module) as engine, tempfile.TemporaryDirectory() as out:
        for _ in range(2):
            engine.train_batch(batch(), token_loss, num_counted)
        found = pack_logits(engine)
        engine.save(out)
        if case.text is case.model:
            merged, base = (AutoModelForCausalLM.from_pretrained(path).eval() for path in (out, case.folder))
        else:
            merged, base = type(case.model).from_pretrained(out).eval(), text_model(case.model)
        adapted = peft.PeftModel.from_pretrained(base, f"{out}/adapter").eval()
        errors = [difference(alone(merged), found), difference(alone(adapted.base_model.model), found)]
    return max(errors) if difference(case.expected, found) > TOLERANCE else float("inf")


if __name__ == "__main__":
    main()
