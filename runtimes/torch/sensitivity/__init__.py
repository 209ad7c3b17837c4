"""Statistics of a model on real batches, from which sensitivities are computed.

`collect_statistics` runs the batches; records and probes are its parts.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.sensitivity.errors import (
        ErrorRequest,
        attention_call,
        attention_errors,
        fixed_point_errors,
        paired_errors,
        run_batched,
        stacked_errors,
    )
    from qsync_opt.runtimes.torch.sensitivity.probes.batch_parts import parts_of
    from qsync_opt.runtimes.torch.sensitivity.products import operand_slots, product_of, replace_operands
    from qsync_opt.runtimes.torch.sensitivity.reductions import channel_variances
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
    "ErrorRequest",
    "Positions",
    "RandomSigns",
    "Step",
    "attention_call",
    "attention_errors",
    "channel_variances",
    "collect_statistics",
    "even_positions",
    "even_runs",
    "fixed_point_errors",
    "full_precision",
    "operand_slots",
    "paired_errors",
    "parts_of",
    "places_by_size",
    "positions_by_size",
    "product_of",
    "replace_operands",
    "run_batched",
    "runs_by_size",
    "stacked_errors",
    "weights_by_size",
]
