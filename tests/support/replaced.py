"""What a test has replaced of gemmkit, and what was made meanwhile."""

from __future__ import annotations

import sys

__all__ = ["forget_plans_of_all", "forget_replaced"]

#: What modules call the memories of what they have planned, bound and launched.
MEMORIES = ("_plans", "plans", "_seen", "_bound", "_launches")


def forget_plans_of_all() -> None:
    """A plan that was made of another table, or for a device that is not there, would be the next test's."""
    for name, module in list(sys.modules.items()):
        if name.startswith("gemmkit.") and module is not None:
            for memory in MEMORIES:
                found = vars(module).get(memory)
                if isinstance(found, dict) and found:
                    found.clear()


def forget_replaced() -> None:
    """What was read of gemmkit while a function of it was another is forgotten: the next test that compiles a kernel by itself
    would be told that code has changed. (It takes 2 ms where a thousand functions have been read.)"""
    state = sys.modules.get("gemmkit.lang.package_state")
    if state is not None and not state.packages_stand():
        from gemmkit.lang.fingerprint import forget_readings

        forget_readings()
