"""How far does noise reach? From relative noise at one operator to the variance of all weight gradients.

Noise at an operator's output travels to the loss: it perturbs the activations that later weight gradients are made of,
and the derivatives of later nonlinear operators, hence the gradients of earlier ones. Noise in a gradient travels to
the input and perturbs the weight gradients on the way. To first order both are linear in the noise, so two sweeps over
the graph (one against, one with the execution order) give the effect of every operator at once.

The currency is the noise-to-signal ratio: energy of the noise over squared norm of the signal. Along an edge it is
multiplied by a weight:

- a sum dilutes a branch's noise by the branch's share of the energy, and so does a tensor's gradient that is the sum of
  what several consumers contribute (exact for independent branches);
- a product turns independent noise on an operand into output noise of known energy, hence the weight
  ``sum_k |x_k|^2 |w_k|^2 / |z|^2`` from the collected norms (exact for noise shaped like the signal);
- element-wise and normalizing operators hand it on as it is; noise that reaches the loss changes the loss's own
  gradient by its measured curvature.

*Independent* noise (rounding of activations and gradients) differs per row and perturbs a weight gradient by
``sum_n |x_n|^2 |g_n|^2`` times the ratio. *Shared* noise (rounding of a weight) is the same map in every row: it adds
up as the signal does, and perturbs a weight gradient by its own squared norm times the ratio.

Not modelled: correlation between paths that meet again, averaging of noise in pooling and reductions, the backward pass
of softmax and normalizations changing with its input, and everything beyond first order except flips of rectifiers
(see ``kink``). The probed gains of ``qsync_opt.sensitivity.statistics`` know all of these but the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.model import Operator, OpGraph
from qsync_opt.sensitivity.statistics import ModelStatistics, OperatorStatistics, Signal

FloatArray = npt.NDArray[np.float64]
_SUMS = frozenset(
    {"add", "add_", "sub", "sub_", "rsub", "cat", "concat", "stack", "where", "masked_fill", "masked_fill_"}
    | {"Add", "Sub", "Sum", "Concat", "Where"}
)
_GATES = frozenset({"mul", "mul_", "div", "div_", "Mul", "Div"})
_KINKS = frozenset({"relu", "relu_", "Relu"})
_SMOOTH = frozenset({"gelu", "silu", "silu_", "mish", "tanh", "sigmoid", "softplus", "Gelu", "Tanh", "Sigmoid"})
_NORMALIZATIONS = frozenset({"layer_norm", "rms_norm", "group_norm", "instance_norm", "batch_norm"})
_SOFTMAX = frozenset({"softmax", "Softmax"})

# Relative noise rho in a pre-activation of variance s^2 changes a smooth activation's derivative by the relative energy
# E[f''(z)^2] / E[f'(z)^2] * rho * s^2; here for GELU of standard normal z; the others lie within a factor of 2.
_CURVATURE = 0.5
# A rectifier whose normal pre-activation carries relative noise rho flips with probability sqrt(rho) / pi; half of the
# elements pass a gradient, so the flips are this share of the gradient's energy.
_FLIPS = 2.0 / math.pi


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Longest paths of an operator, counted in adjustable operators (itself not counted)."""

    to_input: Mapping[str, int]
    to_loss: Mapping[str, int]


def distances(graph: OpGraph) -> Distances:
    """True distances of every operator to the model's input and to its loss.

    Longest paths, so that a residual shortcut does not make an operator shallow; by name, so that nothing depends on
    the order in which anything is stored.

    Source:
        Ours; QSync uses shortest paths (breadth-first layers).
    """
    return Distances(to_input=graph.distances_to_input(), to_loss=graph.distances_to_loss())


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Variance of all weight gradients per unit of noise-to-signal ratio (``kink``: per square root of it)."""

    independent: float = 0.0
    shared: float = 0.0
    kink: float = 0.0

    def __add__(self, other: Effect) -> Effect:
        return Effect(
            independent=self.independent + other.independent,
            shared=self.shared + other.shared,
            kink=self.kink + other.kink,
        )

    def weighted(self, weight: float) -> Effect:
        """The effect of noise that arrives with this weight."""
        return Effect(
            independent=self.independent * weight, shared=self.shared * weight, kink=self.kink * math.sqrt(weight)
        )

    def variance(self, *, independent: float, shared: float) -> float:
        """Variance caused by noise-to-signal ratios of both sorts."""
        smooth = self.independent * independent + self.shared * shared
        return smooth + self.kink * math.sqrt(independent + shared)


def operand_edges(operator: Operator, statistics: OperatorStatistics) -> dict[int, str]:
    """Which operand (``first``, ``second``, ``third``) each graph input of an adjustable operator is."""
    if statistics.third is not None:
        names = ["first", "second", "third"]
    else:
        names = ["first", "second"]
        if len(operator.inputs) < len(names):
            parameters = {"first": statistics.first_parameter, "second": statistics.second_parameter}
            names = [name for name in names if parameters[name] is None]
    return dict(zip(range(len(operator.inputs)), names, strict=False))


def incoherent_gradient(statistics: OperatorStatistics, target: str) -> float:
    """Energy that a gradient would have if its summands were independent: ``sum |x|^2 |g|^2``, all calls."""
    other = statistics.first if target == "second" else statistics.second
    path = "first>second_gradient/floating" if target == "second" else "second>first_gradient/floating"
    product = statistics.products[0].volume * other.mean_square * statistics.output_gradient.mean_square
    return statistics.calls * product * statistics.alignment.get(path, 1.0)


def _incoherent_output(statistics: OperatorStatistics) -> float:
    product = statistics.products[0].volume * statistics.first.mean_square * statistics.second.mean_square
    return statistics.calls * product * statistics.alignment.get("first>output/floating", 1.0)


def ratio(numerator: float, denominator: float) -> float:
    """One number by another, 0 where there is nothing to divide by."""
    return numerator / denominator if denominator > 0 else 0.0


class Propagation:
    """Effects of relative noise everywhere in a model; see the module's text."""

    def __init__(self, graph: OpGraph, statistics: ModelStatistics) -> None:
        self._graph = graph
        self._statistics = statistics
        self._energy: dict[str, float] = {}
        self._gradient_energy: dict[str, float] = {}
        self._edge_energy: dict[tuple[str, int], float] = {}
        self._measure_energies()
        self._measure_gradient_energies()
        self._gradient_effect: dict[str, Effect] = {}
        for operator in graph:
            self._gradient_effect[operator.name] = self._effect_of_gradient_noise(operator)
        self._output_effect: dict[str, Effect] = {name: Effect() for name in self._energy}
        for operator in reversed(graph.operators):
            self._spread_output_effects(operator)

    def output_effect(self, name: str) -> Effect:
        """Effect of relative noise on the output of an operator."""
        self._graph.index(name)
        return self._output_effect[name]

    def input_gradient_effect(self, name: str, position: int) -> Effect:
        """Effect of relative noise on the gradient that an operator delivers to one of its inputs."""
        source = self._graph[name].inputs[position]
        return self._gradient_effect[source].weighted(self._share(name, position))

    def transfers(self, sources: Sequence[str]) -> dict[str, FloatArray]:
        """How much of each source's noise-to-signal ratio arrives at the output of every operator.

        Args:
            sources: Operators that are noisy.

        Returns:
            Operator to one factor per source. Noise of different operators is independent, so that ratios add up.
        """
        place = {name: i for i, name in enumerate(sources)}
        found: dict[str, FloatArray] = {}
        for operator in self._graph:
            arrived = np.zeros(len(sources))
            for position, source in enumerate(operator.inputs):
                arrived += self._output_weight(operator, position) * found[source]
            if operator.name in place:
                arrived[place[operator.name]] += 1.0
            found[operator.name] = arrived
        return found

    def _output_weight(self, reader: Operator, position: int) -> float:
        """By what the noise-to-signal ratio of one input is multiplied on its way to the output."""
        measured, source = self._measured(reader.name), reader.inputs[position]
        operands = {} if measured is None else operand_edges(reader, measured)
        if measured is not None and position in operands:
            if measured.third is not None:
                return 1.0 if operands[position] == "third" else 0.0
            return ratio(_incoherent_output(measured), measured.calls * measured.output.square_sum)
        if reader.op_type in _SUMS:
            total = max(self._energy[reader.name], sum(self._energy[u] for u in reader.inputs))
            return ratio(self._energy[source], total)
        if reader.op_type in _SOFTMAX:
            return ratio(self._energy[source], self._graph[source].output_elements)
        signal = self._signal(reader)
        return 1.0 if signal is None else signal.noise_weight

    # -- energies ------------------------------------------------------------------------------------------------

    def _measured(self, name: str) -> OperatorStatistics | None:
        return self._statistics.find(name)

    def _signal(self, operator: Operator) -> Signal | None:
        """What was seen around an operator, unless its size shows that the name is another's."""
        signal = self._statistics.signals.get(operator.name)
        return signal if signal is not None and signal.elements == operator.output_elements else None

    def _measure_energies(self) -> None:
        """Squared norm of every output: measured, or seen by a measured reader, or derived from its inputs."""
        for operator in self._graph:
            name = operator.name
            measured, signal = self._measured(name), self._signal(operator)
            if measured is not None:
                self._energy[name] = measured.calls * measured.output.square_sum
            elif signal is not None:
                self._energy[name] = signal.output_square_sum
            else:
                self._energy[name] = self._seen_by_reader(operator) or self._derived_energy(operator)

    def _seen_by_reader(self, operator: Operator) -> float | None:
        for reader in self._graph.consumers(operator.name):
            if self._graph[reader].inputs != (operator.name,):
                continue
            signal, measured = self._signal(self._graph[reader]), self._measured(reader)
            if signal is not None:
                return signal.input_square_sum
            if measured is not None and measured.first.elements == operator.output_elements:
                return measured.first.square_sum
        return None

    def _derived_energy(self, operator: Operator) -> float:
        elements = float(operator.output_elements)
        if not operator.inputs or operator.op_type in _NORMALIZATIONS:
            return elements
        mean_squares = [ratio(self._energy[u], self._graph[u].output_elements) for u in operator.inputs]
        if operator.op_type in _GATES:
            return elements * math.prod(mean_squares)
        if operator.op_type in _SUMS:
            return sum(self._energy[u] for u in operator.inputs)
        return elements * max(mean_squares)

    def _measure_gradient_energies(self) -> None:
        """Squared norm of every output's gradient and of what each reader contributes to it."""
        for operator in reversed(self._graph.operators):
            name, measured = operator.name, self._measured(operator.name)
            arrived = sum(
                self._edge_energy[reader, position]
                for reader in dict.fromkeys(self._graph.consumers(name))
                for position, source in enumerate(self._graph[reader].inputs)
                if source == name
            )
            self._gradient_energy[name] = arrived
            operands = {} if measured is None else operand_edges(operator, measured)
            if measured is not None:
                self._gradient_energy[name] = measured.calls * measured.output_gradient.square_sum
            for position, source in enumerate(operator.inputs):
                gradient = None
                if measured is not None and position in operands:
                    gradient = getattr(measured, f"{operands[position]}_gradient")
                    self._edge_energy[name, position] = (
                        0.0 if gradient is None else measured.calls * gradient.square_sum
                    )
                else:
                    self._edge_energy[name, position] = self._through(operator, source)

    def _through(self, operator: Operator, source: str) -> float:
        """Energy of the gradient that an unmeasured operator hands on to one input."""
        energy = self._gradient_energy[operator.name]
        if not self._graph.consumers(operator.name):
            return 1.0  # the loss: only shares matter
        if operator.op_type in _NORMALIZATIONS:
            return energy * ratio(self._graph[source].output_elements, self._energy[source])
        if operator.op_type in _GATES:
            others = [u for u in operator.inputs if u != source]
            return energy * math.prod(ratio(self._energy[u], self._graph[u].output_elements) for u in others)
        return energy

    def _share(self, reader: str, position: int) -> float:
        """Share of one reader in the energy of a tensor's gradient."""
        source = self._graph[reader].inputs[position]
        if self._measured(reader) is None and not self._graph.consumers(reader):
            return 1.0  # the loss
        return min(1.0, ratio(self._edge_energy[reader, position], self._gradient_energy[source]))

    # -- gradients -----------------------------------------------------------------------------------------------

    def _own_effect(self, measured: OperatorStatistics) -> Effect:
        """Effect on the operator's own weight gradient, of relative noise on its input or on its output's gradient."""
        effect = Effect()
        for operand in ("first", "second"):
            gradient = getattr(measured, f"{operand}_gradient")
            if getattr(measured, f"{operand}_parameter") is not None and gradient is not None:
                effect += Effect(
                    independent=incoherent_gradient(measured, operand), shared=measured.calls * gradient.square_sum
                )
        return effect

    def _effect_of_gradient_noise(self, operator: Operator) -> Effect:
        """Effect of relative noise on the whole gradient of an operator's output."""
        measured = self._measured(operator.name)
        effect = Effect() if measured is None else self._own_effect(measured)
        operands = {} if measured is None else operand_edges(operator, measured)
        for position, source in enumerate(operator.inputs):
            weight = self._share(operator.name, position)
            if measured is not None and position in operands and measured.third is None:
                gradient = getattr(measured, f"{operands[position]}_gradient")
                if gradient is None:
                    continue
                norm = measured.calls * gradient.square_sum
                weight *= ratio(incoherent_gradient(measured, operands[position]), norm)
            effect += self._gradient_effect[source].weighted(weight)
        return effect

    # -- outputs -------------------------------------------------------------------------------------------------

    def _spread_output_effects(self, reader: Operator) -> None:
        """Add to every input of ``reader`` what noise on it does in and after ``reader``."""
        measured = self._measured(reader.name)
        operands = {} if measured is None else operand_edges(reader, measured)
        # What is not an operator's output (a mask, a constant) can hold most of the energy of a sum.
        total = max(self._energy[reader.name], sum(self._energy[u] for u in reader.inputs))
        for position, source in enumerate(reader.inputs):
            after = self._output_effect[reader.name]
            if measured is not None and position in operands:
                effect = self._effect_in_product(reader, measured, operands, position, after)
            elif reader.op_type in _SUMS:
                effect = after.weighted(ratio(self._energy[source], total))
            else:
                effect = self._effect_in_function(reader, position, after)
            self._output_effect[source] += effect

    def _effect_in_product(
        self, reader: Operator, measured: OperatorStatistics, operands: dict[int, str], position: int, after: Effect
    ) -> Effect:
        if measured.third is not None:
            # Noise on queries and keys reaches the output through the softmax, in proportion to the scores' size.
            return after if operands[position] == "third" else Effect()
        weight = ratio(_incoherent_output(measured), measured.calls * measured.output.square_sum)
        effect = after.weighted(weight)
        other = "second" if operands[position] == "first" else "first"
        gradient = getattr(measured, f"{other}_gradient")
        if gradient is None:
            return effect
        independent, norm = incoherent_gradient(measured, other), measured.calls * gradient.square_sum
        if getattr(measured, f"{other}_parameter") is not None:
            return effect + Effect(independent=independent, shared=norm)
        for index, name in operands.items():
            if name == other:
                effect += self.input_gradient_effect(reader.name, index).weighted(ratio(independent, norm))
        return effect

    def _effect_in_function(self, reader: Operator, position: int, after: Effect) -> Effect:
        source = reader.inputs[position]
        mean_square = ratio(self._energy[source], self._graph[source].output_elements)
        if reader.op_type in _SOFTMAX:
            return after.weighted(mean_square)
        before = self.input_gradient_effect(reader.name, position)
        signal = self._signal(reader)
        if signal is not None and signal.curvature:
            return after + before.weighted(signal.curvature)
        if reader.op_type in _SMOOTH:
            return after + before.weighted(_CURVATURE * min(1.0, mean_square))
        if reader.op_type in _KINKS:
            return after + Effect(kink=_FLIPS * before.independent)
        return after
