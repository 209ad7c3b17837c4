"""What a decoder computes between its products, each in one pass: norms, rotary positions, attention and gates."""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.kernels.decoder.attention import rotate_and_attend
    from qsync_opt.kernels.decoder.rows import (
        add_rms_norm,
        add_rms_norm_and_round,
        gelu_gate,
        rms_norm,
        rotate_into_pages,
        rotate_positions,
        silu_gate,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "add_rms_norm", "add_rms_norm_and_round", "gelu_gate", "rms_norm", "rotate_and_attend", "rotate_into_pages",
    "rotate_positions", "silu_gate",
]  # fmt: skip
