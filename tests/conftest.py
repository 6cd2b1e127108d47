"""Settings of all tests: property tests without a clock, and GPU tests that skip themselves."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from hypothesis import settings

from tests import forked_python

# a shared or slow machine is no reason for a property test to fail
settings.register_profile("rlite", deadline=None, print_blob=True)
settings.register_profile("quick", settings.get_profile("rlite"), max_examples=25)  # of `make test-fast`
settings.load_profile("rlite")


@pytest.fixture(scope="session", autouse=True)
def own_ray() -> Iterator[None]:
    """A cluster that one process of tests starts is not found by programs that another one starts."""
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: Ray puts sockets there
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RLITE_JOBS", f"{folder}/jobs")
        patch.setenv("RAY_worker_niceness", "0")  # beside other tests, workers of a lower priority would hardly run
        # workers start when a test needs them, and in a moment
        patch.setenv("RAY_enable_worker_prestart", "0")
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_RUNTIME_ENV_HOOK", "tests.forked_python.for_workers")
        patch.setattr("ray._private.services.sys", forked_python.System())
        patch.setenv("RAY_enable_pipe_based_agent_to_parent_health_check", "1")  # not by the parent's process id
        yield
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def own_loggers() -> None:
    """Libraries that other tests import switch the loggers off that exist."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.split(".")[0] == "rlite" and isinstance(logger, logging.Logger):
            logger.disabled = False


def pytest_configure(config: pytest.Config) -> None:
    """Share one server of Python programs, and compiled modules, between all processes of tests."""
    if not hasattr(config, "workerinput"):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each program would compile the library again
        folder = Path(tempfile.mkdtemp(prefix="python-", dir="/tmp"))  # short: it is in the programs' first lines
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        forked_python.prepare(folder)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: Sequence[Any]) -> None:
    """Let the processes of tests be forks, too."""
    for spec in specs:
        spec.python = forked_python.python()


def pytest_collection() -> None:
    """Collect no garbage while modules are imported and tests are made: there is hardly any."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Hide modules from the garbage collector: every release of an engine collects, and would visit all of them."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Hide the modules, too, that the tests of a file have imported."""
    yield
    if nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        # a sandbox imports what a reward of the test needs, not all that the file of tests needs: seconds each time
        has_engines = any(
            hasattr(value, "named_parameters") for value in vars(module).values() if isinstance(value, type)
        )
        if module.__name__.startswith(("tests.first_use.", "tests.integration.", "tests.unit.")) and not has_engines:
            cloudpickle.register_pickle_by_value(module)
    gpu_tests = [item for item in items if item.get_closest_marker("gpu") or "tests/gpu/" in item.path.as_posix()]
    if not gpu_tests:
        return
    import torch  # costs a second, which a run of the light tests alone need not pay

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Show a failure at once: a run that is stopped from outside prints no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        reason = report.longreprtext.splitlines()[-12:]
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s)", *reason, sep="\n", flush=True)
