"""Which operator is running? Names every torch-level call of a forward pass as the capture names it.

A call is named ``<module path>/<operation>``; a second call of the same operation under the same path in one forward
pass gets the suffix ``_1``, a third ``_2`` and so on, so that a module called twice and a module that calls the same
function twice are told apart by one rule. ``capture`` derives the same names from the exported program and checks
that both sides agree.

How it works: each module's ``forward`` is shadowed by an attribute of the instance that keeps the path of the running
module, and a torch function mode, active only inside the outermost ``forward``, sees the calls. Shadowing was taken
instead of hooks because it can clean up in ``finally``: an interrupt in the middle of a forward pass leaves nothing
behind. The mode was taken instead of replacing leaf modules because functional operations need it anyway. It costs
every function of torch some microseconds of host time, named or not. Once a handler has said how each operator runs
(``prepare``), a pass asks it no more, and modules of torch that are one operator are run past the mode.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn

from qsync_opt.errors import NotReadyError, UnsupportedError
from qsync_opt.runtimes.torch.interception.forwards import HALF, Forward, Leaf, forward_of
from qsync_opt.runtimes.torch.interception.functions import FunctionMode, TracedFunctionMode, function_names
from qsync_opt.runtimes.torch.interception.recomputation import CallMemory, Counts
from qsync_opt.runtimes.torch.support import is_capturing


def operator_name(module: str, op_type: str, occurrence: int) -> str:
    """Name of an operator: module path, operation, and which occurrence under that path (0 for the first)."""
    base = f"{module}/{op_type}" if module else op_type
    return base if occurrence == 0 else f"{base}_{occurrence}"


@dataclass(slots=True)
class OperatorCall:
    """One call of a named operator; ``run`` executes it, by default with its own arguments."""

    name: str
    op_type: str
    module: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def writes(self) -> bool:
        """Whether an element-wise operator writes into its input: ``relu_``, or ``relu`` told to with ``inplace``."""
        return (
            self.op_type.endswith("_") or self.kwargs.get("inplace") is True or any(x is True for x in self.args[1:2])
        )

    @property
    def traced_name(self) -> str:
        """Name in a captured graph, where what writes into its input is an operator of its own (``relu_``)."""
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
    """Passes of the root module that were captured."""

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a pass, ``NotImplemented`` if it must run as usual."""
        ...

    def forget(self) -> None:
        """Something that was captured as a constant has changed."""
        ...


# Runs one operator: torch function, positional and keyword arguments of the call.
Run = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]

_past_modes: Any = torch._C.DisableTorchFunction


class Interception:
    """Reports every named operator of a model's forward passes to a handler, until it is removed.

    The model's class, parameters, hooks and ``state_dict`` stay as they are. Shared modules report under the first
    path that ``named_modules`` gives them. A module that runs again during the backward pass (activation
    checkpointing) reports under the names, and with the pass index, of the call that it repeats (`CallMemory`).
    What is checkpointed must be a module, or a function that calls modules: a function's own operations run again
    outside of any module's ``forward``, where they are not seen.

    Attributes:
        path: Path of the running module, None outside of a forward pass.
        thread: Which thread the present or last pass runs in.
        pass_index: Number of outermost forward passes before the present one; a recomputation has that of the pass it
            repeats.
        training: Whether the outermost module of the present pass is in training mode.
        recomputing: Whether the present pass is a recomputation.
        traced: Whether the present pass is being compiled or captured as a CUDA graph: whatever is decided now holds
            in every run of what comes out, and ``pass_index`` says nothing.
        seen: Names met in the present or last pass.
        may_rest: Asked before an eager pass, if the handler set it: True runs the pass as if nothing were intercepted.
            Such a pass is not counted.
        at_rest: What the handler wants every pass to run in, given its outermost module, as if nothing were
            intercepted; a compiled pass too.
        resting: Whether the present pass is such a one.
        prepare: From the name and kind of an operator to how it runs, if the handler set it: eager passes then ask this
            once per operator, and the handler no more.
        prepares_evaluation: Whether that holds in evaluation mode too.
        graphs: Captured passes of the root module, tried before a pass runs.
        prepared_pass: Whether the present pass is such a one.
        finish: Applied to what an outermost module returns, if the handler set it.
    """

    def __init__(
        self,
        model: nn.Module,
        handler: Handler,
        *,
        kinds: tuple[str, ...] = (),
        on_pass_begin: Callable[[], None] | None = None,
        on_pass_end: Callable[[str], None] | None = None,
        recurrent_inputs: Callable[[Any], Any] | None = None,
    ) -> None:
        """Begin to intercept.

        Args:
            model: The root of the module paths.
            handler: Called with every named operator; what it returns is the result of the call.
            kinds: ATen names of operators to report besides the adjustable and the fixed ones.
            on_pass_begin: Called before an outermost forward pass that is no recomputation.
            on_pass_end: Called after an outermost forward pass that did not raise, with the path of its module.
            recurrent_inputs: Applied to the arguments of recurrent modules, which compare the types of inputs and
                weights before any operator runs.

        Raises:
            NotReadyError: The model is being intercepted already.
            UnsupportedError: A module whose ``forward`` cannot be shadowed (a scripted one).
        """
        self._handler = handler
        self._on_pass_begin = on_pass_begin
        self._on_pass_end = on_pass_end
        self.recurrent_inputs = recurrent_inputs
        self.function_names = function_names(kinds)
        self._mode, self._traced_mode = FunctionMode(self), TracedFunctionMode(self)
        self._counts: Counts = {}
        self._operator_names: dict[tuple[str, str], list[str]] = {}
        self._passes = 0
        self._modules: list[tuple[str, nn.Module]] = []
        self.path: str | None = None
        self.thread = 0
        self.pass_index = 0
        self.training = True
        self.recomputing = False
        self._passing = False
        self.traced = False
        self.resting = False
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
            _check_free(path, module)
        for path, module in modules:
            module.forward = forward_of(self, path, module)
            self._modules.append((path, module))

    @property
    def passes(self) -> int:
        """Outermost forward passes that have begun, recomputations not counted."""
        return self._passes

    def rewind(self, passes: int) -> None:
        """Count from an earlier pass on: those after it did not matter."""
        self._passes = passes

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
        # Nothing of an evaluation is computed again. (A training pass without gradients may be: a checkpointed one.)
        self._passing = not (self.training or torch.is_grad_enabled())
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
                self.pass_index = self._passes
                self._passes += 1
            if self._on_pass_begin is not None:
                self._on_pass_begin()
            self.enter(forward.path, args, outermost=True)
        result = self._run(forward, args, kwargs)
        if self._on_pass_end is not None and not self.recomputing:
            self._on_pass_end(forward.path)
        return self._finished(result, whole)

    def _resting(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.resting = True
        try:
            return forward.inner(*args, **kwargs)
        finally:
            self.resting = False

    def _traced(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the outermost module while ``torch.compile`` traces it.

        Nothing may be read here that a pass changes, or the next pass would be traced anew. A recomputation is part of
        the graph then and needs no memory of earlier calls.
        """
        self.traced = True
        self.recomputing = self.prepared_pass = False
        self.training = forward.module.training
        self._counts = {}
        self.seen = []  # a new list: a compiled pass must not depend on what the old one held
        if self._on_pass_begin is not None:
            self._on_pass_begin()
        result = self._run(forward, args, kwargs)
        if self._on_pass_end is not None:
            self._on_pass_end(forward.path)
        # A compiled part may be one that is computed again, which nothing tells here.
        return self._finished(result, not forward.path)

    def _finished(self, result: Any, whole: bool) -> Any:
        """What a pass returns; ``whole`` says whether it is for the script, not for the rest of the model."""
        return self.finish(result) if whole and self.finish is not None else result

    def _run(self, forward: Forward, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.path = forward.path
        try:
            with self._traced_mode if self.traced else self._mode:
                return forward.inner(*args, **kwargs)
        finally:
            self.path = None
            self.prepared_pass = False

    def enter(self, path: str, args: tuple[Any, ...], outermost: bool = False) -> None:
        """Note that a module begins to run inside the pass, or as its outermost."""
        self.path = path
        if not (self.recomputing or self._passing or torch.compiler.is_compiling()):
            self._memory.remember(path, self.pass_index, self._counts, args[0] if args else None, outermost)

    def _recall(self, path: str, args: tuple[Any, ...]) -> bool:
        """Set the counters as they were when the call that is now recomputed began; return whether it was outermost."""
        found = self._memory.recall(path, args[0] if args else None)
        if found is None:
            self._counts = {}
            return not path
        self.pass_index, self._counts, outermost = found
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
            names = self._operator_names.setdefault(key, [])
            if occurrence == len(names):
                names.append(operator_name(module, op_type, occurrence))
            name = names[occurrence]
        self.seen.append(name)
        return self._handler(OperatorCall(name, op_type, module, function, args, kwargs))

    def _run_of(self, key: tuple[str, str], occurrence: int) -> Run:
        """How an operator runs, by module path, kind and occurrence."""
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
        names = self._mode.names
        if leaf.op_type is None and leaf.function in names:  # a role that a user gave
            outer = self.path
            self.enter(forward.path, (x,))
            try:
                return forward.inner(x)
            finally:
                self.path = outer
        if not (self.recomputing or self._passing):
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
        """Ask ``prepare`` anew for every operator, and capture anew: what was decided has changed."""
        self._prepared.clear()
        if self.graphs is not None:
            self.graphs.forget()

    @property
    def handler(self) -> Handler:
        """Whoever is told of the calls."""
        return self._handler

    @contextlib.contextmanager
    def observed(self, handle: Callable[[OperatorCall, bool], Any], kinds: tuple[str, ...]) -> Iterator[None]:
        """Let somebody else run the operators while the block lasts, those of further kinds too.

        Args:
            handle: Called with a call, and whether the handler would be told of it; returns the result.
            kinds: ATen names of operators to report besides.
        """
        names, handler, may_rest, prepare = self.function_names, self._handler, self.may_rest, self.prepare
        (graphs, self.graphs), (at_rest, self.at_rest) = (self.graphs, None), (self.at_rest, None)
        told = frozenset(names.values())
        self._listen({**function_names(kinds), **names})
        self._handler = lambda call: handle(call, call.op_type in told)
        self.may_rest = self.prepare = None
        try:
            yield
        finally:
            self.may_rest, self.prepare, self.graphs, self.at_rest = may_rest, prepare, graphs, at_rest
            self._listen(names)
            self._handler = handler

    def _listen(self, names: dict[Any, str]) -> None:
        self.function_names = names
        for mode in (self._mode, self._traced_mode):
            mode.listen(names)

    def remove(self) -> None:
        """Give every module its own ``forward`` back; the model is as it was.

        Raises:
            NotReadyError: The model is running, or someone else has replaced a ``forward`` since.
        """
        if self.path is not None or self.resting:
            raise NotReadyError("the model is in the middle of a forward pass: end it first")
        for path, module in self._modules:
            forward = module.__dict__.get("forward")
            if not isinstance(forward, Forward) or forward.interception is not self:
                raise NotReadyError(
                    f"forward of module {path or 'the root'!r} was replaced since: take that back first"
                )
        for _, module in self._modules:
            shadowed = module.__dict__.pop("forward").shadowed
            if shadowed is not None:
                module.__dict__["forward"] = shadowed
        self._modules.clear()
        self.graphs = None


def _check_free(path: str, module: nn.Module) -> None:
    if isinstance(module.__dict__.get("forward"), Forward):
        raise NotReadyError(
            f"the operators of module {path or 'the root'!r} are intercepted already (a plan is applied, or "
            "statistics are being collected): undo that first"
        )
    check_not_scripted(path, module)


def check_not_scripted(path: str, module: nn.Module) -> None:
    """Refuse a module that ``torch.jit`` made."""
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
def intercepted(model: nn.Module, handler: Handler) -> Iterator[Interception]:
    """Intercept a model's operators inside a ``with`` block."""
    interception = Interception(model, handler)
    try:
        yield interception
    finally:
        interception.remove()
