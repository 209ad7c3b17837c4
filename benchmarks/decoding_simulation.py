"""What plans and the controller of speculation lose against the best choice, by a simulated clock and synthetic tables.

    python benchmarks/decoding_simulation.py

Each regime has a time of passes that rises with their rows, from nearly not (a card bound by memory) to nearly in
proportion (a processor bound by computing), two drafts (``A8`` takes a share of a pass, ``lookup`` nothing), and an
acceptance of each by draft position that no one knows. What ``lookup`` would draft, more than runs of it, is
compared with the tokens that come out, as a server does. A plan goes by a few hundred measured cycles. A controller
begins with that plan and learns from what is accepted. The best choice is that of who knows the acceptances; times are
nanoseconds of the tables, so that nothing here depends on the machine. Families of regimes: those on which the
controller's constants were chosen, others of the same kind, and others with other costs, batches and acceptances. Some
constants were chosen later, on further seeds of all three kinds.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from results_head import asked_row, results_head

from qsync_opt.decoding import (
    AcceptanceCounts,
    Controller,
    DraftMeasurement,
    Judged,
    Measurements,
    Problem,
    RegimeTimes,
    build_problem,
)
from qsync_opt.io import write_json
from qsync_opt.systems import solve

RESULTS = Path(__file__).parent / "results"
LENGTHS = (1, 2, 3, 4, 6, 8)
PLAIN_NS = 1_000_000
MEASURED_CYCLES, WARM_CYCLES, CYCLES = 300, 200, 600
ASKED_LOSS, ADAPTED_LOSS, ASKED_SHARE, ASKED_SPEED, ASKED_COST, ASKED_CYCLES = 0.03, 0.05, 0.95, 0.99, 0.005, 64
Truth = Mapping[str, Sequence[float]]
"""By draft, how likely the token at each position is accepted if those before it were."""


@dataclasses.dataclass(frozen=True)
class Regime:
    """Times, batch, and the acceptances."""

    verify_ns: Mapping[int, int]
    draft_ns: Mapping[str, int]
    batch: int
    truth: Truth

    def time_per_token_ns(self, draft: str | None, length: int, truth: Truth | None = None) -> float:
        """Of a choice, for who knows the acceptances."""
        if draft is None:
            return float(PLAIN_NS)
        return (length * self.draft_ns[draft] + self.verify_ns[length + 1]) / tokens_of(
            truth or self.truth, draft, length
        )

    def best_ns(self, truth: Truth | None = None) -> float:
        """The least time per token."""
        choices = [self.time_per_token_ns(draft, n, truth) for draft in self.truth for n in LENGTHS]
        return min(float(PLAIN_NS), *choices)


def tokens_of(truth: Truth, draft: str | None, length: int) -> float:
    """Tokens that a cycle yields on average."""
    tokens = reached = 1.0
    for value in truth[draft][:length] if draft else ():
        reached *= value
        tokens += reached
    return tokens


def some_truth(draw: random.Random, shape: str = "level") -> Truth:
    """Acceptances by position: ``"level"`` ones change a little along a draft, ``"rising"`` ones as look-up's do."""

    def positions(least: float, most: float) -> list[float]:
        first, change = draw.uniform(least, most), draw.uniform(0.97, 1.01)
        return [min(0.995, first * change**k) for k in range(max(LENGTHS))]

    def rising(least: float, most: float) -> list[float]:
        first, last, pace = draw.uniform(least, most), draw.uniform(most, 0.99), draw.uniform(0.2, 0.8)
        return [last - (last - first) * pace**k for k in range(max(LENGTHS))]

    def falling(least: float, most: float) -> list[float]:
        first, share, pace = draw.uniform(least, most), draw.uniform(0.3, 0.8), draw.uniform(0.2, 0.8)
        return [first * (share + (1 - share) * pace**k) for k in range(max(LENGTHS))]

    if shape != "level":
        other = rising if shape == "rising" else falling
        return {"A8": other(0.3, 0.98), "lookup": other(0.02, 0.8)}
    return {"A8": positions(0.4, 0.99), "lookup": positions(0.02, 0.9)}


def some_regime(draw: random.Random, shape: str = "level") -> Regime:
    """A regime with its tables; where acceptances are not level, costs and batches are others too."""
    unlike = shape != "level"
    slope = 10 ** draw.uniform(-2.7, -0.1)
    verify_ns = {n: round(PLAIN_NS * (1 + slope * (n - 1))) for n in (1, *(length + 1 for length in LENGTHS))}
    draft_ns = {"A8": round(PLAIN_NS * draw.uniform(*((0.05, 0.6) if unlike else (0.3, 0.95)))), "lookup": 0}
    batch = draw.choice([1, 3, 6, 16] if unlike else [1, 2, 4, 8])
    return Regime(verify_ns, draft_ns, batch, some_truth(draw, shape))


def accepted(draw: random.Random, truth: Sequence[float], length: int) -> int:
    """Accepted tokens of one sequence's draft."""
    count = 0
    while count < length and draw.random() < truth[count]:
        count += 1
    return count


def problem_of(regime: Regime, draw: random.Random) -> Problem:
    """The problem from measured times and some measured cycles."""
    longest = max(LENGTHS)
    counts = {
        draft: AcceptanceCounts.of_cycles([accepted(draw, found, longest) for _ in range(MEASURED_CYCLES)], longest)
        for draft, found in regime.truth.items()
    }
    return build_problem(
        Measurements(
            name="synthetic",
            memory_kib=0,
            lengths=LENGTHS,
            drafts={
                draft: DraftMeasurement(memory_kib=0, accepted=found.accepted, judged=found.judged)
                for draft, found in counts.items()
            },
            regimes=(RegimeTimes(name="r", weight=1.0, verify_ns=regime.verify_ns, draft_ns=regime.draft_ns),),
        )
    )


def controller_of(problem: Problem) -> Controller:
    """A controller that may take every choice."""
    return Controller(problem, "r", [(choice.draft, choice.length) for choice in problem.regime("r").choices])


class Shadow:
    """Look-up's drafts of one sequence beside whatever runs: judged by the tokens that come out anyway."""

    def __init__(self) -> None:
        self.agreed = 0

    def judge(self, draw: random.Random, truth: Sequence[float], tokens: int, own: int) -> list[Judged]:
        """Positions judged by so many new tokens, each with accepted and rejected ones.

        Where look-up runs with ``own`` tokens, a shadow that begins with them shares their fate, and only the
        positions behind them count.
        """
        judged, alike = [], self.agreed == 0
        for place in range(tokens):
            if self.agreed == len(truth):  # the token after a whole draft
                self.agreed = 0
                continue
            position = self.agreed
            right = place < tokens - 1 if alike and position < own else draw.random() < truth[position]
            if position >= own:
                judged.append(Judged(position, int(right), int(not right)))
            self.agreed, alike = (position + 1, alike) if right else (0, False)
        return judged


def run(
    controller: Controller, regime: Regime, truth: Truth, cycles: int, draw: random.Random, shadows: Sequence[Shadow]
) -> tuple[float, float]:
    """Nanoseconds and expected tokens of each sequence; look-up is watched by a shadow of each.

    Expected tokens of what was chosen, for those that were drawn differ by chance from a controller's merit.
    """
    time_ns = tokens = 0.0
    for _ in range(cycles):
        graph = controller.choose()
        counts = [accepted(draw, truth[graph.draft], graph.length) if graph.draft else 0 for _ in shadows]
        own = graph.length if graph.draft == "lookup" else 0
        if own < max(LENGTHS):
            controller.watch(
                "lookup",
                [
                    verdict
                    for shadow, count in zip(shadows, counts, strict=True)
                    for verdict in shadow.judge(draw, truth["lookup"], count + 1, own)
                ],
            )
        controller.observe(counts)
        time_ns += graph.cycle_ns
        tokens += tokens_of(truth, graph.draft, graph.length)
    return time_ns, tokens


def one_regime(seed: int, shape: str = "level") -> dict[str, Any]:
    """What the plan and the controller lose in one regime."""
    draw = random.Random(seed)
    regime = some_regime(draw, shape)
    problem, best_ns = problem_of(regime, draw), regime.best_ns()
    plan = solve(problem).plan
    assert plan is not None
    selection = plan.choices["r"]
    planned_ns = regime.time_per_token_ns(*((selection.draft, selection.length) if selection else (None, 0)))
    controller, shadows = controller_of(problem), [Shadow() for _ in range(regime.batch)]
    run(controller, regime, regime.truth, WARM_CYCLES, draw, shadows)
    time_ns, tokens = run(controller, regime, regime.truth, CYCLES, draw, shadows)
    return {
        "seed": seed, "best": PLAIN_NS / best_ns, "plan": PLAIN_NS / planned_ns,
        "controller": PLAIN_NS * tokens / time_ns,
        "plan_loss": planned_ns / best_ns - 1, "controller_loss": time_ns / tokens / best_ns - 1,
    }  # fmt: skip


def one_change(seed: int, shape: str = "level") -> dict[str, Any]:
    """Cycles until the controller's choice is as good as asked after the kind of text has changed."""
    draw = random.Random(seed)
    regime = some_regime(draw, shape)
    controller, truth = controller_of(problem_of(regime, draw)), some_truth(draw, shape)
    shadows = [Shadow() for _ in range(regime.batch)]
    run(controller, regime, regime.truth, WARM_CYCLES, draw, shadows)
    before = controller.current
    enough_ns = (1 + ADAPTED_LOSS) * regime.best_ns(truth)
    cycles = 0
    while cycles < 10 * ASKED_CYCLES:
        current = controller.current
        if regime.time_per_token_ns(current.draft, current.length, truth) <= enough_ns:
            break
        run(controller, regime, truth, 1, draw, shadows)
        cycles += 1
    stale = regime.time_per_token_ns(before.draft, before.length, truth) / regime.best_ns(truth) - 1
    return {"seed": seed, "cycles": cycles, "from": before.draft or "plain", "loss_if_kept": stale}


def share(values: Sequence[bool]) -> float:
    """The share that is true."""
    return sum(values) / len(values)


FAMILIES = (
    ("seeds on which constants were chosen", 0, "level"),
    ("other seeds", 50_000, "level"),
    ("other costs and rising acceptances", 90_000, "rising"),
    ("other costs and falling acceptances", 130_000, "falling"),
)
"""Name, first seed, and the shape of acceptances."""


def rows(regimes: list[dict[str, Any]], changes: list[dict[str, Any]], family: str) -> list[dict[str, Any]]:
    """The rows of ``asked`` of one family."""
    off = [r for r in regimes if r["best"] == 1.0]
    result: list[dict[str, Any]] = []
    for who in ("plan", "controller"):
        near = share([r[f"{who}_loss"] <= ASKED_LOSS for r in regimes])
        result.append(
            asked_row(
                f"regimes whose {who} is within {ASKED_LOSS:.0%} of the best choice",
                f">= {ASKED_SHARE}",
                near,
                near >= ASKED_SHARE,
                f"{len(regimes)} synthetic regimes, {family}",
            )
        )
        least = min(r[who] for r in regimes)
        result.append(
            asked_row(f"least speed of the {who} over plain", f">= {ASKED_SPEED}", least, least >= ASKED_SPEED, family)
        )
    cost = max(1 / r["controller"] - 1 for r in off)
    result.append(
        asked_row(
            "largest cost of the controller where plain decoding is best",
            f"< {ASKED_COST}",
            cost,
            cost < ASKED_COST,
            f"{len(off)} regimes, {family}, by the clock of the tables: trials of drafts, not the host's time",
        )
    )
    for kind, group in (
        ("", changes),
        (" from a draft", [change for change in changes if change["from"] != "plain"]),
        (" from plain decoding", [change for change in changes if change["from"] == "plain"]),
    ):
        adapted = share([change["cycles"] <= ASKED_CYCLES for change in group])
        result.append(
            asked_row(
                f"changes of the kind of text{kind} after which the choice is within {ADAPTED_LOSS:.0%} of the "
                f"best in {ASKED_CYCLES} cycles",
                f">= {ASKED_SHARE}",
                adapted,
                adapted >= ASKED_SHARE,
                f"{len(group)} changes, {family}",
            )
        )
    return result


def main() -> None:
    """Simulate and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--regimes", type=int, default=200)
    parser.add_argument("--output", default=str(RESULTS / "decoding-simulation.json"))
    options = parser.parse_args()
    asked, records = [], []
    for name, first, shape in FAMILIES:
        regimes = [one_regime(first + k, shape) for k in range(options.regimes)]
        changes = [one_change(10**6 + first + k, shape) for k in range(options.regimes)]
        changes = [change for change in changes if change["loss_if_kept"] > ADAPTED_LOSS]  # there is something to learn
        asked += rows(regimes, changes, name)
        records.append({"family": name, "regimes": regimes, "changes": changes})
    for line in asked:
        print(line)
    write_json(options.output, {**results_head("none: a simulated clock", {}), "asked": asked, "records": records})


if __name__ == "__main__":
    main()
