"""One operator alone in INT8 for some training steps: all operators side by side, from one state, on equal batches.

On a card a whole step of every run, optimizer included, is captured as a graph and replayed; runs share streams.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence

import torch
from noisy import MagnifiedPlan
from shared_errors import ErringPlan, Errors, NotingPlan
from subjects import Batch
from torch import Tensor, nn

from qsync_opt.model import OpGraph
from qsync_opt.runtimes.torch.execution import ApplyOptions
from qsync_opt.runtimes.torch.sensitivity import full_precision

_STREAMS = 8


class Trial:
    """A copy of a model, trained under a plan from a given state as often as wanted."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        put: Callable[[nn.Module], object],
        batches: tuple[Batch, Batch],
        stream: torch.cuda.Stream | None,
    ) -> None:
        """Take the state that model and optimizer are in.

        Args:
            model: Not under a plan.
            optimizer: Of the model.
            put: Puts a plan on a model.
            batches: One as they are trained on, and the one the loss is evaluated on.
            stream: Where a captured graph runs; None: everything is launched by the host.
        """
        self._model = copy.deepcopy(model)
        self._optimizer = _copied(optimizer, self._model)
        # Evaluated without a plan, on the very parameters.
        self._plain = copy.deepcopy(model)
        for shared, own in zip(self._plain.parameters(), self._model.parameters(), strict=True):
            shared.data = own.data
        self._state = [*self._model.parameters(), *self._model.buffers(), *_tensors(self._optimizer)]
        self._saved = [x.detach().clone() for x in self._state]
        put(self._model)
        self._rates = _adjustable_rates(self._optimizer, captured=stream is not None)
        self._inputs = [x.clone() for x in batches[0]]
        self._held_out = batches[1]
        self._found = torch.zeros(())
        self._stream = stream
        self._graphs = (self._train, self._evaluate)
        if stream is not None:
            self._graphs = (self._captured(self._train, stream), self._captured(self._evaluate, stream))

    def _captured(self, function: Callable[[], None], stream: torch.cuda.Stream) -> Callable[[], None]:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
            self._optimizer.zero_grad(set_to_none=True)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                function()
        stream.synchronize()
        return graph.replay

    def _train(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._model(*self._inputs).backward()
        self._optimizer.step()

    def _evaluate(self) -> None:
        with torch.no_grad():
            self._found = self._plain(*self._held_out)

    def restore(self) -> None:
        """Back to the state at the beginning."""
        with torch.no_grad():
            torch._foreach_copy_(self._state, self._saved)

    def step(self, batch: Batch, share: float = 1.0) -> None:
        """One training step, at a share of the learning rate."""
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate * share)
            else:
                group["lr"] = rate * share
        for place, x in zip(self._inputs, batch, strict=True):
            place.copy_(x)
        self._graphs[0]()

    def evaluate(self) -> Tensor:
        """Held-out loss, on the device."""
        self._graphs[1]()
        return self._found.clone()


def _copied(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The same kind of optimizer in the same state for another copy of the model."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    found = type(optimizer)(model.parameters(), lr=groups[0]["lr"])
    state = copy.deepcopy(optimizer.state_dict())
    if next(model.parameters()).is_cuda and "capturable" in groups[0]:
        for group in state["param_groups"]:
            group["capturable"] = True
    found.load_state_dict(state)
    return found


def _adjustable_rates(optimizer: torch.optim.Optimizer, captured: bool) -> list[float]:
    """Learning rate per group; if steps are captured, groups get it as a tensor that can be written to."""
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    if captured:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]), device=group["params"][0].device)
    return rates


def _tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]


def evaluated(steps: int, every: int) -> list[int]:
    """After which steps the loss is evaluated."""
    return sorted({*range(every, steps + 1, every), steps})


class Trials:
    """Every operator alone in a precision, once with its error and once with the error reversed, and none at all."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        graph: OpGraph,
        names: Sequence[str],
        precision: str,
        options: ApplyOptions,
        factor: float,
        batches: tuple[Batch, Batch],
        captured: bool,
        shared: bool = False,
    ) -> None:
        """Take the state that model and optimizer are in.

        Args:
            model: Not under a plan.
            optimizer: Of the model.
            graph: Of the model.
            names: Of the operators.
            precision: Of theirs.
            options: Rounding, and the place in the random stream.
            factor: By which errors are multiplied.
            batches: One as they are trained on, and the one the loss is evaluated on.
            captured: Whether steps run as CUDA graphs on a card.
            shared: Every run adds the errors that its kernel makes in the run that is in full precision, instead of
                those it makes in its own.
        """
        device = next(model.parameters()).device
        self._streams = [torch.cuda.Stream() for _ in range(_STREAMS)] if device.type == "cuda" else [None]
        places = itertools.cycle(self._streams)

        def trial(put: Callable[[nn.Module], object]) -> tuple[Trial, torch.cuda.Stream | None]:
            stream = next(places)
            with full_precision():
                return Trial(model, optimizer, put, batches, stream if captured else None), stream

        errors: dict[str, Errors] = {name: {} for name in names}

        def noting(copied: nn.Module) -> object:
            return NotingPlan(copied, errors, precision, graph, options)

        def erring(name: str, sign: float) -> Callable[[nn.Module], object]:
            if shared:
                return lambda copied: ErringPlan(copied, name, errors[name], graph, options, sign * factor)
            return lambda copied: MagnifiedPlan(copied, {name: precision}, graph, options, factor=sign * factor)

        if shared:
            # Runs before all others, launched by the host, which has time: the others take the card much longer.
            with full_precision():
                clean = Trial(model, optimizer, noting, batches, None)
                clean.step(batches[0])
                clean.restore()
            self._clean = clean, None
        else:
            self._clean = trial(lambda copied: MagnifiedPlan(copied, {}, graph, options))
        self._pairs = {name: [trial(erring(name, sign)) for sign in (1.0, -1.0)] for name in names}
        self._every = [self._clean, *(one for pair in self._pairs.values() for one in pair)]

    def _all(self, function: Callable[[Trial], Tensor | None]) -> list[Tensor | None]:
        found = []
        for trial, stream in self._every:
            if stream is None:
                found.append(function(trial))
                continue
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                found.append(function(trial))
        for stream in self._streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        return found

    def harms(
        self, batches: Sequence[Batch], every: int, shares: Sequence[float] | None = None
    ) -> dict[str, list[float]]:
        """Change of the held-out loss while training on the batches with one operator in low precision throughout.

        The mean over an error and the reversed one: the even part, as the odd part is none in the mean.

        Args:
            batches: One for every step.
            every: Steps between two evaluations; the last step is always followed by one.
            shares: Of the learning rate in every step; None: all of it.

        Returns:
            Operator to the change at every evaluation, `evaluated` says after which steps.
        """
        found: list[Tensor] = []
        stops = evaluated(len(batches), every)
        shares = shares or [1.0] * len(batches)
        with full_precision():
            self._all(Trial.restore)
            for number, (batch, share) in enumerate(zip(batches, shares, strict=True), 1):
                self._all(lambda trial, batch=batch, share=share: trial.step(batch, share))  # type: ignore[misc]
                if number in stops:
                    found.append(torch.stack([x.double() for x in self._all(Trial.evaluate) if x is not None]))
            clean, *both = torch.stack(found, 1).tolist()
        pairs = zip(self._pairs, both[::2], both[1::2], strict=True)
        return {
            name: [(a + b) / 2 - c for a, b, c in zip(ahead, reversed_, clean, strict=True)]
            for name, ahead, reversed_ in pairs
        }
