"""Calls like an earlier one: what the entry gets, what is allocated, and when nothing is served this way. A stub stands
in for the entry; no GPU."""

import types

import pytest
import torch

from cuteforge.families.attention.base import Arrangement
from cuteforge.op import recall
from cuteforge.op.recall import Call, Result
from cuteforge.op.signature import Operand, Signature

NAMES = ("q", "k", "v", "out", "mask")


class Entry:
    """A compiled entry that notes its arguments, or raises."""

    def __init__(self, error=None):
        self.calls, self.error = [], error

    def __call__(self, *args):
        if self.error:
            raise self.error
        self.calls.append(args)


@pytest.fixture
def raw_stream(monkeypatch):
    """A stream, and no current GPU: a torch built with CUDA asks the driver for one, and there may be no driver."""
    monkeypatch.setattr("cuteforge.op.base.raw_stream", lambda device: 77)
    monkeypatch.setattr("cuteforge.op.recall.current_device", lambda: None)


CPU = torch.device("cpu")


def op_of(entry, names=NAMES, arrange=None):
    compiled = types.SimpleNamespace(kernel=types.SimpleNamespace(entry=entry), scalars={CPU.index: (132, 0)})
    signature = Signature(*(Operand(name, "", ("float32",)) for name in names))
    return types.SimpleNamespace(signature=signature, _arrange=arrange, _compiled=compiled)


def tensors(keys=6):
    return torch.zeros(2, 1, 4, 8), torch.zeros(2, keys, 2, 8), torch.zeros(2, keys, 2, 8)


OUT = Result("out", (2, 1, 4, 8), torch.float32)


def call_of(entry, **facts):
    return Call(op_of(entry, ("q", "k", "v", "out")), ("q", "k", "v"), [OUT], CPU, (0.5,), **facts)


def test_the_entry_gets_operands_scalars_and_the_stream(raw_stream):
    entry, given = Entry(), tensors()
    (out,) = call_of(entry).run(given)
    ((q, k, v, got, *scalars),) = entry.calls
    assert (q, k, v) == given and got is out and scalars == [132, 0, 0.5, 77]


def test_operands_stand_where_the_entry_has_them_and_masks_are_bytes(raw_stream):
    """The entry of attention has 15 operands in an order of its own, None for those that an op does not have."""
    entry, (q, k, v) = Entry(), tensors()
    mask = torch.ones(2, 6, dtype=torch.bool)
    op = op_of(entry, NAMES, Arrangement(NAMES))
    (out,) = Call(op, ("q", "k", "v", "mask"), [OUT], CPU).run((q, k, v, mask))
    ((*operands, num_sms, waves, stream),) = entry.calls
    assert len(operands) == 15 and (num_sms, waves, stream) == (132, 0, 77)
    assert operands[:5] == [q, k, v, out, None] and operands[6:] == [None] * 9
    assert operands[5].dtype == torch.uint8 and operands[5].data_ptr() == mask.data_ptr()


SHAPES = [(2, 1, 4, 8), (2, None, 4, 8), (4, None), (None, 3), (None, 0, 2), (None,), (5,), ()]


@pytest.mark.parametrize("length", [0, 1, 6])
def test_results_are_contiguous_and_new(length, raw_stream):
    """As torch lays them out, at every length; but for the strides of what has no elements."""
    names = [f"out_{i}" for i in range(len(SHAPES))]
    results = [Result(name, shape, torch.int32) for name, shape in zip(names, SHAPES)]
    by_tensor = Call(op_of(Entry(), ("q", *names)), ("q",), results, CPU, length_of=("q", 1))
    by_caller = Call(op_of(Entry(), ("q", *names)), ("q",), results, CPU)
    given = (torch.zeros(2, length, 3),)
    first, second, third = by_tensor.run(given), by_tensor.run(given), by_caller.run(given, length)
    for shape, x, y, z in zip(SHAPES, first, second, third, strict=True):
        want = torch.empty([length if n is None else n for n in shape], dtype=torch.int32)
        for got in (x, y, z):
            assert got.shape == want.shape and got.dtype == want.dtype
            assert got.stride() == want.stride() or not got.numel()
        assert not x.numel() or len({t.data_ptr() for t in (x, y, z)}) == 3


def test_tensors_that_are_not_given_are_passed_over(raw_stream):
    entry, (q, k, v) = Entry(), tensors()
    op = op_of(entry, ("q", "k", "v", "out"))
    call_of_five = Call(op, ("q", None, "k", None, "v"), [OUT], CPU)
    (out,) = call_of_five.run((q, None, k, None, v))
    assert entry.calls == [(q, k, v, out, 132, 0, 77)]


def test_a_result_may_be_given_and_may_be_a_source(raw_stream):
    entry, (q, *_) = Entry(), tensors()
    call = Call(op_of(entry, ("q", "out")), ("q", "out"), [], CPU, written=("out",), returned=("out",))
    (got,) = call.run((q, q))
    assert got is q and q._version == 1 and entry.calls == [(q, q, 132, 0, 77)]


def test_the_same_call_may_be_given_its_tensors_in_another_order(raw_stream):
    entry, (q, k, v) = Entry(), tensors()
    call = call_of(entry, agree=lambda v, k: v.shape == k.shape, agreeing=("v", "k"), varying={"q": 0, "k": 1})
    other = call.of(("v", None, "k", "q"), q=None)
    other.run((v, None, k, q))
    assert entry.calls[0][:3] == (q, k, v)
    assert (call.varying, call.agreeing) == ([0, 1, None], [2, 1])
    assert (other.varying, other.agreeing) == ([None, None, 1, None], [0, 2])


def test_what_is_written_counts_as_a_new_version(raw_stream):
    given = tensors()
    call_of(Entry(), written=("k", "v")).run(given)
    assert [x._version for x in given] == [0, 1, 1]


KEY = ("a test",)


@pytest.fixture(autouse=True)
def forgotten():
    recall.forget()
    yield
    recall.forget()


def test_a_call_is_served_on_tensors_like_those_that_were_kept(raw_stream):
    entry = Entry()
    assert recall.serve(KEY, tensors()) is None
    recall.keep(KEY, tensors(), lambda: call_of(entry))
    (out,) = recall.serve(KEY, tensors())
    assert out.shape == (2, 1, 4, 8) and len(entry.calls) == 1
    assert recall.serve(KEY, tensors(keys=7)) is None and len(entry.calls) == 1


def test_extents_that_may_vary_do_and_no_other(raw_stream):
    entry = Entry()
    recall.keep(KEY, tensors(), lambda: call_of(entry, varying={"k": 1, "v": 1}))
    assert recall.serve(KEY, tensors(keys=700)) is not None
    by_head = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(keys=9)]
    assert recall.serve(KEY, (tensors()[0], *by_head[1:])) is not None
    q, k, v = tensors()
    assert recall.serve(KEY, (q, k[:, :, :1], v)) is None
    assert recall.serve(KEY, (q[:1], k, v)) is None
    assert recall.serve(KEY, (q, k.transpose(2, 3).contiguous().transpose(2, 3), v)) is None
    assert len(entry.calls) == 2


def test_extents_that_must_agree_are_compared(raw_stream):
    entry = Entry()

    def same_length(v, k):
        return v.shape[1] == k.shape[1]

    facts = {"agree": same_length, "agreeing": ("v", "k"), "varying": {"k": 1, "v": 1}}
    recall.keep(KEY, tensors(), lambda: call_of(entry, **facts))
    q, k, v = tensors()
    assert recall.serve(KEY, (q, k, v[:, :3])) is None and not entry.calls
    assert recall.serve(KEY, (q, k[:, :3], v[:, :3])) is not None


def test_calls_with_other_tensors_given_are_other_calls(raw_stream):
    """One key serves all: None stands for a tensor that was not given."""
    entry, (q, k, v) = Entry(), tensors()
    op = op_of(entry, ("q", "k", "v", "out"))
    recall.keep(KEY, (q, k, v, None), lambda: Call(op, ("q", "k", "v", None), [OUT], CPU))
    assert recall.serve(KEY, (q, k, v, q)) is None and recall.serve(KEY, (q, k, None, None)) is None
    recall.keep(KEY, (q, k, v, q), lambda: Call(op, ("q", "k", "v", "out"), [], CPU, returned=("out",)))
    (out,) = recall.serve(KEY, (q, k, v, q))
    assert out is q and recall.serve(KEY, (q, k, v, torch.zeros_like(q))) is None
    (out,) = recall.serve(KEY, (q, k, v, None))
    assert out is not q and len(entry.calls) == 2


@pytest.mark.parametrize("error", [TypeError, ValueError, RuntimeError])
def test_what_the_entry_refuses_is_left_to_the_wrapper(raw_stream, error):
    recall.keep(KEY, tensors(), lambda: call_of(Entry(error("misaligned"))))
    assert recall.serve(KEY, tensors()) is None


@pytest.mark.parametrize(
    "variable", ["CUTEFORGE_CHECK", "CUTEFORGE_KERNELS", "CUTEFORGE_FAST_LAUNCH", "CUTEFORGE_NVTX"]
)
def test_nothing_is_served_this_way_where_the_environment_asks_for_more(raw_stream, monkeypatch, variable):
    entry = Entry()
    recall.keep(KEY, tensors(), lambda: call_of(entry))
    monkeypatch.setenv(variable, "1")
    assert recall.serve(KEY, tensors()) is None and not entry.calls


def test_an_option_that_cannot_be_hashed_is_no_key():
    key = ("a test", [1])
    recall.keep(key, tensors(), lambda: call_of(Entry()))
    assert recall.serve(key, tensors()) is None


def test_a_length_is_handed_to_who_allocates(raw_stream):
    entry = Entry()
    call = Call(op_of(entry, ("q", "out")), ("q",), [Result("out", (None, 8), torch.float32)], CPU)
    recall.keep(KEY, tensors()[:1], lambda: call)
    (out,) = recall.serve(KEY, tensors()[:1], 5)
    assert out.shape == (5, 8) and entry.calls[0][1] is out


def test_a_call_under_torch_compile_or_forward_mode_is_not_served(raw_stream):
    entry = Entry()
    recall.keep(KEY, tensors(), lambda: call_of(entry))
    with torch.autograd.forward_ad.dual_level():
        assert recall.serve(KEY, tensors()) is None
    compiled = torch.compile(lambda *x: recall.serve(KEY, x) is None, backend="eager", fullgraph=True)
    assert compiled(*tensors()) and not entry.calls


def test_tensors_that_require_grad_are_served_without_a_graph_only(raw_stream):
    q, k, v = tensors()
    q.requires_grad_()
    with torch.no_grad():
        recall.keep(KEY, (q, k, v), lambda: call_of(Entry()))
        assert recall.serve(KEY, (q, k, v)) is not None
    assert recall.serve(KEY, (q, k, v)) is None


def test_one_tensor_as_keys_and_values(raw_stream):
    """A guard of torch takes no tensor twice."""
    entry, (q, k, v) = Entry(), tensors()
    recall.keep(KEY, (q, k, k), lambda: call_of(entry))
    assert recall.serve(KEY, (q, v, v)) is not None
    assert recall.serve(KEY, (q, k, v)) is None and len(entry.calls) == 1
