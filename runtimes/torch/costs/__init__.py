"""Measured times of operators of many shapes, and the network that can be fitted to them.

`collect` returns a `qsync_opt.costs.learned.CostRecord`.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.costs.collection import collect
    from qsync_opt.runtimes.torch.costs.models import MODELS
    from qsync_opt.runtimes.torch.costs.probes import probe_device
    from qsync_opt.runtimes.torch.costs.workloads import FAMILIES, LIMITS, Candidate, Limits, captured, sweep
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = ["FAMILIES", "LIMITS", "MODELS", "Candidate", "Limits", "captured", "collect", "probe_device", "sweep"]
