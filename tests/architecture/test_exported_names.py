"""The public surface: a name joins or leaves it on purpose, and each can be had."""

import rlite
import rlite.algorithms
import rlite.nn
import rlite.rollout
import rlite.rollout.openai


def test_the_package_exports_these_names_and_no_others():
    assert sorted(rlite.__all__) == [
        "NeedParallel",
        "RLiteInferenceEngine",
        "RLiteTrainEngine",
        "RliteInferenceEngine",
        "RliteTrainEngine",
        "__version__",
        "current_session",
        "gathered",
        "init",
        "register_executor",
        "shutdown",
        "stats_tracker",
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


def test_every_exported_name_exists():
    for package in (rlite, rlite.algorithms, rlite.nn, rlite.rollout, rlite.rollout.openai):
        for name in package.__all__:
            assert getattr(package, name) is not None, f"{package.__name__}.{name}"


def test_both_spellings_name_one_class():
    assert rlite.RLiteInferenceEngine is rlite.RliteInferenceEngine
    assert rlite.RLiteTrainEngine is rlite.RliteTrainEngine


def test_an_unknown_name_is_an_attribute_error():
    assert not hasattr(rlite, "RliteTrainEngin")
