import pytest

from rlite.errors import ConfigError
from rlite.trainer.rl.critic import KlCoefficient
from rlite.trainer.rl.options import KlOptions


def test_the_coefficient_closes_in_on_the_target_by_bounded_steps():
    kl = KlCoefficient(KlOptions(type="loss", coef=0.1, adaptive_target=2.0, adaptive_horizon=100.0))
    assert kl.adapt(2.2, num_sequences=10) == {"kl_coef": 0.1}
    assert kl.coef == pytest.approx(0.1 * (1 + 0.1 * 10 / 100))
    assert kl.adapt(1e9, num_sequences=50) == {"kl_coef": pytest.approx(0.101)}
    assert kl.coef == pytest.approx(0.101 * 1.1)
    kl.adapt(0.0, num_sequences=50)
    assert kl.coef == pytest.approx(0.101 * 1.1 * 0.9)
    kl.adapt(None, num_sequences=50)  # the policy was frozen: nothing was measured
    assert kl.coef == pytest.approx(0.101 * 1.1 * 0.9)


def test_without_a_target_the_coefficient_stays_and_is_no_metric():
    for options in (KlOptions(type="loss"), KlOptions(adaptive_target=1.0)):
        kl = KlCoefficient(options)
        assert kl.adapt(5.0, num_sequences=10) == {}
        assert kl.coef == options.coef


def test_a_resumed_run_goes_on_from_the_adapted_coefficient_and_obeys_a_new_constant():
    adaptive = KlOptions(type="reward", coef=0.1, adaptive_target=1.0)
    first, resumed, constant = KlCoefficient(adaptive), KlCoefficient(adaptive), KlCoefficient(KlOptions(coef=0.7))
    first.adapt(9.0, num_sequences=100)
    for later in (resumed, constant):
        later.load_state_dict(first.state_dict())
    assert resumed.coef == first.coef != 0.1
    assert constant.coef == 0.7
    resumed.load_state_dict({})  # a checkpoint from before
    assert resumed.coef == first.coef


@pytest.mark.parametrize("name", ["adaptive_target", "adaptive_horizon"])
def test_a_target_or_horizon_that_is_not_positive_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}=0"):
        KlOptions(**{name: 0.0})
