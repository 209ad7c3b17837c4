"""Statistics of a model on real batches, from which sensitivities are computed.

`collect_statistics` runs the batches; records and probes are its parts.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.sensitivity.errors import (
        Wanted,
        answered,
        attention_call,
        attention_errors,
        fixed_point_errors,
        paired_errors,
        stacked_errors,
    )
    from qsync_opt.runtimes.torch.sensitivity.products import operand_slots, product_of, replace_operands
    from qsync_opt.runtimes.torch.sensitivity.reductions import channel_variances
    from qsync_opt.runtimes.torch.sensitivity.replays import Replays
    from qsync_opt.runtimes.torch.sensitivity.samples import (
        Positions,
        even_positions,
        even_runs,
        places_by_size,
        positions_by_size,
        runs_by_size,
        weights_by_size,
    )
    from qsync_opt.runtimes.torch.sensitivity.signs import RandomSigns
    from qsync_opt.runtimes.torch.sensitivity.statistics import Step, collect_statistics, full_precision
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Positions", "RandomSigns", "Replays", "Step", "Wanted", "answered", "attention_call", "attention_errors",
    "channel_variances", "collect_statistics", "even_positions", "even_runs", "fixed_point_errors",
    "full_precision", "operand_slots", "paired_errors", "places_by_size", "positions_by_size", "product_of",
    "replace_operands", "runs_by_size", "stacked_errors", "weights_by_size",
]  # fmt: skip
