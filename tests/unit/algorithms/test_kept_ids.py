from __future__ import annotations

import pickle

import pytest
import torch

from rlite.algorithms import TokenLogprobs
from rlite.algorithms.kept_ids import KeptIds, kept_logprobs
from rlite.algorithms.logits import gather_logprobs
from tests.kept_ids import kept_sets, pairs_of, written_out

VOCAB = 11


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("num_rows", [0, 1, 9])
def test_logprobs_are_normalised_over_the_kept_ids_alone(num_rows: int, temperature: float) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    logits = torch.randn(num_rows, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(VOCAB, (num_rows,), generator=generator)
    sets = kept_sets(labels.tolist(), VOCAB)

    def ours(x: torch.Tensor) -> torch.Tensor:
        return kept_logprobs(x, labels, temperature, pairs_of(sets), gather_logprobs(x, labels, temperature))

    torch.testing.assert_close(ours(logits), written_out(logits, labels, sets, temperature))
    assert torch.autograd.gradcheck(ours, (logits,))


def test_the_kept_ids_of_a_pack_stand_at_the_positions_that_predict_their_tokens() -> None:
    data = {
        "kept_counts": torch.tensor([0, 2, 0, 0, 1], dtype=torch.int32),
        "kept_ids": torch.tensor([7, 3, 5], dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, 3, 5]),
    }
    kept = KeptIds.of_pack(data)
    assert kept is not None
    assert kept.ids.tolist() == [3, 5, 7]
    assert kept.rows.tolist() == [0, 3, 0]
    assert kept.is_restricted().tolist() == [True, False, False, True, False]
    chosen = kept.select(torch.tensor([3, -1, 1, 0]))
    assert (chosen.rows.tolist(), chosen.ids.tolist(), chosen.num_rows) == ([3, 0, 3], [3, 5, 7], 4)
    assert kept.select(torch.tensor([2, -1])).ids.tolist() == []
    assert KeptIds.of_pack({"cu_seqlens": data["cu_seqlens"]}) is None
    assert KeptIds.of_pack({"kept_counts": torch.zeros(5), "kept_ids": torch.zeros(0)}) is None


def test_sums_do_not_depend_on_the_order_of_the_ids() -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(512, generator=generator)
    x = 5 * torch.randn(512, generator=generator)
    rows = torch.zeros(512, dtype=torch.long)
    orders = [torch.randperm(512, generator=generator) for _ in range(5)]
    sums = {float(KeptIds(rows, ids[order], 1).log_sums(x[order]).float()) for order in orders}
    assert sums == {float(x.double().logsumexp(0).float())}


def test_token_logprobs_are_a_pair_with_the_whole_vocabulary_beside() -> None:
    a, b, c = torch.zeros(2), torch.ones(2), torch.full((2,), 2.0)
    logprobs, entropy = TokenLogprobs(a, b)
    assert (logprobs is a, entropy is b) == (True, True)
    assert TokenLogprobs(a, b).full_logprobs is a
    copied = pickle.loads(pickle.dumps(TokenLogprobs(a, b, c)))
    assert torch.equal(copied.full_logprobs, c)
    assert torch.equal(copied.entropy, b)
