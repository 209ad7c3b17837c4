"""Inference on ONNX Runtime under a plan.

`OnnxRuntime` profiles a model, rewrites it in mixed precision and runs it.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.onnxruntime.comparing import compare, relative_error
    from qsync_opt.runtimes.onnxruntime.graph_rewrite import rewrite
    from qsync_opt.runtimes.onnxruntime.number_types import WEIGHT_LEVEL, bfloat16_bits, stored, weight_codes
    from qsync_opt.runtimes.onnxruntime.prepared import prepare
    from qsync_opt.runtimes.onnxruntime.runnable import RunnableModel
    from qsync_opt.runtimes.onnxruntime.runtime import OnnxRuntime
    from qsync_opt.runtimes.onnxruntime.support import border_formats
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "WEIGHT_LEVEL", "OnnxRuntime", "RunnableModel", "bfloat16_bits", "border_formats", "compare", "prepare",
    "relative_error", "rewrite", "stored", "weight_codes",
]  # fmt: skip
