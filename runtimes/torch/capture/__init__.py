"""The operator graph of a PyTorch model, through its export to ONNX and one traced forward pass.

`capture` takes a module and its arguments, `capture_model` also says how its calls map to operators.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.capture.calls import RecordedCall, TensorArgument, count_flops, index_bound
    from qsync_opt.runtimes.torch.capture.export import export_onnx, export_program, save_onnx
    from qsync_opt.runtimes.torch.capture.model import CapturedModel, capture, capture_model
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CapturedModel",
    "RecordedCall",
    "TensorArgument",
    "capture",
    "capture_model",
    "count_flops",
    "export_onnx",
    "export_program",
    "index_bound",
    "save_onnx",
]
