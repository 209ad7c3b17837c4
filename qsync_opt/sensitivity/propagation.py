"""Propagation of noise: from relative noise at one operator to the variance of all weight gradients.

Noise at an operator's output travels to the loss: it perturbs the activations that enter later weight gradients, and
the derivatives of later nonlinear operators, hence the gradients of earlier ones. Noise in a gradient travels to the
input and perturbs the weight gradients on its path. To first order both are linear in the noise, so two sweeps over the
graph (one against, one with the execution order) give the effect of every operator at once.

What travels is the noise-to-signal ratio: energy of the noise over squared norm of the signal. Each edge multiplies it
by a weight:

- a sum dilutes a branch's noise by the branch's share of the energy, and so does a tensor's gradient that is the sum of
  the contributions of several consumers (exact for independent branches);
- a product turns independent noise on an operand into output noise of known energy, hence the weight
  ``sum_k |x_k|^2 |w_k|^2 / |z|^2`` from the collected norms (exact for noise shaped like the signal);
- element-wise and normalizing operators leave it as it is; noise that reaches the loss changes the loss's own gradient
  by its measured curvature.

*Independent* noise (rounding of activations and gradients) differs per row and perturbs a weight gradient by
``sum_n |x_n|^2 |g_n|^2`` times the ratio. *Shared* noise (rounding of a weight) is the same map in every row: it adds
up as the signal does, and perturbs a weight gradient by its own squared norm times the ratio.

Where an operand is computed from parameters (weight normalization, parametrizations), noise in its gradient counts as
it arrives at the first operator that reads a parameter, as if that operator kept norms.

Not modelled: correlation between paths that meet again, averaging of noise in pooling and reductions, the backward pass
of softmax and normalizations changing with its input, and everything beyond first order except sign changes of
rectifiers (``Effect.kink``). The probed gains of ``qsync_opt.sensitivity.statistics`` include
all of these but the last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qsync_opt.model import Operator, OpGraph
from qsync_opt.sensitivity.rounding_variance import Noise
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
# A rectifier whose normal pre-activation carries relative noise rho changes sign with probability sqrt(rho) / pi; half
# of the elements pass a gradient, so the changes are this share of the gradient's energy.
_SIGN_CHANGES = 2.0 / math.pi


@dataclass(frozen=True, slots=True)
class Effect:
    """Variance of all weight gradients per unit of noise-to-signal ratio (``kink``: per square root of it)."""

    independent: float = 0.0
    shared: float = 0.0
    kink: float = 0.0

    def __add__(self, other: Effect) -> Effect:
        return Effect(self.independent + other.independent, self.shared + other.shared, self.kink + other.kink)

    def weighted(self, weight: float) -> Effect:
        """The effect of noise whose ratio is multiplied by ``weight`` before it arrives."""
        return Effect(self.independent * weight, self.shared * weight, self.kink * math.sqrt(weight))

    def variance(self, noise: Noise, energy: float) -> float:
        """Variance caused by noise on a signal of squared norm ``energy``."""
        independent, shared = ratio(noise.independent, energy), ratio(noise.shared, energy)
        return self.independent * independent + self.shared * shared + self.kink * math.sqrt(independent + shared)


def ratio(numerator: float, denominator: float) -> float:
    """The quotient, or 0 if the denominator is not positive."""
    return numerator / denominator if denominator > 0 else 0.0


def operand_edges(operator: Operator, statistics: OperatorStatistics) -> dict[int, str]:
    """Position of each graph input of an adjustable operator to its operand (``first``, ``second``, ``third``)."""
    names = ["first", "second"]
    if statistics.third is not None:
        names.append("third")
    elif len(operator.inputs) < len(names):
        names = [name for name in names if getattr(statistics, f"{name}_parameter") is None]
    return dict(zip(range(len(operator.inputs)), names, strict=False))


class Propagation:
    """Effects of relative noise everywhere in a model, by the rules in the module's text."""

    def __init__(self, graph: OpGraph, statistics: ModelStatistics) -> None:
        self._graph = graph
        self._statistics = statistics
        self._operands = {
            operator.name: operand_edges(operator, measured)
            for operator in graph
            if (measured := statistics.find(operator.name)) is not None
        }
        self._of_weights: set[str] = set()
        self._energy: dict[str, float] = {}
        for operator in graph:
            if self._computes_weights(operator):
                self._of_weights.add(operator.name)
            self._energy[operator.name] = self._output_energy(operator)
        self._gradient_energy: dict[str, float] = {}
        self._edge_energy: dict[tuple[str, int], float] = {}
        for operator in reversed(graph.operators):
            self._set_gradient_energies(operator)
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
        """Share of each source's noise-to-signal ratio that arrives at the output of every operator, in their order.

        Noise of different operators is independent, so that ratios add up.
        """
        place = {name: i for i, name in enumerate(sources)}
        factors: dict[str, FloatArray] = {}
        for operator in self._graph:
            total = np.zeros(len(sources))
            for position, source in enumerate(operator.inputs):
                total += self._output_weight(operator, position) * factors[source]
            if operator.name in place:
                total[place[operator.name]] += 1.0
            factors[operator.name] = total
        return factors

    def _computes_weights(self, operator: Operator) -> bool:
        """Whether an operator without statistics turns parameters, and nothing else, into an operand."""
        reads = operator.inputs or operator.parameters
        return bool(reads) and operator.name not in self._operands and self._of_weights.issuperset(operator.inputs)

    def _output_weight(self, reader: Operator, position: int) -> float:
        source = reader.inputs[position]
        product = self._product(reader, position)
        if product is not None:
            measured, operand = product
            if measured.third is not None:
                return 1.0 if operand == "third" else 0.0
            return _product_weight(measured)
        if reader.op_type in _SUMS:
            return ratio(self._energy[source], self._sum_energy(reader))
        if reader.op_type in _SOFTMAX:
            return self._mean_square(source)
        signal = self._signal(reader)
        return 1.0 if signal is None else signal.noise_weight

    def _product(self, operator: Operator, position: int) -> tuple[OperatorStatistics, str] | None:
        """Statistics of a measured operator and the operand that one of its inputs is; None for any other input."""
        operand = self._operands.get(operator.name, {}).get(position)
        return None if operand is None else (self._statistics[operator.name], operand)

    def _signal(self, operator: Operator) -> Signal | None:
        """Measurements around an operator, unless their size shows that the name is another operator's."""
        signal = self._statistics.signals.get(operator.name)
        return signal if signal is not None and signal.elements == operator.output_elements else None

    def _mean_square(self, name: str) -> float:
        return ratio(self._energy[name], self._graph[name].output_elements)

    def _sum_energy(self, operator: Operator) -> float:
        # An input that is no operator's output (a mask, a constant) can hold most of the energy of a sum.
        return max(self._energy[operator.name], sum(self._energy[source] for source in operator.inputs))

    def _output_energy(self, operator: Operator) -> float:
        """Squared norm of an output: measured, seen by a measured reader, or derived from the inputs."""
        measured, signal = self._statistics.find(operator.name), self._signal(operator)
        if measured is not None:
            return measured.calls * measured.output.square_sum
        if signal is not None:
            return signal.output_square_sum
        return self._energy_seen_by_reader(operator) or self._derived_energy(operator)

    def _energy_seen_by_reader(self, operator: Operator) -> float | None:
        for reader in self._graph.consumers(operator.name):
            if self._graph[reader].inputs != (operator.name,):
                continue
            signal, measured = self._signal(self._graph[reader]), self._statistics.find(reader)
            if signal is not None:
                return signal.input_square_sum
            if measured is not None and measured.first.elements == operator.output_elements:
                return measured.first.square_sum
        return None

    def _derived_energy(self, operator: Operator) -> float:
        elements = float(operator.output_elements)
        if not operator.inputs or operator.op_type in _NORMALIZATIONS:
            return elements
        mean_squares = [self._mean_square(source) for source in operator.inputs]
        if operator.op_type in _GATES:
            return elements * math.prod(mean_squares)
        if operator.op_type in _SUMS:
            return sum(self._energy[source] for source in operator.inputs)
        return elements * max(mean_squares)

    def _set_gradient_energies(self, operator: Operator) -> None:
        """Squared norm of the gradient of an output, and of the operator's contribution to each input's gradient."""
        name, measured = operator.name, self._statistics.find(operator.name)
        if measured is not None:
            self._gradient_energy[name] = measured.calls * measured.output_gradient.square_sum
        else:
            self._gradient_energy[name] = sum(
                self._edge_energy[reader, position]
                for reader in dict.fromkeys(self._graph.consumers(name))
                for position, source in enumerate(self._graph[reader].inputs)
                if source == name
            )
        for position, source in enumerate(operator.inputs):
            product = self._product(operator, position)
            if product is not None:
                self._edge_energy[name, position] = _gradient_energy(*product)
            else:
                self._edge_energy[name, position] = self._derived_gradient_energy(operator, source)

    def _derived_gradient_energy(self, operator: Operator, source: str) -> float:
        energy = self._gradient_energy[operator.name]
        if not self._graph.consumers(operator.name):
            return 1.0  # the loss: only shares matter
        if operator.op_type in _NORMALIZATIONS:
            return energy * ratio(self._graph[source].output_elements, self._energy[source])
        if operator.op_type in _GATES:
            return energy * math.prod(self._mean_square(other) for other in operator.inputs if other != source)
        return energy

    def _share(self, reader: str, position: int) -> float:
        source = self._graph[reader].inputs[position]
        if reader not in self._statistics and not self._graph.consumers(reader):
            return 1.0  # the loss
        return min(1.0, ratio(self._edge_energy[reader, position], self._gradient_energy[source]))

    def _effect_of_gradient_noise(self, operator: Operator) -> Effect:
        if operator.name in self._of_weights and operator.parameters:
            energy = self._gradient_energy[operator.name]
            return Effect(independent=energy, shared=energy)
        measured = self._statistics.find(operator.name)
        effect = Effect() if measured is None else _effect_on_own_weights(measured)
        for position, source in enumerate(operator.inputs):
            weight = self._share(operator.name, position)
            product = self._product(operator, position)
            if product is not None and product[0].third is None:
                if getattr(product[0], f"{product[1]}_gradient") is None:
                    continue
                weight *= ratio(_incoherent_gradient(*product), _gradient_energy(*product))
            effect += self._gradient_effect[source].weighted(weight)
        return effect

    def _spread_output_effects(self, reader: Operator) -> None:
        """Add to every input of ``reader`` the effect of noise on it in and after ``reader``."""
        after = self._output_effect[reader.name]
        for position, source in enumerate(reader.inputs):
            product = self._product(reader, position)
            if product is not None:
                effect = self._effect_in_product(reader, *product, after)
            elif reader.op_type in _SUMS:
                effect = after.weighted(ratio(self._energy[source], self._sum_energy(reader)))
            else:
                effect = self._effect_in_function(reader, position, after)
            self._output_effect[source] += effect

    def _effect_in_product(self, reader: Operator, measured: OperatorStatistics, operand: str, after: Effect) -> Effect:
        if measured.third is not None:
            # Noise on queries and keys reaches the output through the softmax, in proportion to the scores' size.
            return after if operand == "third" else Effect()
        effect = after.weighted(_product_weight(measured))
        other = "second" if operand == "first" else "first"
        if getattr(measured, f"{other}_gradient") is None:
            return effect
        independent, norm = _incoherent_gradient(measured, other), _gradient_energy(measured, other)
        if getattr(measured, f"{other}_parameter") is not None:
            return effect + Effect(independent=independent, shared=norm)
        for index, name in self._operands[reader.name].items():
            if name == other:
                effect += self.input_gradient_effect(reader.name, index).weighted(ratio(independent, norm))
        return effect

    def _effect_in_function(self, reader: Operator, position: int, after: Effect) -> Effect:
        mean_square = self._mean_square(reader.inputs[position])
        if reader.op_type in _SOFTMAX:
            return after.weighted(mean_square)
        before = self.input_gradient_effect(reader.name, position)
        signal = self._signal(reader)
        if signal is not None and signal.curvature:
            return after + before.weighted(signal.curvature)
        if reader.op_type in _SMOOTH:
            return after + before.weighted(_CURVATURE * min(1.0, mean_square))
        if reader.op_type in _KINKS:
            return after + Effect(kink=_SIGN_CHANGES * before.independent)
        return after


def _gradient_energy(statistics: OperatorStatistics, operand: str) -> float:
    """Squared norm of the gradient of an operand, all calls; 0 if it needs none."""
    gradient = getattr(statistics, f"{operand}_gradient")
    return 0.0 if gradient is None else statistics.calls * gradient.square_sum


def _incoherent_gradient(statistics: OperatorStatistics, operand: str) -> float:
    """Energy of an operand's gradient if its summands were independent: ``sum |x|^2 |g|^2``, all calls."""
    other = "first" if operand == "second" else "second"
    path = f"{other}>{operand}_gradient/floating"
    signal, gradient = getattr(statistics, other), statistics.output_gradient
    product = statistics.products[0].volume * signal.mean_square * gradient.mean_square
    return float(statistics.calls * product * statistics.alignment.get(path, 1.0))


def _product_weight(statistics: OperatorStatistics) -> float:
    product = statistics.products[0].volume * statistics.first.mean_square * statistics.second.mean_square
    incoherent = statistics.calls * product * statistics.alignment.get("first>output/floating", 1.0)
    return ratio(incoherent, statistics.calls * statistics.output.square_sum)


def _effect_on_own_weights(statistics: OperatorStatistics) -> Effect:
    effect = Effect()
    for operand in ("first", "second"):
        has_gradient = getattr(statistics, f"{operand}_gradient") is not None
        if getattr(statistics, f"{operand}_parameter") is not None and has_gradient:
            effect += Effect(_incoherent_gradient(statistics, operand), _gradient_energy(statistics, operand))
    return effect
