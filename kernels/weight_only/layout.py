"""Packed weights: rounding to codes and scales, and the layout of the codes in memory.

A weight (outputs, inputs) is cut into tiles of 64 outputs by 64 inputs, padded with zeros. Within a tile, code (m, k)
stands where a lane of a warp needs it as operand of a tensor core product: with

    m = 16 i + 8 half + g,    k = 16 t + 4 s + 2 pair + odd

the 4-bit layout is `[i][t][g][s][odd][pair][half]` from the slowest to the fastest (the last three are the nibbles of
one word), the 8-bit layout `[i][s / 2][t][g][s % 2][pair][half][odd]`. Codes are stored plus 8 or plus 128, so that
they are not negative. CPUs read the same buffer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError

TILE = 64
ALLOWED_BITS = (4, 8)
ROTATIONS = (128, 64)
"""Inputs that are rotated together, in the order in which they are tried."""
_ZERO = {4: 8, 8: 128}
# Axes of (M64, i, half, g, K64, t, s, pair, odd), and of the same with s as two axes, in the order of the layout.
_ORDER_4 = (0, 4, 1, 5, 3, 6, 8, 7, 2)
_ORDER_8 = (0, 4, 1, 6, 5, 3, 7, 8, 2, 9)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedWeight:
    """A weight of 4 or 8 bits. Its tensors are complete when it is made and do not change afterwards.

    Cards begin to read them before the kernels that compute the activations of a product have ended.

    Attributes:
        codes: uint8, (outputs / 64, inputs / 64, 4, bits / 4, 32, 16), rounded up; see the module's text.
        scales: float32, (groups, outputs rounded up to 64); 1 in the padding.
        bits: 4 or 8.
        group: Consecutive inputs of an output that share a scale, a multiple of 64.
        out_features: Rows of the weight.
        in_features: Columns of the weight.
        rotation: Inputs that are rotated together: codes stand for the weight times blocks of the normalized Hadamard
            matrix, and products rotate activations first. 0: nothing is rotated.
    """

    codes: Tensor
    scales: Tensor
    bits: int
    group: int
    out_features: int
    in_features: int
    rotation: int = 0

    def __post_init__(self) -> None:
        """Wait for the kernels that write the tensors."""
        if self.codes.is_cuda:
            torch.cuda.current_stream(self.codes.device).synchronize()

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the weight."""
        return self.out_features, self.in_features

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def memory_bytes(self) -> int:
        """Bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> PackedWeight:
        """The same weight on another device."""
        return replace(self, codes=self.codes.to(device), scales=self.scales.to(device))


def hadamard(size: int) -> Tensor:
    """The normalized Hadamard matrix (size, size), FP64, in Sylvester's order, for a power of two.

    It is symmetric and its own inverse.
    """
    matrix = torch.ones((1, 1), dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def rotated_inputs(matrix: Tensor, block: int) -> Tensor:
    """Blocks of the columns of a matrix times the `hadamard` matrix, FP64.

    By sums and differences in one order, so that a row has the same bits in any matrix and on any processor; the order
    of a library's product depends on both.
    """
    values, half = matrix.double(), block // 2
    while half:
        first, second = values.reshape(*matrix.shape[:-1], -1, 2, half).unbind(-2)
        values, half = torch.stack([first + second, first - second], -2), half // 2
    return values.reshape(matrix.shape) / math.sqrt(block)


def _check(shape: torch.Size, bits: int, group: int | None) -> int:
    """The group, whole rows resolved."""
    if bits not in ALLOWED_BITS:
        raise UnsupportedError(f"bits is {bits!r}, but allowed are 4 and 8")
    if len(shape) != 2 or 0 in shape:
        raise UnsupportedError(f"the weight has the shape {tuple(shape)}, but a matrix (outputs, inputs) is needed")
    padded = -(-shape[1] // TILE) * TILE
    if group is None:
        return padded
    if isinstance(group, bool) or not isinstance(group, int) or group < 1 or group % TILE:
        raise UnsupportedError(
            f"group is {group!r}, but it must be a multiple of {TILE}, such as 128, or None for one scale per output"
        )
    return min(group, padded)


def pack(weight: Tensor, bits: int, group: int | None = 128, *, rotate: bool = False) -> PackedWeight:
    """Round a weight to the nearest codes, symmetric, with one FP32 scale per output and group of inputs.

    The scale is the group's largest magnitude over 7 or 127, one FP32 division; a group of zeros has the scale 1. Codes
    and scales are the same bits on every device.

    Args:
        weight: Floating matrix, shape (outputs, inputs).
        bits: 4 or 8.
        group: Inputs per scale, a multiple of 64; None: all.
        rotate: Rotate the inputs first, in blocks of 128, or of 64 where 128 does not divide the padded inputs.

    Raises:
        UnsupportedError: Other bits, group or shape, or a weight that holds NaN or an infinity.

    Source: round to nearest, symmetric; the layout is ours.

    Examples:
        >>> codes_of(pack(torch.eye(3), 4)).tolist()
        [[7, 0, 0], [0, 7, 0], [0, 0, 7]]
    """
    group = _check(weight.shape, bits, group)
    outputs, inputs = weight.shape
    if rotate:
        wide = torch.nn.functional.pad(weight.detach(), (0, -inputs % TILE))
        rotation = next(size for size in ROTATIONS if wide.shape[1] % size == 0)
        return replace(pack(rotated_inputs(wide, rotation), bits, group), in_features=inputs, rotation=rotation)
    padded = -(-inputs // group) * group
    grouped = torch.nn.functional.pad(weight.detach().float(), (0, padded - inputs)).view(outputs, -1, group)
    largest = grouped.abs().amax(2)
    if not bool(torch.isfinite(largest).all()):
        raise UnsupportedError("the weight holds NaN or an infinity, which no code stands for; check the model's file")
    highest = _ZERO[bits] - 1
    # A tensor as divisor: by a number, cards multiply with its reciprocal, which rounds differently.
    scales = torch.where(largest > 0, largest / torch.full_like(largest, highest), torch.ones_like(largest))
    # A scale that underflows would divide to infinity.
    scales = scales.clamp_min(torch.finfo(torch.float32).tiny)
    codes = (grouped / scales[..., None]).round_().clamp_(-highest, highest).to(torch.int8)
    return pack_codes(codes.view(outputs, padded)[:, :inputs], scales, bits, group)


def pack_parts(
    parts: Iterable[Tensor], outputs: int, bits: int, group: int | None = 128, *, rotate: bool = False
) -> PackedWeight:
    """The same as `pack` of a whole weight, which is never held at once.

    Args:
        parts: Rows of the weight in order; each part but the last has a multiple of 64.
        outputs: Rows of all parts.
        bits: As of `pack`.
        group: As of `pack`.
        rotate: As of `pack`.

    Raises:
        UnsupportedError: As `pack` does, or the parts have other rows.
    """
    whole: PackedWeight | None = None
    rows = 0
    for part in parts:
        packed = pack(part, bits, group, rotate=rotate)
        if whole is None:
            high = -(-outputs // TILE)
            codes = packed.codes.new_empty((high, *packed.codes.shape[1:]))
            scales = packed.scales.new_empty((packed.scales.shape[0], high * TILE))
            whole = replace(packed, codes=codes, scales=scales, out_features=outputs)
        end = rows + part.shape[0]
        if rows % TILE or end > outputs:
            raise UnsupportedError(f"a part has rows {rows} to {end} of {outputs}, but it must begin at whole tiles")
        whole.codes[rows // TILE : -(-end // TILE)] = packed.codes
        whole.scales[:, rows : -(-end // TILE) * TILE] = packed.scales
        rows = end
    if whole is None or rows < outputs:
        raise UnsupportedError(f"the parts have {rows} rows, but the weight has {outputs}")
    # Anew, which waits for the copies.
    return replace(whole)


def pack_codes(codes: Tensor, scales: Tensor, bits: int, group: int | None = 128) -> PackedWeight:
    """Pack codes and scales that were computed elsewhere, such as by GPTQ.

    Args:
        codes: Integers, shape (outputs, inputs), from -8 to 7 or from -128 to 127.
        scales: Shape (outputs, groups); the weight is code times scale.
        bits: 4 or 8.
        group: Inputs per scale, a multiple of 64; None: all.

    Raises:
        UnsupportedError: Codes out of range, or shapes that do not fit.
    """
    group = _check(codes.shape, bits, group)
    outputs, inputs = codes.shape
    groups, zero = -(-inputs // group), _ZERO[bits]
    if scales.shape != (outputs, groups):
        raise UnsupportedError(f"scales have the shape {tuple(scales.shape)}, but ({outputs}, {groups}) is needed")
    if codes.is_floating_point() or int(codes.min()) < -zero or int(codes.max()) >= zero:
        raise UnsupportedError(f"codes must be integers from {-zero} to {zero - 1} for {bits} bits")
    rows, columns = -outputs % TILE, -inputs % TILE
    shifted = torch.nn.functional.pad(codes.to(torch.int16) + zero, (0, columns, 0, rows), value=zero).to(torch.uint8)
    high, wide = shifted.shape[0] // TILE, shifted.shape[1] // TILE
    axes = shifted.view(high, 4, 2, 8, wide, 4, 4, 2, 2)
    if bits == 4:
        ordered = axes.permute(_ORDER_4).reshape(high, wide, 4, 1, 32, 16, 2)
        stored = ordered[..., 0] | ordered[..., 1] << 4
    else:
        stored = axes.view(high, 4, 2, 8, wide, 4, 2, 2, 2, 2).permute(_ORDER_8).reshape(high, wide, 4, 2, 32, 16)
    by_group = torch.nn.functional.pad(scales.float().t(), (0, rows), value=1.0).contiguous()
    return PackedWeight(
        codes=stored.contiguous(),
        scales=by_group,
        bits=bits,
        group=group,
        out_features=outputs,
        in_features=inputs,
    )


def ordered_codes(codes: Tensor, bits: int) -> Tensor:
    """Signed codes (padded outputs, padded inputs), int8, from the packed ones."""
    high, wide = codes.shape[:2]
    if bits == 4:
        nibbles = torch.stack((codes & 15, codes >> 4), -1)
        # The axes of the layout, its order undone.
        axes = nibbles.view(high, wide, 4, 4, 8, 4, 2, 2, 2).permute(_inverse(_ORDER_4))
    else:
        axes = codes.view(high, wide, 4, 2, 4, 8, 2, 2, 2, 2).permute(_inverse(_ORDER_8)).flatten(6, 7)
    return (axes.reshape(high * TILE, wide * TILE).to(torch.int16) - _ZERO[bits]).to(torch.int8)


def _inverse(order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(order)), key=lambda axis: order[axis]))


def codes_of(packed: PackedWeight) -> Tensor:
    """The signed codes of a packed weight, int8, shape (outputs, inputs)."""
    return ordered_codes(packed.codes, packed.bits)[: packed.out_features, : packed.in_features]
