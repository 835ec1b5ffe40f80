"""The helper of the fuzz tests: the same examples in every normal run, new ones behind the option, and failures that
can be run again."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from helpers.fuzz import Fuzz, of_run, share_time

NUMBERS = st.integers(0, 1 << 30)


def drawn(fuzz):
    seen = []

    def body(number):
        seen.append(number)

    fuzz.check(body, examples=20, number=NUMBERS)
    return seen


def test_a_normal_run_draws_the_same_each_time():
    assert drawn(Fuzz()) == drawn(Fuzz()) != []


def test_a_seed_draws_the_same_and_another_seed_does_not():
    assert drawn(Fuzz(round_seed=1)) == drawn(Fuzz(round_seed=1)) != drawn(Fuzz(round_seed=2))


def test_a_long_run_has_a_new_seed_each_round():
    seeds = []
    Fuzz(seconds=0.05).repeat(seeds.append)
    assert seeds[0] != seeds[1]


def test_a_failing_round_prints_the_seed_that_fails_again(capsys):
    def body(number):
        assert number % 7

    with pytest.raises(AssertionError):
        Fuzz(seconds=60).check(body, number=NUMBERS)
    round_seed = int(capsys.readouterr().out.split("--fuzz-seed ")[1].split()[0])
    with pytest.raises(AssertionError):
        Fuzz(round_seed=round_seed).check(body, number=NUMBERS)


class Counter(RuleBasedStateMachine):
    sums: list = []

    def __init__(self):
        super().__init__()
        self.total = 0

    @rule(number=NUMBERS)
    def add(self, number):
        self.total += number
        self.sums.append(self.total)


def sums(fuzz):
    Counter.sums.clear()
    fuzz.machine(Counter, examples=5, steps=3)
    return list(Counter.sums)


def test_machines_draw_by_the_seed_too():
    assert sums(Fuzz()) == sums(Fuzz()) != sums(Fuzz(round_seed=1))
    assert sums(Fuzz(round_seed=1)) == sums(Fuzz(round_seed=1)) != sums(Fuzz(round_seed=2))


class Failing(RuleBasedStateMachine):
    @rule()
    def fail(self):
        raise ArithmeticError


def test_machines_fail():
    with pytest.raises(ArithmeticError):
        Fuzz(seconds=60).machine(Failing)


class Config:
    def __init__(self, **options):
        self.stash, self._options = pytest.Stash(), options

    def getoption(self, name):
        return self._options.get(name.strip("-").replace("-", "_"))


class Item:
    def __init__(self, *fixturenames):
        self.fixturenames, self.marks = fixturenames, []

    def add_marker(self, mark):
        self.marks.append(mark)


@pytest.mark.parametrize(
    ("options", "seconds", "round_seed"),
    [
        ({}, None, None),
        ({"fuzz_minutes": 0.5}, 15, None),
        ({"fuzz_seed": 5}, None, 5),
        ({"fuzz_seed": 5, "fuzz_minutes": 0.5}, None, 5),
    ],
)
def test_minutes_are_shared_among_the_tests_that_fuzz(options, seconds, round_seed):
    config, items = Config(**options), [Item("fuzz"), Item("tmp_path"), Item("device", "fuzz")]
    share_time(config, items)
    fuzz = of_run(config)
    assert (fuzz.seconds, fuzz.round_seed) == (seconds, round_seed)
    limits = [[mark.args for mark in item.marks] for item in items]
    assert limits == ([[(615,)], [], [(615,)]] if "fuzz_minutes" in options else [[], [], []])
