"""The hypotheses: for each cause, the settings of the reference in which it would compute what was recorded.

They follow from what two computations of one token can differ in: the tokens before it, their positions, the weights,
the precision, the attention, the experts, and how a log-probability is made of logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations, product
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite.assembly.why.evidence import Case, Ids, Span
from rlite.assembly.why.reference import Reference, Setting, label_logprobs
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, has_chat_template

FACTORS = (0.01, 0.1, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 10.0, 100.0)
"""grid of a factor; the best ones are refined"""
MAX_SPECIAL, MAX_PARTS, MAX_EXPERTS = 16, 7, 8
"""special tokens that are tried in a prompt; its parts that are left out; experts of which two are exchanged"""
NEAR = 1e-3
"""distance of log-probabilities below which a token may be the one that was sampled"""


class Hypothesis(NamedTuple):
    """One deviation from the honest computation."""

    cause: str
    text: str
    """the deviation in words; `{}` stands for the value of `number`"""
    changes: Setting
    number: str | None = None
    """the change that is a positive number, which may lie beside the grid"""

    @property
    def words(self) -> str:
        """The deviation with its number and its layer."""
        told, layer = self.text.format(self.changes.get(self.number or "")), self.changes.get("layer")
        return told if layer is None else f"{told}, in layer {layer} alone"


def hypotheses(case: Case, reference: Reference, side: str) -> Iterator[Hypothesis]:
    """Yield the hypotheses on a record.

    Args:
        case: the case.
        reference: its reference.
        side: side whose record it is.
    """
    yield Hypothesis("code", f"the {side}'s code in this process", {"code": side})
    yield from of_sampling()
    yield from of_weights(case, reference.exact)
    yield Hypothesis("precision", "computed in bfloat16", {"dtype": torch.bfloat16})
    for dtype, scaled in product((torch.float8_e4m3fn, torch.int8), ("row", "matrix")):
        text = f"with matrices in {str(dtype)[6:]}, with a scale of each {scaled}"
        yield Hypothesis("precision", text, {"stored": (dtype, scaled)})
    yield from of_position()
    longest = max(len(span.before) + len(span.ids) for span in case.spans)
    yield from of_attention(reference.model.config.get_text_config().num_hidden_layers, longest)
    if reference.shape is not None:
        yield from of_routing(reference.mixtures, reference.shape.top_k)
    yield from of_prompts(case, reference.tokenizer)


def of_sampling() -> Iterator[Hypothesis]:
    """Yield other ways to make log-probabilities of logits."""
    for x in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0):
        yield Hypothesis("temperature", "at temperature {:.4g}", {"temperature": x}, "temperature")
    yield Hypothesis("kept sets", "normalised over the whole vocabulary", {"top_p": 1.0, "top_k": 0})
    for p in (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99):
        text = "normalised over the ids that top_p={:.3g} keeps"
        yield Hypothesis("kept sets", text, {"top_p": p, "top_k": 0}, "top_p")
    for k in (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 200):
        yield Hypothesis("kept sets", f"normalised over the {k} most likely ids", {"top_p": 1.0, "top_k": k})


def of_weights(case: Case, exact: int) -> Iterator[Hypothesis]:
    """Yield other saved weights, as a whole and in one part of the model."""
    parts = {match[0] if (match := re.match(r".*?layers\.\d+\.", name)) else name for name in case.states[exact]}
    for step in sorted(case.states.keys() - {exact}, key=lambda step: abs(step - exact)):
        cause, text = "stale weights", f"with the weights after step {step}, not {exact}"
        if case.option("actor.lora") and step == 0:
            cause, text = "adapter", "with the base model, without its adapter"
            for x in FACTORS:
                yield Hypothesis(cause, f"with the adapter's scale times {x:g}", {"weights": step, "amount": 1 - x})
        yield Hypothesis(cause, text, {"weights": step})
        for part in sorted(parts) if abs(step - exact) == 1 else ():
            yield Hypothesis(cause, f"{text}, in {part.rstrip('.')} alone", {"weights": step, "part": part})


def of_position() -> Iterator[Hypothesis]:
    """Yield other positions of the model's tokens, and other rotary frequencies."""
    rules: dict[str, Callable[[Tensor, int], Tensor]] = {
        "positions begin at 0 again at the model's first token": lambda p, n: torch.where(p >= n, p - n, p),
        "positions stop at the model's first token": lambda p, n: p.clamp(max=n),
        "positions stop at the prompt's last token": lambda p, n: p.clamp(max=n - 1),
        "no positions: all are 0": lambda p, n: p * 0,
    }
    for by in (*range(-4, 0), *range(1, 9)):
        rules[f"the model's tokens {by:+d} positions away"] = partial(_moved, by)
    yield from (Hypothesis("position", text, {"position": rule}) for text, rule in rules.items())
    for (name, text), x in product({"theta": "the rotary base", "stretch": "positions"}.items(), FACTORS):
        yield Hypothesis("position", f"{text} times {{:.4g}}", {name: x}, name)


def _moved(by: int, places: Tensor, start: int) -> Tensor:
    """Return positions of which those from a place on are moved."""
    return (places + by * (places >= start)).clamp(min=0)


def of_attention(num_layers: int, longest: int) -> Iterator[Hypothesis]:
    """Yield other attention, in all layers and in one."""
    windows = {1, 2, 4, *(max(longest * part // 16, 1) for part in range(2, 16))}
    changes: list[tuple[str, Setting, str | None]] = [
        ("queries see later tokens", {"is_causal": False}, None),
        ("the model's tokens see themselves alone", {"is_split": True}, None),
        ("query heads take key heads in turns", {"is_tiled": True}, None),
        *((f"a query sees {size} positions", {"window": size}, None) for size in sorted(windows)),
        *(("scores times {:.4g}", {"scale": x}, "scale") for x in FACTORS),
    ]
    for layer, (text, change, number) in product((None, *range(num_layers)), changes):
        yield Hypothesis("attention", text, {**change, "layer": layer}, number)


def of_routing(layers: list[int], top_k: int) -> Iterator[Hypothesis]:
    """Yield other choices and weights of experts, in all layers with experts and in one."""
    orders: dict[str, Callable[[int], list[int]]] = {
        "each expert in its neighbour's place": lambda n: [*range(1, n), 0],
        "each expert in the place before": lambda n: [n - 1, *range(n - 1)],
        "experts in reverse order": lambda n: [*range(n)][::-1],
        "both halves of the experts exchanged": lambda n: [*range(n // 2, n), *range(n // 2)],
    }
    for a, b in combinations(range(MAX_EXPERTS), 2):
        orders[f"experts {a} and {b} exchanged"] = partial(_exchanged, a, b)
    choices: dict[str, Callable[[Tensor], Tensor]] = {
        "the first experts chosen always": lambda x: torch.arange(x.shape[-1]).expand_as(x),
        "the experts of the token before": lambda x: x.roll(1, 1),
        "the experts of the token after": lambda x: x.roll(-1, 1),
        "the experts of the mixture before": lambda x: x.roll(1, 2),
    }
    changes: dict[str, Setting] = {text: {"order": order} for text, order in orders.items()}
    changes |= {text: {"choice": choice} for text, choice in choices.items()}
    changes |= {f"{k} experts for a token": {"router": ("top_k", k)} for k in (1, top_k - 1, top_k + 1, 2 * top_k) if k}
    changes |= {f"norm_topk_prob={on}": {"router": ("norm_topk_prob", on)} for on in (True, False)}
    for layer, (text, change) in product((None, *layers), changes.items()):
        yield Hypothesis("routing", text, {**change, "layer": layer})


def _exchanged(a: int, b: int, num_experts: int) -> list[int]:
    """Return the order of experts in which two are exchanged, if there are both."""
    return [{a: b, b: a}.get(x, x) if b < num_experts else x for x in range(num_experts)]


def of_prompts(case: Case, tokenizer: Any) -> Iterator[Hypothesis]:
    """Yield other tokens before the model's own: encoded again, rendered otherwise, or cut."""

    def encode(text: str) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    def decode(ids: Ids) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    def whole(before: Ids, own: Ids) -> tuple[Ids, Ids]:
        ids = encode(decode((*before, *own)))
        return ids[: len(before)], (*ids[len(before) :], *own)[: len(own)]

    def rendered_by(render: Callable[[str], str]) -> Callable[[Ids], Ids]:
        return lambda ids: encode(render(decode(ids)))

    yield Hypothesis("re-tokenisation", "with the text before encoded again", {"before": lambda x: encode(decode(x))})
    yield Hypothesis("re-tokenisation", "with the whole text encoded again", {"own": whole})
    special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    edits: dict[str, Callable[[Ids], Ids]] = {
        "without special tokens": lambda x: tuple(token for token in x if token not in special),
        "without white space at its end": lambda x: encode(decode(x).rstrip()),
    }
    for extra in (*((token,) for token in special[:MAX_SPECIAL]), encode("\n"), encode(" ")):
        edits[f"with {decode(extra)!r} before it"] = partial(add, extra)
        edits[f"with {decode(extra)!r} after it"] = partial(add_after, extra)
    for count in (*range(1, 9), 16, 32, 64):
        edits[f"without its last {count} tokens"] = itemgetter(slice(-count))
        edits[f"without its first {count} tokens"] = itemgetter(slice(count, None))
    for first, last in product(range(MAX_PARTS), repeat=2):
        edits[f"without parts {first} to {last}"] = partial(_without_parts, special=special, first=first, last=last)
    for text, render in renderings(tokenizer).items():
        edits[f"rendered {text}"] = rendered_by(render)
    prompts = {span.before for span in case.spans}
    for text, edit in edits.items():
        if any(edit(before) != before for before in prompts):
            yield Hypothesis("template", f"with the prompt {text}", {"before": edit})


def add_after(extra: Ids, ids: Ids) -> Ids:
    """Return ids with further ones after them."""
    return (*ids, *extra)


def _without_parts(ids: Ids, special: list[int], first: int, last: int) -> Ids:
    """Return ids without some of the parts that begin at special tokens."""
    numbers = torch.tensor([token in special for token in ids]).cumsum(0).tolist()
    return tuple(token for token, number in zip(ids, numbers, strict=True) if not first <= number <= last)


def renderings(tokenizer: Any) -> dict[str, Callable[[str], str]]:
    """Return other ways to render a prompt of one message of a user, with the words for each."""

    def around(*system: str, **options: Any) -> list[str]:
        chat = [*({"role": "system", "content": text} for text in system), {"role": "user", "content": ""}]
        return template.around(chat, len(system), **{"add_generation_prompt": True, **options})

    def again(form: list[str], text: str) -> str:
        message, is_found, rest = text.removeprefix(head).partition(tail)
        return message.join(form) + rest if is_found and text.startswith(head) else text

    if not has_chat_template(tokenizer):
        return {}
    template = ChatTemplate(tokenizer)
    try:
        head, tail = around()
        forms = {
            "without the generation prompt": around(add_generation_prompt=False),
            "with enable_thinking=false": around(enable_thinking=False),
            "by no template": ["", ""],
            "twice": [head * 2, tail * 2],
            "with an empty system message": around(""),
            "with a system message": around("You are a helpful assistant."),
        }
    except (TemplateRefusal, ValueError):  # the template refuses, or writes the message twice
        return {}
    return {text: partial(again, form) for text, form in forms.items() if tail and len(form) == 2}


def sampled_tokens(case: Case, reference: Reference, side: str) -> Hypothesis:
    """Return the hypothesis that the recorded ids are the text encoded again, and the record is of other tokens.

    Each token is the one whose text goes on with the recorded text, and whose log-probability is the recorded one.

    Args:
        case: the case.
        reference: its reference.
        side: side whose record it is.
    """
    pieces = reference.tokenizer.batch_decode([[token] for token in range(len(reference.tokenizer))])
    sampling, made = case.sampling(side), dict[Ids, Ids]()
    for span in case.spans:
        text, found = reference.tokenizer.decode(list(span.ids)), Ids()
        for recorded in span.records[side].tolist():
            logits, _ = reference.logits({}, [Span(span.before, (*found, 0), 0, {})])
            fits = [token for token, piece in enumerate(pieces) if not text or (piece and text.startswith(piece))]
            tokens = torch.tensor(fits)
            if not fits:
                break
            errors = (label_logprobs(logits[-1:].expand(len(tokens), -1), tokens, sampling) - recorded).abs()
            if not errors.min() < NEAR:
                break
            found = (*found, int(tokens[errors.argmin()]))
            text = text[len(pieces[found[-1]]) :]
        made[span.before, span.ids] = (*found, *span.ids[len(found) :])  # type: ignore[index]
    text = "of the tokens that were sampled; the recorded ids are their text encoded again"
    return Hypothesis("re-tokenisation", text, {"own": lambda before, own: (before, made.get((before, own), own))})
