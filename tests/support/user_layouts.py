"""Layouts as a user writes them: what tests put in place of a plain matrix."""

from __future__ import annotations

from dataclasses import dataclass

from gemmkit import layouts


@dataclass(frozen=True)
class Toeplitz(layouts.Layout):
    """a[m, k] = t[m - k + K - 1], never materialised."""

    def element(self, data, m, k, shape):
        return data[m - k + shape.K - 1]


@dataclass(frozen=True)
class Hankel(layouts.Layout):
    """x[i, j] = t[i + j]."""

    def element(self, data, i, j, shape):
        return data[i + j]


@dataclass(frozen=True)
class Packed(layouts.Layout):
    """The rows of a matrix of N columns one after another, in an array of one dimension."""

    def element(self, data, m, n, shape):
        return data[m * shape.N + n]

    def store_element(self, data, m, n, value, shape):
        data[m * shape.N + n] = value
