"""Drawn bad calls: valid calls of the whole public surface in which one or two arguments are broken.

    python -m tests.bad_calls --count 10000 --seed 1

`values` says how arguments are broken, `calls` has the valid calls, `judge` says what may come of a bad one.
"""
