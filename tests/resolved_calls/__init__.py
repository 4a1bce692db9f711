"""Drawn legal calls, resolved for GPUs that need not be here: each has to find a kernel.

    python -m tests.resolved_calls --count 20000 --seed 1 --jobs 16

`draw` makes a call's code, `resolve` resolves it for an H100, an A100 and a T4 without computing it. A refusal is a fault, but
for those that `CALLERS` lists: what the caller asked for by name and such a GPU has not.
"""
