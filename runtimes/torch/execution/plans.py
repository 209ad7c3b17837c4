"""Applies the plan of one device type to a model, and removes it.

The model keeps its class, FP32 parameters and ``state_dict``; only the calls inside its forward pass follow the plan,
so that ``DistributedDataParallel`` and optimizers work unchanged. Gradients reach the parameters, and the all-reduce,
in FP32 on every rank.

A planned operator runs at its precision. An adjustable operator that the plan does not name runs in FP32 and is named
once in a warning. A fixed operator (normalisation, softmax, losses and such) gets its 16-bit inputs cast to FP32.
Everything else follows its inputs by torch's type promotion; in-place operations keep the type of the tensor that they
write to. The output of the model, or of a part that the script calls, is cast to FP32 unless it is its own loss.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from qsync_opt.errors import ModelError, NotReadyError, QSyncError, UnsupportedError
from qsync_opt.kernels import CONVOLUTIONS, KernelOptions, backend, layers, ops
from qsync_opt.kernels.autograd import float_modes
from qsync_opt.kernels.quantize import call_steps, signed
from qsync_opt.model import HasGraph, OpGraph, Role, graph_of
from qsync_opt.numerics import is_eight_bit
from qsync_opt.runtimes.plans import DevicePlans, precisions_of
from qsync_opt.runtimes.torch.ddp import world
from qsync_opt.runtimes.torch.execution.audit import StepAudit
from qsync_opt.runtimes.torch.execution.checks import (
    check_autocast,
    check_capturable,
    check_master_weights,
    check_names,
    check_precisions,
    check_sharding,
    is_sharded,
    model_device,
    some_names,
)
from qsync_opt.runtimes.torch.execution.chunked_loss import ChunkedLoss, loss_heads
from qsync_opt.runtimes.torch.execution.graphs import CapturedPasses
from qsync_opt.runtimes.torch.execution.memory_formats import ChannelsLast
from qsync_opt.runtimes.torch.execution.operators import (
    eight_bits,
    fixed,
    floating,
    lifted,
    refuse_autocast,
    refuse_transforms,
    run_fixed,
)
from qsync_opt.runtimes.torch.interception import (
    CompiledByBlocks,
    Interception,
    OperatorCall,
    Run,
    interception_of,
    operator_name,
    repeated_blocks,
)
from qsync_opt.runtimes.torch.support import HALF, bare_model, full_precision, tensors_in

AUTOCAST_TYPES = {"BF16": torch.bfloat16, "FP16": torch.float16}
"""Argument of ``torch.autocast`` for a precision."""
FORM_OPTIONS = ("captured", "compiled", "regional", "channels_last")
"""Attributes of `ApplyOptions` that say in which form a model runs, whatever its precisions."""
PLANNED_OPTIONS = ("autocast", *FORM_OPTIONS)
"""Of the attributes of `ApplyOptions`, those that a `JobPlan` sets."""
TORCH_MODES = {"FP32": "ieee", "TF32": "tf32"}
"""What torch's settings of FP32 products say for a precision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplySettings:
    """How a plan with ``apply_settings()`` (a `JobPlan`) wants to be applied on this worker, beside its precisions.

    ``worthwhile`` is False if the model is better left alone. `PLANNED_OPTIONS` are as in `ApplyOptions`.
    ``lifted_kinds`` are the kinds of fixed operators whose inputs are cast if no graph is given, ``opaque_modules`` the
    modules that run as they are (`OpGraph.opaque_modules`). ``expected_ns`` is the predicted time of a step;
    ``expected_bytes`` its predicted peak memory, None if predicted for other conditions.
    """

    worthwhile: bool
    autocast: str | None
    captured: bool
    compiled: bool
    regional: bool
    channels_last: bool
    lifted_kinds: tuple[str, ...]
    opaque_modules: tuple[str, ...]
    expected_ns: int
    expected_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOptions:
    """How a plan is carried out.

    Attributes:
        kernels: Rounding, granularity and backend of 8-bit operators. Seed and offset in it are starting points: every
            operator, pass and rank has its own stream. ``half_format`` is replaced by the device's.
        evaluate_in: ``"plan"``: a model in evaluation mode follows the plan too, rounding to nearest, so that equal
            inputs give equal results. ``"FP32"``: it runs in FP32, as the plain model would.
        rank: Stream of random bits of this worker; None: the rank in the default process group, 0 without one. Workers
            with different streams make independent rounding errors, which average out.
        autocast: For a plan that has one precision alone, which torch then carries out without distinguishing
            operators: ``"BF16"`` or ``"FP16"`` under ``torch.autocast``; ``"FP32"`` (IEEE) or ``"TF32"`` by torch's
            settings ``fp32_precision`` of products, convolutions and recurrent layers, from `apply` until `undo`. None:
            operator by operator. A `JobPlan` sets it.
        captured: Capture the first training pass in CUDA graphs and replay it from then on, as `graphed` does. A
            `JobPlan` sets it.
        compiled: Compile the model in place (``model.compile()``), which the first passes do; with ``captured`` what is
            captured is compiled, and other passes run as they are. A `JobPlan` sets it.
        regional: With ``compiled``, compile blocks that repeat once for all of them (`CompiledByBlocks`): faster to
            compile, but nothing is fused across blocks. A `JobPlan` sets it.
        channels_last: Keep weights of two-dimensional convolutions channels last, with their gradients, until `undo`;
            what they compute then is too. Values stay the same. Before ``DistributedDataParallel``, which lays its
            buckets out as it finds the parameters. A `JobPlan` sets it, but not for a sharded model.
        chunked_loss: Compute the loss of `LinearCrossEntropy`, and of Hugging Face's models for causal language
            modelling, without the logits of all tokens at once: these models' training passes with labels then return
            no logits.
        outputs: ``"FP32"``: 16-bit outputs of the model, or of a module of it that the script calls by itself, are cast
            to FP32, so that losses and metrics outside the model compute as before; unless the model returns its own
            loss. ``"plan"``: outputs keep the format of the last operators.

    Raises:
        UnsupportedError: ``evaluate_in``, ``autocast`` or ``outputs`` is something else.
    """

    kernels: KernelOptions = field(default_factory=KernelOptions)
    evaluate_in: str = "plan"
    rank: int | None = None
    autocast: str | None = None
    captured: bool = False
    compiled: bool = False
    regional: bool = False
    channels_last: bool = False
    chunked_loss: bool = True
    outputs: str = "FP32"

    def __post_init__(self) -> None:
        for name, value in (("evaluate_in", self.evaluate_in), ("outputs", self.outputs)):
            if value not in ("plan", "FP32"):
                raise UnsupportedError(f"option {name}={value!r}: allowed are plan, FP32")
        allowed = (*AUTOCAST_TYPES, *TORCH_MODES)
        if self.autocast not in (None, *allowed):
            raise UnsupportedError(f"option autocast={self.autocast!r}: allowed are {', '.join(allowed)} and None")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_compiled(name: str) -> bool:
    """Warn of an operator without a plan, while the model is compiled and not while it runs."""
    warnings.warn(f"adjustable operator {name!r} is not in the plan and runs in FP32", stacklevel=2)
    return True


class AppliedPlan:
    """A plan that is applied to a model: runs every operator call.

    ``audit`` compares the first steps with the prediction, if there is one. ``counter`` is the number of passes, an
    integer on the device, from which compiled graphs draw their noise. ``regions`` are the paths of the blocks that are
    compiled once for all that are equal. ``device_type`` is the applied entry of the plan, None if it has no name.
    """

    def __init__(
        self,
        model: nn.Module,
        precisions: Mapping[str, str],
        graph: OpGraph | None,
        options: ApplyOptions,
        device_type: str | None = None,
        lifted_kinds: tuple[str, ...] = (),
    ) -> None:
        self._model = model
        # The first floating-point parameter, which is looked up in every pass.
        self._first, self._first_name = next(
            (
                (module._parameters, name)
                for module in model.modules()
                for name, parameter in module._parameters.items()
                if parameter is not None and parameter.is_floating_point()
            ),
            ({}, ""),
        )
        self.device_type = device_type
        self.graph = graph
        self.precisions = dict(precisions)
        self._options = options
        self._device = model_device(model)
        self._rank = world()[0] if options.rank is None else options.rank
        self._fixed = frozenset() if graph is None else frozenset(o.name for o in graph.by_role(Role.FIXED))
        # A compiled or captured graph is the same in every pass; this counter on the device renews its noise.
        step = options.kernels.step
        first = signed(options.kernels.offset)
        self.counter = torch.full((), first, dtype=torch.int64, device=self._device) if step is None else step
        self.regions: tuple[str, ...] = ()
        self._places: dict[str, int] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        # Of a pass that is being compiled, or of the region in it; and the former while the latter is traced.
        self._steps_O: torch.Tensor | None = None
        self._all_steps_O: torch.Tensor | None = None
        self._seeds_O: torch.Tensor | None = None
        self._first_place = 0
        self._set_kernels()
        self._counts_passes = step is None and bool(self._kernels)
        self.audit: StepAudit | None = None
        self._unplanned: list[str] = []
        self._checked = False
        # With FP32 everywhere and no 16-bit tensor seen, passes after the first can bypass the interception.
        self._changes_nothing = set(self.precisions.values()) <= {"FP32"}
        self._families: set[str] = set()
        heads = loss_heads(model) if options.chunked_loss else []
        self._chunked = [
            ChunkedLoss(head, functools.partial(self._choice_of, operator_name(head.layer_path, "linear", 0)))
            for head in heads
        ]
        self._loss_layers = [module for module in model.modules() if isinstance(module, layers.LinearCrossEntropy)]
        for path, module in model.named_modules():
            if isinstance(module, layers.LinearCrossEntropy):
                choose = functools.partial(self._choice_of, operator_name(path, "linear", 0))
                module.choice = choose if options.chunked_loss else False
        try:
            # What torch's settings carry out changes nothing per operator.
            passes_only = options.autocast in TORCH_MODES and not (options.captured or options.regional)
            self.interception = Interception(model, self, lifted_kinds, passes_only=passes_only)
        except QSyncError:
            self._give_losses_back()
            raise
        self.interception.on_pass_begin, self.interception.on_pass_end = self._begin_pass, self._end_pass
        self.interception.recurrent_inputs = self.interception.opaque_inputs = lifted
        self._modes_before: tuple[str, ...] | None = None
        self._compiled_before: Any = None
        self._strides = ChannelsLast(model) if options.channels_last else None
        if options.autocast in AUTOCAST_TYPES:
            self.interception.at_rest = self._under_autocast
        elif options.autocast is not None:
            self.interception.at_rest = self._as_set
            self._modes_before = float_modes.set_fp32_modes(TORCH_MODES[options.autocast])
        if options.compiled:
            self._compiled_before = (model._compiled_call_impl,)
            if options.regional:
                self._set_regions(repeated_blocks(model))
            if not options.captured:
                model._compiled_call_impl = self.compiled_passes(model)
        if options.outputs == "FP32" and not self._changes_nothing:  # else 16 bits are the model's own
            self.interception.finish = full_precision
        self.interception.prepares_evaluation = options.evaluate_in == "plan"

    @property
    def options(self) -> ApplyOptions:
        """Options that continue the random stream at the next forward pass, for a plan that replaces this one."""
        kernels = self._options.kernels
        offset = kernels.offset + self.interception.passes
        if self._counts_passes:
            offset = int(self.counter)  # the only count of a compiled graph's passes
        return replace(self._options, kernels=kernels.at(seed=kernels.seed, offset=offset))

    @property
    def half_formats(self) -> frozenset[str]:
        """16-bit formats that gradients pass through."""
        planned = {"BF16", "FP16"} & set(self.precisions.values())
        return frozenset(planned | {kernels.half_format for kernels in self._kernels.values()})

    def go_on_at(self, seed: int, offset: int, step: int | None = None) -> None:
        """Move the rounding to a place in the random stream: seed, and offset of the next pass, of `KernelOptions`.

        ``step`` is for the user's own counter on the device, if the kernel options have one; None keeps it.
        """
        kernels = self._options.kernels.at(seed=seed, offset=offset - self.interception.passes)
        self._options = replace(self._options, kernels=kernels)
        self._set_kernels()
        self.interception.forget_prepared()
        count = offset if kernels.step is None else step
        if count is not None:
            self.counter.fill_(signed(count))

    def _set_kernels(self) -> None:
        """Set the kernel options of each 8-bit operator, with a seed of its own; and the same for a compiled graph."""
        base = self._options.kernels
        self._kernels: dict[str, KernelOptions] = {}
        for name, precision in self.precisions.items():
            if is_eight_bit(precision):
                digest = hashlib.blake2b(f"{base.seed}/{self._rank}/{name}".encode(), digest_size=8).digest()
                seed, half_format = int.from_bytes(digest, "little"), backend.half_format(self._device)
                _, implied = ops.eight_bit(precision, base)
                self._kernels[name] = replace(implied, half_format=half_format, seed=seed)
        self._set_seeds()
        self._traced_kernels = {
            name: replace(kernels, offset=0, step=self.counter) for name, kernels in self._kernels.items()
        }
        self._seeds = {name: str(kernels.seed) for name, kernels in self._kernels.items()}

    def compiled_passes(self, model: nn.Module, **options: Any) -> CompiledByBlocks:
        """What runs a model's passes compiled under this plan; ``options`` are those of ``torch.compile``."""
        autocast = AUTOCAST_TYPES.get(str(self._options.autocast))
        return CompiledByBlocks(model, self.regions, autocast, **options)

    def _set_regions(self, paths: tuple[str, ...]) -> None:
        """Compile the blocks at ``paths`` as regions.

        Equal blocks are compiled once where no constant distinguishes them. So the random stream of an operator in 8
        bits is not told by its seed, a constant, but by an element of a tensor: those of a block lie together, in the
        same order in equal blocks.
        """
        self.regions = paths
        if not (paths and self._kernels):
            return
        inside = {
            path: sorted(name for name in self._kernels if name.startswith((f"{path}/", f"{path}."))) for path in paths
        }
        names = [name for own in inside.values() for name in own]
        for path, own in inside.items():
            begin = names.index(own[0]) if own else 0
            self._spans[path] = (begin, begin + len(own))
        names += sorted(self._kernels.keys() - set(names))
        self._places = {name: index for index, name in enumerate(names)}
        self._set_seeds()
        self.interception.on_region_begin, self.interception.on_region_end = self._begin_region, self._end_region

    def _set_seeds(self) -> None:
        """Write the seeds of the operators in 8 bits to the tensor that compiled graphs read."""
        if self._places:
            seeds_O = torch.tensor([signed(self._kernels[name].seed) for name in self._places], dtype=torch.int64)
            if self._seeds_O is None:
                self._seeds_O = seeds_O.to(self._device)
            else:
                self._seeds_O.copy_(seeds_O)

    def _begin_region(self, path: str) -> None:
        assert self._steps_O is not None  # the pass began in the same graph
        begin, end = self._spans[path]
        # A copy: inputs that begin elsewhere in their memory would make regions differ.
        own = self._steps_O[begin:end].clone()
        self._all_steps_O, self._steps_O, self._first_place = self._steps_O, own, begin

    def _end_region(self) -> None:
        self._all_steps_O, self._steps_O, self._first_place = None, self._all_steps_O, 0

    def __call__(self, call: OperatorCall) -> Any:
        """Run one operator in its precision."""
        precision = self.precisions.get(call.name)
        if not (torch.compiler.is_compiling() or self._checked):
            self._note(call)
        if precision is None:
            if call.op_type not in ops.ADJUSTABLE:
                return run_fixed(call)
            precision = "FP32"
            if call.name not in self._fixed:
                if torch.compiler.is_compiling():
                    _warn_compiled(call.name)
                elif call.name not in self._unplanned:
                    self._unplanned.append(call.name)
        elif not self.interception.training and self._options.evaluate_in == "FP32":
            precision = "FP32"
        kernels = self._kernels_of(call.name)
        if torch.is_autocast_enabled(self._device.type):
            refuse_autocast(call.name, precision)
        return ops.execute(call.op_type, precision, call.function, call.args, call.kwargs, kernels)

    def _kernels_of(self, name: str) -> KernelOptions | None:
        """Options of an operator in the present pass, None for one that is not in 8 bits."""
        kernels = self._kernels.get(name)
        if kernels is None:
            return None
        if not self.interception.training:
            shared = self._steps_O is not None and torch.compiler.is_compiling()
            return replace(kernels.nearest(), seed=0, offset=0) if shared else kernels.nearest()
        if torch.compiler.is_compiling():  # the whole model, or one module of an eager pass
            if self._steps_O is not None:
                step = self._steps_O[self._places[name] - self._first_place]
                return replace(kernels, seed=0, offset=0, step=step)
            # A seed read as an integer could become a symbol, and has more bits than symbols may.
            return self._traced_kernels[name].at(seed=int(self._seeds[name]), offset=0)
        if self.interception.traced:
            return self._traced_kernels[name]
        return kernels.at(seed=kernels.seed, offset=kernels.offset + self.interception.pass_index)

    def _choice_of(self, name: str) -> tuple[str | None, KernelOptions | None]:
        """Precision and options of an output layer whose loss is chunked."""
        if self.interception.resting:  # torch's settings decide
            return None, None
        self.interception.seen.append(name)
        return self.precisions.get(name, "FP32"), self._kernels_of(name)

    def _prepare(self, name: str, op_type: str) -> Run:
        """Runs an operator in every later pass as :meth:`__call__` would."""
        if name not in self.precisions and op_type not in ops.ADJUSTABLE:
            return fixed(name, op_type)
        precision = self.precisions.get(name, "FP32")
        kernels = self._kernels.get(name)
        if kernels is None:
            return floating(name, op_type, precision, self._device)
        interception, nearest = self.interception, kernels.nearest()
        seed, offset = kernels.seed, kernels.offset

        def options() -> KernelOptions:
            return kernels.at(seed=seed, offset=offset + interception.pass_index) if interception.training else nearest

        return eight_bits(name, op_type, precision, self._device, options)

    def _note(self, call: OperatorCall) -> None:
        if call.op_type in ops.ADJUSTABLE:
            self._families.add("conv" if call.op_type in CONVOLUTIONS else "matmul")
        if any(tensor.dtype in HALF for tensor in tensors_in((call.args, call.kwargs))):
            self._changes_nothing = False

    def _may_rest(self) -> bool:
        """Whether plain torch does what the plan says; asked before every pass, because modes may change."""
        if torch.is_autocast_enabled(self._device.type):
            return False  # refused at the first operator
        return self._device.type == "cpu" or all(
            float_modes.current_mode(family) == "ieee" for family in self._families
        )

    def _under_autocast(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass whose plan is carried out by torch's own mixed precision."""
        dtype = AUTOCAST_TYPES[str(self._options.autocast)]
        kind = self._device.type
        if torch.is_autocast_enabled(kind):
            if torch.get_autocast_dtype(kind) is not dtype:
                raise NotReadyError(
                    f"the model runs under torch.autocast in {torch.get_autocast_dtype(kind)}, but its plan is "
                    f"{self._options.autocast}: leave autocast while a plan is applied"
                )
            return contextlib.nullcontext()  # a recomputation in the backward pass
        if not module.training and self._options.evaluate_in == "FP32":
            return contextlib.nullcontext()
        return torch.autocast(kind, dtype=dtype)

    def _as_set(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass whose plan is carried out by torch's settings."""
        if torch.is_autocast_enabled(self._device.type):
            raise NotReadyError(
                f"the model runs under torch.autocast, but its plan is {self._options.autocast}: leave autocast while "
                "a plan is applied"
            )
        return contextlib.nullcontext()

    def remove(self) -> None:
        """Give the model and torch back as they were.

        Raises:
            NotReadyError: As `Interception.remove`.
        """
        self.interception.remove()
        self._give_losses_back()
        if self._modes_before is not None:
            float_modes.set_fp32_modes(self._modes_before)
        if self._strides is not None:
            self._strides.restore()
        if self._compiled_before is not None:
            (self._model._compiled_call_impl,) = self._compiled_before
        if self.audit is not None:
            self.audit.stop()

    def _give_losses_back(self) -> None:
        for chunked in self._chunked:
            chunked.remove()
        for layer in self._loss_layers:
            layer.choice = None

    def _begin_pass(self) -> None:
        if not torch.compiler.is_compiling():
            if self._kernels:
                refuse_transforms(next(iter(self._kernels)))
            first = self._first.get(self._first_name)
            if first is not None and first.dtype is not torch.float32:  # cast since apply, as by model.half()
                check_master_weights(self._model)
        if self._counts_passes:
            self.counter.add_(1)
        if self._seeds_O is not None and torch.compiler.is_compiling():
            self._steps_O = call_steps(self._seeds_O, self.counter)

    def _end_pass(self, path: str) -> None:
        """Check after the first whole training pass that it ran every planned operator, and warn of unplanned ones.

        An evaluation that runs all of them settles it too.
        """
        self._steps_O = None  # or the compiled graph would return it
        # While a pass is compiled, nothing that changes between passes may be read: it would be compiled again.
        tracing = torch.compiler.is_compiling()
        if path or (not tracing and self._checked):
            return
        seen = set(self.interception.seen)
        missing = [name for name in self.precisions if name not in seen]
        if missing and not (self.interception.training and torch.is_grad_enabled()):
            return  # such as generation with an encoder's stored result; the first training pass will tell
        if missing:
            raise ModelError(
                f"the first training pass did not meet {some_names(missing)} of the plan: if the model skips layers "
                "at times, run all of them in one forward pass first (model.eval(), or no chance of skipping), not "
                "compiled; else the plan is for another model: undo it and capture this model again"
            )
        if tracing:
            return
        self._checked = True
        if type(self).__call__ is AppliedPlan.__call__:
            self.interception.prepare = self._prepare
        if self._changes_nothing:
            self.interception.may_rest = self._may_rest
        if self._unplanned:
            warnings.warn(
                f"{len(self._unplanned)} adjustable operators are not in the plan and run in FP32: "
                f"{some_names(self._unplanned)}",
                stacklevel=2,
            )


def apply(
    model: nn.Module,
    plan: Mapping[str, str] | DevicePlans,
    device_type: str | None = None,
    *,
    graph: OpGraph | HasGraph | None = None,
    options: ApplyOptions | None = None,
) -> nn.Module:
    """Run a model under a plan, until :func:`undo`.

    Args:
        model: FP32 model on its device; ``DistributedDataParallel`` or ``torch.compile`` may wrap it already.
        plan: Operator to precision, or a plan with such a mapping per device type. A `JobPlan` that is not worthwhile
            changes nothing.
        device_type: Which entry of the plan; may be left out if there is only one.
        graph: The captured graph or model; with it all names of the plan are checked at once, without it module paths
            and kinds now, and operators after the first training pass.
        options: Kernels and evaluation.

    Returns:
        The same model, changed in place.

    Raises:
        ModelError: The plan or graph is of another model (the first differing operators are named), the plan lacks
            the device type, parameters are not FP32, or an argument is no model or no plan. Raised also by the first
            training pass if it does not run an operator of the plan, and by any if the model was cast since.
        UnsupportedError: The device lacks a planned precision, or an operator cannot run at it; or ``autocast`` is set
            for a plan that mixes precisions, or ``captured`` for a model that cannot be captured.
        NotReadyError: A plan is applied already. Raised also by a forward pass under ``torch.autocast``, and by an
            attempt to copy or pickle the model before ``undo``.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> model = apply(model, {"0/linear": "BF16", "2/linear": "INT8"})
        >>> third = torch.full((1, 4), 1 / 3)
        >>> y = model[0](third)
        >>> bool((y == y.bfloat16()).all()), y.dtype, model(third).dtype
        (True, torch.float32, torch.float32)
        >>> y = undo(model)[0](third)
        >>> bool((y == y.bfloat16()).all())
        False
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"cannot apply a plan to a {type(model).__name__}: a torch.nn.Module is needed")
    settings: ApplySettings | None = getattr(plan, "apply_settings", lambda: None)()
    if settings is not None and not settings.worthwhile:
        return model
    bare = bare_model(model)
    if interception_of(bare) is not None:
        raise NotReadyError("a plan is applied to this model already: undo(model) before applying another")
    precisions = precisions_of(plan, device_type)
    options = options or ApplyOptions()
    check_master_weights(bare)
    check_sharding(bare, options.kernels.weights)
    graph = None if graph is None else graph_of(graph)
    check_names(bare, precisions, graph)
    adjustable = check_precisions(precisions, graph, model_device(bare))
    if settings is not None:
        options = replace(options, **{name: getattr(settings, name) for name in PLANNED_OPTIONS})
    if options.channels_last and is_sharded(bare):
        if settings is None:
            raise UnsupportedError("the model is sharded, but channels_last=True lays out whole weights: leave it out")
        options = replace(options, channels_last=False)
    if options.captured:
        check_capturable(bare)
    if options.autocast is not None:
        check_autocast(adjustable, options.autocast, model_device(bare))
    if device_type is None and isinstance(plan, DevicePlans):
        device_type = next(iter(plan.devices))
    # Without the graph, which rank 0 alone has, the settings name its kinds.
    kinds = graph.lifted_kinds() if graph is not None else settings.lifted_kinds if settings is not None else ()
    applied = AppliedPlan(bare, adjustable, graph, options, device_type, kinds)
    source = graph.opaque_modules() if graph is not None else settings.opaque_modules if settings is not None else ()
    applied.interception.opaque_modules = frozenset(source)
    if options.captured:
        compiled = functools.partial(applied.compiled_passes, bare, dynamic=False) if options.compiled else None
        applied.interception.graphs = CapturedPasses(applied.interception, bare, compiled)
    if settings is not None and not options.compiled:  # its hook would be compiled with the model
        applied.audit = StepAudit(bare, predicted_ns=settings.expected_ns, predicted_bytes=settings.expected_bytes)
    return model


def applied_plan(model: nn.Module) -> AppliedPlan | None:
    """The plan applied to a model (also inside ``DistributedDataParallel``), None if there is none."""
    interception = interception_of(bare_model(model))
    handler = None if interception is None else interception.handler
    return handler if isinstance(handler, AppliedPlan) else None


def undo(model: nn.Module) -> nn.Module:
    """Remove the plan: the model runs as before :func:`apply`.

    Returns:
        The same model.

    Raises:
        NotReadyError: No plan is applied, or the model is in the middle of a forward pass.
    """
    applied = applied_plan(model)
    if applied is None:
        raise NotReadyError("no plan is applied to this model: apply(model, plan) comes first")
    applied.remove()
    return model


@contextlib.contextmanager
def under_plan(
    model: nn.Module,
    plan: Mapping[str, str] | DevicePlans,
    graph: OpGraph | HasGraph | None = None,
    kernels: KernelOptions | None = None,
    **options: Any,
) -> Iterator[None]:
    """Run a model under a plan within the block; ``options`` are those of `ApplyOptions` beside the kernels'."""
    apply(model, plan, graph=graph, options=ApplyOptions(kernels=kernels or KernelOptions(), **options))
    try:
        yield
    finally:
        undo(model)
