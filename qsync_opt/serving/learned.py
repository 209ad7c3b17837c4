"""Serving profiles of devices that were measured in part or not at all: measured, else scaled, learned, or roofline.

A group of a layer, or the head, is a list of programs: products, attention over the cache, and passes over memory. No
training data has products with packed weights, so those have the law of the product in 16 or 32 bits on fewer bytes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from qsync_opt.costs.learned import (
    DeviceVector,
    Leaf,
    LeafKind,
    LearnedModel,
    Phase,
    Program,
    cast_program,
    shipped_model,
)
from qsync_opt.errors import ProblemError
from qsync_opt.numerics import number_format
from qsync_opt.serving.planner import ServeWorkload, default_microbatches
from qsync_opt.serving.profile import (
    KINDS,
    SCHEME_BITS,
    PhaseCosts,
    ServeModel,
    ServingProfile,
    Table,
    check_known_scheme,
    roofline_serving_profile,
)

_KIB = 1024
_HEAD = "head"
"""What the head is called beside `KINDS`."""


def learned_serving_profile(
    model: ServeModel,
    vector: DeviceVector,
    workload: ServeWorkload,
    learned: LearnedModel | None = None,
    *,
    schemes: Sequence[str] = ("W4", "W8", "W16"),
    name: str | None = None,
) -> ServingProfile:
    """The profile of a model on a device of which nothing was measured.

    Layers and head have learned times where the model has laws for all that they run, else those of the roofline. Link,
    workspace and the memory of a process are as `roofline_serving_profile` has them: what a pass costs by itself and
    what a process holds beside the model are not known, and counted as nothing.

    Args:
        model: Sizes.
        vector: The device; `qsync_opt.costs.learned.known_device` has one by name.
        workload: The largest one that will be planned with the profile.
        learned: None: the model that comes with the package.
        schemes: Weight schemes.
        name: Of the profile; by default the device's.

    Raises:
        ProblemError: A scheme is unknown.
        NotReadyError: The package has no model.

    Source: ours.
    """
    base = _roofline(model, vector, schemes)
    estimator = _Estimator(model, vector, learned or shipped_model())
    grids = {phase: _grid(workload, phase) for phase in ("prefill", "decode")}
    costs: dict[str, dict[str, PhaseCosts]] = {kind: {} for kind in KINDS}
    estimates: dict[str, dict[str, str]] = {kind: {} for kind in KINDS}
    for kind in KINDS:
        for scheme in schemes:
            tables = {phase: estimator.table(kind, scheme, phase, grid) for phase, grid in grids.items()}
            costs[kind][scheme] = PhaseCosts(**tables)
            estimates[kind][scheme] = estimator.source(kind, scheme)
    wide = "W32" if _width(_form(vector)) == 4 else "W16"
    heads = {phase: estimator.table(_HEAD, wide, phase, grid) for phase, grid in grids.items()}
    end_kib = -(-model.vocabulary * model.hidden * _width(_form(vector)) // _KIB)
    return replace(
        base,
        name=name or vector.name,
        source=f"estimated for {vector.name}",
        cache_bytes_per_number=_width(_form(vector)),
        costs=costs,
        last=PhaseCosts(**heads),
        first_kib=end_kib,
        last_kib=end_kib,
        estimates=estimates,
    )


def fill_serving_profile(
    profile: ServingProfile, vector: DeviceVector, learned: LearnedModel | None = None, *, schemes: Sequence[str]
) -> ServingProfile:
    """The profile with costs of schemes that it lacks; what it has stays as it is.

    Each table has the best source there is. *Scaled*, of prefilling: a table of the same kind in another scheme, by the
    ratio of both schemes that was measured for the other kind. *Learned*: by the model's laws, times the median of
    measured over learned times in the kind's and phase's other schemes. *Roofline*: where the model lacks a law, times
    such a median too: beside measured times a bare roofline would look like the fastest scheme.
    Decoding is not scaled: how much of it weights are differs between attention and MLP.

    Args:
        profile: Measured at least in part.
        vector: The device that it is of; `qsync_opt.costs.learned.known_device` has one by name.
        learned: None: the model that comes with the package.
        schemes: Those that the result must have.

    Returns:
        The profile itself if it lacks none; else one whose ``estimates`` name the source of each new cost.

    Raises:
        ProblemError: A scheme is unknown.
        NotReadyError: The package has no model.

    Source: ours; the order of sources is that of `learned_profile`.
    """
    holes = {kind: [s for s in dict.fromkeys(schemes) if s not in profile.costs[kind]] for kind in KINDS}
    if not any(holes.values()):
        return profile
    estimator = _Estimator(profile.model, vector, learned or shipped_model(), profile)
    costs = {kind: dict(profile.costs[kind]) for kind in KINDS}
    weights = {kind: dict(profile.weights_kib[kind]) for kind in KINDS}
    estimates = {kind: dict(profile.estimates.get(kind, {})) for kind in KINDS}
    for kind, lacking in holes.items():
        for scheme in lacking:
            check_known_scheme(scheme)
            pattern = next((c for k in (kind, *KINDS) for c in profile.costs[k].values()), None)
            if pattern is None:
                raise ProblemError(
                    f"profile {profile.name!r} has no costs at all, so there are no rows and lengths to estimate for; "
                    "make a whole profile with learned_serving_profile"
                )
            scaled = _scaled(profile, kind, scheme)
            prefill = estimator.table(kind, scheme, "prefill", pattern.prefill) if scaled is None else scaled.table
            decode = estimator.table(kind, scheme, "decode", pattern.decode)
            costs[kind][scheme] = PhaseCosts(prefill=prefill, decode=decode)
            weights[kind][scheme] = profile.model.weights_kib(kind, scheme)
            estimates[kind][scheme] = estimator.source(kind, scheme, None if scaled is None else scaled.source)
    return replace(profile, costs=costs, weights_kib=weights, estimates={k: v for k, v in estimates.items() if v})


@dataclass(frozen=True, slots=True)
class _Scaled:
    table: Table
    source: str


def _scaled(profile: ServingProfile, kind: str, scheme: str) -> _Scaled | None:
    """Prefilling in another scheme, by the ratio of both that the other kind has; None if not all was measured."""
    own = _measured(profile, kind)
    for other in (k for k in KINDS if k != kind and scheme in _measured(profile, k)):
        both = [s for s in own if s in _measured(profile, other)]
        if both:
            near = min(both, key=lambda s: _distance(s, scheme))
            base = own[near].prefill
            up, down = (_measured(profile, other)[s].prefill for s in (scheme, near))

            def ns(rows: int, length: int, base: Table = base, up: Table = up, down: Table = down) -> float:
                return base.at(rows, length) * up.at(rows, length) / max(down.at(rows, length), 1.0)

            return _Scaled(_table(base, ns), f"scaled from {near} as {other}")
    return None


def _distance(scheme: str, other: str) -> float:
    bits = [SCHEME_BITS.get(s, math.inf) for s in (scheme, other)]
    return abs(bits[0] - bits[1])


def _measured(profile: ServingProfile, kind: str) -> dict[str, PhaseCosts]:
    """Costs of a kind that are no estimates."""
    estimated = profile.estimates.get(kind, {})
    return {scheme: costs for scheme, costs in profile.costs[kind].items() if scheme not in estimated}


@dataclass(slots=True)
class _Estimator:
    """Tables of one device by its laws, else by its roofline, and which of them are unlike the training data."""

    model: ServeModel
    vector: DeviceVector
    learned: LearnedModel
    profile: ServingProfile | None = None
    _unlike: set[tuple[str, str, str]] = field(default_factory=set)
    _floors: dict[str, ServingProfile] = field(default_factory=dict)
    _factors: dict[tuple[str, str, bool], float | None] = field(default_factory=dict)

    def table(self, kind: str, scheme: str, phase: str, grid: Table) -> Table:
        """Times of a kind or the head in a scheme at the rows and lengths of ``grid``; none is below the roofline."""
        factor = self._factor(kind, phase, self._knows(kind, scheme, phase)) or 1.0
        floor = self._floor(kind, scheme, phase)

        def ns(rows: int, length: int) -> float:
            return max(factor * self._ns(kind, scheme, phase, rows, length), floor.at(rows, length))

        return _table(grid, ns)

    def source(self, kind: str, scheme: str, prefill: str | None = None) -> str:
        """Where the tables of a kind in a scheme are from, once they were made; ``prefill`` says so of that one."""
        prefill, decode = prefill or self._source(kind, scheme, "prefill"), self._source(kind, scheme, "decode")
        return prefill if prefill == decode else f"prefill {prefill}, decode {decode}"

    def _source(self, kind: str, scheme: str, phase: str) -> str:
        known = self._knows(kind, scheme, phase)
        corrected = ", corrected by what was measured" if self._factor(kind, phase, known) is not None else ""
        if not known:
            return f"roofline of {self.vector.name}{corrected}"
        unlike = SCHEME_BITS[scheme] < 16 or (kind, scheme, phase) in self._unlike
        return f"learned for {self.vector.name}{corrected}{'; unlike the training data' if unlike else ''}"

    def _knows(self, kind: str, scheme: str, phase: str) -> bool:
        # A card decodes by captured kernels that overlap; by laws of launched ones it would take two to three times as
        # long.
        if phase == "decode" and self.vector.kind == "cuda":
            return False
        programs = _programs(self.model, kind, scheme, _form(self.vector), _Pass(1, 1, 1))
        return all(self.learned.knows(program, self.vector) for program in programs)

    def _factor(self, kind: str, phase: str, by_law: bool) -> float | None:
        """The median of measured over estimated times of a kind, all by laws or none; None if nothing was measured."""
        key = (kind, phase, by_law)
        if key not in self._factors:
            known = _measured(self.profile, kind) if self.profile and kind in KINDS else {}
            ratios = [
                value / self._ns(kind, scheme, phase, rows, length)
                for scheme, costs in known.items()
                if scheme in SCHEME_BITS and self._knows(kind, scheme, phase) is by_law
                for rows, line in zip(costs.of(phase).rows, costs.of(phase).values, strict=True)
                for length, value in zip(costs.of(phase).lengths, line, strict=True)
            ]
            self._factors[key] = statistics.median(ratios) if ratios else None
        return self._factors[key]

    def _ns(self, kind: str, scheme: str, phase: str, rows: int, length: int) -> float:
        """By the laws, else by the roofline; above 0."""
        if not self._knows(kind, scheme, phase):
            return max(self._floor(kind, scheme, phase).at(rows, length), 1.0)
        programs = _programs(self.model, kind, scheme, _form(self.vector), _Pass.of(phase, rows, length))
        estimates = self.learned.predict(programs, self.vector)
        if not all(estimate.in_domain for estimate in estimates):
            self._unlike.add((kind, scheme, phase))
        return math.fsum(estimate.ns for estimate in estimates)

    def _floor(self, kind: str, scheme: str, phase: str) -> Table:
        if scheme not in self._floors:
            self._floors[scheme] = _roofline(self.model, self.vector, [scheme])
        roofline = self._floors[scheme]
        return (roofline.last if kind == _HEAD else roofline.costs[kind][scheme]).of(phase)


def _table(grid: Table, ns: Callable[[int, int], float]) -> Table:
    values = tuple(tuple(math.ceil(ns(rows, length)) for length in grid.lengths) for rows in grid.rows)
    return replace(grid, values=values)


def _grid(workload: ServeWorkload, phase: str) -> Table:
    """Rows of all micro-batches that are planned with by default, and lengths up to the longest; the values are 0."""
    options = default_microbatches(workload.prompts)
    parts = {part for option in options for part in (option.prefill, option.decode)}
    rows = tuple(sorted({-(-workload.prompts // part) for part in parts}))
    most = workload.prompt_tokens + (workload.new_tokens if phase == "decode" else 0)
    lengths = tuple(sorted({*(most // 4**k for k in range(4)), most} - {0}))
    return Table(rows=rows, lengths=lengths, values=((0,) * len(lengths),) * len(rows))


def _roofline(model: ServeModel, vector: DeviceVector, schemes: Sequence[str]) -> ServingProfile:
    """By the rates of a vector; those of its cache where all layers' weights fit into it."""
    for scheme in schemes:
        check_known_scheme(scheme)
    in_cache = all(
        model.layers * sum(model.parameters(kind) for kind in KINDS) * SCHEME_BITS[scheme] / 8 <= vector.cache_bytes
        for scheme in schemes
    )
    memory = vector.bandwidth_bytes_per_s
    return roofline_serving_profile(
        model,
        vector.name,
        flops_per_s=vector.peak(_form(vector)),
        bytes_per_s=max(memory, vector.cache_bytes_per_s) if in_cache else memory,
        schemes=schemes,
    )


def _form(vector: DeviceVector) -> str:
    """The format of hidden states and caches, as the runtime has it: FP32 on a CPU, 16 bits on a card."""
    if vector.kind == "cpu":
        return "FP32"
    return "BF16" if "BF16" in vector.peak_flops else "FP16"


@dataclass(frozen=True, slots=True)
class _Pass:
    """How many sequences, of how many new tokens each, which see how many tokens in all."""

    rows: int
    count: int
    seen: int

    @staticmethod
    def of(phase: str, rows: int, length: int) -> _Pass:
        return _Pass(rows, length, length) if phase == "prefill" else _Pass(rows, 1, length)


def _programs(model: ServeModel, kind: str, scheme: str, form: str, at: _Pass) -> list[Program]:
    """What one pass of a group or of the head runs, with hidden states and cache in ``form``."""
    tokens, hidden, bits = at.rows * at.count, model.hidden, SCHEME_BITS[scheme]
    if kind == _HEAD:
        return _product(form, at.rows, model.vocabulary, hidden, bits)
    programs = [_pass_over("layer_norm", "FP32", tokens, hidden, 2 * _width(form), LeafKind.STREAM)]
    if kind == "attn":
        queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
        programs += _product(form, tokens, queries + 2 * keys, hidden, bits)
        programs.append(_pass_over("mul", form, tokens, queries + keys, 2 * _width(form)))  # the rotation
        programs.append(_attention(model, form, at))
        programs += _product(form, tokens, hidden, queries, bits)
    else:
        programs += _product(form, tokens, 2 * model.inner, hidden, bits)
        programs.append(_pass_over("silu", form, tokens, model.inner, 2 * _width(form)))
        programs.append(_pass_over("mul", form, tokens, model.inner, 3 * _width(form)))
        programs += _product(form, tokens, hidden, model.inner, bits)
    return [*programs, _pass_over("add", form, tokens, hidden, 3 * _width(form))]


def _product(form: str, rows: int, columns: int, depth: int, bits: float) -> list[Program]:
    """A product by a weight of so many bits each; wide weights of another format are cast before, by the runtime."""
    programs, weights = [], columns * depth
    if bits >= 16 and bits != 8 * _width(form):
        programs.append(cast_program("BF16" if bits == 16 else "FP32", form, weights))
        bits = 8.0 * _width(form)
    leaf = Leaf(
        kind=LeafKind.PRODUCT,
        number_format=form,
        flops=2.0 * rows * columns * depth,
        num_bytes=rows * (depth + columns) * _width(form) + weights * bits / 8,
        rows=rows,
        columns=columns,
        depth=depth,
    )
    return [*programs, _program("linear", form, rows * columns, leaf)]


def _attention(model: ServeModel, form: str, at: _Pass) -> Program:
    queries = at.rows * at.count * model.heads * model.head_size
    cached = at.rows * at.seen * model.kv_heads * model.head_size
    leaf = Leaf(
        kind=LeafKind.ATTENTION,
        number_format=form,
        flops=4.0 * queries * at.seen,
        num_bytes=2.0 * (queries + cached) * _width(form),
        batch=at.rows * model.heads,
        rows=at.count,
        columns=model.head_size,
        depth=at.seen,
    )
    return _program("scaled_dot_product_attention", form, queries, leaf)


def _pass_over(
    family: str, form: str, rows: int, columns: int, bytes_each: int, kind: LeafKind = LeafKind.POINTWISE
) -> Program:
    leaf = Leaf(
        kind=kind,
        number_format=form,
        flops=rows * columns,
        num_bytes=rows * columns * bytes_each,
        rows=rows,
        columns=columns,
    )
    return _program(family, form, rows * columns, leaf)


def _program(family: str, form: str, elements: int, leaf: Leaf) -> Program:
    return Program(family=family, precision=form, phase=Phase.FORWARD, elements=elements, leaves=(leaf,))


def _width(form: str) -> int:
    return number_format(form).num_bytes
