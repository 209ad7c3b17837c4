"""The operator graph of a PyTorch model, from one forward pass and its export to ONNX.

`capture` returns the graph; `capture_model` also returns the call of each operator.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.capture.calls import RecordedCall, TensorArgument, count_flops, index_bound
    from qsync_opt.runtimes.torch.capture.export import export_onnx, export_program, save_onnx
    from qsync_opt.runtimes.torch.capture.model import CapturedModel, capture, capture_model
    from qsync_opt.runtimes.torch.capture.opaque import OpaqueModule
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CapturedModel", "OpaqueModule", "RecordedCall", "TensorArgument", "capture", "capture_model", "count_flops",
    "export_onnx", "export_program", "index_bound", "save_onnx",
]  # fmt: skip
