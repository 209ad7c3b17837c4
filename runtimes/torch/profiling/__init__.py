"""Measured costs of operators, casts and whole iterations on a device.

`profile` returns the `DeviceProfile` of a model; `try_plan` measures the memory of a plan.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.profiling.operators import (
        DTYPES,
        OperatorBench,
        like,
        time_cast,
        time_gradient_sum,
    )
    from qsync_opt.runtimes.torch.profiling.profiler import operator_menu, option_values, profile, selected_formats
    from qsync_opt.runtimes.torch.profiling.trial import try_plan
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "DTYPES", "OperatorBench", "like", "operator_menu", "option_values", "profile", "selected_formats", "time_cast",
    "time_gradient_sum", "try_plan",
]  # fmt: skip
