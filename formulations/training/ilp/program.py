r"""The assignment of one device as a compact mixed-integer linear program, with its mathematics.

**The problem.** Operators v = 1..n in forward order, precision x_v from P_v, sensitivity w_v(a), forward and backward
times f_v(a), g_v(a), memory m_v(a). An edge e = (u, v) adds a forward cast F_e(x_u, x_v), a backward cast
G_e(x_u, x_v), charged to u's backward, and a cast buffer B_e(x_u, x_v). Buckets k = 0..K-1 are reduced in order, each
taking D_k; O is the optimizer's time. On device i, R_ik is when the last gradient of bucket k is done and R_iK when
backward ends::

    minimise    sum over devices and operators of w_v(x_v)
    subject to  T = max(S_{K-1} + D_{K-1}, max_i R_iK) + O  <=  T_max
                S_k = max(max_i R_ik, peer_k, S_{k-1} + D_{k-1})
                sum of m_v(x_v) + sum of B_e(x_u, x_v)      <=  M_i     on every device i

**The latency limit is linear.** Unrolling the maxima, T = max over k of (max(max_i R_ik, peer_k) + sum of D_j, j >= k)
+ O, so T <= T_max says, for every device i and k = 0..K, with the empty sum at k = K::

    R_ik  <=  c_k := T_max - O - sum of D_j (j >= k)            and     peer_k <= c_k, a constant check

R_ik is the whole forward plus the backward of a suffix of the operators: the rows are *nested prefix sums* of the
backward order. Nothing but T_max is common to two devices, so each is solved alone (`build_assignment`, `segments`).

**The collapse.** A dependent operator's precision follows from its inputs and adds no decision. What is left are
choices, one per adjustable operator, and products: nodes whose state is a pair (g, h) of classes of two other nodes.
A product carries what depends on both: casts on an edge, or the higher of two ranks at a join (see `assignment`).

**The linear program of one device.**

* Choice i with labels a: binary x[i,a], with ``sum over a of x[i,a] = 1``.
* Class g of a node: z[g] = the sum of the states in it, an expression; it gets a column of its own where it is long.
* Product of left classes g = 0..G-1 and right classes h = 0..H-1: continuous y[g,h] >= 0 only for g, h >= 1, with ::

      sum over h of y[g,h] <= z_left[g]           for g >= 1
      sum over g of y[g,h] <= z_right[h]          for h >= 1
      sum of y >= sum over g >= 1 of z_left[g] + sum over h >= 1 of z_right[h] - 1

  The other states are expressions: (g,0) = z_left[g] - sum over h of y[g,h], likewise (0,h), and
  (0,0) = 1 - sum of z_left - sum of z_right + sum of y. The three rows say that these are not negative, so this is
  the projection of the flow form (``sum over h of y[g,h] = z_left[g]`` and so on over all g, h): the same bound with
  a third of the columns, and whole y wherever the z are whole.
* Shared load: s >= the sum of the states of each of its conditions; s >= 0 needs no upper bound, since its load is
  not negative and only upper limits count it.
* Time of segment r, cumulated to stay sparse: t[r] = t[r-1] + loads of segment r, t[r] <= c_r. Memory: one row.
* Objective: sum of w times states. All times are integers in ns and memory integers in KiB; a plan is accepted by
  exact integer evaluation only.

Source: the multiple-choice program of QSync (IPDPS 2024) with cast coupling; the projection to non-reference classes
and the cumulated rows are ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from qsync_opt.formulations.linear import LinearModel
from qsync_opt.formulations.training.ilp.assignment import MEMORY, Assignment, Choice, Product

_ONE = -1
"""Key of the constant in an expression."""
_Expression = dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """What one unit of the program's numbers stands for; 1 keeps exact integers.

    ``cost`` scales the objective, ``time_ns`` the time rows, ``memory_kib`` the memory row.
    """

    cost: float = 1.0
    time_ns: float = 1.0
    memory_kib: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AssignmentProgram:
    """A linear model and which of its columns stand for which label of which choice."""

    model: LinearModel
    choice_columns: Mapping[str, tuple[tuple[str, int], ...]]
    units: Units

    def labels(self, values: Sequence[float]) -> dict[str, str]:
        """Label of every choice at a point: the one whose column is largest."""
        return {
            name: max(columns, key=lambda pair: values[pair[1]])[0] for name, columns in self.choice_columns.items()
        }


class _Linearizer:
    """Columns, rows and expressions of one assignment."""

    def __init__(self, assignment: Assignment, *, whole: bool, allowed: Mapping[str, frozenset[str]] | None) -> None:
        self.assignment = assignment
        self.whole = whole
        self.model = LinearModel(name=assignment.name)
        self.states: list[list[_Expression]] = []
        self.choice_columns: dict[str, tuple[tuple[str, int], ...]] = {}
        self.classes: dict[tuple[int, bytes], list[_Expression]] = {}
        for index, node in enumerate(assignment.nodes):
            if isinstance(node, Choice):
                self._add_choice(node, None if allowed is None else allowed.get(node.name))
            else:
                self._add_product(index, node)

    def _add_choice(self, node: Choice, allowed: frozenset[str] | None) -> None:
        columns = []
        for label in node.labels:
            upper = 1.0 if allowed is None or label in allowed else 0.0
            columns.append((label, self.model.add_column(f"x[{node.name},{label}]", upper=upper, integer=True)))
        self.model.add_row(f"one[{node.name}]", {column: 1.0 for _, column in columns}, lower=1.0, upper=1.0)
        self.choice_columns[node.name] = tuple(columns)
        self.states.append([{column: 1.0} for _, column in columns])

    def _class_expressions(self, node: int, class_S: Sequence[int]) -> list[_Expression]:
        """One expression per class of a node's states; a long one gets a column, once per grouping."""
        key = (node, bytes(class_S))
        if key not in self.classes:
            classes = [
                _sum(s for s, c in zip(self.states[node], class_S, strict=True) if c == g)
                for g in range(max(class_S) + 1)
            ]
            if isinstance(self.assignment.nodes[node], Product):
                name = self.assignment.nodes[node].name
                classes = [self._named(f"z[{name},{g},{len(self.classes)}]", terms) for g, terms in enumerate(classes)]
            self.classes[key] = classes
        return self.classes[key]

    def _named(self, name: str, terms: _Expression) -> _Expression:
        if len(terms) <= 1:
            return terms
        column = self.model.add_column(name, integer=self.whole)
        self._add_row(name, {**terms, column: -1.0}, lower=0.0, upper=0.0)
        return {column: 1.0}

    def _add_row(self, name: str, terms: _Expression, *, lower: float = -math.inf, upper: float = math.inf) -> None:
        constant = terms.get(_ONE, 0.0)
        self.model.add_row(
            name, {c: v for c, v in terms.items() if c != _ONE}, lower=lower - constant, upper=upper - constant
        )

    def _add_product(self, index: int, node: Product) -> None:
        left = self._class_expressions(node.left, [int(c) for c in node.left_class_S])
        right = self._class_expressions(node.right, [int(c) for c in node.right_class_S])
        rest_left, rest_right = range(1, len(left)), range(1, len(right))
        y = {
            (g, h): self.model.add_column(f"y[{node.name},{g},{h}]", integer=self.whole)
            for g in rest_left
            for h in rest_right
        }
        states: dict[tuple[int, int], _Expression] = {(g, h): {column: 1.0} for (g, h), column in y.items()}
        for g in rest_left:
            states[g, 0] = _sum([left[g], *({y[g, h]: -1.0} for h in rest_right)])
        for h in rest_right:
            states[0, h] = _sum([right[h], *({y[g, h]: -1.0} for g in rest_left)])
        minus = [_scale(z, -1.0) for z in (*left[1:], *right[1:])]
        states[0, 0] = _sum([{_ONE: 1.0}, *minus, *({column: 1.0} for column in y.values())])
        if y:  # with one class on a side every state is a class of the other side, never negative by itself
            for (g, h), terms in states.items():
                if g == 0 or h == 0:
                    self._add_row(f"state[{node.name},{g},{h}]", terms, lower=0.0)
        self.states.append([states[g, h] for g in range(len(left)) for h in range(len(right))])
        assert len(self.states) == index + 1  # nodes are added in order

    def add_cost(self, unit: float) -> None:
        """Make the assignment's cost the objective."""
        total: _Expression = {_ONE: self.assignment.constant_cost}
        for node, states in zip(self.assignment.nodes, self.states, strict=True):
            for value, terms in zip(node.cost_S, states, strict=True):
                _accumulate(total, terms, float(value))
        self.model.constant = total.pop(_ONE) / unit
        for column, value in total.items():
            self.model.columns[column] = replace(self.model.columns[column], cost=value / unit)

    def add_time(self, segments: Sequence[_Expression], unit: float) -> None:
        """Cumulate the segments, and keep every time limit."""
        limits = {len(limit.resources): limit for limit in self.assignment.limits if MEMORY not in limit.resources}
        before: _Expression = {}
        longest = 0.0
        for r, load in enumerate(segments):
            longest += sum(abs(value) for value in load.values()) / unit
            elapsed = self.model.add_column(f"t[{r}]", upper=longest, integer=self.whole)
            terms = _sum([before, _scale(load, 1 / unit), {elapsed: -1.0}])
            self._add_row(f"elapsed[{r}]", terms, lower=0.0, upper=0.0)
            if r + 1 in limits:
                limit = limits[r + 1]
                self._add_row(limit.name, {elapsed: 1.0}, upper=limit.bound / unit)
            before = {elapsed: 1.0}

    def add_memory(self, load: _Expression, unit: float) -> None:
        """Keep the memory limit."""
        for limit in self.assignment.limits:
            if limit.resources == (MEMORY,):
                self._add_row(limit.name, _scale(load, 1 / unit), upper=limit.bound / unit)

    def loads(self) -> list[_Expression]:
        """Total load of each resource."""
        totals: list[_Expression] = [{_ONE: float(value)} for value in self.assignment.constant_R]
        for node, states in zip(self.assignment.nodes, self.states, strict=True):
            for load_R, terms in zip(node.load_SR, states, strict=True):
                for r in load_R.nonzero()[0]:
                    _accumulate(totals[r], terms, float(load_R[r]))
        for shared in self.assignment.shared:
            paid = self.model.add_column(f"s[{shared.name}]", integer=self.whole)
            for condition in shared.conditions:
                states = self.states[condition.node]
                met = _sum(states[s] for s in condition.mask_S.nonzero()[0])
                self._add_row(
                    f"shared[{shared.name},{condition.node}]", _sum([{paid: 1.0}, _scale(met, -1.0)]), lower=0
                )
            for r in shared.load_R.nonzero()[0]:
                _accumulate(totals[r], {paid: 1.0}, float(shared.load_R[r]))
        return totals


def linearize(
    assignment: Assignment,
    *,
    units: Units | None = None,
    whole: bool = False,
    allowed: Mapping[str, frozenset[str]] | None = None,
) -> AssignmentProgram:
    """The linear program of an assignment.

    Args:
        assignment: The assignment. Its first resource is memory in KiB, the others are consecutive time segments in
            ns, limited by prefixes.
        units: Scales; exact integers by default.
        whole: Make every column whole, for solvers without continuous columns (use whole units then).
        allowed: Labels that a choice may take (all, where the choice is not in it).

    Returns:
        The program; its objective is in ``units``.

    Source: see the module's text.
    """
    units = units or Units()
    builder = _Linearizer(assignment, whole=whole, allowed=allowed)
    memory, *segments = builder.loads()
    builder.add_cost(units.cost)
    builder.add_time(segments, units.time_ns)
    builder.add_memory(memory, units.memory_kib)
    return AssignmentProgram(model=builder.model, choice_columns=builder.choice_columns, units=units)


def _accumulate(into: _Expression, terms: Mapping[int, float], factor: float) -> None:
    for column, value in terms.items():
        into[column] = into.get(column, 0.0) + factor * value


def _sum(parts: Iterable[_Expression]) -> _Expression:
    total: _Expression = {}
    for terms in parts:
        _accumulate(total, terms, 1.0)
    return {column: value for column, value in total.items() if value}


def _scale(terms: Mapping[int, float], factor: float) -> _Expression:
    return {column: factor * value for column, value in terms.items()}
