"""Statistics of every adjustable operator of a model, from a few training steps in full precision."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qsync_opt.errors import ModelError, first_line
from qsync_opt.kernels import CONVOLUTIONS
from qsync_opt.kernels.autograd import fp32_mode
from qsync_opt.model import HasGraph, OpGraph, Role, graph_of
from qsync_opt.runtimes.torch.interception import OperatorCall, intercept
from qsync_opt.runtimes.torch.sensitivity.probes import MAX_POOLS, Probed, Prober
from qsync_opt.runtimes.torch.sensitivity.products import (
    bounded_lookup,
    is_adjustable,
    operand_slots,
    replace_operands,
    separate,
)
from qsync_opt.runtimes.torch.sensitivity.records import (
    CAST_BEFORE_BACKWARD,
    AttentionRecord,
    ConvolutionRecord,
    GradientScatter,
    LookupRecord,
    MatrixRecord,
    MomentQueue,
    Norms,
    OperatorRecord,
    SignalTensors,
    cast_pending,
    finish_batch,
    loss_curvature,
    normalized,
    signals_on_host,
)
from qsync_opt.runtimes.torch.sensitivity.replays import Replays
from qsync_opt.runtimes.torch.support import (
    Loss,
    call_arguments,
    check_batches,
    model_unchanged,
    without_recomputation,
    without_reentrance,
)
from qsync_opt.sensitivity import (
    GRADIENTS,
    Curvature,
    ModelStatistics,
    OperatorStatistics,
    Signal,
    check_loss_scale,
    merge_operators,
    merge_statistics,
)


def statistics_of_batch(
    recorded: Mapping[str, list[OperatorRecord]],
    watched: Mapping[str, list[SignalTensors]],
    batch: int,
    graph: OpGraph | None,
) -> ModelStatistics:
    """Statistics of one batch from the records of its operators and the norms of its signals."""
    operators: list[OperatorStatistics] = []
    finished = iter(finish_batch([record for records in recorded.values() for record in records], batch))
    for records in recorded.values():
        calls = [next(finished) for _ in records]
        operators.append(calls[0] if len(calls) == 1 else merge_operators(calls, [1] * len(calls), calls=len(calls)))
    signals = {}
    for name, (elements, numbers) in signals_on_host(watched).items():
        means = [sum(values) / len(numbers) for values in zip(*numbers, strict=True)]
        input_squares, output_squares, curvature, spread = means
        if not all(map(math.isfinite, means)):
            raise ModelError(
                f"operator {name!r}: input or result is not finite in batch {batch}, or their squares are not; "
                "statistics need finite values in full precision; check the batch, the loss and the weights"
            )
        signals[name] = Signal(
            elements=elements,
            input_square_sum=input_squares,
            output_square_sum=output_squares,
            curvature=curvature,
            noise_weight=spread * input_squares / output_squares if output_squares and spread != 1.0 else 1.0,
        )
    return ModelStatistics(
        batches=1,
        operators=tuple(operators),
        signals=signals,
        model_fingerprint=None if graph is None else graph.fingerprint(),
    )


def with_probes(
    measured: ModelStatistics, plain: Probed, adaptive: Probed, curvatures: Mapping[str, Mapping[str, Curvature]]
) -> ModelStatistics:
    """Statistics of one batch with the results of its probes."""
    operators = []
    for operator in measured.operators:
        probed: dict[str, Any] = {
            "gains": plain.gains.get(operator.name, {}),
            "adaptive_gains": adaptive.gains.get(operator.name, {}),
            "curvatures": curvatures.get(operator.name, {}),
        }
        operators.append(dataclasses.replace(operator, **probed) if any(probed.values()) else operator)
    signals = {
        name: dataclasses.replace(
            signal,
            flips=plain.flips.get(name, ()),
            adaptive_flips=adaptive.flips.get(name, ()),
            noise_ratio=plain.noise.get(name) or adaptive.noise.get(name, 0.0),
        )
        for name, signal in measured.signals.items()
    }
    return dataclasses.replace(measured, operators=tuple(operators), signals=signals, shift=plain.shift)


Step = Callable[[nn.Module, Any], Tensor]
# Element-wise operators and means, whose norms show how noise is diluted.
_SIGNAL_KINDS = (
    *("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "masked_fill", "cat"),
    *("relu", "relu_", "gelu", "silu", "silu_", "tanh", "sigmoid"),
    "batch_norm",
    *("mean", "avg_pool2d", "adaptive_avg_pool2d", *MAX_POOLS),
)
_RECORDS: dict[str, type[OperatorRecord]] = {
    "embedding": LookupRecord,
    "scaled_dot_product_attention": AttentionRecord,
}


def default_step(model: nn.Module, batch: Any) -> Tensor:
    """Run ``model(**batch)``, ``model(*batch)`` or ``model(batch)`` and return the loss it computes itself.

    Raises:
        ModelError: The model returns no scalar: neither itself, nor as ``.loss``, nor first in a tuple or mapping.
    """
    args, kwargs = call_arguments(batch)
    output = model(*args, **kwargs)
    loss = getattr(output, "loss", None)
    if loss is None:
        loss = output.get("loss") if isinstance(output, Mapping) else output
    if isinstance(loss, list | tuple) and loss:
        loss = loss[0]
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(
            f"the model returned {type(output).__name__} without a scalar loss: pass loss=, a function of the model's "
            "output, or step=, a function of model and batch; both return the loss"
        )
    return loss


def _loss_step(loss: Loss, model: nn.Module, batch: Any) -> Tensor:
    args, kwargs = call_arguments(batch)
    return loss(model(*args, **kwargs))


@contextlib.contextmanager
def _step_of_batch(number: int, batch: Any) -> Iterator[None]:
    """Turn what a step raises within the block into an error that names the batch."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        shapes = (
            ", ".join(str(tuple(x.shape)) for x in tree_leaves(batch) if isinstance(x, Tensor)) or "without tensors"
        )
        raise ModelError(
            f"the step failed on batch {number} ({shapes}): {type(error).__name__}: {first_line(error)}; a batch is "
            "passed as model(**batch), model(*batch) or model(batch), unless step= says otherwise"
        ) from error


class _Collector:
    """Handler of an interception: runs every operator as it is and measures the adjustable ones."""

    def __init__(
        self, model: nn.Module, graph: OpGraph | None, sample: int, replays: Replays, loss_scale: float
    ) -> None:
        self._operators = None if graph is None else {operator.name for operator in graph.by_role(Role.ADJUSTABLE)}
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._sample, self._replays, self._loss_scale = sample, replays, loss_scale
        self.records: dict[str, list[OperatorRecord]] = {}
        self.signals: dict[str, list[SignalTensors]] = {}
        self._norms, self._unmasked = Norms(), Norms(masked=False)
        self.queue = MomentQueue()

    def __call__(self, call: OperatorCall) -> Any:
        if not is_adjustable(call):
            return self._watch_signal(call)
        if self._operators is not None and call.name not in self._operators:
            return call.run()
        if call.op_type == "embedding":
            call.args, call.kwargs = bounded_lookup(call.function, call.args, call.kwargs)
        slots = operand_slots(call.name, call.op_type, call.function, call.args, call.kwargs)
        empty = next((slot.tensor for slot in slots if not slot.tensor.numel()), None)
        if empty is not None:
            raise ModelError(
                f"operator {call.name!r} reads a tensor of shape {tuple(empty.shape)}, which has no element: nothing "
                "can be measured there; pass batches with at least one sample"
            )
        kind = ConvolutionRecord if call.op_type in CONVOLUTIONS else _RECORDS.get(call.op_type, MatrixRecord)
        lead = (None,) if kind is LookupRecord else ()  # a lookup's table is its second operand
        record = kind(
            name=call.name,
            op_type=call.op_type,
            sample=self._sample,
            parameters=(*lead, *(self._parameter(slot.tensor) for slot in slots)),
            replays=self._replays,
            queue=self.queue,
            loss_scale=self._loss_scale,
            differentiated=torch.is_grad_enabled(),
        )
        taps = [_tap(record, name, slot.tensor) for name, slot in zip(GRADIENTS[len(lead) :], slots, strict=False)]
        args, kwargs = replace_operands(call.args, call.kwargs, slots, taps)
        with torch.no_grad():
            if kind is ConvolutionRecord:
                record.put("first.norm", self._norms.of(slots[0].tensor))
            record.measure(call, _detached(args), _detached(kwargs))
        output = separate(call.run(*args, **kwargs))
        with torch.no_grad():
            record.add_tensor("output", _full(output), self._norms.of(output))
        if output.requires_grad:
            output.register_hook(functools.partial(_on_gradient, record, "output_gradient"))  # type: ignore[no-untyped-call]
        self.records.setdefault(call.name, []).append(record)
        return output

    def _parameter(self, tensor: Tensor) -> str | None:
        base = tensor._base
        return self._names.get(id(tensor)) or (None if base is None else self._names.get(id(base)))

    def _watch_signal(self, call: OperatorCall) -> Any:
        output = call.run()
        first_input = next((x for x in (*call.args, *call.kwargs.values()) if _is_floating(x)), None)
        if first_input is not None and _is_floating(output) and output.numel() > 0:
            tensors = {"input": self._unmasked.of(first_input), "output": self._unmasked.of(output)}
            if output.numel() == 1 and output.requires_grad and first_input.numel() > 1:
                tensors["curvature"] = loss_curvature(call, _full(first_input))
            if call.op_type == "batch_norm":
                tensors |= normalized(call, first_input, output)
            self.signals.setdefault(call.traced_name, []).append((output.numel(), tensors))
        return output


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _full(x: Tensor) -> Tensor:
    """Values in FP32, cut off from autograd."""
    return x.detach().to(torch.float32)


def _tap(record: OperatorRecord, gradient: str, tensor: Tensor) -> Tensor:
    """An alias of an operand whose gradient is the contribution of this operator alone."""
    if tensor.dtype not in (torch.float32, torch.float64):
        raise ModelError(
            f"operator {record.name!r} reads {str(tensor.dtype).removeprefix('torch.')}: statistics are collected in "
            "full precision; convert the model with model.float() and do without autocast"
        )
    if not tensor.requires_grad:
        return tensor
    record.needs_gradient[gradient] = tensor.numel()
    if not torch.is_grad_enabled():
        return tensor
    lookup = isinstance(record, LookupRecord)
    alias: Tensor = _Alias.apply(tensor) if lookup else tensor.view_as(tensor)  # type: ignore[no-untyped-call]
    alias.register_hook(functools.partial(_on_gradient, record, gradient))  # type: ignore[no-untyped-call]
    return alias


def _on_gradient(record: OperatorRecord, name: str, gradient: Tensor) -> None:
    with torch.no_grad():
        if name == "output_gradient":
            record.output_gradient(_full(gradient))
        else:
            record.add_tensor(name, _full(gradient.to_dense() if gradient.is_sparse else gradient))


class _Alias(torch.autograd.Function):
    """An alias that accepts any layout of gradient: that of a lookup's table may be sparse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _detached(values: Any) -> Any:
    """Arguments with every floating tensor in FP32 and cut off from autograd."""
    if _is_floating(values):
        return _full(values)
    if isinstance(values, Mapping):
        return {key: _detached(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(_detached(value) for value in values)
    return values


@contextlib.contextmanager
def full_precision() -> Iterator[None]:
    """No autocast and no TF32 within the block."""
    with contextlib.ExitStack() as stack:
        for device_type in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device_type, enabled=False))
        for family in ("matmul", "conv"):
            stack.enter_context(fp32_mode(family, "ieee"))
        stack.enter_context(torch.enable_grad())
        yield


def check_model(model: nn.Module) -> None:
    """Refuse models whose operators would get other names or whose gradients would leave the process.

    Raises:
        ModelError: The model is wrapped for data-parallel training.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ModelError(f"the model is wrapped in {type(model).__name__}: pass the model inside it, model.module")


def _check_complete(statistics: ModelStatistics, graph: OpGraph | None) -> None:
    if not statistics.operators:
        raise ModelError("no adjustable operator ran: does the step call the model that was passed?")
    if graph is None:
        return
    missing = [operator.name for operator in graph.by_role(Role.ADJUSTABLE) if operator.name not in statistics]
    if missing:
        raise ModelError(
            f"{len(missing)} adjustable operators of graph {graph.name!r} did not run, the first is {missing[0]!r}: "
            "the batches must take the path through the model that was captured"
        )


def collect_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    step: Step | None = None,
    loss: Loss | None = None,
    graph: OpGraph | HasGraph | None = None,
    probes: int = 0,
    curvature_probes: int = 0,
    sample_elements: int = 1 << 17,
    adaptive_probes: int = 0,
    whole_batches: bool = False,
    loss_scale: float = 1.0,
    progress: Callable[[int], None] | None = None,
) -> ModelStatistics:
    """Statistics of every adjustable operator over some batches, forward and backward in full precision.

    The model is left as it was: parameters, buffers, gradients, mode and random state. No activation is kept longer
    than autograd keeps it. Two calls with the same model and batches give the same result.

    Args:
        model: In the mode it is trained in, with FP32 parameters, not wrapped for data-parallel training.
        batches: At least one, all of one shape; each as `auto_plan` takes it (keyword arguments as a mapping,
            positional ones as a tuple or list, or the single argument), or what ``step`` takes.
        step: Function of model and batch that returns the loss, in place of ``loss``.
        loss: Function of the model's output that returns the loss; by default the model computes it itself.
        graph: Captured from the model, or the captured model; its adjustable operators, and only they, are then
            measured.
        probes: Random vectors per batch for the gains of the indicator ``kind="probed"``; 0 for none. Two quarters of
            each batch are then differentiated twice, each at the cost of about four steps of as many samples, after
            four forward passes of the whole batch if there are rectifiers or max-pools. 2 to 8 are enough.
        adaptive_probes: Random vectors per batch for the gains of ``kind="progress"``, at the same cost.
        whole_batches: Probe all samples of each batch together: more exact, with several times the memory of a
            training step, and with ``shift``, which ``plan_variance`` needs for models with rectifiers. Batches that
            cannot be divided are always probed so, and those whose loss is not the mean or sum over samples (losses
            over pairs, such as contrastive ones), which one step of the batch and of each part tells.
        curvature_probes: Random vectors per batch for the traces of the indicator ``kind="hessian"``; 0 for none. 8 to
            64 are needed, each at the cost of about a training step.
        sample_elements: Approximate number of elements of an activation whose rounding errors are computed. Norms and
            largest magnitudes always take all elements.
        loss_scale: Factor of the loss where gradients are FP16 (``torch.amp.GradScaler.get_scale()``, a power of two),
            for their underflow. Nothing else depends on it.
        progress: Called after each batch with the number of batches done.

    Returns:
        Statistics in order of first execution, to be saved, merged with those of other ranks, or turned into
        sensitivities.

    Raises:
        ModelError: No batches, or a single one that is in no list; a step that fails; no loss; a value that is not
            finite; an operator of the graph that did not run; operands that are not FP32; the model is wrapped.
        ProblemError: Batches of different shapes; a loss scale that is no power of two.

    Source:
        What is collected follows QSync (IPDPS 2024), section on the indicator; squared norms, output gradients instead
        of weight gradients, rounding factors and alignments are ours.
    """
    check_model(model)
    for name, value, minimum in (
        ("sample_elements", sample_elements, 1),
        ("probes", probes, 0),
        ("adaptive_probes", adaptive_probes, 0),
        ("curvature_probes", curvature_probes, 0),
    ):
        if value < minimum:
            raise ModelError(f"{name} is {value}: at least {minimum} is needed")
    check_loss_scale(loss_scale, "loss_scale")
    check_batches(batches)
    if step is not None and loss is not None:
        raise ModelError("step and loss are both given, but a step returns the loss itself: pass one of the two")
    graph = None if graph is None else graph_of(graph)
    run = step or (default_step if loss is None else functools.partial(_loss_step, loss))
    total: ModelStatistics | None = None
    silent: dict[str, None] = {}
    replays = Replays()
    divide = not whole_batches and bool(probes or adaptive_probes)
    with model_unchanged(model), full_precision(), without_reentrance():
        scatter = GradientScatter(model)
        for number, batch in enumerate(batches):
            collector = _Collector(model, graph, sample_elements, replays, loss_scale)
            with intercept(model, collector, _SIGNAL_KINDS), _step_of_batch(number, batch):
                result = run(model, batch)
            if not isinstance(result, Tensor) or result.numel() != 1:
                is_tensor = isinstance(result, Tensor)
                kind = f"a tensor of shape {tuple(result.shape)}" if is_tensor else type(result).__name__
                raise ModelError(f"the step returned {kind}: it must return the loss, a tensor with one element")
            if not result.requires_grad:
                raise ModelError("the loss does not depend on any trainable parameter: nothing can be measured")
            cast_pending(itertools.chain.from_iterable(collector.records.values()), CAST_BEFORE_BACKWARD)
            with scatter.batch():
                result.backward()  # type: ignore[no-untyped-call]
            del result
            roots = scatter.roots() if adaptive_probes else {}
            silent |= {
                name: None for name, records in collector.records.items() if all(r.lacks_gradient for r in records)
            }
            collector.queue.flush()
            if isinstance(batches, Sized) and len(batches) == 1:
                scatter.clear()  # one batch alone does not scatter
            measured = statistics_of_batch(collector.records, collector.signals, number, graph)
            del collector
            if probes or adaptive_probes or curvature_probes:
                with without_recomputation():
                    prober = Prober(model, run, batch, measured, graph, number, divide=divide)
                    measured = with_probes(
                        measured,
                        prober.gains(probes),
                        prober.gains(adaptive_probes, roots=roots),
                        prober.curvatures(curvature_probes),
                    )
                divide = prober.divides  # what one batch forbids, all do
            total = measured if total is None else merge_statistics([total, measured])
            if progress is not None:
                progress(number + 1)
        noise = scatter.noise()
    if total is None:
        raise ModelError("no batches: at least one is needed to collect statistics")
    total = dataclasses.replace(total, gradient_noise=noise)
    _check_complete(total, graph)
    if silent:
        names = ", ".join(repr(name) for name in silent)
        warnings.warn(
            f"the loss does not depend on the result of {names}: counted with a gradient of zero, so their "
            "precision does not matter",
            stacklevel=2,
        )
    return total
