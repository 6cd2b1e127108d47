"""Proposed tokens: the texts that they come from, when they pay, and that checks change nothing but speed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rlite.backends.embedded.cache import EmbeddedOptions
from rlite.backends.embedded.scheduler import RunningSequence
from rlite.backends.embedded.speculation import FIXED_ROWS, LONGEST, PROBE, TEXTS, Speculator, SuffixIndex, kept_spans
from rlite.backends.embedded.worker import EmbeddedWorker
from rlite.observability import stats_tracker
from rlite.types import GenerationHyperparameters, SequenceRequest, TokenChunk
from tests.tiny import build_model_dir

CPU = torch.device("cpu")
PROMPT = [7, 8, 9, 7, 8, 9, 7, 8, 9, 40, 41, 42]


def sequence_of(prompt: list[int], completion: list[int], max_new: int = 100) -> RunningSequence:
    request = SequenceRequest(request_id=0, input_ids=prompt, gconfig=GenerationHyperparameters(), seed=0)
    length = len(prompt)
    return RunningSequence(request, [*prompt, *completion], length + max_new, frozenset(), min_tokens=length)


def worker_of(path: Path, **options) -> EmbeddedWorker:
    given = {"max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", **options}
    return EmbeddedWorker(str(path), EmbeddedOptions(**given), CPU)


def generated(worker: EmbeddedWorker, num: int = 6, **gconfig) -> list[TokenChunk]:
    hyperparameters = GenerationHyperparameters(**{"max_new_tokens": 48, "ignore_eos": True, **gconfig})
    requests = [
        SequenceRequest(request_id=i, input_ids=PROMPT, gconfig=hyperparameters, seed=i, extras=frozenset({"kept_ids"}))
        for i in range(num)
    ]
    made = {chunk.request_id: chunk for chunk in worker.advance(requests, [], 10_000)}
    return [made[i] for i in range(num)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose text repeats itself often at low temperatures."""
    return build_model_dir(tmp_path_factory.mktemp("m") / "m", "qwen3", hidden=64, initializer_range=0.02)


GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.4}


@pytest.mark.parametrize(
    "gconfig",
    [
        GREEDY,
        SAMPLED,
        SAMPLED | {"top_k": 4},
        GREEDY | {"max_new_tokens": 9, "stop_token_ids": [3, 9, 40], "min_new_tokens": 4},
        SAMPLED | {"top_p": 0.5, "stop_token_ids": list(range(0, 250, 25)), "min_new_tokens": 5},
    ],
    ids=str,
)
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"dtype": "float64"}], ids=str)
def test_tokens_and_logprobs_are_those_of_single_steps(model: Path, options: dict, gconfig: dict) -> None:
    stats_tracker.export()
    single = generated(worker_of(model, speculation=False, **options), **gconfig)
    worker = worker_of(model, speculation=True, **options)
    for _ in range(2):  # the second time, the texts of the first propose
        for ours, theirs in zip(generated(worker, **gconfig), single, strict=True):
            assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
            exact = 0 if options.get("deterministic") else 1e-4
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=exact, rel=0)
            assert ours.sampling_logprobs == pytest.approx(theirs.sampling_logprobs, abs=exact, rel=0)
            assert ours.extras == theirs.extras
    assert worker.speculator is not None
    assert worker.speculator.num_accepted > 20
    counted = stats_tracker.export()
    assert counted["speculation/accepted"] == worker.speculator.num_accepted
    assert counted["speculation/proposed"] == worker.speculator.num_proposed


def test_models_with_windows_and_other_layers_are_checked_too(tmp_path: Path) -> None:
    layers = {"head_dim": 16, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
    path = build_model_dir(tmp_path / "m", "gemma3_text", hidden=64, initializer_range=0.02, **layers)
    single = generated(worker_of(path, speculation=False), **GREEDY)
    worker = worker_of(path, speculation=True)
    assert [m.token_ids for m in generated(worker, **GREEDY)] == [m.token_ids for m in single]
    assert [m.token_ids for m in generated(worker, **GREEDY)] == [m.token_ids for m in single]
    assert worker.speculator is not None
    assert worker.speculator.num_accepted > 20


def test_a_stop_string_ends_a_sequence_within_accepted_tokens(model: Path) -> None:
    text = generated(worker_of(model, speculation=False), num=1, **GREEDY)[0].token_ids
    stop = "".join(map(chr, [token + 33 for token in text[5:7] if token < 94]))
    if not stop:
        pytest.skip("the text has no printable characters there")
    single = generated(worker_of(model, speculation=False), stop=[stop], **GREEDY)
    worker = worker_of(model, speculation=True)
    assert [generated(worker, stop=[stop], **GREEDY) for _ in range(2)] == [single, single]


@pytest.mark.parametrize("filters", [{"top_k": 4}, {}])
def test_the_distribution_is_the_models_own(model: Path, filters: dict[str, int], tmp_path: Path) -> None:
    """A wrong rule of acceptance would favour the tokens of the texts that propose."""
    if not filters:  # a model of 259 almost equal tokens would accept nothing
        model = Path(shutil.copytree(model, tmp_path / "sharper"))
        tensors = load_file(model / "model.safetensors")
        tensors["model.norm.weight"] *= 7
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    gconfig = GenerationHyperparameters(max_new_tokens=6, temperature=1.0, ignore_eos=True, **filters)
    counts = torch.zeros(2, 259)
    for row, is_on in enumerate((False, True)):
        worker = worker_of(model, max_num_seqs=64, speculation=is_on)
        seeds = range(400 * row, 400 * row + 400)
        requests = [SequenceRequest(request_id=i, input_ids=PROMPT, gconfig=gconfig, seed=i) for i in seeds]
        for chunk in worker.advance(requests, [], 10_000):
            counts[row, chunk.token_ids[-1]] += 1
    assert worker.speculator is not None
    assert worker.speculator.num_accepted > 100
    # Pearson's statistic of two samples of one size, whose mean and variance are those of chi-square
    frequent = counts[:, counts.sum(0) >= 10]
    statistic, freedom = float((frequent[0] - frequent[1]).square().div(frequent.sum(0)).sum()), frequent.shape[1] - 1
    assert freedom > 8
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_siblings_and_the_own_text_propose_what_followed() -> None:
    index = SuffixIndex()
    prompt = list(range(20))
    sibling, own = sequence_of(prompt, [50, 51, 52, 53, 54, 55, 56]), sequence_of(prompt, [50, 51, 52])
    for sequence in (sibling, own):
        index.add(sequence)
    assert index.find(own, 10) == [53, 54, 55, 56]
    assert index.find(own, 2) == [53, 54]
    own.tokens += [99, 1, 2, 3]  # as in the prompt
    assert index.find(own, 3) == [4, 5, 6]
    sibling.tokens += [99, 1, 2, 3, 70]  # a longer match than the prompt's
    assert index.find(own, 1) == [70]
    own.tokens += [98]
    assert index.find(own, 10) == []


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    index, own = SuffixIndex(), sequence_of([9, 1, 2, 1, 2, 1, 2, 1], [2])
    index.add(own)
    assert index.find(own, 6) == [1, 2, 1, 2, 1, 2]


def test_texts_of_other_prompts_do_not_propose_and_old_texts_are_forgotten() -> None:
    index = SuffixIndex()
    index.add(sequence_of(list(range(100, 120)), [1, 2, 3, 4, 5]))
    lone = sequence_of(list(range(20, 40)), [1, 2, 3])
    index.add(lone)
    assert index.find(lone, 10) == []
    for number in range(TEXTS + 1):
        index.add(sequence_of([number, 5, 6], []))
    assert index.find(lone, 10) == []
    assert len(index._texts) == TEXTS


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=5), min_size=1, max_size=5),
    st.lists(st.integers(0, 3), min_size=30, max_size=30),
)
def test_kept_tokens_are_accepted_ones_and_one_more(proposals: list[list[int]], sampled: list[int]) -> None:
    start = 0
    for proposal, span in zip(proposals, kept_spans(sampled, proposals), strict=True):
        num = span.stop - span.start
        assert span.start == start
        assert sampled[start : start + num - 1] == proposal[: num - 1]
        assert num == len(proposal) + 1 or sampled[start + num - 1] != proposal[num - 1]
        start += len(proposal) + 1


def test_checks_that_do_not_pay_stop_and_are_tried_again() -> None:
    speculator, sequence = Speculator(is_always=False), sequence_of([1, 2, 3, 1, 2, 3, 1, 2, 3], [])
    speculator.add(sequence)
    assert speculator.propose([sequence]) == [[1, 2, 3, 1, 2, 3]]
    for _ in range(30):
        speculator.observe(LONGEST, 0)
    tried = [bool(speculator.propose([sequence])) for _ in range(PROBE)]
    assert tried == [False] * (PROBE - 1) + [True]
    for _ in range(30):
        speculator.observe(10, 8)
    assert speculator.is_worthwhile(2 * FIXED_ROWS)
    assert not speculator.is_worthwhile(8 * FIXED_ROWS)
    assert Speculator(is_always=True).is_worthwhile(8 * FIXED_ROWS)


def test_a_proposal_ends_before_the_sequence_or_its_ban_of_stop_tokens() -> None:
    speculator = Speculator(is_always=True)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3]
    ending = sequence_of(prompt, [], max_new=3)
    speculator.add(ending)
    assert speculator.propose([ending]) == [[4, 5]]
    ending.min_tokens = len(prompt) + 2
    assert speculator.propose([ending]) == [[4]]


def test_new_weights_forget_the_texts_of_the_old_ones(model: Path) -> None:
    worker = worker_of(model, speculation=True)
    first = generated(worker, **SAMPLED)
    assert worker.speculator is not None
    before = worker.speculator.num_proposed
    worker.weights_changed(1)
    again = generated(worker, **SAMPLED)
    assert worker.speculator.num_proposed == 2 * before, "a run that resumes here makes the same decisions"
    assert [m.token_ids for m in first] == [m.token_ids for m in again]


def test_speculation_is_off_where_bits_would_differ(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"deterministic": True, "dtype": "float64"}
    assert worker_of(model, **options).speculator is None
    assert not caplog.records
    assert worker_of(model, speculation=True, **options).speculator is None
    assert "speculation=true has no effect: deterministic=true" in caplog.text
    assert worker_of(model, speculation=False).speculator is None
