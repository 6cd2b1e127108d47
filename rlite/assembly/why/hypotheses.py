"""The hypotheses: for each cause, the settings of the reference in which it would compute what was recorded.

They follow from what two computations of one token can differ in: the tokens before it, their positions, the weights,
the precision, the attention, the experts, and how a log-probability is made of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations, product
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite.assembly.why.evidence import Case, Ids, Span
from rlite.assembly.why.reference import Parts, Reference, Setting, label_logprobs, labels
from rlite.data.chat.template import ChatTemplate, TemplateRefusal, has_chat_template
from rlite.data.routing import RoutingShape

FACTORS = (0.01, 0.1, 0.25, 0.5, 0.8, 1.25, 2.0, 4.0, 10.0, 100.0)
"""grid of a factor"""
MAX_SPECIAL, MAX_PARTS, MAX_EXPERTS = 16, 7, 8
"""special tokens that are tried in a prompt; its parts that are left out; experts that are tried one by one"""
NEAR = 1e-3
"""distance of log-probabilities below which a token may be the one that was sampled"""


class Hypothesis(NamedTuple):
    """One deviation from the honest computation."""

    cause: str
    text: str
    """the deviation in words; with moves, `{name}` stands for the value of a change"""
    changes: Setting
    moves: tuple[Callable[[Setting], Setting], ...] = ()
    """functions of the changes to changes beside them, from far to near"""

    @property
    def layer(self) -> int | None:
        """Number of the only layer that deviates."""
        parts = self.changes.get("parts")
        return parts.layer if parts else self.changes.get("layer", self.changes.get("mixture"))

    @property
    def words(self) -> str:
        """The deviation with its numbers and its layer."""
        told = self.text.format(**self.changes) if self.moves else self.text
        return told if self.layer is None or "parts" in self.changes else f"{told}, in layer {self.layer} alone"


def times(name: str, most: float = 2.0) -> tuple[Callable[[Setting], Setting], ...]:
    """Return moves of a positive number.

    Args:
        name: name of the change.
        most: largest factor.
    """
    factors = (most ** (sign * 0.5**k) for k in range(18) for sign in (1, -1))
    return tuple(lambda changes, by=by: {**changes, name: changes[name] * by} for by in factors)


def plus(name: str, least: int) -> tuple[Callable[[Setting], Setting], ...]:
    """Return moves of a whole number that is not below the least one."""
    steps = (sign * by for by in (64, 32, 16, 8, 4, 3, 2, 1) for sign in (1, -1))
    return tuple(lambda changes, by=by: {**changes, name: max(changes[name] + by, least)} for by in steps)


def _toggled(label: str, changes: Setting) -> Setting:
    """Return changes of which a layer or a module becomes a part, or is none any more."""
    return {**changes, "parts": changes["parts"]._replace(chosen=changes["parts"].chosen ^ {label})}


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
    yield from of_precision(case.states[reference.exact])
    yield from of_position()
    longest = max(len(span.before) + len(span.ids) for span in case.spans)
    yield from of_attention(reference.model.config.get_text_config().num_hidden_layers, longest)
    if reference.shape is not None:
        yield from of_routing([*reference.mixtures], reference.shape)
    yield from of_prompts(case, reference.tokenizer)


def of_sampling() -> Iterator[Hypothesis]:
    """Yield other ways to make log-probabilities of logits."""
    for x in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0):
        yield Hypothesis("temperature", "at temperature {temperature:.4g}", {"temperature": x}, times("temperature"))
    yield Hypothesis("kept sets", "normalised over the whole vocabulary", {"top_p": 1.0, "top_k": 0})
    for p in (0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99):
        text = "normalised over the ids that top_p={top_p:.3g} keeps"
        yield Hypothesis("kept sets", text, {"top_p": p, "top_k": 0}, times("top_p", 1.1))  # all above 1 are alike
    for k in (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 200):
        yield Hypothesis("kept sets", "over the {top_k} most likely ids", {"top_p": 1.0, "top_k": k}, plus("top_k", 1))
    for p, k in product((0.8, 0.9, 0.95), (10, 20, 50)):  # as released models ask for
        text, change = "over the ids that top_p={top_p:.3g} keeps of the {top_k} most likely", {"top_p": p, "top_k": k}
        yield Hypothesis("kept sets", text, change, (*times("top_p", 1.1), *plus("top_k", 1)))


def in_parts(found: Hypothesis, names: Iterable[str]) -> Iterator[Hypothesis]:
    """Yield a hypothesis for all parameters, then for those of each layer, and of each module.

    Args:
        found: its text has `{parts}`.
        names: names of the parameters that it changes.
    """
    layers, modules = (frozenset(group) for group in zip(*map(labels, names), strict=True))
    moves: tuple[Any, ...] = (*found.moves, *(partial(_toggled, label) for label in sorted(layers | modules)))
    own = (modules | {label} if label in layers else layers | {label} for label in sorted(layers | modules))
    for chosen in (layers | modules, *own):
        parts = Parts(chosen, layers, modules)
        yield Hypothesis(found.cause, found.text, {**found.changes, "parts": parts}, moves)


def of_weights(case: Case, exact: int) -> Iterator[Hypothesis]:
    """Yield other saved weights and other scales of an adapter, as a whole and in parts of the model."""
    state = case.states[exact]
    for step in sorted(case.states.keys() - {exact}, key=lambda step: abs(step - exact)):
        if not (names := [name for name, own in state.items() if not torch.equal(own, case.states[step][name])]):
            continue
        cause, text = "stale weights", f"with the weights after step {step}, not {exact}{{parts}}"
        if case.option("actor.lora") and step == 0:
            cause, text = "adapter", "with the base model, without its adapter{parts}"
            for x in FACTORS:
                told, change = "with the adapter's scale times {amount:.4g}{parts}", {"weights": step, "amount": x}
                yield next(in_parts(Hypothesis(cause, told, change, times("amount")), names))
        yield from in_parts(Hypothesis(cause, text, {"weights": step}), names)


def of_precision(state: Mapping[str, Tensor]) -> Iterator[Hypothesis]:
    """Yield computation and storage with fewer bits.

    Args:
        state: weights by name.
    """
    for dtype in (torch.bfloat16, torch.float16):
        yield Hypothesis("precision", f"computed in {str(dtype)[6:]}", {"dtype": dtype})
    for dtype, scaled in product((torch.float8_e4m3fn, torch.int8), ("row", "matrix", "nothing")):
        text, form = f"in {str(dtype)[6:]}, with a scale of each {scaled}", (dtype, scaled)
        yield next(in_parts(Hypothesis("precision", f"with matrices {text}{{parts}}", {"stored": form}), state))
        yield Hypothesis("precision", f"with keys and values {text}", {"cached": form})


def of_position() -> Iterator[Hypothesis]:
    """Yield other positions of the model's tokens, and other rotary frequencies."""
    rules: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "positions begin at 0 again at the model's first token": lambda p, n: torch.where(p >= n, p - n, p),
        "positions stop at the model's first token": torch.minimum,
        "positions stop at the prompt's last token": lambda p, n: p.minimum(n - 1),
        "no positions: all are 0": lambda p, n: p * 0,
    }
    yield from (Hypothesis("position", text, {"position": rule}) for text, rule in rules.items())
    for by in (-32, -16, -8, *range(-4, 0), *range(1, 9), 16, 32, 64, 128):
        yield Hypothesis("position", "the model's tokens moved by {shift:+d}", {"shift": by}, plus("shift", -4096))
    for (name, text), x in product({"theta": "the rotary base", "stretch": "positions"}.items(), FACTORS):
        yield Hypothesis("position", f"{text} times {{{name}:.4g}}", {name: x}, times(name))


def of_attention(num_layers: int, longest: int) -> Iterator[Hypothesis]:
    """Yield other attention, in all layers and in one."""
    sizes = sorted({1, 2, 4, 8, *(max(longest * part // 16, 1) for part in range(2, 16))})
    heads: dict[str, Callable[[Tensor], Tensor]] = {
        "key heads in turns": lambda x: torch.arange(len(x)) % (x[-1] + 1),
        "the next key head": lambda x: (x + 1) % (x[-1] + 1),
        "the key head before": lambda x: (x - 1) % (x[-1] + 1),
    }
    found = [
        Hypothesis("attention", "queries see later tokens", {"is_causal": False}),
        Hypothesis("attention", "the model's tokens see themselves alone", {"hidden": longest}),
        *(Hypothesis("attention", f"query heads take {text}", {"heads": order}) for text, order in heads.items()),
    ]
    for n in sizes:
        found.append(Hypothesis("attention", "a query sees {window} positions", {"window": n}, plus("window", 1)))
        found.append(Hypothesis("attention", "the first {hidden} are not seen later", {"hidden": n}, plus("hidden", 1)))
    found += [Hypothesis("attention", "scores times {scale:.4g}", {"scale": x}, times("scale")) for x in FACTORS]
    for layer, each in product((None, *range(num_layers)), found):
        yield each._replace(changes={**each.changes, "layer": layer})


def of_routing(layers: list[int], shape: RoutingShape) -> Iterator[Hypothesis]:
    """Yield other choices and weights of experts, in all layers with experts and in one."""
    k, own, first = shape.top_k, [*range(shape.num_experts)], range(min(shape.num_experts, MAX_EXPERTS))
    orders = {f"experts {by:+d} places away": [*own[by:], *own[:by]] for by in (1, -1, len(own) // 2)}
    for a, b in combinations(first, 2):
        orders[f"experts {a} and {b} exchanged"] = [{a: b, b: a}.get(x, x) for x in own]
    choices: dict[str, Callable[[Tensor], Tensor]] = {
        "the first experts chosen always": lambda x: torch.arange(x.shape[-1]).expand_as(x),
        "the experts of the token before": lambda x: x.roll(1, 0),
        "the experts of the token after": lambda x: x.roll(-1, 0),
    }
    changes: dict[str, Setting] = {text: {"order": order} for text, order in orders.items()}
    changes |= {text: {"choice": choice} for text, choice in choices.items()}
    changes |= {f"{n} experts for a token": {"router": ("top_k", n)} for n in (1, k - 1, k + 1, 2 * k) if n}
    changes |= {f"norm_topk_prob={on}": {"router": ("norm_topk_prob", on)} for on in (True, False)}
    found = [Hypothesis("routing", text, change) for text, change in changes.items()]
    for expert, odds in product(first, (0.0, 0.1, 0.3, 3.0, 10.0)):
        text = f"expert {expert} {{odds:.4g}} times as likely"
        found.append(Hypothesis("routing", text, {"expert": expert, "odds": odds}, times("odds")))
    for layer, each in product((None, *layers), found):
        yield each._replace(changes={**each.changes, "mixture": layer})


def of_prompts(case: Case, tokenizer: Any) -> Iterator[Hypothesis]:
    """Yield other tokens before the model's own: encoded again, rendered otherwise, or cut."""

    def encode(text: str, **options: bool) -> Ids:
        return tuple(tokenizer.encode(text, add_special_tokens=False, **options))

    def decode(ids: Ids) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    def whole(before: Ids, own: Ids) -> tuple[Ids, Ids]:
        ids = encode(decode((*before, *own)))
        return ids[: len(before)], (*ids[len(before) :], *own)[: len(own)]

    yield Hypothesis("re-tokenisation", "with the text before encoded again", {"before": lambda x: encode(decode(x))})
    yield Hypothesis("re-tokenisation", "with the whole text encoded again", {"own": whole})
    special = sorted({*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder})
    edits: dict[str, Callable[[Ids], Ids]] = {
        "without special tokens": lambda x: tuple(token for token in x if token not in special),
        "with special tokens as text": lambda x: encode(decode(x), split_special_tokens=True),
        "without white space at its end": lambda x: encode(decode(x).rstrip()),
    }
    texts = ("\n", " ", "\n\n", "<think>\n", "<think>\n\n</think>\n\n")
    for extra in (*((token,) for token in special[:MAX_SPECIAL]), *map(encode, texts)):
        edits[f"with {decode(extra)!r} before it"] = partial(add, extra)
        edits[f"with {decode(extra)!r} after it"] = lambda x, extra=extra: (*x, *extra)  # type: ignore[misc]
    for count in (*range(1, 17), 32, 64):
        edits[f"without its last {count} tokens"] = itemgetter(slice(-count))
        edits[f"without its first {count} tokens"] = itemgetter(slice(count, None))
    for first, last in product(range(MAX_PARTS), repeat=2):
        edits[f"without parts {first} to {last}"] = partial(_without_parts, special=special, first=first, last=last)
    for text, render in renderings(tokenizer).items():
        edits[f"rendered {text}"] = lambda x, render=render: encode(render(decode(x)))  # type: ignore[misc]
    prompts = {span.before for span in case.spans}
    seen = {tuple(prompts)}
    for text, edit in edits.items():
        made = {before: edit(before) for before in prompts}
        if tuple(made.values()) not in seen:
            seen.add(tuple(made.values()))
            yield Hypothesis("template", f"with the prompt {text}", {"before": made.__getitem__})


def _without_parts(ids: Ids, special: list[int], first: int, last: int) -> Ids:
    """Return ids without some of the parts that begin at special tokens."""
    numbers = torch.tensor([token in special for token in ids]).cumsum(0).tolist()
    return tuple(token for token, number in zip(ids, numbers, strict=True) if not first <= number <= last)


def renderings(tokenizer: Any) -> dict[str, Callable[[str], str]]:
    """Return other ways to render a prompt of one message of a user, with the words for each."""

    def around(*system: str) -> list[str]:
        chat = [*({"role": "system", "content": text} for text in system), {"role": "user", "content": ""}]
        return ChatTemplate(tokenizer).around(chat, len(system), add_generation_prompt=True)

    if not has_chat_template(tokenizer):
        return {}
    try:
        head, tail = around()
        forms = {"by no template": ["", ""], "with a system message": around("You are a helpful assistant.")}
    except (TemplateRefusal, ValueError):  # the template refuses, or writes the message twice
        return {}
    return {text: lambda x, to=to: x.replace(head, to[0], 1).replace(tail, to[1], 1) for text, to in forms.items()}  # type: ignore[misc]


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
