"""Tests of the device dialect. They name Numba's types, so Numba is loaded before any of them is imported."""

from gemmkit.lang.deferred import load

load()
