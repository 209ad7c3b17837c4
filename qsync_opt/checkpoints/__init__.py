"""Checkpoints without a framework: who writes which rows, boxes of tensors, folders of files, and how often to save.

A `Problem` splits pieces among writers; `Layout` says which box of which tensor lies where; `best_interval` how often.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.checkpoints.boxes import Box, boxes_of_interval, check_cover
    from qsync_opt.checkpoints.evaluation import Evaluation, evaluate
    from qsync_opt.checkpoints.folders import (
        CHUNK_BYTES,
        MANIFEST,
        FileFact,
        Manifest,
        SavedPiece,
        SavedTensor,
        begin,
        file_facts,
        files_in,
        finish,
        flush,
        hash_of,
        read_chunk,
        read_manifest,
        remove_older,
        restore,
        step_folder,
        steps_in,
        verify,
        verify_file,
        verify_sizes,
        write_manifest,
    )
    from qsync_opt.checkpoints.interval import Interval, best_interval
    from qsync_opt.checkpoints.layout import (
        ChunkRead,
        Copy,
        Shard,
        assign_boxes,
        assign_reads,
        copies_into,
        read_problem,
        replica_problem,
    )
    from qsync_opt.checkpoints.plan import Part, Plan
    from qsync_opt.checkpoints.problem import Piece, Problem, Writer
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "CHUNK_BYTES", "MANIFEST", "Box", "ChunkRead", "Copy", "Evaluation", "FileFact", "Interval", "Manifest", "Part",
    "Piece", "Plan", "Problem", "SavedPiece", "SavedTensor", "Shard", "Writer", "assign_boxes", "assign_reads", "begin",
    "best_interval", "boxes_of_interval", "check_cover", "copies_into", "evaluate", "file_facts", "files_in", "finish",
    "flush", "hash_of", "read_chunk", "read_manifest", "read_problem", "remove_older", "replica_problem", "restore",
    "step_folder", "steps_in", "verify", "verify_file", "verify_sizes", "write_manifest",
]  # fmt: skip
