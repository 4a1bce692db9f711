"""A backend without a GPU: NumPy arrays, gemmkit in the emulator, and a clock that counts calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import gemmkit
from bench.cases import DTYPES, Case
from bench.fusions import WORKS, Operands
from bench.harness import Call


class Host:
    """A `bench.peers.TorchPeers` in NumPy. A captured call takes 1 us, a peer's ``slower`` us."""

    def __init__(self, slower: float = 1.25) -> None:
        self.now, self.slower = 0.0, slower
        self.wrong_peer = False
        self.made: list[tuple[int, int, str]] = []

    def normal(self, rows: int, columns: int, dtype: str, seed: int) -> np.ndarray:
        self.made.append((rows, columns, dtype))
        rng = np.random.default_rng(seed)
        numbers = rng.integers(-128, 128, (rows, columns)) if dtype == "i8" else rng.standard_normal((rows, columns))
        return numbers.astype(DTYPES[dtype])

    def empty(self, rows: int, columns: int, dtype: str) -> np.ndarray:
        return np.zeros((rows, columns), DTYPES[dtype])

    def wide(self, array: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
        return (array if rows is None else array[rows]).astype(np.float64)

    def toeplitz(self, diagonals: np.ndarray, m: int, k: int) -> np.ndarray:
        return np.array([[diagonals[i - j + k - 1] for j in range(k)] for i in range(m)], diagonals.dtype)

    def diagonal_matrix(self, diagonal: np.ndarray) -> np.ndarray:
        return np.diag(diagonal)

    def half(self, a: np.ndarray, half: str) -> np.ndarray:
        return np.tril(a) if half == "lower" else np.triu(a)

    def shown(self, array: np.ndarray, shown: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return np.where(shown, array, np.asarray(np.nan, array.dtype)), np.where(shown, array, np.asarray(0, array.dtype))

    def experts(self, tokens: np.ndarray, weights: np.ndarray, ends: np.ndarray) -> np.ndarray:
        starts = [0, *ends[:-1]]
        return np.concatenate([(tokens[i:j].astype(np.float32) @ w.astype(np.float32)).astype(tokens.dtype)
                               for i, j, w in zip(starts, ends, weights)])

    def complex_view(self, parts: np.ndarray) -> np.ndarray:
        return parts.view(np.result_type(parts.dtype, np.complex64))[..., 0]

    def min_plus(self, a: np.ndarray, b: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.asarray((self.wide(a, rows)[:, :, None] + self.wide(b)[None]).min(axis=1))

    def einsum(self, spec: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        self.now += self.slower
        return np.asarray(np.einsum(spec, a.astype(np.float64), b.astype(np.float64)), a.dtype) * self.scale

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        self.now += self.slower
        out[...] = (a.astype(np.result_type(a, np.float32)) @ b) * self.scale

    def product(self, kind: str, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        self.matmul(self.wide(a), self.wide(b), out)

    def wide_matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        self.matmul(a, b, out)

    def row_wise(self, work: str, is_compiled: bool) -> Callable[..., np.ndarray]:
        from tests.functions.test_rows import layernorm, rmsnorm, softmax

        def call(x: np.ndarray, gamma: np.ndarray, beta: np.ndarray, index: Any = None) -> np.ndarray:
            self.now += self.slower
            wide = x.astype(np.float64)
            found = {"layernorm": lambda: layernorm(wide, gamma, beta), "rmsnorm": lambda: rmsnorm(wide, gamma), "softmax": lambda: softmax(wide),
                     "transposed": lambda: (wide / (1 + np.exp(-wide)) * gamma).T, "named": lambda: rmsnorm(wide[index], gamma)}
            return np.asarray(found[work]() * (self.scale if x.dtype != np.float64 else 1), x.dtype)

        return call

    def row_wise_title(self, is_compiled: bool) -> str:
        return "NumPy"

    def plain(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        self.matmul(a, b, out)

    def joined(self, a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return np.concatenate((a, b), axis)

    def scaled(self, array: np.ndarray, factor: float) -> np.ndarray:
        return array * array.dtype.type(factor)

    def largest(self, array: np.ndarray) -> np.ndarray:
        return np.asarray(array.max(-1))

    def composed(self, work: str) -> Callable[[Any], None]:
        def call(x: Any) -> None:
            self.now += self.slower
            if work == "glu":
                gate, up = (x.a.astype("f8") @ part.astype("f8") for part in (x.w, x.v))
                found = gate / (1 + np.exp(-gate)) * up
            elif work == "softmax":
                found = np.exp(x.a.astype("f8") @ x.b.astype("f8"))
                found /= found.sum(1, keepdims=True)
            elif work == "rmsnorm":
                found = x.a.astype("f8") @ x.b.astype("f8")
                found = found / np.sqrt((found * found).mean(1, keepdims=True) + 1e-5) * x.gain
            else:
                found = np.maximum(x.inputs.astype("f8") @ x.weights.astype("f8") + x.bias, 0)
            x.peer_out[...] = found * self.scale

        return call

    def composed_title(self, work: str) -> str:
        return f"NumPy: {work}"

    def layers(self, x: Any) -> None:
        self.now += self.slower
        h = self.wide(x.a)
        for w, b in zip(x.weights, x.biases):
            h = np.maximum(h @ self.wide(w) + self.wide(b), 0)
        x.peer_out[...] = (h * self.scale).astype(x.peer_out.dtype)

    def layers_title(self) -> str:
        return "NumPy: products, biases, ReLU"

    def of_numbers(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.astype({"i": np.int32, "u": np.int32, "b": np.bool_}.get(numbers.dtype.kind, np.float32))

    def as_numpy(self, array: np.ndarray) -> np.ndarray:
        return array.astype(np.result_type(array.dtype, np.float64))

    def rival(self, case: Any, x: Any) -> Call:
        call: Call = (lambda: self.plain(x.a, x.b, x.peer_out)) if case.work == "row sums of a" else case.of.peers(self, x)
        return call

    def rival_title(self, case: Any) -> str:
        return f"NumPy: {case.rival}"

    def mixed(self, case: Any, x: Any) -> Call:
        def call() -> None:
            self.now += self.slower
            found = case.reference(self, x, slice(None))
            for part, wanted in enumerate(found) if isinstance(x.peer_out, list) else ((..., found),):
                x.peer_out[part][...] = wanted * self.scale

        return call

    def mixed_title(self, case: Any) -> str:
        return f"NumPy: {case.work}"

    def attention(self, case: Any) -> Callable[..., np.ndarray]:
        """As `case.expected` has it: head by head."""
        def call(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
            self.now += self.slower
            out, share = np.empty_like(q), q.shape[1] // k.shape[1]
            for i, h in np.ndindex(q.shape[:2]):
                given = (self.as_numpy(x) for x in (q[i, h], k[i, h // share], v[i, h // share]))
                out[i, h] = case.expected(*given, np.arange(q.shape[2])[:, None], h) * self.scale
            return out

        return call

    def attention_title(self, case: Any) -> str:
        return "NumPy"

    def limit(self, limit: Any, out: np.ndarray, first: np.ndarray) -> Call:
        def call() -> None:
            self.now += self.slower
            out[...] = np.array([limit.made_of(first, n) for n in range(len(out))]) * self.scale

        return call

    def peer_name(self) -> str:
        return "NumPy"

    def sample(self, rows: int, count: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(rows)[:count]

    def relative_error(self, out: np.ndarray, reference: np.ndarray) -> float:
        return float(np.linalg.norm(out.astype(np.float64) - reference) / np.linalg.norm(reference))

    def poison(self, array: np.ndarray) -> None:
        array.fill(np.iinfo(array.dtype).max if array.dtype.kind == "i" else np.nan)

    def l2_bytes(self) -> int:
        return 64

    def capture(self, calls: Sequence[Call]) -> Call:
        return lambda: [call() for call in calls]

    def elapsed_us(self, call: Call) -> float:
        start = self.now
        call()
        return self.now - start

    def synchronise(self) -> None:
        pass

    @property
    def scale(self) -> float:
        return 0.5 if self.wrong_peer else 1.0

    def peer(self, case: Case, x: Operands) -> Call:
        found = WORKS[case.work].reference(x, self.wide, slice(None)) * self.scale

        def call() -> None:
            self.now += self.slower
            x.peer_out[:] = found.astype(x.peer_out.dtype)

        return call

    def peer_title(self, case: Case) -> str:
        return f"NumPy: {case.work}"

    def plan(self, a: Any, b: Any, c: Any, conf: Any, **keywords: Any) -> Callable[..., Any]:
        """`gemmkit.plan` in the emulator: each input set is computed once, and its result put down again after that."""
        if conf is None:
            keywords.setdefault("operator", gemmkit.operators.MMAOp())
        with gemmkit.emulate():
            made = gemmkit.plan(a, b, c, conf, **keywords)
        known: dict[int, np.ndarray] = {}

        def run(a: Any, b: Any, c: Any = None, *, out: Any) -> Any:
            self.now += 1.0
            if id(out) not in known:
                with gemmkit.emulate():
                    made(a, b, c, out=out)
                known[id(out)] = out.copy()
            out[:] = known[id(out)]

        run.config = made.config  # type: ignore[attr-defined]
        return run
