"""Operator graphs and weight statistics from ONNX files, by `read_onnx` and `read_weights`.

The core imports ``onnx`` only here.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.model.onnx.graph import GRAPH_KEY, OPERATOR_KEY
    from qsync_opt.model.onnx.reader import EXTERNAL_FAILURES, inline_functions, load_proto, read_onnx, read_weights
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EXTERNAL_FAILURES", "GRAPH_KEY", "OPERATOR_KEY", "inline_functions", "load_proto", "read_onnx", "read_weights",
]  # fmt: skip
