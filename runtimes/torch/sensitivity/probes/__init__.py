"""Random probes of a model's derivatives: what noise at one operator does to the gradient.

A probe runs extra backward passes; the model's own state stays as it was.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.sensitivity.probes.curvature import probe_curvatures
    from qsync_opt.runtimes.torch.sensitivity.probes.derivatives import (
        attention_twice,
        batch_norm_twice,
        embedding_bag_twice,
        product_twice,
    )
    from qsync_opt.runtimes.torch.sensitivity.probes.gradient import Probe, Probed
    from qsync_opt.runtimes.torch.sensitivity.probes.parts import parts_of
    from qsync_opt.runtimes.torch.sensitivity.probes.prober import Prober
    from qsync_opt.runtimes.torch.sensitivity.probes.rectifiers import (
        MAX_POOLS,
        Contest,
        InputNoise,
        LastRectified,
        NoiseMeasurement,
        Window,
        contest,
        noisy_passes,
        pool_call,
    )
    from qsync_opt.runtimes.torch.sensitivity.probes.taps import DerivativeSums, GainTapper, ParameterGradients
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "MAX_POOLS", "Contest", "DerivativeSums", "GainTapper", "InputNoise", "LastRectified", "NoiseMeasurement",
    "ParameterGradients", "Probe", "Probed", "Prober", "Window", "attention_twice", "batch_norm_twice", "contest",
    "embedding_bag_twice", "noisy_passes", "parts_of", "pool_call", "probe_curvatures", "product_twice",
]  # fmt: skip
