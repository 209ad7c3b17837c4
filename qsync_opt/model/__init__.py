"""Models as graphs of operators with roles, and statistics of their weights.

No framework is needed here; `qsync_opt.model.onnx` reads graphs from ONNX files.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.model.graph import (
        DTYPE_BYTES,
        OPAQUE,
        HasGraph,
        Operator,
        OpGraph,
        ParameterSpec,
        Role,
        TensorSpec,
        graph_of,
        graph_to_json,
        load_graph,
        parse_graph,
        save_graph,
    )
    from qsync_opt.model.roles import (
        ADJUSTABLE,
        ATEN_PRODUCTS,
        ATTENTION,
        BYTE_MASKS,
        INDEX_MASKS,
        LOOKUPS,
        PRODUCTS,
        ROLE_TABLE,
        SAVES_NOTHING,
        SAVES_OUTPUT,
        RoleTable,
        base_kind,
        decide_role,
    )
    from qsync_opt.model.weights import WeightStatistics, weight_statistics
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "ADJUSTABLE", "ATEN_PRODUCTS", "ATTENTION", "BYTE_MASKS", "DTYPE_BYTES", "INDEX_MASKS", "LOOKUPS", "OPAQUE",
    "PRODUCTS", "ROLE_TABLE", "SAVES_NOTHING", "SAVES_OUTPUT", "HasGraph", "OpGraph", "Operator", "ParameterSpec",
    "Role", "RoleTable", "TensorSpec", "WeightStatistics", "base_kind", "decide_role", "graph_of", "graph_to_json",
    "load_graph", "parse_graph", "save_graph", "weight_statistics",
]  # fmt: skip
