"""A dry run plans a model of 72 billion parameters on 64 devices, on this machine, in seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import Qwen2Config

from tests.integration.worlds import environment

NUM_PARAMETERS = 72_706_203_648  # of Qwen2.5-72B


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen2-72b")
    shape = {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80, "vocab_size": 152064}
    Qwen2Config(num_attention_heads=64, num_key_value_heads=8, tie_word_embeddings=False, **shape).save_pretrained(path)
    return path


pytestmark = pytest.mark.slow
DIVIDING = (("tp_size=8",), ("sp_size=4",), ("tp_size=4", "sp_size=2", "ddp_size=2"))
NOT_DIVIDING = ("tp_size=16",)
SCORER = ("reward.rm.model=scorer", "reward.again.model=scorer", "reward.brief.path=my.py:brief")
WITH_SHARED_REWARD = ("rollout.tp_size=8", *SCORER)
WITH_OWN_REWARD = (*SCORER, "reward.rm.num_devices=16", "reward.again.num_devices=16")
WITH_JUDGE = (
    "rollout.tp_size=2",
    *(f"reward.style.judge.{option}" for option in ("model=judge", "rubric=r", "max_model_len=512", "tp_size=2")),
)
WITH_ONLY_REWARDS = (*SCORER, "reward.rm.num_devices=64")
AS_JSON = ("--json", "tp_size=8")
WITH_ROLLOUTS = ("tp_size=8", "optimizer=muon", "rollout.tp_size=8", "device_memory_gib=80")
PROGRAM = """
import contextlib, sys

from rlite import cli

model, *choices = sys.argv[1:]
for number, sizes in enumerate(choices):  # one process makes them all
    code = 0
    with open(f"{number}.stdout", "w") as out, open(f"{number}.stderr", "w") as err:
        sys.argv = ["rlite", "plan", model, "num_devices=64", *sizes.split()]
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as end:
                code = 0 if end.code in (None, 0) else 1
                print("" if code == 0 or isinstance(end.code, int) else end.code, file=err)
    print(code, flush=True)
"""
Ran = tuple[int, str, str]
"""exit code, output and errors"""


@pytest.fixture(scope="module")
def ran(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Ran]:
    """Return the command's result for each choice of sizes."""
    folder = tmp_path_factory.mktemp("plans")
    with_rewards = (WITH_SHARED_REWARD, WITH_OWN_REWARD, WITH_JUDGE, WITH_ONLY_REWARDS)
    choices = [*DIVIDING, NOT_DIVIDING, WITH_ROLLOUTS, AS_JSON, *with_rewards]
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_labels": 1, "num_hidden_layers": 2}
    scorer = Qwen2Config(
        hidden_size=1024, intermediate_size=2048, architectures=["Qwen2ForSequenceClassification"], **heads
    )
    scorer.save_pretrained(folder / "scorer")
    Qwen2Config(hidden_size=1024, intermediate_size=2048, **heads).save_pretrained(folder / "judge")
    (folder / "my.py").write_text("def brief(prompt, completions, **row):\n    return 1.0\n")
    command = [sys.executable, "-c", PROGRAM, f"model_name={model}", *map(" ".join, choices)]
    done = subprocess.run(command, cwd=folder, env=environment(), stdout=subprocess.PIPE, text=True, timeout=280)
    streams = [[(folder / f"{n}.{name}").read_text() for name in ("stdout", "stderr")] for n in range(len(choices))]
    codes = map(int, done.stdout.split())
    return {sizes: (code, out, err) for sizes, code, (out, err) in zip(choices, codes, streams, strict=True)}


def size_of(part: str, out: str) -> int:
    """Bytes of a part in a printed plan."""
    (line,) = (line for line in out.splitlines() if f"{part}, per device" in line)
    return int(line.rpartition("(")[2].partition(" ")[0])


@pytest.mark.parametrize("sizes", DIVIDING)
def test_every_byte_is_divided_over_the_devices_of_a_copy(
    ran: dict[tuple[str, ...], Ran], sizes: tuple[str, ...]
) -> None:
    code, out, err = ran[sizes]
    assert code == 0, err
    assert "72.71 B parameters" in out
    devices = 32 if "ddp_size=2" in sizes else 64
    weights = size_of("weights, float32", out)
    assert size_of("optimizer, adamw", out) == 2 * weights
    assert weights == pytest.approx(NUM_PARAMETERS * 4 / devices, rel=1e-3)


def test_json_has_the_same_sizes_in_bytes_and_the_text_is_beside_it(ran: dict[tuple[str, ...], Ran]) -> None:
    (code, out, err), (_, text, _) = ran[AS_JSON], ran[("tp_size=8",)]
    assert code == 0, err
    made = json.loads(out)
    assert made["num_parameters"] == NUM_PARAMETERS
    assert {part: size_of(part, text) for part in made["sizes"]} == made["sizes"]
    assert text.strip() in err


def test_sizes_that_do_not_divide_are_refused(ran: dict[tuple[str, ...], Ran]) -> None:
    code, _, err = ran[NOT_DIVIDING]
    assert code != 0
    assert "num_key_value_heads=8" in err


def test_generation_and_the_optimizer_are_counted(ran: dict[tuple[str, ...], Ran]) -> None:
    code, out, err = ran[WITH_ROLLOUTS]
    assert code == 0, err
    embeddings = 2 * 152064 * 8192
    muon_has = NUM_PARAMETERS - embeddings  # norms and biases are some ten thousandths
    assert size_of("optimizer, muon", out) == pytest.approx(4 * (muon_has + 2 * embeddings) / 64, rel=1e-3)
    assert size_of("rollout weights, bfloat16", out) == pytest.approx(NUM_PARAMETERS * 2 / 8, rel=1e-6)
    per_sequence = 2 * 80 * 1 * 128 * 4096 * 2
    spare_page = per_sequence * 64 // 4096
    num_seqs = int((80 * 0.6 * 2**30 - NUM_PARAMETERS * 2 / 8 - spare_page) // per_sequence)
    assert size_of(f"KV cache, {num_seqs} sequences of 4096 tokens", out) == spare_page + num_seqs * per_sequence


def test_a_reward_model_is_counted_once_beside_generation_or_on_devices_of_its_own(
    ran: dict[tuple[str, ...], Ran],
) -> None:
    layer = 2 * 1024 * 1024 + 2 * 1024 * 512 + 2048 + 3 * 1024 * 2048 + 2 * 1024
    whole = 151936 * 1024 + 2 * layer + 2 * 1024
    for sizes, num_devices in ((WITH_SHARED_REWARD, 64), (WITH_OWN_REWARD, 16)):
        code, out, err = ran[sizes]
        assert code == 0, err
        weights = size_of("weights, bfloat16, of reward again", out)
        assert weights == pytest.approx(2 * whole / num_devices, rel=1e-3)
        assert "of reward rm" not in out
        assert "brief" not in out
    shared, own = ran[WITH_SHARED_REWARD][1], ran[WITH_OWN_REWARD][1]
    gathered = size_of("gathered units of reward again", shared)
    beside = gathered + size_of("weights, bfloat16, of reward again", shared)
    assert size_of("rewards beside generation, together", shared) == beside + size_of("generation together", shared)
    assert "48 = " in own
    assert "and 16 for rewards" in own
    assert size_of("weights, float32", own) == pytest.approx(NUM_PARAMETERS * 4 / 48, rel=1e-2)


def test_rewards_leave_devices_for_training(ran: dict[tuple[str, ...], Ran]) -> None:
    code, _, err = ran[WITH_ONLY_REWARDS]
    assert code != 0
    assert "rewards take 64 devices, and num_devices=64 in all" in err


def test_the_engine_of_a_judge_is_counted_as_one_that_generates(ran: dict[tuple[str, ...], Ran]) -> None:
    code, out, err = ran[WITH_JUDGE]
    assert code == 0, err
    tokens = 64 * 512 + 64  # of 64 sequences, and one page without a sequence
    per_token = 2 * 2 * (2 // 2) * 256 * 2
    assert size_of("KV cache of reward style", out) == tokens * per_token
