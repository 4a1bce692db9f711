"""The gate on machine code (`tools.sass_gate`), on texts: what it reads, and that it fails where it should."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tools.sass_gate.__main__ import main
from tools.sass_gate.cases import CASES
from tools.sass_gate.compare import compare
from tools.sass_gate.listing import Listing, histogram, main_loops
from tools.sass_gate.record import STORED, compact, load, save

# An outer loop around one that multiplies and one that fetches; a wait at the end jumps back into the first.
SASS = """
        .section .debug_line
        /*0000*/ 	.byte	0x0d, 0x1e
        /*0004*/ 	.word	.L_x_9@srel
.L_x_0:
        /*0000*/                   IMAD.MOV.U32 R1, RZ, RZ, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R7 ;
        /*0020*/              @!P0 BRA `(.L_x_4) ;
.L_x_9:
        /*0030*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24.reuse, UP0 ;
        /*0040*/                   IADD3 R7, R7, R9, RZ ;
        /*0050*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0060*/                   UTMALDG.2D [UR8], [UR6] ;
        /*0070*/               @P2 BRA `(.L_x_2) ;
        /*0080*/               @P3 BRA `(.L_x_0) ;
        /*0090*/                   EXIT ;
.L_x_4:
        /*00a0*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R7 ;
        /*00b0*/                   BRA `(.L_x_9) ;
"""


def recorded(sass: str = SASS, **changes: Any) -> dict[str, Any]:
    kernel = {"registers": 168, "spills": [0, 0, 0], "histogram": histogram(sass), "loops": main_loops(Listing.of(sass))}
    return {"compilers": {"ptxas": "13.0.88"}, "kernels": {"tma": {**kernel, **changes}}}


def test_loops_have_their_registers_renamed() -> None:
    loops = main_loops(Listing.of(SASS))
    assert loops["multiply"] == ["SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR0], R0 ;", "@!P0 BRA label0 ;",
                                 "HGMMA.64x128x16.F32 R1, gdesc[UR1], R1, UP0 ;", "IADD3 R0, R0, R2, RZ ;", "@P1 BRA label1 ;"]
    assert loops["fetch"] == ["UTMALDG.2D [UR0], [UR1] ;", "@P0 BRA label0 ;"]
    assert main_loops(Listing.of(SASS.replace("R24", "R88").replace("UR12", "UR40").replace(".L_x_", ".L_x_7"))) == loops


def test_a_text_without_instructions_is_refused() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        Listing.of(".section .text")


CHANGED = {
    "an instruction more": ({"histogram": {**histogram(SASS), "WARPSYNC": 2}}, "tma: WARPSYNC 0 -> 2"),
    "one less": ({"histogram": {**histogram(SASS), "IADD3": 0}}, "tma: IADD3 1 -> 0"),
    "another modifier": ({"histogram": histogram(SASS.replace("UTMALDG.2D", "UTMALDG.3D"))}, "tma: UTMALDG.2D 1 -> 0"),
    "registers": ({"registers": 170}, "tma: registers 168 -> 170"),
    "spills": ({"spills": [8, 8, 16]}, "tma: spills [0, 0, 0] -> [8, 8, 16]"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_the_gate_fails(what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields, message = CHANGED[what]
    files = [tmp_path / name for name in ("before.json", "after.json")]
    save(recorded(), files[0])
    save(recorded(**fields), files[1])
    assert main(["compare", *map(str, files)]) == 1
    assert message in capsys.readouterr().out.splitlines()
    assert main(["compare", str(files[0]), str(files[0])]) == 0


def test_another_order_is_noted() -> None:
    before, after = recorded(), recorded(loops={**recorded()["kernels"]["tma"]["loops"], "fetch": ["@P0 BRA label0 ;", "UTMALDG.2D [UR0], [UR1] ;"]})
    outcome = compare(before, after, lines=True)
    assert outcome.status == 0 and outcome.notes[0] == "tma: loop 'fetch': 1 of 2 lines differ"
    assert any(note.startswith("tma: +") for note in outcome.notes)
    outcome = compare(compact(before), after)                    # digests alone, as the repository keeps them
    assert outcome.status == 0 and len(outcome.notes) == 1 and compare(compact(before), before).notes == ()


def test_kernels_that_one_side_lacks() -> None:
    before, after = recorded(), copy.deepcopy(recorded())
    after["kernels"]["other"] = after["kernels"]["tma"]
    assert compare(before, after).faults == ("other: only the second has this kernel",)
    assert compare(after, before, partial=True).status == 0


def test_other_compilers_are_not_compared() -> None:
    other = recorded(registers=1)
    other["compilers"] = {"ptxas": "13.1.5"}
    outcome = compare(recorded(), other)
    assert outcome.status == 2 and not outcome.faults and "ptxas 13.0.88 and 13.1.5" in outcome.incomparable


def test_the_stored_record_is_of_the_cases_and_small() -> None:
    assert set(load(STORED)["kernels"]) == set(CASES)
    assert STORED.stat().st_size < 200_000
