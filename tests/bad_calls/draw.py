"""Drawing bad calls: one or two arguments broken, left out, misspelt or too many; methods that break their contracts."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np

from tests.bad_calls.calls import CALLS, Argument, Call, commands, methods
from tests.bad_calls.judge import Case, good_call, run
from tests.bad_calls.public import drawn
from tests.bad_calls.values import METHODS, broken

WEIGHTS = np.array([call.weight for call in CALLS], float)


def draw(seed: int, number: int) -> Case:
    """The case of a number: the same for the same seed."""
    rng = np.random.default_rng((seed, number))
    way = rng.random()
    if way < 0.03:
        return _command(rng)
    if way < 0.15:
        return _method(rng)
    if way < 0.5:
        return drawn(rng)
    return _broken_call(CALLS[int(rng.choice(len(CALLS), p=WEIGHTS / WEIGHTS.sum()))], rng)


def outcomes(seed: int, numbers: range, accepted: bool = False) -> tuple[Counter[str], list[tuple[int, str]]]:
    """How the calls went, and the faults of those numbers."""
    went: Counter[str] = Counter()
    faults = []
    for number in numbers:
        case = draw(seed, number)
        start = time.process_time()
        outcome = run(case)
        if time.process_time() - start > 2:
            print(f"case {number} took {time.process_time() - start:.0f} s: {case.code}"[:200], flush=True)
        went[outcome.kind] += 1
        fault = outcome.fault or (good_call() if number % 20 == 0 else None)
        if fault is not None:
            faults.append((number, fault))
        elif accepted and outcome.kind == "accepted":
            print(f"accepted {number}: {case.broken}    {case.code}"[:300])
    return went, faults


def _broken_call(call: Call, rng: np.random.Generator) -> Case:
    values = [argument.good for argument in call.arguments]
    names: list[str] = []
    chosen = rng.choice(len(values), size=min(len(values), 1 + (rng.random() < 0.2)), replace=False)
    for n in map(int, chosen):
        argument = call.arguments[n]
        values[n] = broken(argument.kind, argument.good, rng)
        names += [argument.name, *argument.also]
    given = [f"{a.name}={value}" if a.by_keyword else value for a, value in zip(call.arguments, values)]
    way = rng.random()
    if way < 0.03:                                                        # misspelt
        given.append("operater=None")
        names.append("operater")
    elif way < 0.06:                                                      # left out
        left = int(rng.integers(len(given)))
        names += [name for argument in call.arguments[left:] for name in (argument.name, *argument.also)]
        del given[left]
    elif way < 0.08:                                                      # too many
        given.insert(0, "None")
        names += [a.name for a in call.arguments]
    names += _related(call, names)
    if any("Bias(" in values[int(n)] for n in chosen):
        names += ["bias", "Bias"]
    if call.function.startswith("epilogues."):                            # the component, too
        names.append(call.function.removeprefix("epilogues."))
    if call.function == "gk.get_config":                                  # what is chosen by default does not go with it
        names += ["block_shape", "compute_warp"]
    if "matmul(result" in call.after:                                     # an operand, by then
        names += ["a", "b", "global_a_layout"]
    expected = None
    others = "epilogues.Epilogue()", "epilogues.ReLU()", "operators.MIN_PLUS"     # good ones, of which NumPy knows nothing
    is_another = any(values[int(n)] in (*others, *["None"] * (call.arguments[int(n)].name == "epilogue"))
                     and values[int(n)] != call.arguments[int(n)].good for n in chosen)
    if call.expected is not None and way >= 0.08 and not is_another:
        expected = f"(lambda {', '.join(a.name for a in call.arguments)}: {call.expected})({', '.join(_plain(a, v) for a, v in zip(call.arguments, values))})"
    return Case(f"{call.function}({', '.join(given)})", call.after, tuple(dict.fromkeys(names)), expected,
                " and ".join(f"{call.arguments[int(n)].name}={values[int(n)]}" for n in chosen))


def _plain(argument: Argument, value: str) -> str:
    plain = f"np.asarray({value})" if value.startswith("np.matrix(") else value       # a stack of matrices cannot be multiplied
    return plain if argument.kind == "array" else "None"


def _related(call: Call, names: list[str]) -> list[str]:
    """Arguments that may be named instead: shapes and dtypes of operands disagree both ways."""
    operands = [a.name for a in call.arguments if a.kind in ("array", "shape", "component", "any", "dtype", "tile", "count")]
    return [*operands, "gemm_shape"] if any(a.name in names for a in call.arguments) else []


def _command(rng: np.random.Generator) -> Case:
    arguments = commands()[int(rng.integers(len(commands())))]
    return Case(f"main({list(arguments)!r})", "result", (*arguments, "error"), None, " ".join(arguments))


def _method(rng: np.random.Generator) -> Case:
    cases = methods()
    base, name, arguments, made, used = cases[int(rng.integers(len(cases)))]
    body, changed = str(rng.choice(METHODS)).replace("{{", "{").replace("}}", "}"), arguments
    if rng.random() < 0.4:                                                # another number of arguments
        changed = str(rng.choice(["", "x", "a, b, c, d, e, f, g", "*rest", "x, *, key", "**keywords", arguments + ", more"]))
        body = "return 0"
    constants = ", identity=0.0, start=0.0" if "FPU" in base else ""
    return Case(f"method({base}, {name!r}, {changed!r}, {body!r}{constants}){made}", used,
                (name, "Mine", base.rpartition(".")[2], *(("a",) if name == "extents" else ())), None, f"{base}.{name}({changed}): {body}")


__all__ = ["draw", "outcomes"]
