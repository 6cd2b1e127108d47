"""An inference engine as a model of lm-evaluation-harness.

    results = lm_eval.simple_evaluate(RliteLM(engine), tasks=["gsm8k"], apply_chat_template=True)

Tokenisation, truncation and windows are those of the harness's own `HFLM`, so the numbers are the same.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rlite.data.chat.template import ChatTemplate, check_template_options
from rlite.engine.inference import RliteInferenceEngine
from rlite.errors import ConfigError, DataError
from rlite.imports import optional
from rlite.types import GenerationHyperparameters

with optional("the harness needs", "lm-eval"):
    from lm_eval import simple_evaluate, utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.tasks import TaskManager

__all__ = ["RliteLM", "TaskManager", "simple_evaluate"]

OFF: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "typical_p"), (1, None)),
    **dict.fromkeys(("repetition_penalty", "length_penalty"), (1, None)),
    **dict.fromkeys(("diversity_penalty", "no_repeat_ngram_size"), (0, None)),
    "early_stopping": (False, None),
}
"""options of transformers that rlite has not, and their values that change nothing"""
T = TypeVar("T")
Encoded = tuple[tuple[str, str] | None, list[int], list[int]]
"""context and continuation as texts (None for a window of a longer text), and both as tokens"""


class RliteLM(TemplateLM):
    """Model for `lm_eval.simple_evaluate(model=...)`.

    Args:
        engine: a built engine, whose executor computes log-probabilities of prompts.
        max_length: most tokens that the model reads, as `HFLM` counts them: the last token of a continuation is not
            read. Default: two less than the engine's `max_model_len`.
        max_gen_toks: tokens of an answer if the task does not say.
        batch_size: requests of one call of the engine.
        add_bos_token: whether texts begin with the beginning-of-text token; None leaves it to the tokenizer.
        prefix_token_id: token before a text without a context. Default: the beginning-of-text or the end token.
        chat_template_options: further keyword arguments for the chat template.

    Raises:
        ConfigError: an argument is out of range, or the chat template does not read an option.
    """

    def __init__(
        self,
        engine: RliteInferenceEngine,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        batch_size: int = 256,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        longest = engine.context_length - 2
        max_length = longest if max_length is None else max_length
        if not 1 <= max_length <= longest:
            allowed = f"expected a number from 1 to {longest}, which max_model_len={engine.context_length} allows"
            raise ConfigError(f"RliteLM(max_length={max_length}): {allowed}")
        for name, value in (("max_gen_toks", max_gen_toks), ("batch_size", batch_size)):
            if value < 1:
                raise ConfigError(f"RliteLM({name}={value}): expected a number of at least 1")
        self.engine, self.tokenizer = engine, engine.tokenizer
        if self.tokenizer.eos_token_id is None:
            raise ConfigError(f"RliteLM: the tokenizer of {engine.path} has no end token; set its eos_token")
        self.max_length, self.max_gen_toks, self.batch_size = max_length, max_gen_toks, batch_size
        self._special_tokens = {} if add_bos_token is None else {"add_special_tokens": add_bos_token}
        self._prefix_token_id = prefix_token_id
        self.num_requests = 0
        """requests that the harness has sent, windows of long texts included"""
        self.num_answered = 0
        """answered requests among them"""
        self.num_cut = 0
        """contexts that were too long and have lost their beginning"""
        check_template_options(self.tokenizer, chat_template_options or {}, "RliteLM")
        self._template = ChatTemplate(self.tokenizer, chat_template_options)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        known = (self._prefix_token_id, self.tokenizer.bos_token_id, self.eot_token_id)
        return next(token for token in known if token is not None)

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches requests that a chat template has rendered."""
        return self.engine.path.replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as the model reads it.

        Args:
            chat_history: the messages.
            add_generation_prompt: the model's turn begins. Otherwise it continues the last message.

        Raises:
            TemplateRefusal: the chat template fails.
        """
        return self._template.render(
            chat_history, add_generation_prompt=add_generation_prompt, continue_final_message=not add_generation_prompt
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the tokens of a text.

        Args:
            string: the text. A beginning-of-text token in it is not added twice.
            add_special_tokens: whether the tokenizer adds special tokens; None is `add_bos_token`.
            **kwargs: unused.
        """
        special = self._special_tokens if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            special = {"add_special_tokens": False}
        return self.tokenizer.encode(string, **special)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text. Longer texts are scored in windows, each token once.

        Args:
            requests: the harness's requests, whose arguments are `(text,)`.
            disable_tqdm: unused.
        """
        windows = [self._windows(text) for (text,) in (request.args for request in requests)]
        scored = iter(self._loglikelihood_tokens(list(itertools.chain(*windows))))
        totals = [math.fsum(next(scored)[0] for _ in each) for each in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each context, up to its first stop string.

        Args:
            requests: the harness's requests, whose arguments are `(context, options)`.
            disable_tqdm: unused.

        Raises:
            UnknownOptionError: the engine does not know an option.
        """
        groups: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(index)
        self.num_requests += len(requests)
        texts = [""] * len(requests)
        for options, indices in groups.items():
            for batch in _batched(indices, self.batch_size):
                found = self._generate([requests[index].args[0] for index in batch], json.loads(options))
                self.num_answered += len(found)
                for index, text in zip(batch, found, strict=True):
                    texts[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _windows(self, text: str) -> list[Encoded]:
        tokens, first = self.tok_encode(text), self.prefix_token_id
        windows = utils.get_rolling_token_windows(tokens, first, self.max_length, context_len=1)
        return [(None, *utils.make_disjoint_window(window)) for window in windows]

    def _loglikelihood_tokens(self, requests: Sequence[Encoded], **kwargs: Any) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation, and whether greedy decoding would produce it.

        Args:
            requests: contexts and continuations. A context that is too long loses its beginning.
            **kwargs: unused.

        Raises:
            DataError: a continuation is empty or too long.
        """
        self.num_requests += len(requests)
        answers = []
        for batch in _batched(requests, self.batch_size):
            scored = self.engine.score([self._sequence(*each) for each in batch], num_top=1)
            self.num_answered += len(scored)
            for (texts, _, continuation), found in zip(batch, scored, strict=True):
                num = len(continuation)
                is_greedy = [token for (token,) in found.top_ids[-num:]] == continuation
                answers.append((math.fsum(found.logprobs[-num:]), is_greedy))
                if texts is not None:
                    self.cache_hook.add_partial("loglikelihood", texts, answers[-1])
        return answers

    def _sequence(self, texts: tuple[str, str] | None, context: list[int], continuation: list[int]) -> list[int]:
        if not 1 <= len(continuation) <= self.max_length:
            expected = f"expected 1 to {self.max_length}, {self._limit}"
            raise DataError(f"the continuation {texts and texts[1]!r:.80} has {len(continuation)} tokens; {expected}")
        self.num_cut += len(context) + len(continuation) > self.max_length + 1
        return (context + continuation)[-(self.max_length + 1) :]

    @property
    def _limit(self) -> str:
        return f"which max_length={self.max_length} and the engine's max_model_len={self.engine.context_length} allow"

    def _generate(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        asked = normalize_gen_kwargs(options, self.max_gen_toks)
        asked = {name: value for name, value in asked.items() if name not in OFF or value not in OFF[name]}
        stops = [stop for stop in asked.pop("until") if stop]
        max_tokens = asked.pop("max_gen_toks")
        if not 1 <= max_tokens < self.max_length:
            expected = f"expected 1 to {self.max_length - 1}, {self._limit}"
            raise ConfigError(f"the task asks for answers of {max_tokens} tokens; {expected}")
        if not asked.pop("do_sample"):
            asked |= {"temperature": 0.0}
        sampling = GenerationHyperparameters.from_mapping({**asked, "max_new_tokens": max_tokens, "stop": stops})
        room = self.max_length - max_tokens
        encoded = [self.tok_encode(context) for context in contexts]
        self.num_cut += sum(len(prompt) > room for prompt in encoded)
        prompts = [prompt[-room:] or [self.prefix_token_id] for prompt in encoded]
        end = self.tokenizer.decode(self.eot_token_id)
        outputs = self.engine.generate(prompts, sampling)
        return [postprocess_generated_text(output.text, [*stops, end], None) for output in outputs]


def _batched(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
