"""What a guard takes for alike: everything that a launch reads of tensors but their addresses. No GPU."""

import pytest
import torch

from cuteforge.op.guards import ANY_SHAPE, Likeness
from cuteforge.op.recall import Replays


class Finding:
    """Stands in for a replay: what was found out about tensors that have to be alike in a certain way."""

    def __init__(self, value, *how):
        self.value, self.how = value, how

    def written_out(self, tensors):
        names = [f"x{i}" for i in range(len(tensors))]
        condition, behind = Likeness(tensors, *self.how).condition(names)
        is_alike = eval(f"lambda {', '.join(names)}: {condition}", behind)
        return lambda others, *_: (self.value,) if is_alike(*others) else None, is_alike


def add(replays, tensors, value, *how):
    replays.add(tensors, Finding(value, *how))


def find(replays, tensors):
    """What was found out about tensors like these, by both ways to ask."""
    served = [results[0] for serve in replays.serves if (results := serve(tensors)) is not None]
    found = replays.find(tensors)
    assert (found.value if found else None) == (served[0] if served else None)
    return found and found.value


def tensors():
    return torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(4, dtype=torch.int32)


class Sub(torch.Tensor):
    pass


CHANGES = {
    "shape": lambda x, n: (torch.zeros(2, 4, 8, dtype=x.dtype), n),
    "strides": lambda x, n: (torch.zeros(3, 2, 8, dtype=x.dtype).transpose(0, 1), n),
    "rank": lambda x, n: (x[0], n),
    "dtype": lambda x, n: (x.half(), n),
    "index dtype": lambda x, n: (x, n.long()),
    "device": lambda x, n: (x.to("meta"), n),
    "requires_grad": lambda x, n: (x.clone().requires_grad_(), n),
    "parameter": lambda x, n: (torch.nn.Parameter(x, requires_grad=False), n),
    "subclass": lambda x, n: (x.as_subclass(Sub), n),
    "conjugate view": lambda x, n: (torch.view_as_complex(torch.zeros(2, 3, 8, 2)).conj(), n),
    "no tensor": lambda x, n: (x, None),
    "an array": lambda x, n: (x, [1, 2, 3, 4]),
}


def one_replay():
    replays = Replays()
    add(replays, tensors(), "finding")
    return replays


def test_tensors_alike_are_found_wherever_they_lie():
    replays = one_replay()
    assert find(replays, tensors()) == "finding"
    wide = torch.zeros(100, dtype=torch.bfloat16)
    assert find(replays, (wide[1:49].view(2, 3, 8), tensors()[1])) == "finding"


@pytest.mark.parametrize("change", CHANGES)
def test_any_other_fact_is_noticed(change):
    assert find(one_replay(), CHANGES[change](*tensors())) is None


@pytest.mark.parametrize(
    "change", [lambda x: x.resize_(2, 3, 16), lambda x: x.transpose_(0, 1)], ids=["resized", "transposed"]
)
def test_a_tensor_that_changes_is_no_longer_found(change):
    replays, (x, n) = one_replay(), tensors()
    assert find(replays, (x, n)) == "finding"
    change(x)
    assert find(replays, (x, n)) is None


def test_inference_mode_is_a_kind_of_its_own():
    replays = one_replay()
    with torch.inference_mode():
        assert find(replays, tensors()) is None
        add(replays, tensors(), "inside")
        assert find(replays, tensors()) == "inside"
    assert find(replays, tensors()) == "finding"


def test_a_few_kinds_are_kept():
    replays, kinds = Replays(), [(torch.zeros(size),) for size in (1, 2, 3, 4)]
    for size, kind in enumerate(kinds):
        assert replays.is_due()
        add(replays, kind, size + 1)
    assert [find(replays, kind) for kind in kinds] == [1, 2, 3, 4]


def test_of_calls_that_all_differ_few_are_kept():
    """To describe tensors takes longer than a launch, and each that was kept is looked at by all later calls."""
    replays = Replays()
    for size in range(1, 1000):
        if replays.is_due():
            add(replays, (torch.zeros(size),), size)
    assert len(replays.serves) == 1
    assert find(replays, (torch.zeros(960),)) == 960


def test_tensors_that_require_grad_are_found_without_grad_mode_only():
    """Parameters of a model that runs without a graph."""
    replays, leaf = Replays(), torch.zeros(2, requires_grad=True)
    add(replays, (leaf,), "finding")
    assert not replays.serves
    with torch.no_grad():
        add(replays, (leaf,), "finding")
        assert find(replays, (leaf,)) == "finding"
    assert find(replays, (leaf,)) is None


@pytest.mark.parametrize("places", ["aa", "aba", "abab", "abbcab"])
def test_tensors_that_are_given_twice_have_to_be_so_again(places):
    replays, letters = Replays(), sorted(set(places))

    def draw():
        return {letter: torch.zeros(2, 3) for letter in letters}

    first, other = draw(), draw()
    add(replays, [first[letter] for letter in places], "finding")
    assert find(replays, [other[letter] for letter in places]) == "finding"
    assert find(replays, [torch.zeros(2, 3) for _ in places]) is None
    assert find(replays, [other[letter] for letter in places[:-1]] + [None]) is None


ROWS = torch.zeros(8, 3, 4)


def test_a_first_extent_may_vary_and_no_stride_with_it():
    replays = Replays()
    add(replays, (ROWS,), "finding", [0])
    assert find(replays, (torch.zeros(1, 3, 4),)) == find(replays, (torch.zeros(800, 3, 4),)) == "finding"
    assert find(replays, (torch.zeros(0, 3, 4),)) == "finding"
    assert find(replays, (torch.zeros(8, 3, 8)[..., :4],)) is None
    assert find(replays, (torch.zeros(8, 4, 4),)) is None


@pytest.mark.parametrize(
    "x", [ROWS[:1], ROWS[:1].expand(8, 3, 4), torch.zeros(3, 8, 4).transpose(0, 1)], ids=["one", "expanded", "inner"]
)
def test_a_first_dim_that_does_not_step_over_the_others_may_not_vary(x):
    """More along it could share addresses; and of one element the stride says nothing."""
    replays = Replays()
    add(replays, (x,), "finding", [0])
    assert find(replays, (x,)) == "finding"
    assert find(replays, (torch.empty(0).set_(x.untyped_storage(), 0, (4, 3, 4), x.stride()),)) is None


def test_a_later_extent_may_vary_with_the_strides_before_it():
    replays, keys = Replays(), torch.zeros(2, 6, 4, 8)
    add(replays, (keys,), "finding", [1])
    assert find(replays, (torch.zeros(2, 9, 4, 8),)) == "finding"
    assert find(replays, (torch.zeros(2, 4, 9, 8).transpose(1, 2),)) == "finding"
    assert find(replays, (torch.zeros(3, 6, 4, 8),)) is None


def test_of_a_shape_that_the_entry_checks_nothing_is_compared_but_the_rank():
    replays = Replays()
    add(replays, (ROWS,), "finding", [ANY_SHAPE])
    for x in (torch.zeros(0, 7, 1), ROWS.transpose(0, 2), ROWS[:1].expand(8, 3, 4)):
        assert find(replays, (x,)) == "finding"
    for x in (ROWS[0], ROWS[None], ROWS.double(), ROWS.to("meta"), ROWS.tolist()):
        assert find(replays, (x,)) is None


def test_of_a_tensor_in_two_places_the_stricter_one_counts():
    """Any shape will do for what is read, but not where it is also written."""
    replays = Replays()
    add(replays, (ROWS, ROWS), "finding", [ANY_SHAPE, 0])
    more, expanded = torch.zeros(9, 3, 4), ROWS[:1].expand(8, 3, 4)
    assert find(replays, (more, more)) == "finding" and find(replays, (expanded, expanded)) is None
    replays = Replays()
    add(replays, (ROWS, ROWS), "finding", [1, 0])
    assert find(replays, (ROWS, ROWS)) == "finding" and find(replays, (more, more)) is None


def test_what_was_not_given_is_not_given_again():
    replays = Replays()
    add(replays, (ROWS, None, None), "finding")
    assert find(replays, (torch.zeros_like(ROWS), None, None)) == "finding"
    assert find(replays, (ROWS, ROWS, None)) is None and find(replays, (None, None, None)) is None
    add(replays, (ROWS, ROWS, None), "twice")
    assert (find(replays, (ROWS, ROWS, None)), find(replays, (ROWS, None, None))) == ("twice", "finding")


def test_extents_that_vary_may_have_to_agree():
    replays = Replays()
    add(replays, (ROWS, None, ROWS[:2]), "finding", [0, None, 0], lambda few, many: len(few) < len(many), (2, 0))
    assert find(replays, (ROWS, None, torch.zeros(7, 3, 4))) == "finding"
    assert find(replays, (ROWS, None, torch.zeros(8, 3, 4))) is None


def test_a_torch_without_guards_keeps_nothing(monkeypatch):
    monkeypatch.setattr("cuteforge.op.recall.AVAILABLE", False)
    assert not Replays().is_due()
