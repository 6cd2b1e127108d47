"""Tests with the real evaluation harnesses: `make test-harness` installs them, elsewhere these tests are left out."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import rlite
from rlite import RliteInferenceEngine
from rlite.assembly.quickstart.run import CHATML
from tests.tiny import build_model_dir

collect_ignore_glob = [] if importlib.util.find_spec("lm_eval") else ["test_*.py"]
CORPUS = Path(__file__).parents[2] / "LICENSE"
"""text that does not change: another one makes another tokenizer, and so other answers"""
MAX_MODEL_LEN = 128


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # the harnesses' warnings are not ours to mend


@pytest.fixture(scope="session")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer merges bytes and begins texts with a token of its own, as Llama's does."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train([str(CORPUS)], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    whole.chat_template = CHATML
    folder = build_model_dir(
        tmp_path_factory.mktemp("models") / "llama",
        "llama",
        hidden=64,
        vocab_size=len(whole),
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    whole.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[RliteInferenceEngine]:
    rlite.init(device="cpu", num_devices=1, num_threads=1)
    engine = RliteInferenceEngine(path)
    engine.build(max_model_len=MAX_MODEL_LEN, max_num_seqs=16)
    yield engine
    rlite.shutdown()


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data file of multiple-choice questions, with texts to continue."""
    rows = [
        {"question": f"{a} + {b} =", "choices": [str(a + b), str(a - b), "a number"], "answer": 0}
        for a in range(3, 8)
        for b in range(2)
    ]
    file = tmp_path_factory.mktemp("data") / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file
