"""FlashAttention 3 where it cannot run: one line says why, and what computes attention instead."""

from __future__ import annotations

import logging

import pytest
import torch

from rlite.backends.models import attention
from rlite.backends.models.attention import use_flash_attention_3


@pytest.fixture(autouse=True)
def _asked_for_the_first_time() -> None:
    use_flash_attention_3.cache_clear()


@pytest.mark.parametrize(
    ("device", "capability", "told"),
    [
        ("cpu", (9, 0), "it needs a Hopper GPU"),
        ("cuda", (8, 0), "it needs a Hopper GPU"),
        ("cuda", (9, 0), "the package flash_attn_3 is not installed"),
    ],
)
def test_one_line_says_why_torch_computes_attention(
    device: str,
    capability: tuple[int, int],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    with caplog.at_level(logging.WARNING):
        found = [use_flash_attention_3(torch.device(device)) for _ in range(2)]
    assert found[0].startswith(f"torch's: {told}")
    assert [told in record.message for record in caplog.records] == [True]


def test_on_hopper_with_the_package_torch_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(attention.importlib.util, "find_spec", lambda name: name == "flash_attn_interface" or None)
    monkeypatch.setattr(attention, "activate_flash_attention_impl", told.append)
    assert {use_flash_attention_3(torch.device("cuda")) for _ in range(2)} == {"FlashAttention 3"}
    assert told == ["FA3"]
    assert "FA3" in torch.nn.attention.list_flash_attention_impls()
