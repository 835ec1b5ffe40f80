"""Calls like an earlier one: what the entry gets, what is allocated, and when nothing is served this way. A stub stands
in for the entry; no GPU."""

import traceback

import pytest
import torch

from cuteforge.families.attention.operands import entry_operands
from cuteforge.op import recall
from cuteforge.op.replay import Launcher, Recipe, Replay, Result, Variation

NAMES = ("q", "k", "v", "out", "mask")


class Entry:
    """A compiled entry that notes its arguments, or raises."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def __call__(self, *args):
        if self.error:
            raise self.error
        self.calls.append(args)


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """No current GPU: a torch built with CUDA asks the driver for one, and there may be no driver."""
    monkeypatch.setattr("cuteforge.op.replay.current_device", lambda: None)


CPU = torch.device("cpu")


def launcher(entry, operands=("q", "k", "v", "out"), as_bytes=()):
    return Launcher(entry, operands, frozenset(as_bytes), (132, 0), CPU.index, lambda device: 77)


VARIATION = ("length_of", "varying", "agree", "agreeing")


def replay_of(entry, operands=("q", "k", "v", "out"), given=("q", "k", "v"), results=None, **facts):
    results = [OUT] if results is None else results
    variation = Variation(**{name: facts.pop(name) for name in VARIATION if name in facts})
    return Replay(launcher(entry, operands), Recipe(given, results, CPU, **facts, variation=variation))


def tensors(keys=6):
    return torch.zeros(2, 1, 4, 8), torch.zeros(2, keys, 2, 8), torch.zeros(2, keys, 2, 8)


OUT = Result("out", (2, 1, 4, 8), torch.float32)


def run(replay, tensors, *args):
    serve, is_alike = replay.written_out(tensors)
    assert is_alike(*tensors)
    return serve(tensors, *args)


def call_of(entry, **facts):
    return replay_of(entry, scalars=(0.5,), **facts)


def test_the_entry_gets_operands_scalars_and_the_stream():
    entry, given = Entry(), tensors()
    (out,) = run(call_of(entry), given)
    ((q, k, v, got, *scalars),) = entry.calls
    assert (q, k, v) == given and got is out and scalars == [132, 0, 0.5, 77]


def test_a_call_may_bring_its_own_scalars():
    entry, given = Entry(), tensors()
    run(replay_of(entry, scalars=None), given, None, (0.25, 1))
    assert entry.calls[0][4:] == (132, 0, 0.25, 1, 77)


def test_operands_stand_where_the_entry_has_them_and_masks_are_bytes():
    """The entry of attention has 17 operands in an order of its own, None for those that an op does not have."""
    entry, (q, k, v) = Entry(), tensors()
    mask = torch.ones(2, 6, dtype=torch.bool)
    operands = entry_operands(NAMES)
    recipe = Recipe(("q", "k", "v", "mask"), [OUT], CPU)
    (out,) = run(Replay(launcher(entry, operands, ["mask"]), recipe), (q, k, v, mask))
    ((*got, num_sms, waves, stream),) = entry.calls
    assert len(got) == 17 and (num_sms, waves, stream) == (132, 0, 77)
    by_name = dict(zip(operands, got))
    as_bytes = by_name.pop("mask")
    assert by_name == {"q": q, "k": k, "v": v, "out": out, None: None}
    assert as_bytes.dtype == torch.uint8 and as_bytes.data_ptr() == mask.data_ptr()


def test_a_traceback_shows_the_line_that_was_written_out():
    with pytest.raises(ValueError, match="misaligned") as raised:
        run(call_of(Entry(ValueError("misaligned"))), tensors())
    shown = "".join(traceback.format_exception(raised.value))
    assert "entry(q, k, v, out, scalar_0, scalar_1, scalar_2, current_handle(device))" in shown


SHAPES = [(2, 1, 4, 8), (2, None, 4, 8), (4, None), (None, 3), (None, 0, 2), (None,), (5,), ()]


@pytest.mark.parametrize("length", [0, 1, 6])
def test_results_are_contiguous_and_new(length):
    """As torch lays them out, at every length; but for the strides of what has no elements."""
    names = [f"out_{i}" for i in range(len(SHAPES))]
    results = [Result(name, shape, torch.int32) for name, shape in zip(names, SHAPES)]
    by_tensor = replay_of(Entry(), ("q", *names), ("q",), results, length_of=("q", 1))
    by_caller = replay_of(Entry(), ("q", *names), ("q",), results)
    given = (torch.zeros(2, length, 3),)
    first, second, third = run(by_tensor, given), run(by_tensor, given), run(by_caller, given, length)
    for shape, x, y, z in zip(SHAPES, first, second, third, strict=True):
        want = torch.empty([length if n is None else n for n in shape], dtype=torch.int32)
        for got in (x, y, z):
            assert got.shape == want.shape and got.dtype == want.dtype
            assert got.stride() == want.stride() or not got.numel()
        assert not x.numel() or len({t.data_ptr() for t in (x, y, z)}) == 3


def test_tensors_that_are_not_given_are_passed_over():
    entry, (q, k, v) = Entry(), tensors()
    (out,) = run(replay_of(entry, given=("q", None, "k", None, "v")), (q, None, k, None, v))
    assert entry.calls == [(q, k, v, out, 132, 0, 77)]


def test_a_result_may_be_given_and_may_be_a_source():
    entry, (q, *_) = Entry(), tensors()
    call = replay_of(entry, ("q", "out"), ("q", "out"), [], written=("out",), returned=("out",))
    (got,) = run(call, (q, q))
    assert got is q and q._version == 1 and entry.calls == [(q, q, 132, 0, 77)]


def test_the_same_call_may_be_given_its_tensors_in_another_order():
    entry, (q, k, v) = Entry(), tensors()
    call = call_of(entry, agree=lambda v, k: v.shape == k.shape, agreeing=("v", "k"), varying={"q": 0, "k": 1})
    other = call.reordered(("v", None, "k", "q"), q=None)
    run(other, (v, None, k, q))
    assert entry.calls[0][:3] == (q, k, v)
    first, second = call.likeness((q, k, v)), other.likeness((v, None, k, q))
    assert (first.varying, first.agreeing) == ([0, 1, None], [2, 1])
    assert (second.varying, second.agreeing) == ([None, None, 1, None], [0, 2])


def test_what_is_written_counts_as_a_new_version():
    given = tensors()
    run(call_of(Entry(), written=("k", "v")), given)
    assert [x._version for x in given] == [0, 1, 1]


KEY = ("a test",)


@pytest.fixture(autouse=True)
def forgotten():
    recall.forget()
    yield
    recall.forget()


def test_a_call_is_served_on_tensors_like_those_that_were_kept():
    entry = Entry()
    assert recall.recall(KEY, tensors()) is None
    recall.remember(KEY, tensors(), lambda: call_of(entry))
    (out,) = recall.recall(KEY, tensors())
    assert out.shape == (2, 1, 4, 8) and len(entry.calls) == 1
    assert recall.recall(KEY, tensors(keys=7)) is None and len(entry.calls) == 1


def test_extents_that_may_vary_do_and_no_other():
    entry = Entry()
    recall.remember(KEY, tensors(), lambda: call_of(entry, varying={"k": 1, "v": 1}))
    assert recall.recall(KEY, tensors(keys=700)) is not None
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(keys=9)]
    assert recall.recall(KEY, (tensors()[0], *by_head[1:])) is not None
    q, k, v = tensors()
    assert recall.recall(KEY, (q, k[:, :, :1], v)) is None
    assert recall.recall(KEY, (q[:1], k, v)) is None
    assert recall.recall(KEY, (q, k.transpose(2, 3).contiguous().transpose(2, 3), v)) is None
    assert len(entry.calls) == 2


def test_extents_that_must_agree_are_compared():
    entry = Entry()

    def same_length(v, k):
        return v.shape[1] == k.shape[1]

    facts = {"agree": same_length, "agreeing": ("v", "k"), "varying": {"k": 1, "v": 1}}
    recall.remember(KEY, tensors(), lambda: call_of(entry, **facts))
    q, k, v = tensors()
    assert recall.recall(KEY, (q, k, v[:, :3])) is None and not entry.calls
    assert recall.recall(KEY, (q, k[:, :3], v[:, :3])) is not None


def test_calls_with_other_tensors_given_are_other_calls():
    """One key serves all: None stands for a tensor that was not given."""
    entry, (q, k, v) = Entry(), tensors()
    recall.remember(KEY, (q, k, v, None), lambda: replay_of(entry, given=("q", "k", "v", None)))
    assert recall.recall(KEY, (q, k, v, q)) is None and recall.recall(KEY, (q, k, None, None)) is None
    into_q = replay_of(entry, given=("q", "k", "v", "out"), results=[], returned=("out",))
    recall.remember(KEY, (q, k, v, q), lambda: into_q)
    (out,) = recall.recall(KEY, (q, k, v, q))
    assert out is q and recall.recall(KEY, (q, k, v, torch.zeros_like(q))) is None
    (out,) = recall.recall(KEY, (q, k, v, None))
    assert out is not q and len(entry.calls) == 2


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError])
def test_what_the_entry_refuses_is_left_to_the_wrapper(error):
    recall.remember(KEY, tensors(), lambda: call_of(Entry(error("misaligned"))))
    assert recall.recall(KEY, tensors()) is None


@pytest.mark.parametrize(
    "variable", ["CUTEFORGE_CHECK", "CUTEFORGE_KERNELS", "CUTEFORGE_FAST_LAUNCH", "CUTEFORGE_NVTX"]
)
def test_nothing_is_served_this_way_where_the_environment_asks_for_more(monkeypatch, variable):
    entry = Entry()
    recall.remember(KEY, tensors(), lambda: call_of(entry))
    monkeypatch.setenv(variable, "1")
    assert recall.recall(KEY, tensors()) is None and not entry.calls


def test_an_option_that_cannot_be_hashed_is_no_key():
    key = ("a test", [1])
    recall.remember(key, tensors(), lambda: call_of(Entry()))
    assert recall.recall(key, tensors()) is None


def test_a_length_is_handed_to_who_allocates():
    entry = Entry()
    call = replay_of(entry, ("q", "out"), ("q",), [Result("out", (None, 8), torch.float32)])
    recall.remember(KEY, tensors()[:1], lambda: call)
    (out,) = recall.recall(KEY, tensors()[:1], 5)
    assert out.shape == (5, 8) and entry.calls[0][1] is out


def test_a_call_under_torch_compile_or_forward_mode_is_not_served():
    entry = Entry()
    recall.remember(KEY, tensors(), lambda: call_of(entry))
    with torch.autograd.forward_ad.dual_level():
        assert recall.recall(KEY, tensors()) is None
    compiled = torch.compile(lambda *x: recall.recall(KEY, x) is None, backend="eager", fullgraph=True)
    assert compiled(*tensors()) and not entry.calls


def test_tensors_that_require_grad_are_served_without_a_graph_only():
    q, k, v = tensors()
    q.requires_grad_()
    with torch.no_grad():
        recall.remember(KEY, (q, k, v), lambda: call_of(Entry()))
        assert recall.recall(KEY, (q, k, v)) is not None
    assert recall.recall(KEY, (q, k, v)) is None


def test_one_tensor_as_keys_and_values():
    """A guard of torch takes no tensor twice."""
    entry, (q, k, v) = Entry(), tensors()
    recall.remember(KEY, (q, k, k), lambda: call_of(entry))
    assert recall.recall(KEY, (q, v, v)) is not None
    assert recall.recall(KEY, (q, k, v)) is None and len(entry.calls) == 1
