"""Screenshots of HTML files, or of the pages of a built site, with headless Chromium where it is installed.

    python -m tools.screenshots report.html                         # report.png beside it
    python -m tools.screenshots report.html --out docs --dark --size 1100x700
    python -m tools.screenshots report.html --element "#pipeline" --hover "#pipeline rect.wait"
    python -m tools.screenshots site --page index.html --page tutorials/layout/ --out shots

A folder is a site: it is served to the browser from this machine alone, for as long as this takes. Without --page all of its
pages are taken. The status is 1 where a page's script raised something, or with --alone where a file asked for anything but
itself, or a page of a site for anything but the site's; both are said. It is 2 where there is no Chromium, file, page or
element of that name.
"""

from __future__ import annotations

import argparse
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tools.browser import Browser, NoBrowser, address_of

SIZE = "1200x900"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address at which a folder's files are served on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def pages_of(site: Path, given: Sequence[str]) -> dict[str, str]:
    """The pages of a site: by the name of the picture, the path under the site's address.

    Raises ValueError for a page that the site lacks, or a site without pages.
    """
    paths = list(given) or [str(file.relative_to(site).as_posix()) for file in sorted(site.rglob("*.html"))]
    if not paths:
        raise ValueError(f"{site}: there is no page (*.html) in this folder")
    found = {}
    for path in paths:
        file = site / path / "index.html" if path.endswith("/") or (site / path).is_dir() else site / path
        if not file.is_file():
            raise ValueError(f"--page {path}: {site} has no such page")
        own = file.relative_to(site).with_suffix("")
        name = own.parent if own.name == "index" and own.parent != Path() else own
        found["-".join(name.parts)] = file.relative_to(site).as_posix()
    return found


def size_of(text: str) -> tuple[int, int]:
    """``1200x900`` as numbers; raises ValueError."""
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise ValueError(f"--size {text}: WIDTHxHEIGHT is needed, for example {SIZE}")
    return int(found[1]), int(found[2])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m tools.screenshots", description=(__doc__ or "").split("\n\n")[0])
    made.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="an HTML file, or the folder of a built site")
    made.add_argument("--page", action="append", default=[], metavar="PATH", help="a page of the site (again for more)")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="where pictures go (default: a file's; of a site: here)")
    made.add_argument("--size", default=SIZE, metavar="WxH", help=f"of the window (default: {SIZE})")
    made.add_argument("--scale", type=float, default=1, help="pixels of the picture for one of the page (default: 1)")
    made.add_argument("--dark", action="store_true", help="tell pages that the reader prefers dark (names end in -dark)")
    made.add_argument("--whole", action="store_true", help="the whole page, not what the window shows")
    made.add_argument("--element", metavar="CSS", help="this element alone")
    made.add_argument("--hover", metavar="CSS", help="with the mouse over this element")
    made.add_argument("--alone", action="store_true", help="fail where a page asks for anything but itself")
    made.add_argument("--browser", metavar="PROGRAM", help="Chromium's program (default: the one that is found)")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        return _run(options)
    except (ValueError, NoBrowser, RuntimeError, OSError) as error:
        print(f"screenshots: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    size = size_of(options.size)
    for path in options.paths:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file or folder")
    if options.page and not any(path.is_dir() for path in options.paths):
        raise ValueError("--page: pages are of a site, and no PATH is a folder")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
    wrong = 0
    with Browser(options.browser) as browser:
        for path in options.paths:
            if path.is_dir():
                with served(path) as root:
                    for name, at in pages_of(path, options.page).items():
                        wrong += _taken(browser, root, at, (options.out or Path()) / name, size, options)
            else:
                wrong += _taken(browser, address_of(path), "", (options.out or path.parent) / path.stem, size, options)
    return 1 if wrong else 0


def _taken(browser: Browser, root: str, at: str, to: Path, size: tuple[int, int], options: argparse.Namespace) -> bool:
    """Take the picture of the page at ``root + at``; whether something is wrong with it."""
    page = browser.open(root + at, width=size[0], height=size[1], scale=options.scale, dark=options.dark)
    if options.hover:
        page.hover(options.hover)
    file = to.with_name(f"{to.name}{'-dark' if options.dark else ''}.png")
    file.write_bytes(page.picture(options.element, options.whole))
    print(f"{file}: {file.stat().st_size / 1000:.0f} kB")
    asked = [one for one in page.fetched if not (at and one.startswith(root))] if options.alone else []
    for wrong in (*page.errors, *(f"asks for {one}" for one in asked)):
        print(f"{root}{at}: {wrong}", file=sys.stderr)
    return bool(page.errors or asked)


if __name__ == "__main__":
    sys.exit(main())
