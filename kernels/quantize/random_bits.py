"""Random bits by counter: the same bits for the same key on every device and with any number of threads.

Word ``i`` of a stream is ``mix(key + i * GOLDEN)`` in 64 bits, where ``mix`` is three times ``w ^= w >> 32`` with a
multiplication by an odd constant between them. It depends on index and key alone. A key is itself a mix of seed, offset
and stream number, so that streams of different operators and steps start at unrelated points of the 2**64 cycle.

``torch.Generator`` was not used: its bits differ between CPU and CUDA, on CUDA also with the launch grid, and its
state would have to be saved for a recomputation of the forward pass to round the same way.

Source: The sequence of counters and the mix of keys are those of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast
    splittable pseudorandom number generators", OOPSLA 2014). The words' mix shifts by half a word, which costs a card
    with 32-bit registers one instruction instead of four; its multiplier is that of the public-domain degski64.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_LOW_33_BITS = (1 << 33) - 1
_WORD_MULTIPLIER = 0xD6E8FEB86659FD93
_LOW_32_BITS = (1 << 32) - 1
# The lowest bit of each of the four 16-bit lanes of a word.
_ODD_LANES = 0x0001_0001_0001_0001


def signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def stream_key(seed: int, offset: int, stream: int) -> int:
    """Key of one random stream: a 64-bit mix of three integers."""
    if torch.compiler.is_compiling():  # a graph cannot look into a cache
        return _mix(_call_key(seed, offset) + stream + _GOLDEN)
    return _mix(_cached_call_key(seed, offset) + stream + _GOLDEN)


def _call_key(seed: int, offset: int) -> int:
    return _mix(_mix(seed + _GOLDEN) + offset + _GOLDEN)


# Of the last calls: each draws several streams, the last one in its backward pass.
_cached_call_key = functools.lru_cache(maxsize=4096)(_call_key)


def stepped_key(key: int, step: Tensor | None) -> int | Tensor:
    """The key of one step: ``key`` mixed with a counter that lives on the device, so that graphs replay with new noise.

    ``step`` is one int64, which the caller raises between steps; None leaves the key of a stream as it is.
    """
    return key if step is None else _mixed(step.reshape(1) + signed(key + _GOLDEN))


def call_steps(seeds_O: Tensor, step: Tensor) -> Tensor:
    """One int64 for every operator of a pass, to be its ``step``: a mix of its seed and the counter of passes.

    Operators that differ by this input alone, and not by a constant, can share the code of a compiled graph.
    """
    return _mixed(_mixed(seeds_O + signed(_GOLDEN)) + step + signed(_GOLDEN))


def _mixed(value: Tensor) -> Tensor:
    """`_mix` of every element."""
    # Shifts of int64 copy the sign.
    value = (value ^ ((value >> 30) & ((1 << 34) - 1))) * signed(_MULTIPLIER_1)
    value = (value ^ ((value >> 27) & ((1 << 37) - 1))) * signed(_MULTIPLIER_2)
    return value ^ ((value >> 31) & _LOW_33_BITS)


# CPU callers draw in pieces of up to this many words; the multiples of GOLDEN for one piece are kept.
_CACHED_WORDS = 1 << 14


@functools.cache
def _cached_steps() -> Tensor:
    return torch.arange(_CACHED_WORDS, dtype=torch.int64).mul_(signed(_GOLDEN))


def random_words(key: int | Tensor, start: int, count: int, device: torch.device) -> Tensor:
    """Words ``start`` to ``start + count - 1`` of the stream ``key``: int64, shape (count,)."""
    if isinstance(key, Tensor):
        first: int | Tensor = key + signed(start * _GOLDEN)
    else:
        first = signed(key + start * _GOLDEN)
    if device.type == "cpu" and count <= _CACHED_WORDS and not torch.compiler.is_compiling():
        words = _cached_steps()[:count] + first
    else:
        words = torch.arange(count, dtype=torch.int64, device=device).mul_(signed(_GOLDEN)).add_(first)
    for _ in range(2):
        words.bitwise_xor_((words >> 32).bitwise_and_(_LOW_32_BITS)).mul_(signed(_WORD_MULTIPLIER))
    return words.bitwise_xor_((words >> 32).bitwise_and_(_LOW_32_BITS))


def centred_noise(key: int | Tensor, start: int, count: int, device: torch.device) -> Tensor:
    """Uniform integers for elements ``start`` to ``start + count - 1``: odd, in [-32767, 32767], int16, shape (count,).

    ``start`` must be a multiple of four (four elements share a word). Odd values lie symmetrically around zero, so
    that ``round(x + noise / 65536)`` leaves integers alone and misses the expectation of any other ``x`` by at most
    2**-16 of a step: below the resolution of FP32 at the top of the INT8 range.
    """
    words = random_words(key, start // 4, (count + 3) // 4, device).bitwise_or_(_ODD_LANES)
    return words.view(torch.int16)[:count]
