"""Fuzz tests: a few seconds each in a normal run, as long as one likes with ``--fuzz-minutes``.

A test takes the fixture `fuzz` and gives it a body with hypothesis strategies, or a state machine:

    def test_sums(fuzz):
        fuzz.check(lambda a, b: check_sum(a, b), a=st.integers(), b=st.integers())

A normal run is derandomized: hypothesis draws the same examples from the source of the body each time, and stores
none. So CI goes red for a change, never by luck, and a number of examples ends a test, not a clock. With
``--fuzz-minutes N`` the fuzz tests of the run share N minutes, and every round has a new seed. A failing round prints
its seed beside hypothesis's smallest example; ``--fuzz-seed`` runs that round again.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

# pytest-timeout's limit of a test, beyond the minutes it was given: the last round, and shrinking.
_GRACE_SECONDS = 600


class Fuzz:
    """How long a fuzz test runs.

    Args:
        seconds: rounds start until then; None: one round, the same each time.
        round_seed: of the only round; None: a new one for each.
    """

    def __init__(self, seconds: float | None = None, round_seed: int | None = None) -> None:
        self.seconds, self.round_seed = seconds, round_seed

    def check(self, body: Callable[..., None], examples: int = 100, **strategies: Any) -> None:
        """Call `body` with what `strategies` draw, `examples` times a round. It fails by raising."""

        def one_round(round_seed: int | None) -> None:
            run = given(**strategies)(body)
            self._settings(round_seed, examples)(_seeded(run, round_seed))()

        self.repeat(one_round)

    def machine(self, machine: type[RuleBasedStateMachine], examples: int = 20, steps: int = 50) -> None:
        """Run a state machine of hypothesis, `examples` times a round, up to `steps` steps each."""

        def one_round(round_seed: int | None) -> None:
            copy = _seeded(type(machine.__name__, (machine,), {}), round_seed)
            run_state_machine_as_test(copy, settings=self._settings(round_seed, examples, stateful_step_count=steps))

        self.repeat(one_round)

    def repeat(self, one_round: Callable[[int | None], None]) -> None:
        """Call `one_round` with the seed of each round; None in a normal run, which has one."""
        if self.seconds is None:
            return one_round(self.round_seed)
        end = time.monotonic() + self.seconds
        while time.monotonic() < end:
            round_seed = random.SystemRandom().getrandbits(32)
            try:
                one_round(round_seed)
            except BaseException:
                print(f"this round again: --fuzz-seed {round_seed}")
                raise

    @staticmethod
    def _settings(round_seed: int | None, examples: int, **more: Any) -> settings:
        return settings(
            max_examples=examples,
            derandomize=round_seed is None,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            **more,
        )


def _seeded(test: Any, round_seed: int | None) -> Any:
    return test if round_seed is None else seed(round_seed)(test)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("fuzz")
    group.addoption("--fuzz-minutes", metavar="N", type=float, help="share N minutes among the fuzz tests; new seeds")
    group.addoption("--fuzz-seed", metavar="SEED", type=int, help="one round of each fuzz test, with this seed")


def share_time(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give each test that takes `fuzz` its part of the minutes, and the timeout that goes with it."""
    minutes = config.getoption("--fuzz-minutes")
    takers = [item for item in items if "fuzz" in getattr(item, "fixturenames", ())]
    if minutes is None or not takers:
        return
    config.stash[_SECONDS] = seconds = 60 * minutes / len(takers)
    for item in takers:
        item.add_marker(pytest.mark.timeout(seconds + _GRACE_SECONDS))


def of_run(config: pytest.Config) -> Fuzz:
    """What the options of a run ask for."""
    round_seed = config.getoption("--fuzz-seed")
    return Fuzz(None if round_seed is not None else config.stash.get(_SECONDS, None), round_seed)


_SECONDS = pytest.StashKey[float]()
