"""Peak memory of a compiled step under a plan, from the compiler's code, which is not run.

The compiler decides per plan what to save for the backward pass, what to recompute, and which results share memory.
Here it generates the code of both passes, which takes seconds: no kernel is built, and no step runs. Inductor may time
products with and without padded operands (its ``shape_padding``), which takes memory meanwhile; the choice depends on
the device, so predict on the device, or the part of it, that is to train. Inductor caches the choice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from qsync_opt.errors import UnsupportedError, first_line
from qsync_opt.kernels import KernelOptions
from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.execution import under_plan
from qsync_opt.runtimes.torch.steps.compiled.recording import compiled_inside
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps.compiled import PassCode, Peak, step_peak


class _NotRunError(Exception):
    """Ends a pass whose code has been generated."""


def compiled_plan_peak(
    example: TrainingExample,
    graph: OpGraph,
    plan: Mapping[str, str],
    kernels: KernelOptions | None = None,
) -> Peak:
    """Peak memory of the passes of a compiled step under a plan, beyond the memory in use between steps.

    It excludes the optimizer and what libraries allocate during a call.

    Args:
        example: The model without a plan, on the device for training, with a batch.
        graph: Of the model.
        plan: Precision of every adjustable operator.
        kernels: As in training.

    Raises:
        UnsupportedError: The model cannot be compiled as one graph per pass; or this version of torch differs.
    """
    model = example.model
    with under_plan(model, dict(plan), graph, kernels), compiled_inside(model), generated_passes() as passes:
        try:
            example.forward()
        except _NotRunError:
            pass
        except TorchDynamoException as failure:
            raise UnsupportedError(f"the model cannot be compiled as one graph: {first_line(failure)}") from failure
    if [is_backward for is_backward, _ in passes] != [False, True]:
        raise UnsupportedError(
            f"{len(passes)} graphs were compiled, but one of the forward and one of the backward pass are needed; is "
            "the model in training mode?"
        )
    # The backward pass may delete its incoming gradients only if torch hands them over.
    handed_over = hasattr(torch.autograd.Function, "boxed_grads_call")
    return step_peak(passes[0][1], passes[1][1], tangents_held=not handed_over)


@contextlib.contextmanager
def generated_passes() -> Iterator[list[tuple[bool, PassCode]]]:
    """Collect the code compiled inside, and whether it is of a backward pass; calling it raises `_NotRunError`."""
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.graph import GraphLowering

    passes: list[tuple[bool, PassCode]] = []
    lowering: Any = GraphLowering

    def collect(graph: Any) -> Any:
        code, _ = graph.codegen()
        passes.append((bool(graph.is_backward), PassCode(code.value, _sizes(graph))))
        graph.cache_key, graph.cache_path = PyCodeCache.write(code.value)
        graph.cache_linemap = []
        return _NotRun(graph.cache_path)

    before = lowering.compile_to_module
    graphs: Any = torch._inductor.config
    autograd: Any = torch._functorch.config
    lowering.compile_to_module = collect
    # Versions that compile the backward pass when it first runs have a setting to compile it now.
    settings = {"enable_autograd_cache": False, "force_non_lazy_backward_lowering": True}
    try:
        with (
            graphs.patch({"fx_graph_cache": False, "graph_partition": False}),
            autograd.patch({name: value for name, value in settings.items() if hasattr(autograd, name)}),
        ):
            yield passes
    finally:
        lowering.compile_to_module = before


class _NotRun:
    """Replaces a compiled module."""

    def __init__(self, path: str) -> None:
        self.__file__ = path

    def call(self, args: Any) -> Any:
        """Refuse to run."""
        raise _NotRunError


def _sizes(graph: Any) -> dict[str, int]:
    """Bytes of all results that are tensors, by name."""
    sizes_of = {}
    for name, buffer in graph.name_to_buffer.items():
        if not buffer.has_tensor_output():  # none, or several with buffers of their own
            continue
        try:
            sizes, strides = list(map(int, buffer.get_size())), list(map(int, buffer.get_stride()))
        except TypeError as failure:
            raise UnsupportedError(
                f"the result {name} of the compiled model has the size {list(buffer.get_size())}; its memory is "
                "known where every size is a number before the model runs: take what depends on data out of the model"
            ) from failure
        reach = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True))
        sizes_of[name] = (reach if all(sizes) else 0) * buffer.get_dtype().itemsize
    return sizes_of
