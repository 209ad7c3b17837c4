"""Compiled training steps: recordings charged to operators, and peak memory from the compiler's code.

The compiler's schedule says which operators are in each of its kernels.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.steps.compiled import peak
    from qsync_opt.runtimes.torch.steps.compiled.peak import compiled_plan_peak
    from qsync_opt.runtimes.torch.steps.compiled.recording import compiled_inside, record_compiled_plan
    from qsync_opt.runtimes.torch.steps.compiled.schedule import annotated_operators, read_schedules
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "annotated_operators", "compiled_inside", "compiled_plan_peak", "peak", "read_schedules",
    "record_compiled_plan",
]  # fmt: skip
