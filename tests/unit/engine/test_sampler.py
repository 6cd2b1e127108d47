from __future__ import annotations

import pytest
import torch

from rlite.algorithms.kept_ids import KeptIds
from rlite.backends.serving import native
from rlite.backends.serving.sampler import Sampling, SamplingBatch, kept_ids_of, sample, sample_each, uniforms
from rlite.nn import linear_logprobs
from rlite.types import MAX_KEPT_IDS, GenerationHyperparameters

NO_STOP: frozenset[int] = frozenset()


def batch_of(
    *gconfigs: GenerationHyperparameters, vocab_size: int, stop_ids=NO_STOP, is_early=False, extras=()
) -> SamplingBatch:
    rows = [
        Sampling(gconfig, number, stop_ids, is_early, has_kept_ids="kept_ids" in extras)
        for number, gconfig in enumerate(gconfigs)
    ]
    return SamplingBatch.of(rows, vocab_size, torch.device("cpu"))


def reference_splitmix64(state: int) -> int:
    mask = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def test_uniforms_are_splitmix64_of_seed_and_position_in_integer_arithmetic() -> None:
    golden, mask = 0x9E3779B97F4A7C15, 2**64 - 1
    for seed in (0, 1, -5, 2**63 - 1):
        for position in (0, 1, 77):
            inner = reference_splitmix64((seed + golden) & mask)
            expected = (reference_splitmix64((inner + position * golden) & mask) >> 40) / 2**24
            assert uniforms(torch.tensor([seed]), torch.tensor([position])).item() == expected


def test_uniforms_fill_the_unit_interval_evenly_over_seeds_and_over_positions() -> None:
    for u in (uniforms(torch.arange(20_000), torch.tensor(3)), uniforms(torch.tensor(3), torch.arange(20_000))):
        assert u.min() >= 0
        assert u.max() < 1
        counts = torch.histc(u, bins=20, min=0, max=1)
        assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-squared, 19 degrees of freedom: p < 1e-5


def frequencies(logits: torch.Tensor, gconfig: GenerationHyperparameters, draws: int = 40_000) -> torch.Tensor:
    rows = logits.expand(draws, -1)
    batch = batch_of(*[gconfig] * draws, vocab_size=logits.numel())
    tokens, logprobs, sampling, _ = sample(rows, batch, uniforms(torch.arange(draws), torch.tensor(11)))
    full = torch.log_softmax(logits / gconfig.temperature, -1)
    torch.testing.assert_close(logprobs, full[tokens])
    assert (sampling >= logprobs - 1e-6).all()
    return torch.bincount(tokens, minlength=logits.numel()) / draws


def test_a_row_that_is_not_finite_says_so_and_leaves_the_others_theirs() -> None:
    logits = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0))
    random, sampled = torch.tensor([0.1, 0.5, 0.9, 0.3]), GenerationHyperparameters()
    for gconfig in (sampled, sampled.new(top_p=0.9), sampled.new(top_k=5), sampled.new(greedy=True)):
        batch = batch_of(*[gconfig] * 4, vocab_size=2000)
        expected = [values[[0, 3]] for values in sample(logits, batch, random)[:3]]
        odd = logits.clone()
        odd[1, 7], odd[2, 7] = float("nan"), float("inf")
        tokens, logprobs, sampling_logprobs, _ = sample(odd, batch, random)
        assert ((tokens >= 0) & (tokens < 2000)).all()
        assert logprobs[[1, 2]].isnan().all()
        for values, its in zip((tokens, logprobs, sampling_logprobs), expected, strict=True):
            assert torch.equal(values[[0, 3]], its)


@pytest.mark.parametrize("vocab_size", [1, 5, 259, 3001, 40_000])
def test_the_function_in_c_and_pytorch_sample_the_same(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rows = 200
    logits = 8 * torch.randn(rows, vocab_size, generator=generator)
    logits[:, 2:4] = float("-inf")
    random = torch.rand(rows, generator=generator)
    random[:2] = torch.tensor([0.0, 1 - 2**-24])
    gconfigs = [GenerationHyperparameters(greedy=row % 5 == 4) for row in range(rows)]
    batch = batch_of(*gconfigs, vocab_size=vocab_size)
    assert native.compiled() is not None
    ours = sample(logits, batch, random)
    monkeypatch.setattr(native, "compiled", lambda: None)
    theirs = sample(logits, batch, random)
    assert not logits[torch.arange(rows), ours.tokens].isinf().any()
    is_same = ours.tokens == theirs.tokens  # unless rounding puts the random number on the other side of a boundary
    assert is_same.sum() >= rows - 2
    assert is_same[4::5].all()
    exact = torch.log_softmax(logits.double(), -1).gather(1, ours.tokens[:, None])[:, 0]
    torch.testing.assert_close(ours.logprobs.double(), exact, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(ours.logprobs[is_same], theirs.logprobs[is_same], rtol=1e-5, atol=1e-5)


def test_samples_follow_the_tempered_distribution() -> None:
    logits = torch.tensor([0.1, 2.0, -1.0, 0.7, float("-inf")])
    for temperature in (1.0, 0.5, 2.0):
        seen = frequencies(logits, GenerationHyperparameters(temperature=temperature))
        torch.testing.assert_close(seen, torch.softmax(logits / temperature, -1), atol=0.01, rtol=0)
        assert seen[-1] == 0


def test_top_k_and_top_p_keep_the_head_of_the_distribution_and_renormalise_it() -> None:
    probs = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2])
    logits = probs.log()
    cases = {
        (2, 1.0): [0, 0.4, 0, 0.25, 0],
        (0, 0.6): [0, 0.4, 0, 0.25, 0],  # 0.4 alone is below 0.6, the next token is the one that reaches it
        (0, 0.66): [0, 0.4, 0, 0.25, 0.2],
        (3, 0.5): [0, 0.4, 0, 0.25, 0],  # top_p counts what top_k leaves: 0.4 / 0.85 is below 0.5
        (1, 1.0): [0, 1, 0, 0, 0],
        (0, 1e-6): [0, 1, 0, 0, 0],
    }
    for (top_k, top_p), expected in cases.items():
        kept = torch.tensor(expected, dtype=torch.float32)
        seen = frequencies(logits, GenerationHyperparameters(top_k=top_k, top_p=top_p))
        torch.testing.assert_close(seen, kept / kept.sum(), atol=0.01, rtol=0)


def test_each_row_keeps_its_own_parameters_and_sampling_logprobs_are_of_the_cut_distribution() -> None:
    logits = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.2]).log().expand(3, -1)
    batch = batch_of(
        GenerationHyperparameters(temperature=0, top_k=1),
        GenerationHyperparameters(top_k=2),
        GenerationHyperparameters(temperature=2.0),
        vocab_size=5,
    )
    tokens, logprobs, sampling, _ = sample(logits, batch, torch.tensor([0.99, 0.99, 0.99]))
    assert tokens.tolist() == [1, 3, 4]
    tempered = torch.log_softmax(logits[2] / 2, -1)[4]
    torch.testing.assert_close(logprobs, torch.stack([logits[0, 1], logits[0, 3], tempered]))
    expected = torch.stack([logits[0, 1], torch.tensor(0.25 / 0.65).log(), tempered])
    torch.testing.assert_close(sampling, expected)


def test_stop_tokens_cannot_be_made_early_not_even_greedily() -> None:
    logits = torch.tensor([[0.1, 5.0, 0.2], [0.1, 5.0, 0.2]])
    gconfigs = GenerationHyperparameters(temperature=0), GenerationHyperparameters()
    batch = batch_of(*gconfigs, vocab_size=3, stop_ids=frozenset([1]), is_early=True)
    for u in (0.0, 0.3, 0.999):
        tokens, logprobs, _, _ = sample(logits, batch, torch.tensor([u, u]))
        assert tokens[0] == 2
        assert tokens[1] != 1
        assert logprobs[0] == torch.log_softmax(logits[0], -1)[2]  # of the unfiltered distribution


def test_the_largest_random_number_never_finds_a_token_of_probability_zero() -> None:
    logits = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    logits[:, -300:] = float("-inf")
    batch = batch_of(*[GenerationHyperparameters()] * 64, vocab_size=1000)
    tokens, logprobs, _, _ = sample(logits, batch, torch.full((64,), 1 - 2.0**-24))
    assert tokens.max() < 700
    assert logprobs.isfinite().all()


def test_a_large_vocabulary_is_sampled_by_the_same_inverse_of_the_cumulative_distribution() -> None:
    vocab_size = 10_007  # no multiple of a segment
    generator = torch.Generator().manual_seed(0)
    logits = 4 * torch.randn(64, vocab_size, generator=generator)
    logits[:, ::3] = float("-inf")
    uniform = torch.rand(64, generator=generator)
    uniform[:2] = torch.tensor([0.0, 1 - 2.0**-24])
    batch = batch_of(*[GenerationHyperparameters(temperature=0.5)] * 64, vocab_size=vocab_size)
    tokens, logprobs, _, _ = sample(logits, batch, uniform)
    expected = torch.log_softmax(logits.double() / 0.5, -1)
    torch.testing.assert_close(logprobs.double(), expected.gather(1, tokens[:, None])[:, 0], atol=5e-6, rtol=0)
    cumulative = expected.exp().cumsum(-1)
    above = cumulative.gather(1, tokens[:, None])[:, 0]
    below = above - expected.exp().gather(1, tokens[:, None])[:, 0]
    assert (below - 1e-6 <= uniform).all()
    assert (uniform <= above + 1e-6).all()
    assert logprobs.isfinite().all()


def reference_kept(logits: torch.Tensor, gconfig: GenerationHyperparameters) -> list[int]:
    """Walk down from the most likely token: top-k first, then the least number of tokens that reach top_p."""
    probs = torch.softmax(logits.double() / gconfig.temperature, -1)
    order = probs.argsort(descending=True).tolist()
    order = order[: gconfig.top_k] if gconfig.top_k > 0 else order
    whole, reached, kept = float(probs[order].sum()), 0.0, []
    for token in order:
        if reached >= gconfig.top_p * whole and gconfig.top_p < 1:
            break
        kept.append(token)
        reached += float(probs[token])
    return sorted(kept[:MAX_KEPT_IDS])


def test_reported_kept_ids_are_those_of_top_k_and_top_p_and_logprobs_are_over_them() -> None:
    vocab_size = 1000
    logits = 3 * torch.randn(6, vocab_size, generator=torch.Generator().manual_seed(0))
    base = GenerationHyperparameters()
    gconfigs = [
        base.new(top_p=0.9),
        base.new(top_k=20),
        base.new(top_p=0.7, top_k=40, temperature=0.6),
        base,
        base.new(greedy=True, top_k=3),
        base.new(top_p=0.5),
    ]
    batch = batch_of(*gconfigs, vocab_size=vocab_size, extras=("kept_ids",))
    tokens, logprobs, sampling, kept = sample(logits, batch, torch.rand(6, generator=torch.Generator().manual_seed(1)))
    found = kept_ids_of(kept, 6)
    for row, gconfig in enumerate(gconfigs):
        scaled = logits[row].double() / gconfig.temperature if not gconfig.greedy else logits[row].double()
        if not gconfig.is_truncating:
            assert found[row] == []
            assert sampling[row] == logprobs[row]
            continue
        assert found[row] == reference_kept(logits[row], gconfig)
        expected = scaled[tokens[row]] - scaled[found[row]].logsumexp(0)
        torch.testing.assert_close(sampling[row].double(), expected, atol=1e-6, rtol=0)
        assert int(tokens[row]) in found[row]


def test_a_row_that_reports_keeps_at_most_so_many_ids_and_the_others_all_of_theirs() -> None:
    logits = torch.zeros(1, 2000) - 1e-3 * torch.arange(2000)
    gconfig = GenerationHyperparameters(top_p=0.999)
    silent, reporting = (batch_of(gconfig, vocab_size=2000, extras=extras) for extras in ((), ("kept_ids",)))
    late = torch.tensor([0.99])
    assert sample(logits, silent, late).kept is None
    assert int(sample(logits, silent, late).tokens) > MAX_KEPT_IDS
    made = sample(logits, reporting, late)
    assert kept_ids_of(made.kept, 1) == [list(range(MAX_KEPT_IDS))]
    assert int(made.tokens) < MAX_KEPT_IDS
    draws = 4000
    batch = batch_of(*[gconfig.new(top_p=1.0, top_k=1999)] * draws, vocab_size=2000, extras=("kept_ids",))
    tokens = sample(logits.expand(draws, -1), batch, uniforms(torch.arange(draws), torch.tensor(1))).tokens
    seen = torch.histc(tokens.float(), bins=4, min=0, max=MAX_KEPT_IDS) / draws
    expected = torch.softmax(logits[0, :MAX_KEPT_IDS], -1).view(4, -1).sum(-1)
    torch.testing.assert_close(seen, expected, atol=0.03, rtol=0)


def test_tokens_that_may_not_be_made_yet_are_not_kept() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    batch = batch_of(
        GenerationHyperparameters(top_k=3), vocab_size=4, stop_ids=frozenset([0]), is_early=True, extras=("kept_ids",)
    )
    assert kept_ids_of(sample(logits, batch, torch.tensor([0.5])).kept, 1) == [[1, 2, 3]]


def test_a_row_that_reports_samples_alone_what_it_samples_in_company() -> None:
    logits = 3 * torch.randn(5, 300, generator=torch.Generator().manual_seed(0))
    gconfigs = [GenerationHyperparameters(top_p=0.2 + 0.15 * row) for row in range(5)]
    random = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    together = sample(logits, batch_of(*gconfigs, vocab_size=300, extras=("kept_ids",)), random)
    alone = [batch_of(gconfig, vocab_size=300, extras=("kept_ids",)) for gconfig in gconfigs]
    each = sample_each(logits, alone, random)
    assert torch.equal(each.kept, together.kept)
    assert torch.equal(each.tokens, together.tokens)
    assert torch.equal(each.sampling_logprobs, together.sampling_logprobs)


def test_from_the_same_logits_sampler_and_trainer_compute_the_same_bits_over_the_kept_ids() -> None:
    vocab_size, num_rows = 400, 64
    logits = 4 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(2))
    for temperature in (1.0, 0.7):
        gconfig = GenerationHyperparameters(top_p=0.95, top_k=60, temperature=temperature)
        batch = batch_of(*[gconfig] * num_rows, vocab_size=vocab_size, extras=("kept_ids",))
        made = sample(logits, batch, uniforms(torch.arange(num_rows), torch.tensor(3)))
        assert made.kept is not None
        replay = KeptIds.of(made.kept[:, 0], made.kept[:, 1], num_rows)
        trained = linear_logprobs(logits, torch.eye(vocab_size), made.tokens, temperature, block_size=64, replay=replay)
        assert torch.equal(trained.logprobs, made.sampling_logprobs)
