"""The operators ``torch.ops.qsync_opt.*``: their declaration, and the loading of their CUDA code.

An operator is declared in Python: schema, plain-PyTorch implementation (the specification, and what CPUs run) and
fake kernel. Its CUDA implementation is registered by the compiled library of its unit, which :func:`activate` builds
and loads before the first call on a card. Where it cannot be built, the plain implementation is registered for CUDA in
its place, and :func:`reason` says why.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from qsync_opt.errors import NotInstalledError, NotReadyError, UnsupportedError
from qsync_opt.kernels.compilation import builder

NAMESPACE = "qsync_opt"
BACKENDS = ("auto", "compiled", "reference")
"""By which an operator may be asked for: compiled where that runs, compiled or an error, the specification."""
_FRAGMENT: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]
_PLAIN: dict[str, dict[str, Callable[..., Any]]] = {}
# Per unit, "" if its CUDA code is loaded, else why it is not.
_STATE: dict[str, str] = {}


def define(schema: str, *, unit: str | None, plain: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """Declare an operator.

    Args:
        schema: Name and signature: ``"double(Tensor x) -> Tensor"``.
        unit: Unit whose library registers the CUDA implementation, under the same name; None: ``plain`` runs on every
            device, and no compiler looks into it.
        plain: The operator in plain PyTorch: the specification, and the implementation on CPU.
        fake: Shapes, strides and types of the results without computing them.

    Returns:
        The operator, an ``OpOverload``.
    """
    name = schema.partition("(")[0]
    _FRAGMENT.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _FRAGMENT.impl(name, plain, "CPU")
    if unit is None:
        _FRAGMENT.impl(name, plain, "CUDA")
    else:
        _PLAIN.setdefault(unit, {})[name] = plain
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_FRAGMENT)
    return getattr(torch.ops.qsync_opt, name).default


def check_backend(backend: str) -> None:
    """Refuse a backend that `operator` does not know.

    Raises:
        UnsupportedError: It is none of `BACKENDS`.
    """
    if backend not in BACKENDS:
        raise UnsupportedError(f"backend is {backend!r}, but allowed are {', '.join(BACKENDS)}")


def operator(unit: str, name: str, device: torch.device, backend: str) -> Any:
    """An operator of a unit, ready on the device; its plain implementation for ``backend="reference"``.

    Raises:
        UnsupportedError: ``backend="compiled"``, and the unit's CUDA code cannot run.
    """
    if backend == "reference":
        return _PLAIN[unit][name]
    if device.type == "cuda" and not activate(unit) and backend == "compiled":
        raise UnsupportedError(f"backend 'compiled': {name} runs in plain PyTorch here: {reason(unit)}")
    return getattr(torch.ops.qsync_opt, name).default


def present_targets() -> tuple[str, ...]:
    """Targets of the cards that torch sees, without repetition."""
    capabilities = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return tuple(sorted({builder.target_of(capability) for capability in capabilities}))


def _load(unit: str) -> str:
    """Build and load; return why it could not be done, or nothing."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA card"
    try:
        torch.ops.load_library(builder.build(unit, present_targets()))  # type: ignore[no-untyped-call]
    except (NotInstalledError, NotReadyError, UnsupportedError) as error:
        return str(error)
    return ""


@torch.compiler.assume_constant_result
def activate(unit: str) -> bool:
    """Make the unit's operators callable on CUDA tensors, building its library on first use.

    Returns whether the compiled code runs there; else the plain implementation does.
    """
    if unit not in _STATE:
        _STATE[unit] = _load(unit)
        if _STATE[unit] and torch.cuda.is_available():
            for name, plain in _PLAIN.get(unit, {}).items():
                _FRAGMENT.impl(name, plain, "CUDA")
    return not _STATE[unit]


def build_missing(units: Sequence[str]) -> list[str]:
    """Build the libraries of several units for the present cards at the same time, and return which were missing.

    A unit that cannot be built is left to `activate`, which says why.
    """
    targets = present_targets()
    try:
        missing = [unit for unit in units if targets and not builder.library_path(unit, targets).is_file()]
    except NotInstalledError:
        return []

    def build(unit: str) -> None:
        with contextlib.suppress(NotInstalledError, NotReadyError, UnsupportedError):
            builder.build(unit, targets)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(build, missing))
    return missing


def reason(unit: str) -> str:
    """Why a unit's compiled code does not run here, with what to install; empty if it does."""
    activate(unit)
    return _STATE[unit]


def refusal(unit: str, device: torch.device, oldest: tuple[int, int]) -> str:
    """Why the unit's CUDA code, for cards from a compute capability on, does not run on a device, or nothing."""
    if device.type != "cuda":
        return f"there is no kernel for {device.type}"
    if torch.cuda.get_device_capability(device) < oldest:
        return f"{device} is older than compute capability {'.'.join(map(str, oldest))}"
    return reason(unit)
