"""Values that no argument means, and what may come of a call with one: an error that names the argument, or a right
answer."""

from __future__ import annotations

import fractions
import math
import numbers
import re
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from cuteforge import ContractError, TensorSpec, UnsupportedError
from helpers.budget import assert_same_values
from helpers.public_calls import Call


class _Hostile:
    """Raises where it is compared, or asked whether it is true."""

    def _raise(self, *_: Any) -> Any:
        raise ZeroDivisionError("hostile")

    __bool__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _raise
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return "<hostile>"


class _Unhashable:
    __hash__ = None

    def __repr__(self) -> str:
        return "<unhashable>"


class _FakeStream:
    """What other libraries' streams look like."""

    cuda_stream = "no number"


class _OwnTensor(torch.Tensor):
    """A subclass without a dispatch of its own."""


class _OwnInt(int):
    """A subclass."""


class Value(NamedTuple):
    """Nonsense by a name that an error message can show."""

    label: str
    make: Callable[[], Any]


def _values() -> Iterator[Value]:
    plain = (
        None,
        "nonsense",
        "",
        "cuda:99",
        b"bytes",
        2**63,
        2**200,
        -1,
        -(2**63) - 1,
        0,
        1,
        0.5,
        -2.5,
        1e300,
        math.nan,
        math.inf,
        -math.inf,
        True,
        False,
        1j,
        ...,
        int,
        print,
        (),
        (1,),
        (1, 2, 3),
        ("a", None),
        fractions.Fraction(1, 3),
        torch.float32,
        torch.complex64,
        torch.device("meta"),
        torch.strided,
        range(2),
        TensorSpec((2, 3), "float32"),
        TensorSpec((), "nonsense"),
    )
    for value in plain:
        yield Value(repr(value)[:40], lambda value=value: value)
    made: dict[str, Callable[[], Any]] = {
        "[]": list,
        "{}": dict,
        "{'a': 1}": lambda: {"a": 1},
        "set": lambda: {1, 2},
        "[1, 2]": lambda: [1, 2],
        "[[]]": lambda: [[]],
        "[None]": lambda: [None],
        "generator": lambda: (i for i in range(2)),
        "object()": object,
        "hostile": _Hostile,
        "[hostile]": lambda: [_Hostile()],
        "unhashable": _Unhashable,
        "fake stream": _FakeStream,
        "int subclass": lambda: _OwnInt(3),
        "np.zeros(3)": lambda: np.zeros(3),
        "np.int64(1)": lambda: np.int64(1),
        "np.float32(nan)": lambda: np.float32("nan"),
        "np.bool_": lambda: np.bool_(True),
        "np.str_": lambda: np.str_("cuda"),
        "np.array(objects)": lambda: np.array([None, "a"], dtype=object),
        "tensor()": lambda: torch.tensor(1.0),
        "tensor(True)": lambda: torch.tensor(True),
        "tensor([])": lambda: torch.empty(0),
        "tensor 7-D": lambda: torch.zeros(1, 1, 1, 1, 1, 1, 1),
        "tensor int8": lambda: torch.zeros(2, 3, dtype=torch.int8),
        "tensor complex": lambda: torch.zeros(2, 3, dtype=torch.complex64),
        "tensor meta": lambda: torch.empty(2, 3, device="meta"),
        "tensor huge meta": lambda: torch.empty(2**40, 2**20, device="meta"),
        "sparse": lambda: torch.zeros(2, 3).to_sparse(),
        "nested": lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "Parameter": lambda: torch.nn.Parameter(torch.zeros(2, 3)),
    }
    for label, make in made.items():
        yield Value(label, make)


VALUES = tuple(_values())


def _twists() -> Iterator[tuple[str, type, Callable[[Any], Any]]]:
    """Of a good argument, what is near to it."""
    for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.int16, torch.bool, torch.complex64):
        yield f"as {dtype}", torch.Tensor, lambda x, dtype=dtype: x.to(dtype)
    yield "as a list", torch.Tensor, lambda x: x.tolist()
    yield "as numpy", torch.Tensor, lambda x: x.numpy()
    yield "on meta", torch.Tensor, lambda x: x.to("meta")
    yield "with a dim more", torch.Tensor, lambda x: x[None]
    yield "with a last dim more", torch.Tensor, lambda x: x[..., None]
    yield "with a dim less", torch.Tensor, lambda x: x[0]
    yield "empty", torch.Tensor, lambda x: x[:0]
    yield "with a row more", torch.Tensor, lambda x: torch.cat((x, x[-1:]))
    yield "with a column less", torch.Tensor, lambda x: x[..., :-1]
    yield "with a column more", torch.Tensor, lambda x: torch.cat((x, x[..., -1:]), -1)
    yield "transposed", torch.Tensor, lambda x: x.transpose(0, -1)
    yield "expanded", torch.Tensor, lambda x: x[:1].expand_as(x)
    yield "with strides", torch.Tensor, lambda x: torch.stack((x, x), -1)[..., 0]
    yield "sparse of it", torch.Tensor, lambda x: x.to_sparse()
    yield "as a subclass", torch.Tensor, lambda x: x.as_subclass(_OwnTensor)
    yield "requires grad", torch.Tensor, lambda x: x.clone().requires_grad_() if x.is_floating_point() else x
    yield "conjugated", torch.Tensor, lambda x: x.to(torch.complex64).conj()
    yield "negated lazily", torch.Tensor, lambda x: torch._neg_view(-x) if x.is_floating_point() else x
    yield "as numpy integer", int, np.int64
    yield "as numpy flag", bool, np.bool_
    yield "as numpy float", float, np.float64
    yield "as a text", object, str
    yield "in a list", object, lambda x: [x]
    yield "in a tuple", object, lambda x: (x,)
    yield "as a list of its items", tuple, list


TWISTS = tuple(_twists())
# Twists that mean what they are made of, so that an answer has to be the same.
SAME = (
    "with strides",
    "as a subclass",
    "requires grad",
    "negated lazily",
    "as numpy integer",
    "as numpy flag",
    "as numpy float",
    "as a list of its items",
)


def nonsense_for(name: str, argument: Any) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """(label, good argument -> what is given instead). A raw stream is believed: a driver that is given another number
    crashes the process."""
    for value in VALUES:
        if name == "stream" and isinstance(value.make(), numbers.Integral):
            continue
        yield value.label, lambda _, value=value: value.make()
    for label, kind, twist in TWISTS:
        # a bool is an int in Python
        if isinstance(argument, kind) and not (kind is int and isinstance(argument, bool)):
            yield label, twist


class Answer(NamedTuple):
    """Of a call without nonsense: its result, or the error of one that needs a GPU."""

    result: Any = None
    error: str | None = None


_NO_CUDA = "without CUDA|not compiled with CUDA|no NVIDIA driver"


def answer(call: Call) -> Answer:
    try:
        return Answer(call.run(**call.arguments))
    except (ContractError, UnsupportedError) as error:
        return Answer(error=str(error))


def problem(call: Call, replaced: dict[str, str], want: Answer) -> str | None:
    """What is wrong with how a call with nonsense ended, or None.

    Args:
        replaced: the arguments that are nonsense, and its labels.
        want: of the call without nonsense.
    """
    try:
        got = call.run(**call.arguments)
    except (ContractError, UnsupportedError) as error:
        if str(error) == want.error or _names(str(error), call, replaced):
            return None
        return f"names no argument: {re.sub('got .*', 'got …', str(error))[:120]}"
    except Exception as error:
        if "stream" in replaced and re.search(_NO_CUDA, str(error)):
            return None  # a torch without CUDA, or a machine without a driver, has no streams
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    return _wrong_answer(call, replaced, got, want.result)


def _names(message: str, call: Call, replaced: dict[str, str]) -> bool:
    """What disagrees may be named either way round, of two arguments any; what no argument takes by its own name."""
    if len(replaced) > 1 and ": wanted " in message:
        return True
    given = {name: call.arguments[name] for name in replaced}
    may_mean_something = any(
        isinstance(x, (torch.Tensor, TensorSpec)) or fits(call, name, x) for name, x in given.items()
    )
    named = [*call.names, *_FACTS] if may_mean_something else list(replaced)
    names = [*named, *(other for name in named for other in _OTHER_NAMES.get(name, ()))]
    subject = message.partition(": wanted ")[0]  # all of a text of another form
    return any(re.search(rf"\b{re.escape(name)}\b", subject) for name in names)


# What an argument is called further down.
_OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "table": ("freqs_cis", "cos", "sin", "positions"),
    "cos": ("freqs_cis",),  # there is one or the other
    "sin": ("freqs_cis",),
    "kv_cache": ("cache",),
    "is_causal": ("causal",),
    "scale": ("softmax_scale",),
    "attn_mask": ("mask",),
    "x": ("weight", "inputs"),  # of TensorSpec.of, which is told a name, and of a DecodeGraph
    "request": ("requests",),
    "head_dim": ("d",),
    "requests": ("request", "inputs"),
}
# What an error about a whole call names.
_FACTS = ("dtype", "device", "D", "Dv", "Hq", "Hkv")


def _wrong_answer(call: Call, replaced: dict[str, str], got: Any, want: Any) -> str | None:
    for name, label in replaced.items():
        value = call.arguments[name]
        if label not in SAME and name not in call.ignored and not fits(call, name, value):
            return f"served, though {name} means nothing"
    if want is not None and all(label in SAME for label in replaced.values()) and not _same(got, want):
        return f"another answer: {got!r:.80}, wanted {want!r:.80}"
    return None


# By a word of the annotation: what may be given.
_KINDS: dict[str, tuple[type, ...]] = {
    "Tensor": (torch.Tensor,),
    "int": (int, np.integer),
    "float": (int, float, np.floating, np.integer, fractions.Fraction),
    "bool": (bool, np.bool_, int, np.integer),
    "str": (str,),
    "None": (type(None),),
    "Sequence": (list, tuple, range, np.ndarray, torch.Tensor, types.GeneratorType, str, bytes),
    "tuple": (list, tuple, torch.Size, range, np.ndarray, set, dict, types.GeneratorType),
    "Window": (tuple, list),
    "device": (str, torch.device),
    "dtype": (torch.dtype, str),
    "Mapping": (dict,),
    "Callable": (),
}
# Of arguments whose annotation says Any, or less than what is meant.
_KINDS_BY_NAME: dict[str, tuple[type, ...]] = {
    "device": (str, torch.device, int, type(None)),
    "dtype": (torch.dtype, str),
    "backend": (str, type(None), type),
    "stream": (int, type(None)),
    "stride": (list, tuple, range, np.ndarray, set, dict, types.GeneratorType, type(None)),
    "step": (type(print), type),
    "function": (str, torch.Tensor),
    "x": (torch.Tensor, TensorSpec),
    "tokens": (list, tuple, range, np.ndarray, types.GeneratorType, str, bytes, type(None)),
    "name": (str,),
}


def fits(call: Call, name: str, value: Any) -> bool:
    """Whether a value is of a kind that the argument takes."""
    parameter = call.signature.parameters.get(name)
    if name in _KINDS_BY_NAME:
        return isinstance(value, _KINDS_BY_NAME[name])
    text = "Any" if parameter is None or parameter.annotation is parameter.empty else str(parameter.annotation)
    if "Any" in text or parameter.kind is parameter.VAR_POSITIONAL:
        return isinstance(value, (torch.Tensor, TensorSpec, type(None)))
    return any(isinstance(value, kinds) for word, kinds in _KINDS.items() if re.search(rf"\b{word}\b", text))


def _same(got: Any, want: Any) -> bool:
    if isinstance(want, torch.Tensor):
        try:
            assert_same_values(got.detach().as_subclass(torch.Tensor), want, "result")
        except AssertionError:
            return False
        return True
    if isinstance(want, (tuple, list)):
        return len(got) == len(want) and all(map(_same, got, want))
    if isinstance(want, dict):
        return list(got.keys()) == list(want.keys()) and all(map(_same, got.values(), want.values()))
    return type(got) is type(want)
