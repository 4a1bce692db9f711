"""Faults seeded in the kernels' syntax trees, and whether the emulator finds them: ``python -m tests.mutation``."""
