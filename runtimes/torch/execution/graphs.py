"""Forward and backward pass of a planned model as two CUDA graphs, which the host launches instead of every kernel.

A plan costs the host more than plain torch, and models of small operators are bound by their host anyway. A captured
pass runs no Python: it replays operators, casts and roundings on the present weights, with new noise in every pass.

Source:
    The procedure (warm up, capture forward, then backward) is that of ``torch.cuda.make_graphed_callables``; it differs
    in accepting any batch, refusing a backward pass whose activations are overwritten, keeping accumulated gradients,
    and not touching the nodes that accumulate into parameters.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.kernels.autograd import differentiated_once
from qsync_opt.kernels.quantize import clear_weights
from qsync_opt.runtimes.torch.execution.checks import NO_SECOND_DERIVATIVE, check_capturable, model_device
from qsync_opt.runtimes.torch.interception import Interception, interception_of
from qsync_opt.runtimes.torch.support import (
    bare_model,
    call_arguments,
    capture_stream,
    capturing,
    compiled_in_place,
    hidden_capture,
    is_capturing,
    model_unchanged,
    recorded_waits,
    without_cudnn_attention,
)

_LOGGER = logging.getLogger(__name__)
_WARM_UPS = 3


def graphed(model: nn.Module, batch: Any) -> nn.Module:
    """Capture a planned model's training passes in CUDA graphs and replay them from then on, until ``undo``.

    This helps models whose steps wait for the host, which has more to do under a plan than without one. Forward and
    backward pass are each launched as one; loss functions outside the model, the optimizer and the all-reduce of
    ``DistributedDataParallel`` are not captured. A pass in evaluation mode, without gradients, or with a batch of
    other shapes or other non-tensor arguments runs eagerly. After applying another plan, call this again.

    As with any CUDA graph, each pass overwrites the output of the one before; Python code of the model (hooks of inner
    modules, counters, branches on values) does not run again; nothing in the model may wait for the device or work on
    the CPU. Memory for the activations stays reserved. Each backward pass must come before the next forward pass.
    Gradients may be accumulated; parameters receive them all at once, after the whole backward pass, so that an
    all-reduce no longer overlaps it.

    Args:
        model: On a card, in training mode, with a plan applied; also inside ``DistributedDataParallel``.
        batch: As in training: keyword arguments as a mapping, positional ones as a tuple or list, or the single one.

    Returns:
        The same model, changed in place. Parameters, gradients, buffers and random state are as before.

    Raises:
        NotReadyError: No plan is applied, or the model is in evaluation mode.
        UnsupportedError: The model is not on a card, is sharded, has SyncBatchNorm, or returns other objects than
            tensors.

    Source:
        See the module's text.
    """
    bare = bare_model(model)
    interception = interception_of(bare)
    if interception is None:
        raise NotReadyError(
            "no plan is applied to this model: apply(model, plan) comes first; a model without a plan is captured with "
            "torch.cuda.make_graphed_callables"
        )
    if not bare.training:
        raise NotReadyError(
            "graphed: the model is in evaluation mode: call model.train() before, passes of it are captured"
        )
    check_capturable(bare)
    interception.graphs = None
    graphs = CapturedPasses(interception, bare)
    graphs.capture(*call_arguments(batch))
    interception.graphs = graphs
    return model


def _description(leaf: Any) -> Any:
    """The part of an input that a captured pass fixes: of a tensor all but its values, else the value itself."""
    if isinstance(leaf, Tensor):
        return (tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad)
    return leaf


@dataclass(frozen=True, slots=True)
class _Passes:
    """Two graphs and the tensors that they read and write."""

    forward: torch.cuda.CUDAGraph
    backward: torch.cuda.CUDAGraph | None
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    """Of the output, with a `_Place` for each tensor."""
    output_gradients: tuple[Tensor | None, ...]
    gradients: tuple[Tensor | None, ...]
    """Of the inputs, then of the parameters."""
    written: set[int] = field(default_factory=set)
    """Indices of ``output_gradients`` that are not zero."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Index of a tensor of the output among its tensors."""

    index: int


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: CapturedPasses, passes: _Passes, *tensors: Tensor) -> tuple[Tensor, ...]:
        for place, tensor in zip(passes.inputs, tensors, strict=False):
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor, non_blocking=True)
        ctx.set_materialize_grads(False)
        passes.forward.replay()
        graphs.generation += 1
        ctx.graphs, ctx.passes, ctx.generation = graphs, passes, graphs.generation
        # A loss is copied: users keep those of many steps.
        outputs = tuple(output.clone() if output.numel() == 1 else output.detach() for output in passes.outputs)
        ctx.mark_non_differentiable(
            *(o for o, place in zip(outputs, passes.output_gradients, strict=True) if place is None)
        )
        return outputs

    @staticmethod
    @differentiated_once(NO_SECOND_DERIVATIVE)
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        graphs: CapturedPasses = ctx.graphs
        passes: _Passes = ctx.passes
        if ctx.generation != graphs.generation:
            raise NotReadyError(
                "a captured forward pass ran again before the backward pass of the one before it, whose activations "
                "are gone: call backward() before the next forward pass, or do without graphed()"
            )
        graphs.keep_accumulated(passes)
        for index, (place, gradient) in enumerate(zip(passes.output_gradients, gradients, strict=True)):
            if place is None:
                continue
            if gradient is not None:
                place.copy_(gradient)
                passes.written.add(index)
            elif index in passes.written:  # only then: it may be large, as logits are beside the loss
                place.zero_()
                passes.written.discard(index)
        assert passes.backward is not None
        passes.backward.replay()
        return (None, None, *(None if g is None else g.detach() for g in passes.gradients))


class CapturedPasses:
    """The graphs of one model for one kind of batch, which its interception replays for batches that fit.

    They are captured by `capture`, or else in the first training pass.

    Attributes:
        generation: Forward passes replayed so far.
        replayed: Whether the last pass of the model was a replay.
    """

    def __init__(
        self, interception: Interception, model: nn.Module, compiled: Callable[[], Callable[..., Any]] | None = None
    ) -> None:
        """``compiled`` makes what is captured in place of the model, which it compiles for a shape; None: the model."""
        self._compiled = compiled
        self.generation = 0
        self.replayed = False
        self._interception = interception
        self._model = model
        self._parameters: tuple[Tensor, ...] = ()
        self._bound: tuple[TreeSpec, list[Any]] | None = None
        self._passes: _Passes | None = None
        self._warned = False

    def forget(self) -> None:
        """Capture anew before the next replay: constants of the graphs have changed."""
        self._passes = None

    def capture(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Capture the passes of a batch; those of other batches run eagerly."""
        leaves, spec = tree_flatten((args, dict(kwargs)))
        self._parameters = tuple(p for p in self._model.parameters() if p.requires_grad)
        self._passes = self._capture(leaves, spec)
        self._bound = spec, [_description(leaf) for leaf in leaves]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The model's output by a replay; ``NotImplemented`` if the pass does not fit the captured one."""
        self.replayed = False
        recomputes = torch._C._current_graph_task_id() != -1
        if not (self._model.training and torch.is_grad_enabled()) or recomputes:
            return NotImplemented
        if torch.is_autocast_enabled("cuda") or is_capturing():
            return NotImplemented
        leaves, spec = tree_flatten((args, dict(kwargs)))
        if self._bound is not None and (spec, [_description(leaf) for leaf in leaves]) != self._bound:
            if not self._warned:
                self._warned = True
                _LOGGER.warning("a batch differs from the captured one in shape or kind: such passes run eagerly")
            return NotImplemented
        if self._passes is None:
            self.capture(args, kwargs)
        passes = self._passes
        assert passes is not None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        outputs = _Replay.apply(self, passes, *tensors, *self._parameters)  # type: ignore[no-untyped-call]
        self.replayed = True
        values = [outputs[leaf.index] if isinstance(leaf, _Place) else leaf for leaf in passes.leaves]
        return tree_unflatten(values, passes.spec)

    def keep_accumulated(self, passes: _Passes) -> None:
        """Copy accumulated gradients out of the memory that the next replay writes."""
        count = len(passes.inputs)
        for parameter, target in zip(self._parameters, passes.gradients[count:], strict=True):
            gradient = parameter.grad
            if gradient is not None and target is not None and gradient.data_ptr() == target.data_ptr():
                parameter.grad = gradient.clone()

    def _capture(self, leaves: Sequence[Any], spec: TreeSpec) -> _Passes:
        """Warm up and capture; the model and its random streams are left unchanged."""
        interception = self._interception
        previous, interception.graphs = interception.graphs, None
        counter, passes = getattr(interception.handler, "counter", None), interception.passes
        count = None if counter is None else counter.clone()
        gc.collect()  # earlier graphs, which hold memory, may be part of a cycle
        try:
            with (
                torch.cuda.device(model_device(self._model)),
                model_unchanged(self._model),
                compiled_in_place(self._model, self._compiled()) if self._compiled else contextlib.nullcontext(),
            ):
                return self._warm_up_and_capture(leaves, spec)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as failure:
            reason = str(failure).partition("\n")[0]
            raise UnsupportedError(
                f"graphed: the passes of this model cannot be captured ({reason}): a captured pass may neither wait "
                "for the device, as .item() and branches on values do, nor move tensors from and to the CPU"
            ) from failure
        finally:
            interception.graphs = previous
            interception.passes = passes
            if counter is not None:
                counter.copy_(count)

    def _warm_up_and_capture(self, leaves: Sequence[Any], spec: TreeSpec) -> _Passes:
        # Memory of their own, so that a replay does not depend on the caller's tensors.
        places = [
            leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]
        inputs = tuple(place for place in places if isinstance(place, Tensor))
        args, kwargs = tree_unflatten(places, spec)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}

        def run(parameters: Sequence[Tensor]) -> tuple[list[Any], TreeSpec]:
            others = {id(own): other for own, other in zip(self._parameters, parameters, strict=True)}
            replaced = {names[own]: other for own, other in others.items()}
            with _recurrent_weights(self._model, others):
                return tree_flatten(functional_call(self._model, replaced, args, kwargs))

        def both(parameters: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
            outputs = _differentiable(run(parameters)[0])
            return _gradients(outputs, list(map(torch.zeros_like, outputs)), inputs, parameters)

        used = [g is not None for g in both(self._parameters)]
        # The same memory as other leaves of the autograd graph: a wrapper or an earlier loss may keep the nodes that
        # accumulate into parameters, which belong to their stream and must not be touched while capturing. They are
        # parameters themselves, or what was compiled for the first pass would be compiled anew for another class.
        aliases = [nn.Parameter(parameter.detach()) for parameter in self._parameters]
        stream = capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS - 1):
                both(aliases)
            with recorded_waits() as waits:
                both(aliases)
        if waits:
            _LOGGER.info("captured in the model's knowledge, because a pass waits for the device: %s", waits[0])
        torch.cuda.current_stream().wait_stream(stream)
        clear_weights()  # captured passes use no stored ones
        passes = _record(run, inputs, aliases, stream, waits=bool(waits))
        _check_memory(self._parameters, aliases)
        if [g is not None for g in passes.gradients] != used:
            raise UnsupportedError(
                "graphed: a module of this model also keeps its parameters elsewhere, so that their gradients would be "
                "lost: run it operator by operator"
            )
        return passes


def _check_memory(parameters: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
    """Refuse passes after which tensors that stood in for the parameters are no longer where those are."""
    if any(own.data_ptr() != alias.data_ptr() for own, alias in zip(parameters, aliases, strict=True)):
        raise UnsupportedError(
            "graphed: a module of this model moves its parameters to other memory in a forward pass, as a recurrent "
            "layer does whose weights are computed (weight_norm, weight drop), so that a captured pass would never see "
            "them change: run it operator by operator"
        )


@contextlib.contextmanager
def _recurrent_weights(model: nn.Module, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Let recurrent layers read ``others``, by the parameters' identities, in place of their parameters.

    They keep a list of their weights of their own. Where a parameter is not the one in that list, they would move all
    of them to new memory, which a captured pass would read ever after.
    """
    before = [(m, m._flat_weights, m._flat_weight_refs) for m in model.modules() if isinstance(m, nn.RNNBase)]
    try:
        for module, *_ in before:
            own = [getattr(module, name, None) for name in module._flat_weights_names]
            weights: list[Any] = [others.get(id(weight), weight) for weight in own]
            module._flat_weights = weights
            module._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]
        yield
    finally:
        for module, weights, references in before:
            module._flat_weights, module._flat_weight_refs = weights, references


def _record(
    run: Callable[[Sequence[Tensor]], tuple[list[Any], TreeSpec]],
    inputs: tuple[Tensor, ...],
    parameters: Sequence[Tensor],
    stream: torch.cuda.Stream,
    *,
    waits: bool,
) -> _Passes:
    """Capture a forward pass and its backward pass.

    The capture is first hidden from a model that never waits for its device, so that it takes the branches of an eager
    pass; if that fails, also without cuDNN's attention, the model is captured in the open.
    """

    def both() -> _Passes:
        forward, backward = torch.cuda.CUDAGraph(), None
        with capturing(forward, stream):
            leaves, spec = run(parameters)
        for leaf in leaves:
            if not (leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))):
                raise UnsupportedError(
                    f"the model's output holds a {type(leaf).__name__}, which cannot be handed out by a captured pass: "
                    "tensors in tuples, lists, mappings or classes that torch.utils._pytree knows are needed"
                )
        outputs = _differentiable(leaves)
        seeds = [torch.zeros_like(output) for output in outputs]
        if outputs and (parameters or any(x.requires_grad for x in inputs)):
            backward = torch.cuda.CUDAGraph()
        # In a pool of its own: the next forward pass would overwrite gradients that are still accumulated.
        with contextlib.nullcontext() if backward is None else capturing(backward, stream):
            gradients = _gradients(outputs, seeds, inputs, parameters)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        places = {id(tensor): _Place(index) for index, tensor in enumerate(tensors)}
        remaining = iter(seeds)
        return _Passes(
            forward=forward,
            backward=backward,
            inputs=inputs,
            outputs=tuple(tensor.detach() for tensor in tensors),
            spec=spec,
            leaves=tuple(places[id(leaf)] if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            output_gradients=tuple(next(remaining) if tensor.requires_grad else None for tensor in tensors),
            gradients=gradients,
        )

    # cuDNN's attention may refuse to be captured, where flash attention does not.
    for attention in () if waits else (contextlib.nullcontext, without_cudnn_attention):
        try:
            with hidden_capture(), attention():
                return both()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as failure:
            _LOGGER.info("not captured like an eager pass: %s", str(failure).partition("\n")[0])
    return both()


def _gradients(
    outputs: Sequence[Tensor], seeds: Sequence[Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of the inputs, None for those that need none, then of the parameters."""
    wanted = (*(x for x in inputs if x.requires_grad), *parameters)
    if not (outputs and wanted):
        return (None,) * (len(inputs) + len(parameters))
    gradients = iter(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
    return (*[next(gradients) if x.requires_grad else None for x in inputs], *gradients)


def _differentiable(leaves: Sequence[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
