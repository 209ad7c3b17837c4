"""Full-graph GNN training over several workers, on PyTorch Geometric, with planned message widths.

`partition_graph` splits a graph, `full_graph` lets a model of PyTorch Geometric train on one part of it.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.messages.exchange import EXACT, HaloExchange
    from qsync_opt.runtimes.torch.messages.graph import FullGraph, MessageOptions, full_graph
    from qsync_opt.runtimes.torch.messages.partition import Part, load_part, partition_graph
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EXACT", "FullGraph", "HaloExchange", "MessageOptions", "Part", "full_graph", "load_part", "partition_graph",
]  # fmt: skip
