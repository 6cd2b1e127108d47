import json
from pathlib import Path

import pytest
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from rlite import RliteTrainEngine
from rlite.errors import ConfigError
from rlite.nn import HuggingFaceFsdp2TrainModule
from rlite.nn.pretrained import end_ids, load_tokenizer
from rlite.trainer.model.modules import policy_module, schedule
from rlite.trainer.model.options import OptimizerOptions
from tests.tiny import build_model_dir


def options(**changes):
    return OptimizerOptions(
        **{"lr": 1.0, "weight_decay": 0.0, "scheduler": "cosine", "warmup_steps": 4, "total_steps": 12} | changes
    )


def test_the_schedule_rises_in_the_warm_up_and_ends_at_zero():
    factors = [schedule(options())(step) for step in range(13)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert factors[8] == pytest.approx(0.5)
    assert factors[12] == pytest.approx(0.0)
    assert schedule(options(scheduler="linear"))(10**6) == 0.0
    assert schedule(options(scheduler="constant"))(10**6) == 1.0
    falling = options(scheduler="polynomial", lr=2.0, lr_end=0.5, power=2.0)
    assert schedule(falling)(8) == pytest.approx(0.25 + 0.75 * 0.5**2)
    assert schedule(falling)(12) == 0.25


class Mine(HuggingFaceFsdp2TrainModule, Qwen2ForCausalLM):
    """A user's module."""


def test_the_driver_counts_tied_parameters_once_as_the_checkpoint_does(tmp_path: Path) -> None:
    path = build_model_dir(tmp_path / "model", tie=True)
    size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(path).parameters())
    with init_empty_weights():
        own = Mine.from_pretrained(path)
    assert RliteTrainEngine(own).num_parameters == size
    assert RliteTrainEngine(policy_module(path)).num_parameters == size


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = build_model_dir(tmp_path / "model")
    assert len(load_tokenizer(str(folder))) > 256
    for path in (*folder.glob("tokenizer*"), *folder.glob("*.jinja")):
        path.unlink()
    with pytest.raises(ConfigError, match=r"model .*model: no tokenizer: copy tokenizer.json"):
        load_tokenizer(str(folder))


def test_a_model_that_names_no_end_token_is_recognised(tmp_path: Path) -> None:
    folder = build_model_dir(tmp_path / "model")
    assert end_ids(str(folder))
    for name in ("generation_config.json", "config.json"):
        kept = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({key: value for key, value in kept.items() if key != "eos_token_id"}))
    assert not end_ids(str(folder))
    (folder / "generation_config.json").unlink()
    assert not end_ids(str(folder))
