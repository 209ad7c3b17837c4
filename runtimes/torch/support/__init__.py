"""Helpers for PyTorch that know nothing of plans: timing, memory, CUDA graphs, optimizers, iterations.

Every other folder of this runtime may use them.
"""

from typing import TYPE_CHECKING

from qsync_opt.doors import lazy

if TYPE_CHECKING:
    from qsync_opt.runtimes.torch.support.cuda_graphs import (
        capture_stream,
        capturing,
        hidden_capture,
        is_capturing,
        no_collection,
        recorded_waits,
        without_cudnn_attention,
    )
    from qsync_opt.runtimes.torch.support.devices import device_identity, partition
    from qsync_opt.runtimes.torch.support.iteration import (
        Loss,
        TrainingExample,
        call_arguments,
        check_batches,
        check_samples,
        measure_iteration,
        resident_bytes,
        time_passes,
    )
    from qsync_opt.runtimes.torch.support.memory import (
        allocation_of,
        allocations_of,
        memory_budget,
        out_of_memory_by_type,
        silent_profiler,
        storage_of,
        wanted_bytes,
    )
    from qsync_opt.runtimes.torch.support.models import (
        bare_model,
        compiled_in_place,
        first_device,
        model_unchanged,
        plain_name,
    )
    from qsync_opt.runtimes.torch.support.optimizers import (
        check_steps,
        optimizer_key,
        optimizer_name,
        rebuild_optimizer,
        single,
        state_bytes,
    )
    from qsync_opt.runtimes.torch.support.outputs import HALF, default_loss, full_precision, model_loss, tensors_in
    from qsync_opt.runtimes.torch.support.recomputation import without_recomputation, without_reentrance
    from qsync_opt.runtimes.torch.support.timing import (
        Elapsed,
        Stopwatch,
        cpu_clock,
        intervals_ns,
        make_stopwatch,
        synchronize,
        time_mark,
    )
else:
    __getattr__, __dir__ = lazy(__name__)

__all__ = [
    "HALF", "Elapsed", "Loss", "Stopwatch", "TrainingExample", "allocation_of", "allocations_of", "bare_model",
    "call_arguments", "capture_stream", "capturing", "check_batches", "check_samples", "check_steps",
    "compiled_in_place", "cpu_clock", "default_loss", "device_identity", "first_device", "full_precision",
    "hidden_capture", "intervals_ns", "is_capturing", "make_stopwatch", "measure_iteration", "memory_budget",
    "model_loss", "model_unchanged", "no_collection", "optimizer_key", "optimizer_name", "out_of_memory_by_type",
    "partition", "plain_name", "rebuild_optimizer", "recorded_waits", "resident_bytes", "silent_profiler", "single",
    "state_bytes", "storage_of", "synchronize", "tensors_in", "time_mark", "time_passes", "wanted_bytes",
    "without_cudnn_attention", "without_recomputation", "without_reentrance",
]  # fmt: skip
