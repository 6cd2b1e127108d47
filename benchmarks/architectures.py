"""Compare rlite with transformers for every causal language model: equal, refused, or not built.

    python -m benchmarks.architectures --write docs/architectures.md

For each class of transformers' mapping, a small model with random weights is built from the default config, on two CPU
processes. The engines compute log-probabilities of several sequences in one pack. They are compared with those of the
unmodified model, which reads one sequence at a time. The gradients of a pack are compared too. If the engines accept a
model and compute it wrongly, the command ends with an error.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from accelerate import init_empty_weights
from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from rlite import RliteInferenceEngine, RliteTrainEngine
from rlite.assembly.quickstart.run import byte_tokenizer
from rlite.backends.models.architecture import TOLERANCE, alone, difference, miniature, packed, saved, sequences
from rlite.errors import RliteError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.nn.pretrained import causal_lm_class, summary
from tests import forked_python
from tests.integration.worlds import world

EQUAL, REFUSED, WRONG, NOT_BUILT = "equal", "refused", "WRONG", "not built"
HEAD = """# Models

Both engines run unmodified Hugging Face models with rlite's own attention, and pack several sequences into one forward.
For some models, this gives wrong results. They mix tokens by other means than attention, or compute masks or positions
themselves. `build` therefore checks a small copy of the model in the driver, before any process starts, in a fraction
of a second. The copy has every kind of layer that the config gives. Modules of one kind have equal types, sizes and
attributes. If the config does not list the kinds layer by layer, the copy has all layers. `build` raises ConfigError if

- a token reaches other tokens by other means than attention and known mixers. Attention is switched off, each token is
  a document for the mixers, and the embeddings of one token are NaN: the NaN must stay at this token.
- a mixer lets documents of a pack reach each other, again found by NaN, or its gradients differ in a pack.
- the config names a kind of layer that rlite does not know.
- the logits of a pack differ from those of transformers. They are compared in float64.
- the log-probabilities of served tokens differ from those of transformers.
- on GPUs, the heads have a width that torch's flash attention does not take.

The table below is the output of `python -m benchmarks.architectures --write docs/architectures.md`,
made with transformers {version}: one row for the default config of every class in transformers' causal language
mapping. The entries mean:

- **equal**: log-probabilities equal the unmodified model's in evaluation mode, and gradients are equal in training.
- **refused**: `build` raises ConfigError. The last column gives the reason.
- **not built**: no small model could be built from the default config, so there was nothing to compare. `build` refuses
  such a model too, unless the comparison works with the checkpoint's own config.

The columns *train* and *serve* use one device. *tp 2* splits matrices over two devices (`tp_size=2`), and *sp 2* splits
tokens over two devices (`sp_size=2`). *serve tp 2* is an inference engine with `tensor_parallel_size=2`. Encoders are
built with `is_decoder=true`.

- A checkpoint may differ from its class's default config, for instance by a sliding window. `build` checks the
  checkpoint's config.
- Sliding windows are applied layer by layer as the model's config states, in training and in serving.
- A *mixer* is a layer that carries a state from token to token: a gated delta net, Kimi delta attention, Mamba or a
  short convolution. rlite knows it by its parts: a convolution, the number of its layer, hidden states and a cache as
  arguments. Training computes it for each document of a pack. Serving keeps one state of it for each sequence.
- If rotary angles depend on the longest sequence (`longrope`, `dynamic`), the length of sequences is limited to the
  range in which the angles are constant.

A module with its own forward can skip the comparison by overriding `check_architecture()`. Other executors of the
inference engine do their own checks.

{summary}

| type | class | train | tp 2 | sp 2 | serve | serve tp 2 | reason |
|---|---|---|---|---|---|---|---|
"""


class Module(HuggingFaceFsdp2TrainModule):
    """Train module without an optimizer, for forward passes alone."""


class Verdict(NamedTuple):
    """Result of one model in one column of the table, with the reason."""

    name: str
    reason: str = ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="the page to write; default: print it")
    parser.add_argument("--only", nargs="*", help="model types; default: all")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        forked_python.prepare(Path(folder))  # which starts the ranks
        stack.enter_context(world(2))
        for config_class in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING), key=lambda config_class: config_class.model_type):
            if not args.only or config_class.model_type in args.only:
                name = MODEL_FOR_CAUSAL_LM_MAPPING[config_class].__name__
                rows.append((config_class.model_type, name, *verdicts(config_class)))
                print(name, *(verdict.name for verdict in rows[-1][2:]), flush=True)
    page = render(rows)
    if args.write:
        args.write.write_text(page)
    else:
        print(page)
    if wrong := [row for row in rows if any(verdict.name == WRONG for verdict in row[2:])]:
        raise SystemExit(f"accepted and computed wrongly: {wrong}")


def verdicts(config_class: type[PreTrainedConfig]) -> list[Verdict]:
    """Return the verdicts of training, tensor and context parallel training, serving, and serving on two devices."""
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    try:
        model = miniature(cls, default_config(cls, config_class))
        expected = alone(model).detach()
    except Exception as error:
        return [Verdict(NOT_BUILT, summary(error))] * 5
    with saved(model) as folder:
        byte_tokenizer().save_pretrained(folder)
        return [
            verdict(lambda: train_error(folder, expected) + gradient_error(model)),
            verdict(lambda: train_error(folder, expected, tensor_parallel_size=2, tp_size=2)),
            verdict(lambda: train_error(folder, expected, tensor_parallel_size=2, sp_size=2)),
            verdict(lambda: served_error(folder, model)),
            verdict(lambda: served_error(folder, model, tensor_parallel_size=2)),
        ]


def default_config(cls: type[PreTrainedModel], config_class: type[PreTrainedConfig]) -> PreTrainedConfig:
    """Return the default config of a class: the text part if the model takes that alone, and a decoder's."""
    config = config_class()
    if vars(cls).get("config_class", config_class) is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    if vars(config).get("is_decoder") is False:
        config.is_decoder = True
    return config


def verdict(error_of: Callable[[], float]) -> Verdict:
    """Run one comparison. rlite's own errors are refusals. Any other error counts as a wrong result."""
    try:
        return Verdict(EQUAL if error_of() <= TOLERANCE else WRONG)
    except RliteError as error:
        return Verdict(REFUSED, str(error))
    except Exception as error:
        return Verdict(WRONG, summary(error))


def train_error(folder: str, expected: Tensor, **sizes: int) -> float:
    """Return the difference of the logits of one pack on the train engine from `expected`."""
    with init_empty_weights():
        module = causal_lm_class(folder, Module).from_pretrained(folder)
    engine = RliteTrainEngine(module)
    engine.build(data_parallel_size=1, compute_dtype="float32", **sizes)
    try:
        rows = sequences()
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        engine.eval()
        found = engine.forward({"input_ids": ids, "attention_mask": mask}, logits_of)
        return difference(expected, torch.cat([row[: len(ids)] for row, ids in zip(found, rows, strict=True)]))
    finally:
        engine.release()


def logits_of(logits: Tensor, data: dict[str, Tensor]) -> Tensor:
    return logits


def gradient_error(model: PreTrainedModel) -> float:
    """Return the largest difference of a pack's gradients, relative to the largest gradient of their tensor."""
    weights = torch.randn(alone(model).shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for compute in (alone, packed):
        model.zero_grad()
        (compute(model) * weights).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    expected, found = gradients
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    return max(float((expected[name] - found[name]).abs().max()) for name in expected) / largest


def served_error(folder: str, model: PreTrainedModel, **sizes: int) -> float:
    """Return the difference of generated tokens' log-probabilities from the model's own."""
    engine = RliteInferenceEngine(folder)
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


def render(rows: list[tuple]) -> str:
    """Return the page."""
    lines = []
    for model_type, name, *found in rows:
        reasons = dict.fromkeys(verdict.reason for verdict in found if verdict.reason)
        prefix = f"{name} ({model_type!r}) "
        text = "; ".join(shorten(reason.removeprefix(prefix)) for reason in reasons)
        lines.append(f"| {model_type} | {name} | {' | '.join(v.name for v in found)} | {text} |")
    count = {which: sum(row[2].name == which for row in rows) for which in (EQUAL, REFUSED, NOT_BUILT)}
    num_served = sum(row[5].name == EQUAL for row in rows)
    summary = (
        f"Of {len(rows)} entries, {count[EQUAL]} can be trained and {num_served} of them can also be served. "
        f"{count[REFUSED]} are refused, and {count[NOT_BUILT]} are not built."
    )
    return HEAD.format(version=transformers.__version__, summary=summary) + "\n".join(lines) + "\n"


def shorten(reason: str) -> str:
    """Return a reason as a table's cell: one sentence, no remedy, no folder."""
    reason = reason.split(". Use another model")[0].replace("|", "/").replace("\n", " ")
    reason = re.sub(r"\S*/tmp\w+: (\w+ \('[\w-]+'\) )?", "", reason)
    return reason if len(reason) <= 200 else reason[:197] + "..."


if __name__ == "__main__":
    main()
