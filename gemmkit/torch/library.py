"""Operators of ``torch.library``: what all of gemmkit's have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["define", "qualified"]

_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)?")


def qualified(name: Any) -> str:
    """``namespace::name`` of a name; without a namespace it is gemmkit's. Raises ValueError for no name, or a taken one."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f'name={name!r}: a name such as "linear" or "mine::linear" is needed')
    full = name if "::" in name else f"gemmkit::{name}"
    namespace, own = full.split("::")
    if hasattr(getattr(torch.ops, namespace), own):
        raise ValueError(f"name={name!r}: there is an operator {full} already; give another name")
    return full


def define(name: str, schema: str, compute: Callable[..., Any], allocate: Callable[..., Any]) -> Any:
    """An operator that computes by ``compute``; ``allocate`` gives its results of tensors without data (fake and meta
    ones)."""
    torch.library.define(name, schema)
    torch.library.impl(name, ("cpu", "cuda"), compute)
    torch.library.register_fake(name, allocate)
    namespace, own = name.split("::")
    return getattr(getattr(torch.ops, namespace), own).default
