"""A job's plan travels without the user's classes."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import cloudpickle
import pytest

from rlite.control import RLJobBuilder, RLRoleType
from rlite.control.spec import JobPlan
from rlite.runtime.cluster.ray.host import hosting

LIBRARY = """
import ray
from rlite.control import BaseTrainer, BaseWorkload, trainer_invocation

class Dose: ...

class Actor(BaseWorkload):
    @trainer_invocation(post_func=lambda doses: doses[0])
    @ray.method(num_returns=2)
    def update(self, x: Dose, *, by: Dose = Dose()) -> Dose:
        return x

    async def later(self): ...

class Trainer(BaseTrainer):
    def init(self): ...
    def fit(self): ...
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> JobPlan:
    """A plan in a process that cannot import the classes."""
    (tmp_path / "users_library.py").write_text(LIBRARY)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        library = importlib.import_module("users_library")
        job = RLJobBuilder().device_per_node(1).device_type("CPU").trainer(library.Trainer)
        job = job.actor(library.Actor).total(1).per_node(1).end()
        made = job.build().plan("job", 1)
        assert cloudpickle.loads(made.classes.trainer) is library.Trainer
        assert cloudpickle.loads(made.classes.workloads[RLRoleType.ACTOR].pickled) is library.Actor
        pickled = cloudpickle.dumps(made)
    monkeypatch.delitem(sys.modules, "users_library")
    return cloudpickle.loads(pickled)


def test_the_master_imports_nothing_of_the_user_s(plan: JobPlan) -> None:
    packed = plan.classes.workloads[RLRoleType.ACTOR]
    with pytest.raises(ModuleNotFoundError, match="users_library"):
        cloudpickle.loads(packed.pickled)
    methods = hosting(packed.interface, packed.actor_options).__ray_metadata__.method_meta
    assert [each.name for each in methods.signatures["update"]][:2] == ["x", "by"]
    assert methods.num_returns["update"] == 2
    assert "later" not in methods.signatures
    assert "users_library" not in sys.modules
