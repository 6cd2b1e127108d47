"""Options of modules, and model folders before they are read. No torch here: options are listed and checked at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Lt
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from rlite.config import Count, FinitePositive, Options
from rlite.errors import ConfigError
from rlite.imports import lacking

ALL_LINEAR = "all-linear"


class LoraOptions(Options):
    """Low-rank adapters beside linear layers."""

    rank: Count = 16
    """columns of each factor"""
    alpha: FinitePositive = 32.0
    """scale: the product of the factors is multiplied by alpha / rank"""
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    """share of an adapter's inputs that is set to 0 in training"""
    target_modules: list[str] = [ALL_LINEAR]
    """names of linear layers, or how they end; all-linear: each but the output embedding or head. It may be empty if
    target_parameters is not"""
    target_parameters: list[str] = []
    """names of the stacked matrices of experts, or how they end, such as mlp.experts.gate_up_proj: each expert has an
    adapter of its own. By default the experts stay as they are"""

    def problems(self) -> Iterator[str]:
        """Yield a message for layers that cannot be meant."""
        is_empty = not self.target_modules and not self.target_parameters
        if is_empty or (ALL_LINEAR in self.target_modules and len(self.target_modules) > 1):
            yield f"target_modules={self.target_modules}: expected names of layers, or {ALL_LINEAR} alone"
        if self.target_parameters and self.dropout:
            yield f"target_parameters: adapters of experts have no dropout, and dropout={self.dropout}; set it to 0"


def check_liger_installed() -> None:
    """Check that the packages of `use_liger_kernel` are installed."""
    if message := lacking("use_liger_kernel=true needs", "liger", "liger_kernel", "triton"):
        raise ConfigError(f"{message}, on a machine with GPUs; or leave it out")


def model_folder(path: str | Path) -> Path | None:
    """Return the folder of a checkpoint, None if `path` is a name on the hub."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ConfigError(f"model folder {str(path)!r}: expected a config.json in it, found none")
        return folder
    try:
        validate_repo_id(str(path))
    except HFValidationError as error:
        raise ConfigError(f"model {str(path)!r}: no such folder; check the path") from error
    return None
