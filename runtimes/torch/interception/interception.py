"""Intercepts the operators of a model's forward passes, under the names that the captured graph has for them.

A call is named ``<module path>/<operation>``; later calls of the same operation under the same path in one forward pass
get the suffixes ``_1``, ``_2`` and so on. ``capture`` derives the same names from the exported program and checks that
both sides agree.

Each module's ``forward`` is shadowed by an attribute of the instance that keeps the path of the running module, and a
torch function mode, active only inside the outermost ``forward``, sees the calls. Unlike hooks, a shadow can clean up
in ``finally``, so that an interrupt in the middle of a forward pass leaves nothing behind. The mode costs some
microseconds of host time per torch function. Once the handler has prepared how each operator runs (``prepare``), passes
no longer ask it, and torch modules that are one operator run without the mode.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.runtimes.torch.interception.forwards import Forward, Leaf, forward_of
from qsync_opt.runtimes.torch.interception.functions import FunctionMode, TracedFunctionMode, function_names
from qsync_opt.runtimes.torch.interception.recomputation import CallMemory, Counts
from qsync_opt.runtimes.torch.support import HALF, is_capturing


def operator_name(module: str, op_type: str, occurrence: int) -> str:
    """Name of an operator: module path, kind, and the number of its occurrence under that path from 0."""
    base = f"{module}/{op_type}" if module else op_type
    return base if occurrence == 0 else f"{base}_{occurrence}"


_known_name = functools.lru_cache(maxsize=2**16)(operator_name)


@dataclass(slots=True)
class OperatorCall:
    """One call of a named operator."""

    name: str
    op_type: str
    module: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def writes(self) -> bool:
        """Whether an element-wise operator writes into its input: ``relu_``, or ``relu`` with ``inplace``."""
        return (
            self.op_type.endswith("_") or self.kwargs.get("inplace") is True or any(x is True for x in self.args[1:2])
        )

    @property
    def traced_name(self) -> str:
        """Name in a captured graph, where an operator that writes into its input has a kind of its own (``relu_``)."""
        if not self.writes or self.op_type.endswith("_"):
            return self.name
        path, slash, last = self.name.rpartition("/")
        return f"{path}{slash}{self.op_type}_{last.removeprefix(self.op_type)}"

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Execute the torch function; without arguments, with those of the call."""
        if args or kwargs:
            return self.function(*args, **kwargs)
        return self.function(*self.args, **self.kwargs)


Handler = Callable[[OperatorCall], Any]


class Replays(Protocol):
    """Captured passes of the root module."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a pass, ``NotImplemented`` if it must run as usual."""

    def forget(self) -> None:
        """Capture anew: something captured as a constant has changed."""


Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]
"""Runs one operator, given the torch function and the positional and keyword arguments of the call."""

_past_modes: Any = torch._C.DisableTorchFunction


class Interception:
    """Hands every named operator of a model's forward passes to a handler, until it is removed.

    The model's class, parameters, hooks and ``state_dict`` stay as they are. Shared modules report under the first
    path that ``named_modules`` gives them. A module that runs again during the backward pass (activation
    checkpointing) reports under the names, and with the pass index, of the call that it repeats (`CallMemory`). Only
    modules, and functions that call modules, can be checkpointed: a function's own operations are recomputed outside
    of any module's ``forward``, where they are not seen.

    Attributes:
        handler: Called with every named operator; returns the result of the call.
        path: Path of the running module, None outside of a forward pass.
        thread: Thread of the present or last pass; 0 if it is compiled.
        passes: Outermost forward passes that have begun, without recomputations.
        pass_index: Index of the present pass; for a recomputation, of the pass that it repeats.
        training: Whether the outermost module of the present pass is in training mode.
        recomputing: Whether the present pass is a recomputation.
        traced: Whether the present pass is being compiled or captured as a CUDA graph: decisions are then constants of
            the graph, and ``pass_index`` is meaningless.
        seen: Names met in the present or last pass.
        may_rest: If set, asked before an eager pass: True runs the pass as if nothing were intercepted, uncounted.
        at_rest: If set, the context in which every pass, compiled ones included, runs as if nothing were intercepted;
            given the outermost module.
        resting: Whether the present pass runs in one of these ways.
        checkpointing: Whether what is traced now is recomputed in the backward pass.
        announced: The block that will be passed to ``checkpoint`` next, where its layer says so.
        regional: Whether blocks are regions of compiled passes.
        prepare: If set, maps an operator's name and kind to how it runs; eager passes ask this once per operator
            instead of the handler in every call.
        prepares_evaluation: Whether ``prepare`` holds in evaluation mode too.
        prepared_pass: Whether the present pass uses it.
        graphs: Captured passes of the root module, tried before a pass runs.
        finish: If set, applied to what an outermost module returns.
        on_pass_begin: If set, called before an outermost forward pass, but not before a recomputation.
        on_pass_end: If set, called with the path of the outermost module after its pass.
        on_region_begin: If set, called with the path of a block before it is traced as a region of a compiled pass.
        on_region_end: If set, called after it.
        traced_mode: The function mode of passes that are compiled or captured.
        recurrent_inputs: If set, applied to the arguments of recurrent modules, which compare the types of inputs and
            weights before any operator runs.
        opaque_modules: Paths of modules inside of which nothing is intercepted.
        opaque_inputs: If set, applied to their arguments.
    """

    def __init__(
        self, model: nn.Module, handler: Handler, kinds: tuple[str, ...] = (), *, passes_only: bool = False
    ) -> None:
        """Begin to intercept the operators of ``model``, those of further ``kinds`` (ATen names) too.

        ``passes_only``: of passes that all rest (``at_rest``) only those of the model itself are seen, and no other
        module is touched, except while the operators are `observed`.

        Raises:
            NotReadyError: The model is being intercepted already.
            UnsupportedError: A module is scripted.
        """
        self.handler = handler
        self.on_pass_begin: Callable[[], None] | None = None
        self.on_pass_end: Callable[[str], None] | None = None
        self.on_region_begin: Callable[[str], None] | None = None
        self.on_region_end: Callable[[], None] | None = None
        self.recurrent_inputs: Callable[[Any], Any] | None = None
        self.opaque_modules: frozenset[str] = frozenset()
        self.opaque_inputs: Callable[[Any], Any] | None = None
        self.function_names = function_names(kinds)
        self._mode, self.traced_mode = FunctionMode(self), TracedFunctionMode(self)
        self._counts: Counts = {}
        self.passes = 0
        self.path: str | None = None
        self.thread = 0
        self.pass_index = 0
        self.training = True
        self.recomputing = False
        self._evaluating = False
        self.traced = False
        self.resting = False
        self.checkpointing = False
        self.announced: Forward | None = None
        self.regional = False
        self.may_rest: Callable[[], bool] | None = None
        self.at_rest: Callable[[nn.Module], contextlib.AbstractContextManager[Any]] | None = None
        self.prepare: Callable[[str, str], Run] | None = None
        self.prepares_evaluation = True
        self.prepared_pass = False
        self.graphs: Replays | None = None
        self.finish: Callable[[Any], Any] | None = None
        self._prepared: dict[tuple[str, str], list[tuple[str, Run]]] = {}
        self._on_cuda = any(parameter.is_cuda for parameter in model.parameters())
        self.seen: list[str] = []
        modules = list(model.named_modules())
        shared = len(modules) < sum(1 for _ in model.named_modules(remove_duplicate=False))
        self._memory = CallMemory(shared_modules=shared)
        for path, module in modules:
            if interception_of(module) is not None:
                raise NotReadyError(
                    f"the operators of module {path or 'the root'!r} are intercepted already (a plan is applied, or "
                    "statistics are being collected): undo that first"
                )
            check_not_scripted(path, module)
        self._modules, self._others = (modules[:1], modules[1:]) if passes_only else (modules, [])
        self._shadow(self._modules)

    def outermost(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the outermost module of a pass."""
        if self.at_rest is not None:
            with self.at_rest(forward.module):
                result = self._resting(forward, args, kwargs)
            return self._finished(result, not forward.path)
        if torch.compiler.is_compiling():
            return self._traced(forward, args, kwargs)
        if self.may_rest is not None and self.may_rest():
            return self._resting(forward, args, kwargs)
        self.traced = self._on_cuda and is_capturing()
        self.thread = get_ident()
        self.recomputing = torch._C._current_graph_task_id() != -1
        self.training = forward.module.training
        # An evaluation is never recomputed; a training pass without gradients may be (a checkpointed one).
        self._evaluating = not (self.training or torch.is_grad_enabled())
        self.prepared_pass = (
            self.prepare is not None and not self.traced and (self.training or self.prepares_evaluation)
        )
        whole = True
        if self.recomputing:
            whole = self._recall(forward.path, args)
        else:
            self._counts = {}
            self.seen.clear()
            if not self.traced:  # a captured pass does not run now, and runs many times later
                self.pass_index = self.passes
                self.passes += 1
            if self.on_pass_begin is not None:
                self.on_pass_begin()
            self.enter(forward.path, args, outermost=True)
        result = self._run(forward, args, kwargs)
        if self.on_pass_end is not None and not self.recomputing:
            self.on_pass_end(forward.path)
        return self._finished(result, whole)

    def _resting(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.resting = True
        watched = self.regional and torch.compiler.is_compiling()
        try:
            with self.traced_mode if watched else contextlib.nullcontext():
                return forward.inner(*args, **kwargs)
        finally:
            self.resting = False

    def _traced(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the outermost module while ``torch.compile`` traces it.

        Nothing that a pass changes may be read here, or the next pass would be traced anew. A recomputation is part of
        the graph and needs no memory of earlier calls.
        """
        self.traced = True
        self.thread = 0  # which one it runs in later is not known
        self.recomputing = self.prepared_pass = False
        self.training = forward.module.training
        self._counts = {}
        self.seen = []  # a new list: a compiled pass must not depend on the contents of the old one
        if self.on_pass_begin is not None:
            self.on_pass_begin()
        result = self._run(forward, args, kwargs)
        if self.on_pass_end is not None:
            self.on_pass_end(forward.path)
        # Whether a compiled part is a recomputation is unknown here.
        return self._finished(result, not forward.path)

    def run_opaque(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run a module of the pass in which nothing is intercepted."""
        if self.opaque_inputs is not None:
            args = tuple(map(self.opaque_inputs, args))
            kwargs = {name: self.opaque_inputs(value) for name, value in kwargs.items()}
        self.resting = True
        try:
            with _past_modes():
                return forward.inner(*args, **kwargs)
        finally:
            self.resting = False

    def _finished(self, result: Any, whole: bool) -> Any:
        """What a pass returns; ``whole``: to the script, not to the rest of the model."""
        return self.finish(result) if whole and self.finish is not None else result

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.path = forward.path
        try:
            with self.traced_mode if self.traced else self._mode:
                return forward.inner(*args, **kwargs)
        finally:
            self.path = None
            self.prepared_pass = False

    def enter(self, path: str, args: tuple[Any, ...], outermost: bool = False) -> None:
        """Note that a module begins to run inside the pass, or as its outermost."""
        self.path = path
        if not (self.recomputing or self._evaluating or torch.compiler.is_compiling()):
            self._memory.remember(path, self.pass_index, self._counts, args[0] if args else None, outermost)

    def _recall(self, path: str, args: tuple[Any, ...]) -> bool:
        """Set the counters as they were when the call that is now recomputed began; return whether it was outermost."""
        repeated = self._memory.recall(path, args[0] if args else None)
        if repeated is None:
            self._counts = {}
            return not path
        self.pass_index, self._counts, outermost = repeated
        return outermost

    def call(self, op_type: str, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Name one call and hand it to the handler."""
        module = self.path or ""
        key = (module, op_type)
        occurrence = self._counts.get(key, 0)
        self._counts[key] = occurrence + 1
        if not torch.compiler.is_compiling() and self.prepared_pass:
            return self._run_of(key, occurrence)(function, args, kwargs)
        if torch.compiler.is_compiling():
            name = operator_name(module, op_type, occurrence)
        else:
            name = _known_name(module, op_type, occurrence)
        self.seen.append(name)
        return self.handler(OperatorCall(name, op_type, module, function, args, kwargs))

    def _run_of(self, key: tuple[str, str], occurrence: int) -> Run:
        ready = self._prepared.get(key)
        if ready is None:
            ready = self._prepared[key] = []
        while len(ready) <= occurrence:
            assert self.prepare is not None
            name = operator_name(*key, len(ready))
            ready.append((name, self.prepare(name, key[1])))
        name, run = ready[occurrence]
        self.seen.append(name)
        return run

    def run_leaf(self, forward: Forward, leaf: Leaf, x: torch.Tensor) -> Any:
        """Run a module that is one operator in a prepared pass, without the mode."""
        if leaf.op_type is None and leaf.function in self._mode.names:  # a user gave it a role
            outer = self.path
            self.enter(forward.path, (x,))
            try:
                return forward.inner(x)
            finally:
                self.path = outer
        if not (self.recomputing or self._evaluating):
            self._memory.remember(forward.path, self.pass_index, self._counts, x)
        with _past_modes():
            if leaf.arguments is None:
                if leaf.op_type is not None and x.dtype in HALF:
                    x = x.float()
                return forward.inner(x)
            key = (forward.path, leaf.op_type or "")
            occurrence = self._counts.get(key, 0)
            self._counts[key] = occurrence + 1
            return self._run_of(key, occurrence)(leaf.function, leaf.arguments(x), {})

    def forget_prepared(self) -> None:
        """Ask ``prepare`` anew for every operator, and capture anew, because decisions have changed."""
        self._prepared.clear()
        if self.graphs is not None:
            self.graphs.forget()

    @contextlib.contextmanager
    def observed(self, handle: Callable[[OperatorCall, bool], Any], kinds: tuple[str, ...]) -> Iterator[None]:
        """Replace the handler within the block, for operators of further ``kinds`` (ATen names) too.

        ``handle`` is called with a call, and whether the replaced handler would have run it; it returns the result.
        """
        names, before = self.function_names, (self.handler, self.may_rest, self.prepare, self.graphs, self.at_rest)
        handled = frozenset(names.values())
        self._listen({**function_names(kinds), **names})
        self.handler = lambda call: handle(call, call.op_type in handled)
        self.may_rest = self.prepare = self.graphs = self.at_rest = None
        self._shadow(self._others)
        try:
            yield
        finally:
            self._unshadow(self._others)
            self._listen(names)
            self.handler, self.may_rest, self.prepare, self.graphs, self.at_rest = before

    def _listen(self, names: dict[Any, str]) -> None:
        self.function_names = names
        for mode in (self._mode, self.traced_mode):
            mode.listen(names)

    def _shadow(self, modules: list[tuple[str, nn.Module]]) -> None:
        for path, module in modules:
            module.forward = forward_of(self, path, module)

    def _unshadow(self, modules: list[tuple[str, nn.Module]]) -> None:
        for _, module in modules:
            shadowed = module.__dict__.pop("forward").shadowed
            if shadowed is not None:
                module.__dict__["forward"] = shadowed

    def remove(self) -> None:
        """Give every module its own ``forward`` back; the model is as it was.

        Raises:
            NotReadyError: The model is running, or someone else has replaced a ``forward`` since.
        """
        if self.path is not None or self.resting:
            raise NotReadyError("the model is in the middle of a forward pass: end it first")
        for path, module in self._modules:
            if interception_of(module) is not self:
                raise NotReadyError(
                    f"forward of module {path or 'the root'!r} was replaced since: take that back first"
                )
        self._unshadow(self._modules)
        self._modules.clear()
        self.graphs = None


def check_not_scripted(path: str, module: nn.Module) -> None:
    """Refuse a module of ``torch.jit``."""
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedError(
            f"module {path or 'the root'!r} is scripted: plans need plain Python modules; build the model without "
            "torch.jit"
        )


def interception_of(model: nn.Module) -> Interception | None:
    """The interception that is active on a model, None if there is none."""
    forward = model.__dict__.get("forward")
    return forward.interception if isinstance(forward, Forward) else None


@contextlib.contextmanager
def intercept(model: nn.Module, handler: Handler, kinds: tuple[str, ...] = ()) -> Iterator[Interception]:
    """Intercept a model's operators, and those of further ``kinds``, inside a ``with`` block."""
    interception = Interception(model, handler, kinds=kinds)
    try:
        yield interception
    finally:
        interception.remove()
