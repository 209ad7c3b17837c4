"""Statistics of a model on real batches, from which sensitivities are computed.

`collect_statistics` runs the batches; records and probes are its parts.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.sensitivity.errors import attention_call, attention_errors
    from qsync_opt.runtimes.torch.sensitivity.products import operand_slots, product_of, replace_operands
    from qsync_opt.runtimes.torch.sensitivity.replays import Replays
    from qsync_opt.runtimes.torch.sensitivity.statistics import Step, collect_statistics, full_precision
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "Replays", "Step", "attention_call", "attention_errors", "collect_statistics", "full_precision",
    "operand_slots", "product_of", "replace_operands",
]  # fmt: skip
