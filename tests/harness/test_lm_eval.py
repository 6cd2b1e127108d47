"""`RliteLM` and the endpoint under lm-evaluation-harness give the numbers of the harness's own `HFLM`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

from rlite import RliteInferenceEngine
from rlite.errors import ConfigError, DataError, UnknownOptionError
from rlite.evaluation.lm_eval import RliteLM
from rlite.rollout.openai import AgentEndpoint, AgentSession
from tests.harness.conftest import MAX_MODEL_LEN

MAX_LENGTH = MAX_MODEL_LEN - 2
LONG = "The quick brown fox jumps over the lazy dog. " * 12
PAIRS = [
    ("Two plus two is", " four"),
    ("Two plus two is ", "four"),
    ("", "It begins here."),
    ("", "<|begin|>It begins here."),
    ("<|begin|>It has", " begun"),
    ("naïve — ", "日本語 🙂"),
    ("An untrai", "ned model of the world"),
    (LONG, " and sleeps"),
    ("short", LONG[:150]),
]
"""contexts and continuations: spaces and merges at the border, no context, a context beyond `MAX_LENGTH`"""
TEXTS = ["", "One line.", LONG, LONG * 3 + "日本語"]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+2?"}]
T = TypeVar("T")


@pytest.fixture(scope="module")
def oracle(path: Path) -> HFLM:
    return HFLM(str(path), device="cpu", dtype="float32", batch_size=3, max_length=MAX_LENGTH)


@pytest.fixture(scope="module")
def model(engine: RliteInferenceEngine) -> RliteLM:
    return RliteLM(engine, batch_size=4)


@pytest.fixture(scope="module")
def pairs(engine: RliteInferenceEngine) -> list[tuple[str, str]]:
    """`PAIRS`, and contexts with the continuations that greedy decoding produces, as far as the harness takes them.

    It takes text with tokens of its own behind the context's. A continuation may merge with the context's last token.
    """
    contexts = [f"{number} little" for number in range(20)]
    outputs = engine.generate(contexts, {"temperature": 0.0, "max_tokens": 1})
    greedy = [(context, output.text) for context, output in zip(contexts, outputs, strict=True)]
    texts = [(context, text) for context, text in greedy if text.strip() and "\ufffd" not in text]
    taken = [
        pair
        for pair in texts
        if len(engine.tokenizer("".join(pair))["input_ids"]) > len(engine.tokenizer(pair[0])["input_ids"])
    ]
    assert taken
    return [*PAIRS, *taken]


def requests(kind: Any, arguments: list[tuple[Any, ...]]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(arguments)]


def over_http(engine: RliteInferenceEngine, path: Path, use: Callable[[dict[str, Any]], T]) -> T:
    """The result of a synchronous function of the arguments of the harness's client for the endpoint."""

    async def serve() -> T:
        session = AgentSession(engine, engine.tokenizer, is_recording=False)
        async with AgentEndpoint() as endpoint, endpoint.serving(session) as access:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("OPENAI_API_KEY", access.api_key)
                arguments = {
                    "base_url": f"{access.base_url}/completions",
                    "model": access.model,
                    "tokenizer": str(path),
                    "tokenizer_backend": "huggingface",
                    "max_length": MAX_MODEL_LEN,
                }
                return await asyncio.to_thread(use, arguments)

    return asyncio.run(serve())


def assert_same(found: list[tuple[float, bool]], expected: list[tuple[float, bool]], lengths: list[int]) -> None:
    for (logprob, is_greedy), (other, is_other_greedy), length in zip(found, expected, lengths, strict=True):
        assert logprob == pytest.approx(other, abs=1e-5 * length)
        assert is_greedy == is_other_greedy


# -- RliteLM -----------------------------------------------------------------------------------------------------------


def test_log_likelihoods_are_those_of_the_harness(model: RliteLM, oracle: HFLM, pairs: list[tuple[str, str]]) -> None:
    expected = oracle.loglikelihood(requests("loglikelihood", pairs))
    lengths = [len(oracle.tok_encode(continuation)) for _, continuation in pairs]
    assert_same(model.loglikelihood(requests("loglikelihood", pairs)), expected, lengths)
    assert {is_greedy for _, is_greedy in expected} == {True, False}


def test_a_text_longer_than_the_context_is_scored_in_the_harnesss_windows(model: RliteLM, oracle: HFLM) -> None:
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    lengths = [len(oracle.tok_encode(text)) for text in TEXTS]
    assert max(lengths) > 3 * MAX_LENGTH
    found, expected = model.loglikelihood_rolling(asked), oracle.loglikelihood_rolling(asked)
    for total, other, length in zip(found, expected, lengths, strict=True):
        assert total == pytest.approx(other, abs=1e-5 * length)


def test_answers_are_those_of_the_harness(model: RliteLM, oracle: HFLM) -> None:
    options = [
        {"until": ["e"], "max_gen_toks": 24, "do_sample": False},
        {"until": [], "max_gen_toks": 7},
        {"until": "\n", "max_tokens": 20, "temperature": 0.0},
    ]
    asked = [(context, each) for each in options for context in ("Two plus", "naïve — ", LONG, "A dog")]
    expected = [oracle.generate_until(requests("generate_until", [each]))[0] for each in asked]
    assert model.generate_until(requests("generate_until", asked)) == expected
    assert len(set(expected)) > 6


def test_chat_templates_are_rendered_as_the_harness_renders_them(model: RliteLM, oracle: HFLM) -> None:
    assert model.apply_chat_template(CHAT) == oracle.apply_chat_template(CHAT)
    begun = [*CHAT, {"role": "assistant", "content": "The sum is"}]
    continued = model.apply_chat_template(begun, add_generation_prompt=False)
    assert continued == oracle.apply_chat_template(begun, add_generation_prompt=False)
    assert continued.endswith("The sum is")
    assert model.chat_template(True) == oracle.chat_template(True)


def test_a_conversation_that_the_chat_template_refuses_is_named_by_its_roles(
    model: RliteLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "chat_template", "{{ raise_exception('no system message') }}")
    with pytest.raises(DataError, match=r"chat template refuses .* roles system, user: no system message"):
        model.apply_chat_template(CHAT)


def test_options_that_change_nothing_are_accepted(model: RliteLM) -> None:
    off = {"num_beams": 1, "repetition_penalty": 1.0, "early_stopping": False}
    asked = {"until": ["e"], "max_gen_toks": 8}
    plain, given = (requests("generate_until", [("Two plus", own)]) for own in (asked, {**asked, **off}))
    assert model.generate_until(given) == model.generate_until(plain)


def test_invalid_requests_are_refused_with_a_remedy(engine: RliteInferenceEngine, model: RliteLM) -> None:
    with pytest.raises(ConfigError, match=r"max_length=127.*1 to 126, which max_model_len=128 allows"):
        RliteLM(engine, max_length=127)
    with pytest.raises(ConfigError, match="batch_size=0"):
        RliteLM(engine, batch_size=0)
    with pytest.raises(ConfigError, match=r"RliteLM.enable_thinkin"):
        RliteLM(engine, chat_template_options={"enable_thinkin": False})
    with pytest.raises(
        DataError, match=r"tokens; expected 1 to 126, which max_length=126 and .* max_model_len=128 allow"
    ):
        model.loglikelihood(requests("loglikelihood", [("a", LONG * 2)]))
    with pytest.raises(UnknownOptionError, match="num_beams"):
        model.generate_until(requests("generate_until", [("a", {"num_beams": 2, "max_gen_toks": 4})]))
    with pytest.raises(
        ConfigError, match=r"asks for answers of 126 tokens; expected 1 to 125, which .* max_model_len=128 allow"
    ):
        model.generate_until(requests("generate_until", [("a", {"max_gen_toks": 126})]))


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 4, "num_concurrent": 2}, {"tokenized_requests": False, "add_bos_token": True}]
)
def test_log_likelihoods_are_the_same_over_http(
    engine: RliteInferenceEngine, path: Path, pairs: list[tuple[str, str]], options: dict[str, Any]
) -> None:
    # the tokens of these texts do not survive decoding and encoding: cut ones, and those of the special token's text
    lost = ("<|begin|>", LONG[:9]) if options.get("tokenized_requests") is False else ()
    asked = requests("loglikelihood", [pair for pair in pairs if not any(text in "".join(pair) for text in lost)])

    def use(arguments: dict[str, Any]) -> Any:
        client = LocalCompletionsAPI(**arguments, **options)
        return client.loglikelihood(asked), [len(client.tok_encode(each.args[1])) for each in asked]

    found, lengths = over_http(engine, path, use)
    has_bos = bool(options.get("add_bos_token"))
    same = HFLM(str(path), device="cpu", dtype="float32", add_bos_token=has_bos, max_length=MAX_LENGTH)
    assert_same(found, same.loglikelihood(asked), lengths)


def test_texts_and_answers_are_the_same_over_http(engine: RliteInferenceEngine, path: Path) -> None:
    asked = requests("loglikelihood_rolling", [(text,) for text in TEXTS])
    answers = requests("generate_until", [(c, {"until": ["e"], "max_gen_toks": 16}) for c in ("Two plus", "A dog")])

    def use(arguments: dict[str, Any]) -> Any:
        client = LocalCompletionsAPI(**arguments)
        return client.loglikelihood_rolling(asked), client.generate_until(answers)

    totals, texts = over_http(engine, path, use)
    # the client keeps one place of the context for the token that it has to ask for, and one more
    same = HFLM(str(path), device="cpu", dtype="float32", add_bos_token=False, max_length=MAX_LENGTH)
    for total, other, text in zip(totals, same.loglikelihood_rolling(asked), TEXTS, strict=True):
        assert total == pytest.approx(other, abs=1e-5 * max(1, len(text)))
    assert texts == same.generate_until(answers)


# -- whole evaluations -------------------------------------------------------------------------------------------------

CHOICES = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ANSWERS = """
task: answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 8}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def tasks(questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TaskManager:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, text in (("sums", CHOICES), ("answers", ANSWERS)):
        (tmp_path / f"{name}.yaml").write_text(text.format(file=questions))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def test_whole_tasks_give_the_results_and_samples_of_the_harness(
    model: RliteLM, oracle: HFLM, tasks: TaskManager
) -> None:
    def evaluated(lm: Any) -> Any:
        return lm_eval.simple_evaluate(
            lm,
            tasks=["sums", "answers"],
            task_manager=tasks,
            num_fewshot=1,
            apply_chat_template=True,
            fewshot_as_multiturn=True,
            bootstrap_iters=0,
        )

    found, expected = evaluated(model), evaluated(oracle)
    assert found["results"] == expected["results"]
    assert {"acc,none", "acc_norm,none"} <= found["results"]["sums"].keys()
    for task in ("sums", "answers"):
        ours, theirs = (each["samples"][task] for each in (found, expected))
        assert [sample["arguments"] for sample in ours] == [sample["arguments"] for sample in theirs]
        assert len(ours) == 10
    answers = ([sample["resps"] for sample in each["samples"]["answers"]] for each in (found, expected))
    assert next(answers) == next(answers)


def test_a_whole_task_gives_the_results_of_the_harness_over_http(
    engine: RliteInferenceEngine, path: Path, oracle: HFLM, tasks: TaskManager
) -> None:
    def evaluated(lm: Any, arguments: dict[str, Any] | None = None) -> Any:
        return lm_eval.simple_evaluate(lm, arguments, tasks=["sums"], task_manager=tasks, batch_size=8)["results"]

    found = over_http(
        engine, path, lambda arguments: evaluated("local-completions", {**arguments, "add_bos_token": True})
    )
    assert found == evaluated(oracle)
