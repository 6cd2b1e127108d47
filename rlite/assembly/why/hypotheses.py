"""The hypotheses: for each cause, the settings of the reference in which it would compute what was recorded.

They follow from what two computations of one token can differ in: the tokens before it, their positions, the weights,
the precision, the attention, the experts, and how a log-probability is made of logits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import combinations, product
from operator import add, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlite.assembly.why.evidence import Case, Ids, Span
from rlite.assembly.why.reference import Parts, Reference, Setting, label_logprobs, labels, layer_label
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
    start: object = None
    """beginning of the moves, if others are tried, too"""

    @property
    def layer(self) -> int | None:
        """Number of the only layer that deviates."""
        return next((part.layer for part in self.changes.values() if isinstance(part, Parts)), None)

    @property
    def words(self) -> str:
        """The deviation with its numbers and its parts of the model."""
        return self.text.format(**self.changes) if self.moves else self.text


def times(name: str, most: float = 2.0) -> tuple[Callable[[Setting], Setting], ...]:
    """Return moves of a positive number."""
    factors = (most ** (sign * 0.5**k) for k in range(18) for sign in (1, -1))
    return tuple(lambda changes, by=by: {**changes, name: changes[name] * by} for by in factors)


def plus(name: str, least: int) -> tuple[Callable[[Setting], Setting], ...]:
    """Return moves of a whole number that is not below the least one."""
    steps = (sign * by for by in (64, 32, 16, 8, 4, 3, 2, 1) for sign in (1, -1))
    return tuple(lambda changes, by=by: {**changes, name: max(changes[name] + by, least)} for by in steps)


def _toggled(key: str, label: str, changes: Setting) -> Setting:
    """Return changes of which a layer or a module becomes a part, or is none any more."""
    return {**changes, key: changes[key]._replace(chosen=changes[key].chosen ^ {label})}


def hypotheses(case: Case, reference: Reference, side: str) -> Iterator[Hypothesis]:
    """Yield the hypotheses on a record."""
    yield Hypothesis("code", f"the {side}'s code in this process", {"code": side})
    yield from of_sampling()
    yield from of_weights(case, reference.exact)
    yield from of_precision(case.states[reference.exact])
    own = reference.model.config.get_text_config()
    yield from of_position(own)
    longest = max(len(span.before) + len(span.ids) for span in case.spans)
    yield from of_attention(own.num_hidden_layers, longest)
    if reference.shape is not None:
        yield from of_routing([*reference.mixtures], reference.shape)
    yield from of_prompts(case, reference.tokenizer)


def of_sampling() -> Iterator[Hypothesis]:
    """Yield other ways to make log-probabilities of logits."""
    for x in (0.3, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 3.0):
        yield Hypothesis("temperature", "at temperature {temperature:.4g}", {"temperature": x}, times("temperature"))
    for name, numbers in {"repetition": (1.05, 1.3, 0.8), "presence": (0.5, -0.5), "frequency": (0.5, -0.5)}.items():
        for x in numbers:
            yield Hypothesis("penalties", f"with a {name} penalty of {{{name}:.4g}}", {name: x}, times(name))
    text = "normalised over what top_p={top_p:.3g} and top_k={top_k} keep (1 and 0 keep all)"
    moves = (*times("top_p", 1.1), *plus("top_k", 0))
    some = [*product((0.3, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.98, 0.99, 1.0), (0,))]
    some += product((1.0,), (1, 2, 3, 4, 5, 8, 10, 16, 20, 32, 40, 50, 64, 100, 200))
    for p, k in (*some, *product((0.8, 0.9, 0.95), (10, 20, 50))):  # the last as released models ask for
        yield Hypothesis("kept sets", text, {"top_p": p, "top_k": k, "min_p": 0.0}, moves, (p < 1, k > 0))
    for x in (0.01, 0.03, 0.1, 0.3):
        change, text = {"top_p": 1.0, "top_k": 0, "min_p": x}, "normalised over what min_p={min_p:.3g} keeps"
        yield Hypothesis("kept sets", text, change, times("min_p"))


def in_parts(
    found: Hypothesis, key: str, layers: Collection[str], modules: Collection[str] = frozenset()
) -> Iterator[Hypothesis]:
    """Yield a hypothesis for the whole model, then for each layer, and for each module.

    `modules`: labels of the modules; {} if whole layers deviate.
    """
    whole = frozenset((*layers, *modules))
    moves: tuple[Any, ...] = (*found.moves, *(partial(_toggled, key, label) for label in sorted(whole)))
    own = (frozenset((*(modules if label in layers else layers), label)) for label in sorted(whole))
    for chosen in (whole, *own):
        changes = {**found.changes, key: Parts(chosen, frozenset(layers), frozenset(modules))}
        yield Hypothesis(found.cause, found.text, changes, moves, None if modules else chosen)


def groups(names: Iterable[str]) -> tuple[frozenset[str], ...]:
    """Return the labels of the layers and of the modules of parameters."""
    return tuple(frozenset(group) for group in zip(*map(labels, names), strict=True))


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
                yield next(in_parts(Hypothesis(cause, told, change, times("amount")), "parts", *groups(names)))
        yield from in_parts(Hypothesis(cause, text, {"weights": step}), "parts", *groups(names))


def of_precision(state: Mapping[str, Tensor]) -> Iterator[Hypothesis]:
    """Yield computation and storage with fewer bits."""
    for dtype in (torch.bfloat16, torch.float16):
        yield Hypothesis("precision", f"computed in {str(dtype)[6:]}", {"dtype": dtype})
    for dtype, scaled in product((torch.float8_e4m3fn, torch.int8), ("row", "matrix", "nothing")):
        text, form = f"in {str(dtype)[6:]}, with a scale of each {scaled}", (dtype, scaled)
        matrices = Hypothesis("precision", f"with matrices {text}{{parts}}", {"stored": form})
        yield next(in_parts(matrices, "parts", *groups(state)))
        yield Hypothesis("precision", f"with keys and values {text}", {"cached": form})


def of_position(config: Any) -> Iterator[Hypothesis]:
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
    if "rope_theta" in (config.to_dict().get("rope_parameters") or {}):  # else layers have their own
        for kind, x in (("default", 1.0), *product(("yarn", "llama3"), (2.0, 4.0, 8.0, 32.0))):
            text = f"rotary frequencies scaled as {kind} by {{factor:.4g}}"
            yield Hypothesis("position", text, {"rope": kind, "factor": x}, times("factor"))


def of_attention(num_layers: int, longest: int) -> Iterator[Hypothesis]:
    """Yield other attention, in all layers and in some."""
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
    for each in found:
        yield from in_parts(each._replace(text=each.text + "{layer}"), "layer", [*map(layer_label, range(num_layers))])


def of_routing(layers: list[int], shape: RoutingShape) -> Iterator[Hypothesis]:
    """Yield other choices and weights of experts, in all layers with experts and in some."""
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
    for each in found:
        yield from in_parts(each._replace(text=each.text + "{mixture}"), "mixture", [*map(layer_label, layers)])


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
