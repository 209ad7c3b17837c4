"""Full-graph GNN training over several workers, on PyTorch Geometric, with planned message widths.

`partition_graph` splits a graph, `full_graph` lets a model of PyTorch Geometric train on one part of it.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.messages.exchange import EXACT, HaloExchange
    from qsync_opt.runtimes.torch.messages.graph import FullGraph, MessageOptions, full_graph
    from qsync_opt.runtimes.torch.messages.graphs import block_graph, load_graph, save_graph
    from qsync_opt.runtimes.torch.messages.launched import (
        Run,
        count_parts,
        part_file,
        part_workers,
        train_own_part,
        under_launcher,
    )
    from qsync_opt.runtimes.torch.messages.partition import Part, load_part, partition_graph
    from qsync_opt.runtimes.torch.messages.prediction import PredictedEpoch, StepTimes, predict_epoch
    from qsync_opt.runtimes.torch.messages.training import MODELS, NodeClassifier, Trained, TrainingOptions, train
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "EXACT", "MODELS", "FullGraph", "HaloExchange", "MessageOptions", "NodeClassifier", "Part", "PredictedEpoch", "Run",
    "StepTimes", "Trained", "TrainingOptions", "block_graph", "count_parts", "full_graph", "load_graph", "load_part",
    "part_file", "part_workers", "partition_graph", "predict_epoch", "save_graph", "train", "train_own_part",
    "under_launcher",
]  # fmt: skip
