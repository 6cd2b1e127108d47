"""Tests of the real vLLM: `make test-vllm` runs them in an environment of their own, elsewhere they are left out."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
