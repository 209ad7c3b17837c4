"""The codec by the fastest implementation on a tensor's device: CUDA kernels, compiled loops, or plain PyTorch.

All give the bits of `reference`. Sums and two-shot forms are compiled; exponents run in plain PyTorch everywhere.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qsync_opt.errors import UnsupportedError
from qsync_opt.kernels.compilation import library
from qsync_opt.kernels.gradients import reference
from qsync_opt.kernels.gradients.reference import FORMS, Encoded, Layout
from qsync_opt.kernels.quantize import signed

UNIT = "gradients"
_CUDA_BLOCK = 256
CODES = {"int8": torch.int8, "fp8": torch.uint8, "bf16": torch.bfloat16}
"""Types of codes of the two-shot forms that are compiled."""


@functools.cache
def _loops() -> Any:
    if importlib.util.find_spec("numba") is None:
        return None
    return importlib.import_module("qsync_opt.kernels.gradients.loops")


def compiled_by(device: torch.device | str) -> str | None:
    """What compiles the codec on a device: ``"numba"``, ``"CUDA"``, or None where it runs in plain PyTorch."""
    if torch.device(device).type == "cuda":
        return "CUDA" if library.activate(UNIT) else None
    return "numba" if _loops() is not None else None


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes, reduces and decodes flat contiguous FP32 tensors.

    ``backend``: ``"compiled"`` refuses where nothing is compiled, ``"reference"`` takes plain PyTorch, ``"auto"`` the
    compiled form where there is one.

    Raises:
        UnsupportedError: An unknown backend; when used, ``"compiled"`` where there is no compiled form.
    """

    backend: str = "auto"

    def __post_init__(self) -> None:
        if self.backend not in library.BACKENDS:
            raise UnsupportedError(f"backend={self.backend!r}: allowed are {', '.join(library.BACKENDS)}")

    def _on(self, device: torch.device) -> str | None:
        compiler = None if self.backend == "reference" else compiled_by(device)
        if compiler is None and self.backend == "compiled":
            why = (
                library.reason(UNIT) if device.type == "cuda" else "numba is missing: pip install 'qsync-opt[solvers]'"
            )
            raise UnsupportedError(f"backend 'compiled': the codec runs in plain PyTorch here: {why}")
        return compiler

    def _on_form(self, device: torch.device, form: str, block: int) -> str | None:
        """As `_on`; exponents, and on cards other blocks, are not compiled."""
        compiler = self._on(device) if form in CODES else None
        return None if compiler == "CUDA" and block != _CUDA_BLOCK and form != "bf16" else compiler

    def sum_scales(self, x: Tensor, block: int) -> Tensor:
        """BF16 scales before their MAX all-reduce; see `reference.sum_scales`."""
        compiler = self._on(x.device)
        if compiler is None or not len(x):
            return reference.sum_scales(x, block)
        if compiler == "CUDA":
            scales: Tensor = _OPERATORS["scales"](x, block)
            return scales
        scales = torch.empty(-(-len(x) // block), dtype=torch.int16)
        _loops().sum_scales(_host(x.view(torch.int32)), block, _host(scales))
        return scales.view(torch.bfloat16)

    def encode_sum(
        self, x: Tensor, scales: Tensor, levels: int, layout: Layout, key: int, out: Tensor | None = None
    ) -> Tensor:
        """Codes under common scales; see `reference.encode_sum`. Compiled loops write them into ``out``, if given."""
        compiler = self._on(x.device)
        if compiler is None or not len(x):
            return reference.encode_sum(x, scales, levels, layout, key)
        words = layout.words(len(x))
        if compiler == "CUDA":
            codes: Tensor = _OPERATORS["encode"](
                x, scales, levels, layout.width, layout.lanes, words, layout.block, signed(key)
            )
            return codes
        out = torch.empty(words, dtype=layout.dtype) if out is None else out
        _loops().encode_sum(
            _host(x), _host(scales.float()), levels, layout.width, layout.lanes, words, layout.block,
            _word(key), _host(out),
        )  # fmt: skip
        return out

    def decode_sum(
        self,
        codes: Tensor,
        scales: Tensor,
        levels: int,
        workers: int,
        layout: Layout,
        elements: int,
        out: Tensor | None = None,
    ) -> Tensor:
        """The mean gradient from summed codes; see `reference.decode_sum`. On CPUs ``out`` may receive it."""
        compiler = self._on(codes.device)
        if compiler is None or not elements:
            return reference.decode_sum(codes, scales, levels, workers, layout, elements)
        words = layout.words(elements)
        if compiler == "CUDA":
            mean: Tensor = _OPERATORS["decode"](
                codes, scales, levels, workers, layout.width, layout.lanes, words, layout.block, elements
            )
            return mean
        out = torch.empty(elements) if out is None else out
        _loops().decode_sum(
            _host(codes), _host(scales.float()), levels, workers, layout.width, layout.lanes, words, layout.block,
            _host(out),
        )  # fmt: skip
        return out

    def encode(self, x: Tensor, form: str, block: int, key: int, out: Tensor | None = None) -> Encoded:
        """Codes with scales of this worker's own; see `reference.encode`. Compiled loops write codes into ``out``."""
        compiler = self._on_form(x.device, form, block)
        if compiler is None or not len(x):
            return reference.encode(x, form, block, key)
        if compiler == "CUDA":
            return Encoded(*_OPERATORS["encode_own"](x, FORMS.index(form), block, signed(key)))
        codes = torch.empty(len(x), dtype=CODES[form]) if out is None else out
        if form == "bf16":
            _loops().encode_bf16(_host(x.view(torch.int32)), _word(key), _host(codes))
            return Encoded(codes, x.new_empty(0))
        scales = torch.empty(-(-len(x) // block))
        _loops().encode(
            _host(x), _host(x.view(torch.int32)), form == "fp8", block, _word(key), _bytes(codes), _host(scales)
        )
        return Encoded(codes, scales)

    def reduce(self, codes_ND: Tensor, scales_NB: Tensor, form: str, block: int, key: int) -> Encoded:
        """The mean of the workers' values, encoded again; see `reference.reduce`."""
        compiler = self._on_form(codes_ND.device, form, block)
        if compiler is None or not codes_ND.shape[1]:
            return reference.reduce(codes_ND, scales_NB, form, block, key)
        if compiler == "CUDA":
            return Encoded(*_OPERATORS["reduce_own"](codes_ND, scales_NB, FORMS.index(form), block, signed(key)))
        codes, scales = torch.empty_like(codes_ND[0]), torch.empty_like(scales_NB[0])
        if form == "bf16":
            _loops().reduce_bf16(_host(codes_ND), _word(key), _host(codes))
        else:
            _loops().reduce(
                _bytes(codes_ND), _host(scales_NB), form == "fp8", block, _word(key), _bytes(codes), _host(scales)
            )
        return Encoded(codes, scales)

    def decode(self, encoded: Encoded, form: str, block: int, out: Tensor | None = None) -> Tensor:
        """Values of codes; see `reference.decode`. On CPUs ``out`` may receive them."""
        codes = encoded.codes
        if form == "bf16":  # one operation of torch, which is compiled
            return reference.decode(encoded, form, block) if out is None else out.copy_(codes)
        compiler = self._on_form(codes.device, form, block)
        if compiler is None or not len(codes):
            return reference.decode(encoded, form, block)
        if compiler == "CUDA":
            values: Tensor = _OPERATORS["decode_own"](*encoded, FORMS.index(form), block)
            return values
        out = torch.empty(len(codes)) if out is None else out
        _loops().decode(_bytes(codes), _host(encoded.scales), form == "fp8", block, _host(out))
        return out


_HOST_TYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bfloat16: np.int16,
}


def _host(values: Tensor) -> Any:
    """The memory of a contiguous tensor as an array, which keeps the tensor alive.

    Not by ``numpy()``, after which torch never resizes a storage again: sharded gradients are freed so.
    """
    memory: Any = (ctypes.c_byte * (values.numel() * values.element_size())).from_address(values.data_ptr())
    memory.tensor = values
    return np.frombuffer(memory, _HOST_TYPES[values.dtype]).reshape(values.shape)


def _bytes(codes: Tensor) -> Any:
    return _host(codes.view(torch.uint8))


def _word(key: int) -> np.uint64:
    """The key as numba takes it, so that loops are compiled for one type."""
    return np.uint64(key & ((1 << 64) - 1))


def _plain_scales(x: Tensor, block: int) -> Tensor:
    return reference.sum_scales(x, block)


def _plain_encode(
    x: Tensor, scales: Tensor, levels: int, width: int, lanes: int, words: int, block: int, key: int
) -> Tensor:
    return reference.encode_sum(x, scales, levels, Layout(width=width, lanes=lanes, block=block), key)


def _plain_decode(
    codes: Tensor, scales: Tensor, levels: int, workers: int, width: int, lanes: int, words: int, block: int,
    elements: int,
) -> Tensor:  # fmt: skip
    layout = Layout(width=width, lanes=lanes, block=block)
    return reference.decode_sum(codes, scales, levels, workers, layout, elements)


def _plain_encode_own(x: Tensor, form: int, block: int, key: int) -> tuple[Tensor, Tensor]:
    return reference.encode(x, FORMS[form], block, key)


def _plain_reduce_own(codes: Tensor, scales: Tensor, form: int, block: int, key: int) -> tuple[Tensor, Tensor]:
    return reference.reduce(codes, scales, FORMS[form], block, key)


def _plain_decode_own(codes: Tensor, scales: Tensor, form: int, block: int) -> Tensor:
    return reference.decode(Encoded(codes, scales), FORMS[form], block)


def _blocks(elements: Any, block: int) -> Any:
    return (elements + block - 1) // block


_OPERATORS: dict[str, Any] = {
    name: library.define(schema, unit=UNIT, plain=plain, fake=fake)
    for name, schema, plain, fake in (
        (
            "scales",
            "gradient_sum_scales(Tensor x, int block) -> Tensor",
            _plain_scales,
            lambda x, block: x.new_empty(_blocks(x.shape[0], block), dtype=torch.bfloat16),
        ),
        (
            "encode",
            "gradient_encode_sum(Tensor x, Tensor scales, int levels, int width, int lanes, int words, int block, "
            "int key) -> Tensor",
            _plain_encode,
            lambda x, scales, levels, width, lanes, words, block, key: x.new_empty(
                words, dtype=torch.int8 if lanes == 1 else torch.int32
            ),
        ),
        (
            "decode",
            "gradient_decode_sum(Tensor codes, Tensor scales, int levels, int workers, int width, int lanes, "
            "int words, int block, int elements) -> Tensor",
            _plain_decode,
            lambda codes, scales, levels, workers, width, lanes, words, block, elements: codes.new_empty(
                elements, dtype=torch.float32
            ),
        ),
        (
            "encode_own",
            "gradient_encode(Tensor x, int form, int block, int key) -> (Tensor, Tensor)",
            _plain_encode_own,
            lambda x, form, block, key: (
                x.new_empty(x.shape, dtype=CODES[FORMS[form]]),
                x.new_empty(0 if FORMS[form] == "bf16" else _blocks(x.shape[0], block)),
            ),
        ),
        (
            "reduce_own",
            "gradient_reduce(Tensor codes, Tensor scales, int form, int block, int key) -> (Tensor, Tensor)",
            _plain_reduce_own,
            lambda codes, scales, form, block, key: (
                codes.new_empty(codes.shape[1]),
                scales.new_empty(scales.shape[1]),
            ),
        ),
        (
            "decode_own",
            "gradient_decode(Tensor codes, Tensor scales, int form, int block) -> Tensor",
            _plain_decode_own,
            lambda codes, scales, form, block: codes.new_empty(codes.shape, dtype=torch.float32),
        ),
    )
}
