"""Options of the SGLang executor on a machine without SGLang."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from rlite import RliteInferenceEngine
from rlite.backends.sglang.replica import BACKEND
from rlite.backends.sglang.server import SglangOptions
from rlite.errors import ConfigError, UnknownOptionError
from tests.tiny import build_model_dir

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="SGLang is installed")


def test_a_missing_sglang_is_named_with_what_to_install_and_is_never_imported(tmp_path: Path) -> None:
    engine = RliteInferenceEngine(build_model_dir(tmp_path, hidden=64, layers=1), executor="sglang")
    with pytest.raises(ConfigError, match=r"not installed: pip install 'rlite\[sglang\]', or attach"):
        engine.build(max_model_len=64)
    with pytest.raises(UnknownOptionError, match="max_num_seqs"):
        engine.build(max_num_seq=64)
    assert "sglang" not in sys.modules


def test_running_servers_need_no_sglang_but_urls_and_options_of_the_connection() -> None:
    options = SglangOptions(addresses=["http://a:1", "http://b:1"], api_key="key", seed=4)
    assert BACKEND.num_copies(None, options) == 2
    assert BACKEND.num_copies(1, SglangOptions(addresses=["http://a:1"])) == 1
    for addresses, told in [(["a:1"], "is no URL"), (["http://a:1", "http://a:1"], "named twice")]:
        with pytest.raises(ConfigError, match=told):
            SglangOptions(addresses=addresses)
    with pytest.raises(ConfigError, match="max_model_len: with addresses"):
        SglangOptions(addresses=["http://a:1"], max_model_len=64)
