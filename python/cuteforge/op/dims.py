"""Dims of operands: sums of products of symbols, such as ``coff*d`` or ``B+1``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

Dims = dict[str, int]


@dataclass(frozen=True)
class Term:
    """One dim: a sum of products, each a coefficient and its symbols."""

    text: str
    products: tuple[tuple[int, tuple[str, ...]], ...]

    @classmethod
    def parse(cls, owner: str, text: str) -> Term:
        products = []
        for product in text.split("+"):
            coefficient, symbols = 1, []
            for factor in product.split("*"):
                if factor.isdecimal():
                    coefficient *= int(factor)
                elif re.fullmatch(r"[A-Za-z_]\w*", factor):
                    symbols.append(factor)
                else:
                    raise ValueError(f"{owner}: cannot read the dim {text!r}")
            products.append((coefficient, tuple(symbols)))
        names = [name for _, symbols in products for name in symbols]
        if len(set(names)) != len(names):
            raise ValueError(f"{owner}: a symbol repeats in the dim {text!r}")
        return cls(text, tuple(products))

    def unknowns(self, dims: Mapping[str, int]) -> set[str]:
        return {name for _, symbols in self.products for name in symbols if name not in dims}

    def reduce(self, dims: Mapping[str, int]) -> list[tuple[int, tuple[str, ...]]]:
        """The products with every known symbol multiplied into the coefficient."""
        reduced = []
        for coefficient, symbols in self.products:
            for name in symbols:
                coefficient *= dims.get(name, 1)
            reduced.append((coefficient, tuple(name for name in symbols if name not in dims)))
        return reduced

    def render(self, dims: Mapping[str, int]) -> str:
        """The term with known symbols replaced by their values: ``1024``, ``2*d``, ``B+1``."""
        reduced = self.reduce(dims)
        constant = sum(c for c, symbols in reduced if not symbols)
        parts = ["*".join(([str(c)] if c != 1 else []) + list(symbols)) for c, symbols in reduced if symbols]
        return "+".join(parts + ([str(constant)] if constant or not parts else []))
