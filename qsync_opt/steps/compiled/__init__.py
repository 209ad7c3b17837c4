"""Steps of compiled models: traces of generated kernels and the memory that generated code allocates.

It builds on `qsync_opt.steps` and is used where `torch.compile` runs the model.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.steps.compiled.generated import PassCode, Peak, step_peak
    from qsync_opt.steps.compiled.trace import (
        ChargedStep,
        CompiledEvents,
        HostCall,
        Scheduled,
        charge_compiled,
        match_calls,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ChargedStep", "CompiledEvents", "HostCall", "PassCode", "Peak", "Scheduled", "charge_compiled", "match_calls",
    "step_peak",
]  # fmt: skip
