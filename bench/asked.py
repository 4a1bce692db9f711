"""What was asked of the paper's experiments beside what was reached: `python -m bench.asked`.

    python -m bench.asked                                  the tables, of hopper_square.json and experiments.json
    python -m bench.asked --into docs/experiments.md       write them into the text, between its marks
    python -m bench.asked --into docs/peers.md             the same of that text: the table of rivals

From the files alone. Further tables are those of `bench.paper_tables`. The first table has a line for every row that
is asked something, and one for a group whose geometric mean is; the second the 48 contractions by where each tensor's
fastest index is.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import paper_tables, report, verdicts
from bench.experiments import contractions
from bench.experiments.run import GROUPS
from bench.marks import put

RESULTS = Path(__file__).parent / "results"
FILES = RESULTS / "hopper_square.json", RESULTS / "experiments.json"
BEGIN, END = "<!-- asked: python -m bench.asked --into docs/experiments.md -->", "<!-- end of what was asked -->"


def line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def asked(bar: float | None, aim: float | None, ratio: float) -> list[str]:
    return [*("" if x is None else f"{x:.2f}" for x in (bar, aim)), verdicts.verdict(ratio, bar, aim)]


def lines(group: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of a group: its geometric mean if something is asked of that, else every row."""
    title = verdicts.GROUPS[group]
    if group in verdicts.MEANS and rows:
        found = verdicts.summary(rows)[group]
        mean, parts = found["geometric_mean"], ", ".join(f"{kind} {x:.3f}" for kind, x in found["means"].items())
        what = f"geometric mean of {len(rows)} ({parts})"
        yield line([title, what, f"**{mean:.3f}**", *asked(*verdicts.MEANS[group], mean)])
        return
    for row in rows:
        what = f"{row['work']} {row['dtype']} {verdicts.size(row)}: {row['ours_us']:.0f} us and {row['peer_us']:.0f} us"
        yield line([title, what, f"**{row['ratio']:.3f}**", *asked(row.get("bar"), row.get("aim"), row["ratio"])])
        title = ""


def paper(content: Mapping[str, Any]) -> list[str]:
    """The first table: every experiment of the paper, those that were not measured too."""
    found = [line(["experiment", "what: ours and the peer's time", "reached", "at least", "aim", ""]), "|" + "---|" * 6]
    failed = content.get("failed", {})
    for group in GROUPS:
        found += lines(group, [row for row in content["rows"] if row["group"] == group])
        found += [line([verdicts.GROUPS[group], f"{case}: {why}", "not measured", "", "", "missed"])
                  for case, why in failed.items() if case.startswith(f"{group}:")]  # fmt: skip
    return found


def directions(case: str) -> tuple[str, str]:
    """Of a case such as "abj-bka-kj" (indices fastest first): in which dimension of the product the fastest index of A, of B
    and of D is, and which two have different ones in the same dimension.

    >>> directions("abcijk-ijma-mkbc"), directions("ij-ik-kj")
    (('M, K, M', 'A and D'), ('M, K, M', ''))
    """
    d, a, b = case.split("-")
    fastest = dict(A=a[0], B=b[0], D=d[0])
    along = {name: "K" if x not in d else "M" if x in a else "N" for name, x in fastest.items()}
    apart = [f"{x} and {y}" for x, y in ("AB", "AD", "BD") if along[x] == along[y] and fastest[x] != fastest[y]]
    return ", ".join(along.values()), ", ".join(apart)


def families(content: Mapping[str, Any]) -> list[str]:
    """The second table: geometric means of TCCG's contractions by TCCG's groups and `directions`, worst float16 first."""
    ratios = {row["case"]: row["ratio"] for row in content["rows"]}
    named = {case: name for name, cases in contractions.tccg_groups().items() for case in cases}
    found: dict[tuple, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    example: dict[tuple, str] = {}
    for case in contractions.tccg():
        if str(case) in ratios:
            key = named[case.work], *directions(case.work)
            found[key][case.kind].append(ratios[str(case)])
            example.setdefault(key, case.work)

    def cells(kinds: Mapping[str, list[float]]) -> Iterator[str]:
        for kind in contractions.KINDS:
            some = kinds.get(kind)
            yield f"{verdicts.geometric_mean(some):.2f} ({min(some):.2f} to {max(some):.2f})" if some else "not measured"

    order = sorted(found, key=lambda key: verdicts.geometric_mean(next(iter(found[key].values()))))
    means = (f"{kind} mean (of)" for kind in contractions.KINDS)
    head = ["TCCG's group", "A, B, D along", "at odds", "cases", *means, "such as"]
    return [line(head), "|" + "---|" * len(head)] + [
        line([*key, str(len(next(iter(found[key].values())))), *cells(found[key]), example[key]])
        for key in order
    ]


def text(content: Mapping[str, Any], dates: Sequence[str]) -> str:
    """Both tables, and where they come from."""
    said = f"On {content['device']}, driver {content['driver']}; measured {', '.join(dates)}. "
    return "\n".join([
        said + "Ratios: the peer's time over ours.", "", *paper(content), "",
        "The 48 contractions of TCCG, by the dimension of the product in which each tensor's fastest index is, and by whose",
        "are at odds (two indices of one dimension: what makes neighbours in one tensor does not in the other):", "",
        *families(content),
    ])  # fmt: skip


def made(files: Sequence[Path]) -> str:
    """`text` of result files.

    Raises:
        ValueError: files of several devices.
    """
    contents = [report.read(path) for path in files]
    return text(verdicts.merge(contents), [f"{c['date'][:16].replace('T', ' ')} ({c['bench']})" for c in contents])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.asked", description="What was asked, and what was reached.")
    parser.add_argument("results", type=Path, nargs="*", help="result files (default: hopper_square, experiments)")
    parser.add_argument("--into", type=Path, help="a text to write the tables into")
    options = parser.parse_args(arguments)
    if options.into is None:
        print(made(options.results or FILES))
        return 0
    text = options.into.read_text(encoding="utf-8")
    wanted = [name for name in paper_tables.TABLES if paper_tables.marks(name)[0] in text]
    if BEGIN in text or not wanted:
        text = put(text, made(options.results or FILES), BEGIN, END)
    for name in wanted:
        text = put(text, "\n".join(paper_tables.TABLES[name](RESULTS)), *paper_tables.marks(name))
    options.into.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
