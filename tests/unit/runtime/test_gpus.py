"""GPUs that are not here, by name."""

from __future__ import annotations

import pytest

from gemmkit.runtime.device import A100, GPUS, H100, T4, assumed, assumed_device, gpu, target


def test_by_architecture() -> None:
    assert gpu("sm_90a") is gpu("sm_90") is H100 and gpu("sm_75") is T4 and gpu("sm_80:108") is A100
    assert list(GPUS) == ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


def test_with_other_multiprocessors() -> None:
    pcie = gpu("sm_90a:114")
    assert (pcie.arch_name, pcie.sm_count, pcie.shared_memory_per_block) == ("sm_90a", 114, H100.shared_memory_per_block)


@pytest.mark.parametrize("text", ["", "H100", "sm_70", "sm_90a:", "sm_90a:0", "sm_90a:x", "sm_80a", "SM_80", "sm_80:108 "])
def test_what_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no GPU that kernels can be compiled for: one of sm_75, .*sm_90a:114"):
        gpu(text)


def test_a_device_is_assumed_within() -> None:
    before = target()
    assert assumed_device() is None
    with assumed(A100):
        assert target() is target(-1) is assumed_device() is A100
        with assumed(T4):
            assert target() is T4
        assert target() is A100
    assert target() == before
