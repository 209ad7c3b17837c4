"""Weights as a stage holds them: packed in 4 or 8 bits by `qsync_opt.kernels.weight_only`, or plain.

A scheme's name is ``W`` and the bits of weights, ``H`` where inputs are rotated first (by Hadamard matrices), and ``A``
and the bits of activations where they are rounded: W4 (or W4A16), W4A8, W4H, W4HA8, W8 (W8A16), W8A8, W16 (BF16), W32
(FP32).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional as F

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels import weight_only

GROUP = 128
"""Inputs that share a scale."""


class Scheme(NamedTuple):
    """Bits of weights, activations as `qsync_opt.kernels.weight_only` names them, and whether inputs are rotated."""

    bits: int
    activations: str = weight_only.WIDE
    rotated: bool = False


SCHEMES = {
    "W4": Scheme(4),
    "W4A16": Scheme(4),
    "W4A8": Scheme(4, "A8"),
    "W4H": Scheme(4, rotated=True),
    "W4HA8": Scheme(4, "A8", rotated=True),
    "W8": Scheme(8),
    "W8A16": Scheme(8),
    "W8A8": Scheme(8, "A8"),
    "W16": Scheme(16),
    "W32": Scheme(32),
}
"""Schemes by name."""


def scheme_bits(scheme: str) -> int:
    """Weight bits of a scheme's name.

    Raises:
        UnsupportedError: Any other name.
    """
    if scheme not in SCHEMES:
        raise UnsupportedError(f"scheme is {scheme!r}, but this runtime has {', '.join(SCHEMES)}")
    return SCHEMES[scheme].bits


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A matrix (out, in) in a scheme: ``packed`` for 4 and 8 bits, else ``plain``."""

    scheme: str
    packed: weight_only.PackedWeight | None = None
    plain: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        if self.packed is not None:
            return self.packed.shape
        assert self.plain is not None
        return self.plain.shape[0], self.plain.shape[1]

    @property
    def bytes(self) -> int:
        """Memory of codes and scales, or of the plain numbers."""
        if self.packed is not None:
            return self.packed.memory_bytes
        assert self.plain is not None
        return self.plain.nbytes


def pack(weight: torch.Tensor, scheme: str, group: int | None = GROUP) -> PackedWeight:
    """Round a matrix (out, in) to nearest, or keep it in the type of its scheme.

    Raises:
        UnsupportedError: An unknown scheme, or a weight that cannot be packed.
    """
    bits = scheme_bits(scheme)
    if bits <= 8:
        return PackedWeight(scheme, packed=weight_only.pack(weight, bits, group, rotate=SCHEMES[scheme].rotated))
    kept = torch.bfloat16 if bits == 16 else torch.float32
    return PackedWeight(scheme, plain=weight.to(kept).contiguous())


def pack_parts(parts: Iterable[torch.Tensor], shape: tuple[int, int], scheme: str) -> PackedWeight:
    """The same as `pack` of a matrix (out, in) that comes in parts of its rows and is never held at once.

    Every part but the last has a multiple of 64 rows.

    Raises:
        UnsupportedError: As `pack` does.
    """
    bits = scheme_bits(scheme)
    if bits <= 8:
        rotated = SCHEMES[scheme].rotated
        return PackedWeight(scheme, packed=weight_only.pack_parts(parts, shape[0], bits, GROUP, rotate=rotated))
    return PackedWeight(scheme, plain=join_parts(parts, shape, torch.bfloat16 if bits == 16 else torch.float32))


def join_parts(parts: Iterable[torch.Tensor], shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A matrix of parts of its rows, on their device."""
    whole: torch.Tensor | None = None
    rows = 0
    for part in parts:
        if whole is None:
            whole = torch.empty(shape, dtype=dtype, device=part.device)
        whole[rows : rows + len(part)] = part
        rows += len(part)
    assert whole is not None and rows == shape[0], "parts are the rows of the matrix"
    return whole


def unpack(weight: PackedWeight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers that a weight stands for, (out, in)."""
    if weight.packed is not None:
        return weight_only.unpack(weight.packed, dtype)
    assert weight.plain is not None
    return weight.plain.to(dtype)


def activations_of(weight: PackedWeight, activations: str) -> str:
    """What the activations of a weight's products are rounded to: as its scheme says, else as a pass asks."""
    own = SCHEMES[weight.scheme].activations
    return activations if own == weight_only.WIDE else own


def linear(
    x: torch.Tensor | weight_only.RoundedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    *,
    activations: str = weight_only.WIDE,
    reproducible: bool = False,
) -> torch.Tensor:
    """``x @ weight.T + bias`` in the type of ``x``.

    Args:
        x: Shape (..., in), or rows that are rounded already, for a packed weight.
        weight: In any scheme.
        bias: Shape (out,).
        activations: Of packed weights, where their scheme does not round them already.
        reproducible: A row's result has the same bits in any batch; packed weights only, see `has_reproducible`.
    """
    if weight.packed is not None:
        activations = activations_of(weight, activations)
        return weight_only.linear(x, weight.packed, bias, activations=activations, reproducible=reproducible)
    assert isinstance(x, torch.Tensor)
    return F.linear(x, unpack(weight, x.dtype), bias)


def has_reproducible(weight: PackedWeight, x: torch.Tensor) -> bool:
    """Whether there is a product by this weight whose rows have the same bits in any batch."""
    types = (torch.bfloat16, torch.float16, *((torch.float32,) if x.device.type == "cpu" else ()))
    return weight.packed is not None and x.dtype in types and not weight_only.explain(x.device)
