"""The published ways to scale the frequencies of a rotary embedding to longer contexts, and how configs spell them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, ClassVar

from cuteforge.arguments import integer, number
from cuteforge.errors import ContractError, UnsupportedError


@dataclass(frozen=True)
class _FactorScaling:
    """A scaling that is one number and leaves the amplitude alone."""

    factor: float

    def __post_init__(self) -> None:
        _check_numbers(self, factor=1.0)

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0


@dataclass(frozen=True)
class LinearScaling(_FactorScaling):
    """Position interpolation (arXiv 2306.15595, equation 4): position ``m`` turns as ``m / factor`` did.

    Args:
        factor: how many times longer the context gets, 1 or more.

    Raises:
        ContractError: a value out of range, by name; so for every kind.
    """

    kind: ClassVar[str] = "linear"

    def scale(self, frequencies: Sequence[float], rotary_dim: int, base: float) -> list[float]:
        """The frequencies of all pairs, given the plain ones; radians per position, fp64."""
        return [frequency / self.factor for frequency in frequencies]


@dataclass(frozen=True)
class NTKScaling(_FactorScaling):
    """NTK-aware interpolation (YaRN paper, arXiv 2309.00071, definition 1).

    The base becomes ``base * factor ** (rotary_dim / (rotary_dim - 2))``: the fastest pair keeps its frequency, the
    slowest has it divided by `factor`.

    Args:
        factor: as in `LinearScaling`.
    """

    kind: ClassVar[str] = "ntk"

    def scale(self, frequencies: Sequence[float], rotary_dim: int, base: float) -> list[float]:
        """As `LinearScaling.scale`. Two columns are one pair, the fastest: nothing changes."""
        steps = max(1, rotary_dim - 2)
        return [frequency * self.factor ** (-2 * i / steps) for i, frequency in enumerate(frequencies)]


@dataclass(frozen=True)
class Llama3Scaling:
    """The scaling of Llama 3.1 and later, as published with the models (``apply_scaling``).

    A pair that turns more than `high_freq_factor` times over the original context keeps its frequency; one that turns
    less than `low_freq_factor` times has it divided by `factor`; in between the two are blended, linear in the turns.

    Args:
        factor, low_freq_factor, high_freq_factor: the model's; Llama 3.1 has 8, 1, 4.
        original_max_position_embeddings: the context that the model was first trained for, 8192 there.
    """

    kind: ClassVar[str] = "llama3"
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        _check_numbers(self, factor=1.0, low_freq_factor=0.0, high_freq_factor=0.0, original_max_position_embeddings=1)
        if self.high_freq_factor <= self.low_freq_factor:
            wanted = f"a number above low_freq_factor = {self.low_freq_factor}"
            raise ContractError(f"scaling.high_freq_factor: wanted {wanted}, got {self.high_freq_factor}")

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        return 1.0

    def scale(self, frequencies: Sequence[float], rotary_dim: int, base: float) -> list[float]:
        """As `LinearScaling.scale`."""
        return [self._scale_one(frequency) for frequency in frequencies]

    def _scale_one(self, frequency: float) -> float:
        turns = self.original_max_position_embeddings * frequency / (2 * math.pi)
        kept = _ramp(turns, self.low_freq_factor, self.high_freq_factor)
        return (1 - kept) * frequency / self.factor + kept * frequency


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): interpolation by parts, and larger cos and sin.

    Pairs that turn more than `beta_fast` times over the original context keep their frequency, pairs that turn less
    than `beta_slow` times have it divided by `factor`. In between the two are blended linearly in the number of the
    pair, between the pairs where the two limits fall: so the authors' code and every model trained with it, while
    the paper's equation 23 is linear in the turns. cos and sin are multiplied by `amplitude`, so that logits
    grow by its square (section 3.4).

    Args:
        factor: as in `LinearScaling`.
        original_max_position_embeddings: the context that the model was first trained for.
        beta_fast, beta_slow: turns; 32 and 1 in the paper.
        attention_factor: the amplitude. None: ``m(mscale) / m(mscale_all_dim)`` if both are given and not 0 (DeepSeek),
            else ``m(1)``, with ``m(c) = 0.1 * c * ln(factor) + 1``.
        mscale, mscale_all_dim: see attention_factor.
        truncate: whether the two limits are rounded outward to whole pairs; gpt-oss does not.
    """

    kind: ClassVar[str] = "yarn"
    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        _check_numbers(self, factor=1.0, original_max_position_embeddings=1, beta_fast=0.0, beta_slow=0.0)
        optional = ("attention_factor", "mscale", "mscale_all_dim")
        _check_numbers(self, **{name: 0.0 for name in optional if getattr(self, name) is not None})
        if self.beta_slow <= 0:
            raise ContractError(f"scaling.beta_slow: wanted a number above 0, got {self.beta_slow}")
        if self.beta_fast <= self.beta_slow:
            wanted = f"a number above beta_slow = {self.beta_slow}"
            raise ContractError(f"scaling.beta_fast: wanted {wanted}, got {self.beta_fast}")
        if not isinstance(self.truncate, bool):
            raise ContractError(f"scaling.truncate: wanted a bool, got {self.truncate!r}")

    @property
    def amplitude(self) -> float:
        """What cos and sin are multiplied by."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def scale(self, frequencies: Sequence[float], rotary_dim: int, base: float) -> list[float]:
        """As `LinearScaling.scale`."""
        first, last = self._pair_at(self.beta_fast, rotary_dim, base), self._pair_at(self.beta_slow, rotary_dim, base)
        # before they are rounded: they may be infinite
        first, last = min(max(first, 0), rotary_dim), min(last, rotary_dim - 1)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        last = max(first, last)
        # Limits that meet are a step; the authors' code makes it a ramp of this width.
        last = first + 0.001 if first == last else last
        blend = [_ramp(i, first, last) for i in range(len(frequencies))]
        return [(1 - b) * frequency + b * frequency / self.factor for b, frequency in zip(blend, frequencies)]

    def _mscale(self, weight: float) -> float:
        return 0.1 * weight * math.log(self.factor) + 1.0

    def _pair_at(self, turns: float, rotary_dim: int, base: float) -> float:
        """The pair, between whole ones, whose plain frequency makes `turns` turns over the original context."""
        wavelength = self.original_max_position_embeddings / turns
        return rotary_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(base))


Scaling = LinearScaling | NTKScaling | Llama3Scaling | YarnScaling
_KINDS: dict[str, type[Scaling]] = {each.kind: each for each in (LinearScaling, NTKScaling, Llama3Scaling, YarnScaling)}
# Plain frequencies; the second is what older configs of multimodal models say.
_PLAIN = ("default", "mrope")
# Types of transformers that one table cannot serve.
_UNSERVED = {
    "dynamic": "changes with the length of the sequence",
    "longrope": "changes with the length of the sequence",
    "proportional": "leaves pairs unrotated",
    "axial": "turns by positions of several axes",
}
# Keys of transformers' dictionaries that say nothing about frequencies: the part of a head that `rotary_dim` says, the
# axis by whose position a pair of a multimodal model turns, and the length of a context.
_OTHER_KEYS = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "max_position_embeddings")


def parse_scaling(scaling: Any) -> tuple[Scaling | None, float | None]:
    """`scaling` of `rotary_table` as an object, None for none, and the base that it says, None where it says none.

    Raises:
        ContractError: no such kind, a key that the kind does not know, or one that it lacks.
        UnsupportedError: a kind that one table cannot serve.
    """
    if scaling is None or isinstance(scaling, tuple(_KINDS.values())):
        return scaling, None
    if not isinstance(scaling, Mapping):
        raise ContractError(f"scaling: wanted a mapping with a rope_type, or None, got {type(scaling).__name__}")
    _refuse_layers(scaling)
    # transformers writes options that are not set as None
    options = {key: value for key, value in scaling.items() if value is not None and key not in _OTHER_KEYS}
    kind = _pop_kind(options)
    theta = options.pop("rope_theta", None)
    if theta is not None and host_number("scaling.rope_theta", theta, 1.0) == 1:
        raise ContractError(f"scaling.rope_theta: wanted a number above 1, got {theta}")
    return _make(kind, options), None if theta is None else float(theta)


def _refuse_layers(scaling: Mapping) -> None:
    """Models whose layers differ have a dictionary of dictionaries."""
    for key, value in scaling.items():
        if isinstance(value, Mapping):
            raise ContractError(f"scaling.{key}: wanted the dictionary of one type of layers, got one of each type")


def _make(kind: str, options: dict[str, Any]) -> Scaling | None:
    """The `Scaling` of a kind, made from its options."""
    wanted = {field.name: field.default is MISSING for field in fields(_KINDS[kind])} if kind in _KINDS else {}
    for key in options:
        if key not in wanted:
            takes = f"the keys {', '.join(wanted)}" if wanted else "no other key"
            raise ContractError(f"scaling.{key}: wanted {takes} beside rope_type {kind!r}, got {key!r}")
    missing = [name for name, is_required in wanted.items() if is_required and name not in options]
    if missing:
        raise ContractError(f"scaling.{missing[0]}: wanted a value for rope_type {kind!r}, got none")
    return _KINDS[kind](**options) if kind in _KINDS else None


def _pop_kind(options: dict[str, Any]) -> str:
    """Take the kind out of `options`; older model configs call it ``type``, some have both."""
    given = [options.pop(key) for key in ("rope_type", "type") if key in options]
    known = (*_KINDS, *_PLAIN)
    for kind in given or [None]:
        if isinstance(kind, str) and kind in _UNSERVED:
            raise UnsupportedError(f"scaling.rope_type: {kind!r} {_UNSERVED[kind]}, which no single table does")
        if not isinstance(kind, str) or kind not in known:
            raise ContractError(f"scaling.rope_type: wanted one of {', '.join(known)}, got {kind!r}")
    # transformers writes the type of a multimodal model as "default" beside the older "mrope"
    if len({"default" if kind in _PLAIN else kind for kind in given}) > 1:
        raise ContractError(f"scaling.type: wanted {given[0]!r} (that of rope_type), got {given[1]!r}")
    return given[0]


def _ramp(value: float, low: float, high: float) -> float:
    """0 up to `low`, 1 from `high`, linear in between."""
    return min(1.0, max(0.0, (value - low) / (high - low)))


def _check_numbers(scaling: Scaling, **at_least: float) -> None:
    """Refuse fields below their limits and fields that are not finite numbers; the rest become plain Python numbers.

    A field whose limit is an int has to be an integer.
    """
    for name, limit in at_least.items():
        checked = integer if isinstance(limit, int) else host_number
        object.__setattr__(scaling, name, checked(f"scaling.{name}", getattr(scaling, name), limit))


def host_number(name: str, value: Any, least: float) -> float:
    """A number of the host, which has fp64."""
    return number(name, value, least, sys.float_info.max)
