"""Screenshots by headless Chromium: what is refused without one, and where one is, what a page is seen to do."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest

from tests.support.patches import Set
from tools.browser import NAMES, Browser, NoBrowser, address_of, found
from tools.screenshots import main, pages_of, served, size_of

needs_browser = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="no Chromium is installed")
DARK = "<!doctype html><style>@media (prefers-color-scheme: dark) {body {width: 7px}} b:hover {color: red}</style><b>hello</b>"


def size(png: bytes) -> tuple[int, ...]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", png[16:24])


def test_no_browser(environment: Set, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment(PATH=tmp_path)
    with pytest.raises(NoBrowser, match="looked for chromium, chromium-browser"):
        found()
    with pytest.raises(NoBrowser, match=r"looked for other\); install it"):
        found("other")
    (tmp_path / "x.html").write_text("x")
    assert main([str(tmp_path / "x.html")]) == 2
    assert "apt-get install chromium" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.html"
    file.write_text("x")
    for arguments, message in (([str(tmp_path / "no.html")], "there is no such file"),
                               ([str(file), "--size", "0x3"], "WIDTHxHEIGHT"),
                               ([str(file), "--page", "x.html"], "no PATH is a folder")):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="100"):
        size_of("100")


def test_pages_of_a_site(tmp_path: Path) -> None:
    for name in ("index.html", "start/index.html", "how/to/index.html", "404.html"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert pages_of(tmp_path, ()) == {"404": "404.html", "how-to": "how/to/index.html", "index": "index.html",
                                      "start": "start/index.html"}
    assert pages_of(tmp_path, ["how/to/", "start"]) == {"how-to": "how/to/index.html", "start": "start/index.html"}
    with pytest.raises(ValueError, match="--page none"):
        pages_of(tmp_path, ["none"])
    with pytest.raises(ValueError, match="no page"):
        pages_of(tmp_path / "none", ())


@needs_browser
def test_pictures_and_what_a_page_does(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(DARK)
    (tmp_path / "b.html").write_text('<!doctype html><link rel=stylesheet href="own.css"><script>nothing.at.all</script>')
    (tmp_path / "own.css").write_text("body {height: 2000px}")
    with Browser() as browser, served(tmp_path) as root:
        page = browser.open(address_of(tmp_path / "a.html"), width=300, height=200, dark=True)
        assert size(page.picture()) == (300, 200) and page.run("document.body.clientWidth") == 7
        page.hover("b")
        assert page.run("getComputedStyle(document.querySelector('b')).color") == "rgb(255, 0, 0)"
        assert size(page.picture("b"))[1] < 40 and not page.errors and not page.fetched
        with pytest.raises(RuntimeError, match="no such element"):
            page.hover("i")
        other = browser.open(root + "b.html", width=300, height=200)
        assert size(other.picture(whole=True)) == (300, 2016)
        assert other.fetched == [root + "own.css"] and "nothing is not defined" in other.errors[0]


@needs_browser
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.html").write_text(DARK)
    assert main([str(tmp_path), "--out", str(tmp_path / "out"), "--dark", "--alone"]) == 0
    assert size((tmp_path / "out" / "a-dark.png").read_bytes()) == (1200, 900)
    (tmp_path / "a.html").write_text('<img src="file:///no.png">')
    assert main([str(tmp_path / "a.html"), "--alone"]) == 1
    assert "asks for file:///no.png" in capsys.readouterr().err
