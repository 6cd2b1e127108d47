"""Layers that are asked to be compiled and cannot be."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from rlite.backends.fsdp2.compiled import CompiledLayers, check_compile
from rlite.backends.fsdp2.options import Fsdp2Options
from rlite.errors import ConfigError


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin().exp()


@contextmanager
def compiler(path: Path) -> Iterator[None]:
    torch._dynamo.reset()
    with torch._inductor.config.patch({"cpp.cxx": (str(path),), "fx_graph_cache": False}):
        yield
    torch._dynamo.reset()


def results(layers: list[Layer]) -> list[Tensor]:
    x = torch.linspace(0, 1, 12, dtype=torch.float64).view(3, 4).requires_grad_()
    out = x
    for layer in layers:
        out = layer(out)
    out.sum().backward()
    return [out.detach(), x.grad, *(layer.weight.grad for layer in layers)]


def test_without_a_compiler_layers_run_as_they_are_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layers = [Layer(), Layer()]
    with compiler(tmp_path / "no-such-compiler"), caplog.at_level(logging.WARNING):
        compiled = CompiledLayers(layers, "cpu")
        found = results(layers)
    assert [type(layer) for layer in layers] == [Layer, Layer]
    assert compiled.text().startswith("layers run without torch.compile: compile=layers needs a C++ compiler")
    assert len(caplog.records) == 1
    assert all(map(torch.equal, found, results([Layer(), Layer()])))


@pytest.mark.slow
def test_a_compiler_that_fails_costs_one_line_and_no_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = tmp_path / "g++"
    program.write_text('#!/bin/sh\n[ "$1" = --version ] && exec g++ --version\nexit 1\n')
    program.chmod(0o755)
    layers = [Layer(), Layer()]
    with compiler(program), caplog.at_level(logging.WARNING, logger="rlite"):
        compiled = CompiledLayers(layers, "cpu")
        assert compiled.failure is None
        found = results(layers)
    assert compiled.failure is not None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "layers run without torch.compile" in caplog.text
    assert all(map(torch.equal, found, results([Layer(), Layer()])))


def test_layers_that_cannot_be_compiled_are_refused() -> None:
    with pytest.raises(ConfigError, match="use_liger_kernel=true fuses the same operations; leave compile out"):
        check_compile(nn.Module(), 1, use_liger_kernel=True)
    with pytest.raises(ConfigError, match="tp_size=2"):
        check_compile(nn.Module(), 2, use_liger_kernel=False)
    with pytest.raises(ConfigError, match="deterministic=true: compiled code rounds in another way"):
        Fsdp2Options(deterministic=True, compile="layers")
    with pytest.raises(ConfigError, match="deterministic=true: compiled code rounds in another way"):
        Fsdp2Options(deterministic=True, fused_head=True)
