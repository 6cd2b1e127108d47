import torch

from rlite.algorithms import TokenLogprobs
from rlite.trainer.preferences import DpoLoss, RewardModelLoss


def test_losses_on_pairs_name_what_they_report():
    data = {
        "cu_seqlens": torch.tensor([0, 3, 6], dtype=torch.int32),
        "loss_mask": torch.tensor([0, 1, 1, 0, 1, 1]),
        "ref_logprobs": -torch.rand(6),
        "is_chosen": torch.tensor([1, 0]),
    }
    scores = torch.randn(6)
    for loss, outputs in ((RewardModelLoss(), scores), (DpoLoss(), TokenLogprobs(scores, scores))):
        _, report = loss(outputs, data)
        assert set(report) == set(loss.reported)
