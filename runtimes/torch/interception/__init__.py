"""Names the operators of a running forward pass as the captured graph does, and runs code around them.

Plans, recordings and probes are all built on `Interception`.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.interception.functions import functions_named, numbers_in_range
    from qsync_opt.runtimes.torch.interception.interception import (
        Handler,
        Interception,
        OperatorCall,
        Run,
        check_not_scripted,
        intercept,
        interception_of,
        operator_name,
    )
    from qsync_opt.runtimes.torch.interception.masks import simplify_masks
    from qsync_opt.runtimes.torch.interception.regions import CompiledByBlocks, repeated_blocks, share_to_compile
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CompiledByBlocks", "Handler", "Interception", "OperatorCall", "Run", "check_not_scripted", "functions_named",
    "intercept", "interception_of", "numbers_in_range", "operator_name", "repeated_blocks", "share_to_compile",
    "simplify_masks",
]  # fmt: skip
