"""The public surface: a name joins or leaves it on purpose, and each can be had."""

import ast
import importlib
import inspect
from types import ModuleType

import pytest

import rlite
import rlite.control
import rlite.nn
import rlite.rollout
import rlite.rollout.contracts
import rlite.rollout.openai
import rlite.rollout.rewards
import rlite.viewer


def test_the_package_exports_these_names_and_no_others():
    assert sorted(rlite.__all__) == [
        "NeedParallel",
        "RLiteInferenceEngine",
        "RLiteTrainEngine",
        "RliteInferenceEngine",
        "RliteTrainEngine",
        "__version__",
        "current_session",
        "evaluate",
        "gathered",
        "init",
        "register_executor",
        "session",
        "shutdown",
        "stats_tracker",
        "train",
    ]


def test_agents_have_these_names_and_no_others():
    assert rlite.rollout.openai.__all__ == [
        "Access",
        "AgentClient",
        "AgentEndpoint",
        "AgentSession",
        "AgentWorkflow",
        "Recording",
        "Turn",
    ]


def test_contracts_of_environments_have_these_names_and_no_others():
    assert rlite.rollout.contracts.__all__ == [
        "GroupReward",
        "OpenEnv",
        "OpenEnvTools",
        "OrsEnvironment",
        "ToolEnvironmentWorkflow",
        "ToolEpisode",
        "TrlEnvironment",
        "VerifiersEnvironment",
        "VerifiersWorkflow",
        "contract_workflow",
        "from_openenv",
    ]


def test_the_control_plane_has_these_names_and_no_others():
    assert rlite.control.__all__ == [
        "BaseTrainer",
        "BaseWorkload",
        "JobHandle",
        "JobResult",
        "JobSpec",
        "RLJob",
        "RLJobBuilder",
        "RLRoleType",
        "RoleGroup",
        "RoleSpec",
        "trainer_invocation",
    ]


def test_every_exported_name_exists():
    for package in (
        rlite,
        rlite.control,
        rlite.nn,
        rlite.rollout,
        rlite.rollout.contracts,
        rlite.rollout.openai,
        rlite.rollout.rewards,
        rlite.viewer,
    ):
        for name in package.__all__:
            assert getattr(package, name) is not None, f"{package.__name__}.{name}"


@pytest.mark.parametrize(
    "package",
    [
        rlite,
        rlite.control,
        rlite.nn,
        rlite.rollout,
        rlite.rollout.contracts,
        rlite.rollout.openai,
        rlite.rollout.rewards,
        rlite.viewer,
    ],
    ids=lambda p: p.__name__,
)
def test_lazy_names_equal_those_of_type_checkers(package: ModuleType):
    [block] = [
        node
        for node in ast.parse(inspect.getsource(package)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {}
    for node in block.body:
        if isinstance(node, ast.ImportFrom):
            home = importlib.import_module(str(node.module))
            seen |= {alias.asname or alias.name: getattr(home, alias.name) for alias in node.names}
    assert {name: getattr(package, name) for name in package.__all__ if name != "__version__"} == seen


def test_both_spellings_name_one_class():
    assert rlite.RLiteInferenceEngine is rlite.RliteInferenceEngine
    assert rlite.RLiteTrainEngine is rlite.RliteTrainEngine


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'rlite' has no attribute 'RliteTrainEngin'"):
        _ = rlite.RliteTrainEngin


def test_packages_are_attributes_without_being_imported():
    assert rlite.data.__name__ == "rlite.data"
    assert {"data", "stats_tracker", "RLiteTrainEngine"} <= set(dir(rlite))
