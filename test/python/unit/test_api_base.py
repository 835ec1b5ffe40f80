"""The life of an op, with a kernel that only records its arguments: no GPU needed."""

from __future__ import annotations

import contextlib
import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cuteforge.errors import ContractError, UnsupportedError
from cuteforge.op import base as api_base
from cuteforge.op.base import APIBase
from cuteforge.op.signature import Operand, Signature
from cuteforge.op.tensor_spec import TensorSpec
from cuteforge.op.tuple_dict import TupleDict
from cuteforge.runtime import streams
from cuteforge.runtime.compile_cache import KernelKey
from helpers.stub_gpu import STREAM, StubKernel, pass_for_gpu, pass_for_gpu_in_tables


@dataclass(frozen=True)
class Traits:
    head_dim: int
    scale_by_two: bool


class Scale(APIBase):
    """y = x * 2 for every row that `index` names."""

    signature = Signature(
        Operand("x", "T d", ("bfloat16", "float32"), align_bytes=16),
        Operand("index", "B+1", ("int32",)),
        Operand("y", "T d", ("=x",), role="out"),
    )

    def __init__(self, x, index, y, scale_by_two=True):
        super().__init__(x=x, index=index, y=y)
        self.scale_by_two = scale_by_two
        self.content_checks = 0

    def _check_relations(self, dims):
        if dims["d"] > 256:
            raise UnsupportedError(f"d: wanted at most 256, got {dims['d']}")

    def _kernel_key(self, dims, arch):
        return KernelKey("nowhere:build", Traits(dims["d"], self.scale_by_two), arch.name)

    def _scalars(self, arch):
        return (arch.num_sms,)

    def _is_empty(self, operands):
        return operands[0].numel() == 0

    def _check_contents(self, operands):
        self.content_checks += 1


def spec_samples(tokens=8, d=64) -> tuple:
    return TensorSpec((tokens, d), "float32"), TensorSpec((3,), "int32"), TensorSpec((tokens, d), "float32")


def cpu_operands(tokens=8, d=64) -> tuple:
    x = torch.full((tokens, d), float("nan"))
    return x, torch.zeros(3, dtype=torch.int32), torch.full_like(x, float("nan"))


@pytest.fixture
def kernels(monkeypatch) -> dict[KernelKey, StubKernel]:
    """Kernels by key, made on demand in place of compiled ones."""
    loaded: dict[KernelKey, StubKernel] = {}
    monkeypatch.setattr(api_base, "load_kernel", lambda key: loaded.setdefault(key, StubKernel(key)))
    monkeypatch.delenv("CUTEFORGE_ARCH", raising=False)
    return loaded


@pytest.fixture
def gpu(monkeypatch) -> None:
    """CPU tensors pass for those of an sm_90 GPU: only the compiled entry, absent here, would notice."""
    pass_for_gpu(monkeypatch)


@pytest.fixture
def cuda_metadata(monkeypatch) -> None:
    """The validation table, too, takes CPU tensors for those of a GPU."""
    pass_for_gpu_in_tables(monkeypatch)


@pytest.fixture
def table_passes(monkeypatch) -> list:
    """The validation table accepts any call, as it would on a GPU; returns the operands it was run on."""
    calls = []
    monkeypatch.setattr(Scale, "check_call", lambda self, operands: calls.append(operands))
    return calls


def compiled_scale(kernels) -> tuple[Scale, StubKernel]:
    op = Scale(*spec_samples()).compile("sm_90a")
    return op, next(iter(kernels.values()))


# Samples, support, compiling.


@pytest.mark.parametrize("kind", ["spec", "meta", "fake"])
def test_support_is_answered_without_a_gpu(kind):
    specs = spec_samples()
    if kind == "meta":
        specs = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in specs]
    if kind == "fake":
        with FakeTensorMode():
            specs = [torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="cuda") for s in specs]
    op = Scale(*specs)
    assert op.check_support() is True
    assert op.dims == {"T": 8, "d": 64, "B": 2}


def test_refusals_of_samples_name_the_operand():
    x, _, y = spec_samples()
    with pytest.raises(ContractError, match="^index: wanted dtype int32, got int64"):
        Scale(x, TensorSpec((3,), "int64"), y).check_support()
    with pytest.raises(UnsupportedError, match="^d: wanted at most 256, got 512"):
        Scale(*spec_samples(d=512)).check_support()
    with pytest.raises(ContractError, match="^x: wanted a CUDA device, got cpu"):
        Scale(*cpu_operands()).check_support()
    with pytest.raises(ContractError, match="^x: wanted a torch.Tensor or TensorSpec, got int"):
        Scale(3, None, None)
    with pytest.raises(TypeError, match=r"missing \['y'\], unknown or repeated \['z'\]"):
        APIBase.__init__(Scale.__new__(Scale), x=1, index=2, z=3)


def test_compile_checks_first_returns_self_and_is_free_the_second_time(kernels):
    op = Scale(*spec_samples())
    assert op.compile("sm_90a") is op.compile() is op.compile("sm_90a") is op
    assert [key.arch for key in kernels] == ["sm_90a"]
    op.compile("sm_80")
    assert [key.arch for key in kernels] == ["sm_90a", "sm_80"]
    with pytest.raises(UnsupportedError, match="^d: "):
        Scale(*spec_samples(d=512)).compile("sm_90a")


def test_compile_takes_the_architecture_of_the_environment(kernels, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_ARCH", "sm_89")
    Scale(*spec_samples()).compile()
    assert [key.arch for key in kernels] == ["sm_89"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what happens without a GPU")
def test_compile_without_gpu_or_name_says_how_to_name_one(kernels):
    with pytest.raises(UnsupportedError, match="CUTEFORGE_ARCH"):
        Scale(*spec_samples()).compile()


# Launching.


def test_execute_passes_operands_scalars_and_stream(kernels, gpu):
    op, kernel = compiled_scale(kernels)
    x, index, y = cpu_operands()
    op.execute(x, y=y, index=index)
    assert kernel.launches == [(x, index, y, 132, STREAM)]


def test_execute_before_compile_names_compile(kernels, gpu):
    with pytest.raises(RuntimeError, match=r"Scale is not compiled: call compile\(\) first"):
        Scale(*spec_samples()).execute(*cpu_operands())
    with pytest.raises(RuntimeError, match=r"call compile\(\) first"):
        Scale(*spec_samples()).bind(*cpu_operands())


def test_call_compiles_then_executes(kernels, gpu, monkeypatch):
    monkeypatch.setenv("CUTEFORGE_ARCH", "sm_90a")
    op = Scale(*spec_samples())
    op(*cpu_operands())
    op(*cpu_operands(tokens=500))
    (kernel,) = kernels.values()
    assert len(kernel.launches) == 2


def test_missing_and_repeated_operands_are_told(kernels, gpu):
    op, _ = compiled_scale(kernels)
    x, index, y = cpu_operands()
    with pytest.raises(TypeError, match=r"Scale takes the operands x, index, y: missing \['y'\]"):
        op.execute(x, index)
    with pytest.raises(TypeError, match=r"unknown or repeated \['x'\]"):
        op.execute(x, index, y, x=x)
    with pytest.raises(TypeError, match="4 positional"):
        op.execute(x, index, y, y)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU tensor beside a real GPU is a GPU test")
def test_cpu_operands_are_refused_by_name(kernels):
    op, kernel = compiled_scale(kernels)
    with pytest.raises(ContractError, match="^x: wanted a CUDA device, got cpu"):
        op.execute(*cpu_operands())
    with pytest.raises(ContractError, match="^x: wanted a CUDA device, got cpu"):
        op.bind(*cpu_operands())
    assert kernel.launches == []


def fake_tensor() -> torch.Tensor:
    with FakeTensorMode():
        return torch.empty(8, 64)


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (None, "wanted a torch.Tensor, got NoneType"),
        ([1.0], "wanted a torch.Tensor, got list"),
        (TensorSpec((8, 64), "float32"), "wanted a torch.Tensor, got TensorSpec"),
        (fake_tensor(), "wanted a plain tensor with device memory, got a FakeTensor"),
    ],
    ids=["None", "list", "spec", "fake"],
)
@pytest.mark.parametrize("position", [0, 2])
def test_operands_without_memory_never_reach_the_entry(kernels, gpu, bad, got, position):
    op, kernel = compiled_scale(kernels)
    operands = list(cpu_operands())
    operands[position] = bad
    with pytest.raises(ContractError) as refused:
        op.execute(*operands)
    assert str(refused.value) == f"{op.signature.names[position]}: {got}"
    assert kernel.launches == []


def test_meta_operand_is_refused_by_name(kernels):
    op, _ = compiled_scale(kernels)
    x, index, y = cpu_operands()
    with pytest.raises(ContractError, match="^x: wanted a tensor with device memory, got a meta tensor"):
        op.execute(x.to("meta"), index, y)


def test_parameters_run_only_where_no_graph_is_expected(kernels, gpu):
    op, kernel = compiled_scale(kernels)
    x, index, y = cpu_operands()
    parameter = torch.nn.Parameter(x)
    for operand in (parameter, x.clone().requires_grad_()):
        with pytest.raises(ContractError, match=r"^x: .* does not require grad.*no_grad\(\).*differentiable"):
            op.execute(operand, index, y)
    assert kernel.launches == []
    with torch.no_grad():
        op.execute(parameter, index, y)
    op.execute(torch.nn.Parameter(x, requires_grad=False), index, y)
    with torch.inference_mode():
        op.execute(parameter, index, y)
    assert len(kernel.launches) == 3


def test_parameter_without_memory_is_refused(kernels, gpu):
    """Parameters skip the questions that other subclasses are asked, not this one."""
    op, kernel = compiled_scale(kernels)
    x, index, y = cpu_operands()
    parameter = torch.nn.Parameter(y.to("meta"), requires_grad=False)
    with pytest.raises(ContractError, match="^y: wanted a tensor with device memory, got a meta tensor"):
        op.execute(x, index, parameter)
    assert kernel.launches == []


def test_broadcast_output_is_refused_before_the_launch(kernels, gpu):
    op, kernel = compiled_scale(kernels)
    x, index, y = cpu_operands()
    with pytest.raises(ContractError, match="^y: wanted an output whose elements do not overlap"):
        op.execute(x, index, y[:1].expand(8, 64))
    op.execute(x, index, torch.empty(8, 80)[:, :64])
    assert len(kernel.launches) == 1


@pytest.mark.parametrize("error", [TypeError("argument 0"), ValueError("argument 0"), RuntimeError("no export")])
def test_refusal_of_the_entry_becomes_the_one_that_names_the_operand(kernels, gpu, cuda_metadata, error):
    op, kernel = compiled_scale(kernels)
    kernel.refuses = error
    x, index, y = cpu_operands()
    with pytest.raises(ContractError, match=r"^y: wanted shape \(T, d\) = \(8, 64\), got \(7, 64\)"):
        op.execute(x, index, y[:7])


def test_error_that_is_no_refusal_is_raised_as_it_is(kernels, gpu, table_passes):
    op, kernel = compiled_scale(kernels)
    kernel.refuses = RuntimeError("unspecified launch failure")
    with pytest.raises(RuntimeError) as raised:
        op.execute(*cpu_operands())
    assert raised.value is kernel.refuses
    assert len(table_passes) == 1


def test_refusal_that_the_table_does_not_know_is_still_a_contract_error(kernels, gpu, table_passes):
    op, kernel = compiled_scale(kernels)
    kernel.refuses = ValueError("Mismatched stride on argument #2")
    with pytest.raises(ContractError, match="argument #2"):
        op.execute(*cpu_operands())


def test_only_extents_that_were_not_compiled_in_may_change(kernels, cuda_metadata):
    op, _ = compiled_scale(kernels)
    op.check_call(cpu_operands(tokens=500))
    with pytest.raises(ContractError, match=r"^x: wanted shape \(T, d\) = \(T, 64\), got \(8, 128\)"):
        op.check_call(cpu_operands(d=128))
    x, index, y = cpu_operands()
    with pytest.raises(ContractError, match=r"^x: wanted dtype float32 \(that of the sample\), got bfloat16"):
        op.check_call((x.bfloat16(), index, y.bfloat16()))
    shared = torch.empty(16, 64)
    with pytest.raises(ContractError, match="^y: wanted memory of its own for an output, got memory shared with x"):
        op.check_call((shared[:8], index, shared[4:12]))


def test_code_for_another_gpu_is_refused(kernels, gpu):
    op = Scale(*spec_samples()).compile("sm_100a")
    with pytest.raises(UnsupportedError, match=r"compiled for sm_100a, which cuda:0 of compute capability 9\.0"):
        op.execute(*cpu_operands())


def test_nothing_to_do_is_checked_but_not_launched(kernels, gpu, table_passes):
    op, kernel = compiled_scale(kernels)
    op.execute(*cpu_operands(tokens=0))
    op.bind(*cpu_operands(tokens=0))()
    assert kernel.launches == []
    assert len(table_passes) == 2


def test_environment_turns_checks_on(kernels, gpu, table_passes, monkeypatch):
    op, kernel = compiled_scale(kernels)
    op.execute(*cpu_operands())
    assert (len(table_passes), op.content_checks) == (0, 0)
    monkeypatch.setenv("CUTEFORGE_FAST_LAUNCH", "0")
    op.execute(*cpu_operands())
    assert (len(table_passes), op.content_checks) == (1, 0)
    monkeypatch.setenv("CUTEFORGE_CHECK", "1")
    op.execute(*cpu_operands())
    assert (len(table_passes), op.content_checks) == (2, 1)
    assert len(kernel.launches) == 3


def test_environment_turns_nvtx_ranges_on(kernels, gpu, monkeypatch):
    op, kernel = compiled_scale(kernels)
    ranges = []

    @contextlib.contextmanager
    def nvtx_range(text):
        ranges.append((text, len(kernel.launches)))
        yield

    monkeypatch.setattr(torch.cuda.nvtx, "range", nvtx_range)
    op.execute(*cpu_operands())
    monkeypatch.setenv("CUTEFORGE_NVTX", "1")
    op.execute(*cpu_operands())
    assert ranges == [("cuteforge nowhere:build", 1)], "entered before the second launch"
    assert len(kernel.launches) == 2


def test_explicit_stream_is_launched_on_and_recorded(kernels, gpu, monkeypatch):
    op, kernel = compiled_scale(kernels)
    recorded = []
    monkeypatch.setattr(api_base, "record_streams", lambda *args: recorded.append((*args, len(kernel.launches))))
    operands = cpu_operands()
    op.execute(*operands, stream=0)
    assert kernel.launches[0][-1] == 0
    assert recorded == [(operands, 0, 0, 1)], "recorded once, after the launch"


def test_bind_validates_once(kernels, gpu, table_passes, monkeypatch):
    op, kernel = compiled_scale(kernels)
    bound = []
    monkeypatch.setattr(api_base, "bound_launch", lambda *args: bound.append(args) or (lambda: None))
    operands = cpu_operands()
    call = op.bind(*operands)
    call()
    call()
    assert bound == [(kernel, operands, (132,), None, operands[2:])]
    assert table_passes == [operands]


def test_scalars_of_a_call_follow_those_of_the_op(kernels, gpu, table_passes, monkeypatch):
    """Launched and bound alike: a bound launch once dropped them, and a rotation turned forwards where it should turn
    back."""
    op, kernel = compiled_scale(kernels)
    bound = []
    monkeypatch.setattr(api_base, "bound_launch", lambda *args: bound.append(args) or (lambda: None))
    operands = cpu_operands()
    op._launch(operands, None, (7,))
    op._bind(operands, None, (7,))
    assert kernel.launches[0][3:5] == (132, 7)
    assert bound[0][2] == (132, 7)


@pytest.mark.parametrize("entry", ["execute", "call", "bind"])
def test_a_launch_counts_as_a_write_of_each_output(entry, kernels, gpu, table_passes, monkeypatch):
    """As torch's own ops do: a graph that saved the tensor before refuses to use it. Each launch of a bound one counts,
    too."""
    op, kernel = compiled_scale(kernels)
    x, index, y = cpu_operands()
    x, y = x.zero_(), y.zero_()
    launch = {"execute": op.execute, "call": op, "bind": lambda *operands: None}[entry]
    if entry == "bind":
        monkeypatch.setattr(streams, "current_stream_query", lambda: lambda device_index: STREAM)
        bound = op.bind(x, index, y)
        launch = lambda *_: bound()  # noqa: E731
    versions = x._version, index._version, y._version
    for count in (1, 2, 3):
        launch(x, index, y)
        assert (x._version, index._version, y._version - count) == versions
    with torch.inference_mode():
        launch(x, index, y)
        assert y._version == versions[2] + 4
        if entry != "bind":
            launch(x, index, torch.zeros_like(y))
    assert len(kernel.launches) >= 4


def test_a_refused_launch_counts_as_no_write(kernels, gpu, table_passes):
    op, kernel = compiled_scale(kernels)
    kernel.refuses = ValueError("refused")
    x, index, y = cpu_operands()
    version = y._version
    with pytest.raises(ContractError):
        op.execute(x, index, y)
    assert y._version == version


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))], ids=["deepcopy", "pickle"]
)
def test_copy_loads_its_kernel_again_when_used(kernels, gpu, copied):
    op, kernel = compiled_scale(kernels)
    twin = copied(op)
    assert twin.dims == op.dims
    twin.execute(*cpu_operands())
    assert len(kernel.launches) == 1
    with pytest.raises(RuntimeError, match=r"call compile\(\) first"):
        copied(Scale(*spec_samples())).execute(*cpu_operands())


def test_samples_are_not_kept_alive():
    x, index, y = (torch.empty(s.shape, dtype=getattr(torch, s.dtype), device="meta") for s in spec_samples())
    op = Scale(x, index, y)
    assert all(isinstance(sample, TensorSpec) for sample in op.samples.values())


# TupleDict.


def test_tuple_dict_unpacks_values_in_creation_order():
    result = TupleDict(out=1, lse=2)
    out, lse = result
    assert (out, lse) == (1, 2)
    assert (result["out"], result[1], result[-1], result[:1], [*reversed(result)]) == (1, 2, 2, (1,), [2, 1])


def test_tuple_dict_is_a_dict_in_all_else():
    result = TupleDict(out=1, lse=2)
    assert (len(result), list(result.keys()), dict(result.items())) == (2, ["out", "lse"], {"out": 1, "lse": 2})
    assert "out" in result
    assert 1 not in result
    assert result == dict(result) == {**result} == TupleDict(out=1, lse=2)
    assert repr(result) == "TupleDict(out=1, lse=2)"
    with pytest.raises(KeyError, match="max"):
        result["max"]
    with pytest.raises(IndexError):
        result[2]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, TupleDict.copy, lambda r: pickle.loads(pickle.dumps(r))])
def test_tuple_dict_copies_stay_tuple_dicts(copied):
    twin = copied(TupleDict(lse=torch.ones(2), out=torch.zeros(1)))
    assert type(twin) is TupleDict
    lse, out = twin
    assert (lse.shape, out.shape) == ((2,), (1,))
