"""What the ranks of a call have to have alike, as text.

A statement holds what is the same on all ranks by the call's meaning. An array's values, address and strides are a rank's
own matter, and so is the length of what is not shared out; they must not decide whether ranks meet, or one rank would wait
for others that do not.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
import torch

import gemmkit
from gemmkit.components import Component, field_values, further_state
from gemmkit.emulator.mode import is_emulating
from gemmkit.kept import frozen
from gemmkit.lang.closures import captured
from gemmkit.lang.fingerprint import digest, read_class, read_closure, read_value
from gemmkit.lang.package_state import package_digest
from gemmkit.lang.runtime_fields import Scalar, annotated
from gemmkit.launch import Cache
from gemmkit.runtime.arrays import info_of, is_array

_texts = Cache()                                  # by the fingerprint, which has more in it (alignment)


def component_text(value: Any) -> str:
    """A component's class, code and constants; of arrays and run-time numbers only dtypes and dimensions.

    >>> import numpy as np
    >>> from gemmkit.epilogues import Bias, Scale
    >>> component_text(Scale(2.0)) == component_text(Scale(3.0)), component_text(Scale(2.0)) == component_text(
    ...     Bias(np.zeros(4, np.float32)))
    (True, False)
    """
    if not isinstance(value, Component):
        return digest(_text(value))
    key = frozen(value).fingerprint
    found: str | None = _texts.get(key)
    return found or _texts.keep(key, digest(_text(value)))


def _text(value: Any, is_runtime: bool = False) -> str:
    if isinstance(value, Component):
        kinds = annotated(type(value))
        parts = [f"{name}={_text(field, kinds.get(name) is Scalar)}"
                 for name, field in {**field_values(value), **further_state(value)}.items()]
        return "\n".join((read_class(type(value), Component).text, *parts))
    if is_array(value):
        info = info_of(value)
        return f"array of {info.dtype}, {len(info.shape)} dimensions"
    if is_runtime or isinstance(value, np.generic):
        return f"number of {type(value).__name__}"
    if callable(value) and hasattr(value, "__code__"):
        held = captured(value)
        return "\n".join((read_closure(value, held.keys()).text, *(f"{name}={_text(x)}" for name, x in held.items())))
    return read_value(value, "value").text


def statement_of(call: str, tensor: Any, facts: dict[str, Any], components: dict[str, Any]) -> dict[str, str]:
    """The statement of a call: its name, versions, the kind of a tensor's device, ``facts`` and its components' texts."""
    said = {"the call": call, "gemmkit's version": gemmkit.__version__, "gemmkit's source": package_digest(of_process=False),
            "PyTorch's version": str(torch.__version__), "Python's version": platform.python_version(),
            "the device": _device_text(tensor.device)}
    said |= {name: str(fact) for name, fact in facts.items()}
    for name in sorted(components):
        if components[name] is not None:
            said[name] = f"{type(components[name]).__name__} {component_text(components[name])[:16]}"
    return said


def _device_text(device: Any) -> str:
    if device.type != "cuda":
        return f"{device.type}{', emulated' if is_emulating() else ''}"
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"


def gpu_text(device: Any) -> str:
    """Which GPU it is, of all hosts."""
    return f"{platform.node()}, {torch.cuda.get_device_properties(device).uuid}"
