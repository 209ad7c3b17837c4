"""Costs of serving that were measured, left out, and estimated from the rest, for models of a few sizes.

    python benchmarks/serving_holes.py [--rounds 4] [--device NAME] [--other NAME] [--profiles FOLDER] [--output FILE]
    python benchmarks/serving_holes.py --place cuda:0 --rounds 2 --device H200 --other A100 --output FILE

Every scheme of a measured profile is left out in turn and filled again. ``ways`` of filling, each compared with what
was measured, at all rows and lengths of the tables:

- learned: `fill_serving_profile`, from the other schemes;
- learned from one: the same where only the scheme next in bits was measured;
- learned from nothing: the whole profile is `learned_serving_profile`'s;
- learned as another: as learned, but for ``--other``, a device that it is not;
- scaled: the scheme was left out of one kind alone (prefill only; decoding is learned);
- roofline and roofline from nothing: as the learned ones, with no law;
- copy: the table of the scheme next in bits as it is.

A machine that others share is slower at times: of several rounds the median of each entry counts, and ``repeat`` is how
far a single round is from it. ``--profiles`` keeps what was measured, for another run.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from results_head import asked_row, processors, results_head

from qsync_opt.costs.learned import known_device, shipped_model
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import config_from_json, profile_serving, sample_config
from qsync_opt.serving import (
    KINDS,
    SCHEME_BITS,
    PhaseCosts,
    ServeWorkload,
    ServingProfile,
    Table,
    fill_serving_profile,
    learned_serving_profile,
    load_serving_profile,
)
from qsync_opt.testing import without_laws

SHORT = ServeWorkload(prompts=8, prompt_tokens=64, new_tokens=32)
MODELS = {
    "demo": ({"layers": 4, "hidden": 256, "inner": 704, "heads": 8, "kv_heads": 4, "vocabulary": 512}, SHORT),
    "long": (
        {"layers": 4, "hidden": 512, "inner": 1536, "heads": 8, "kv_heads": 8, "vocabulary": 1024},
        ServeWorkload(prompts=8, prompt_tokens=256, new_tokens=64),
    ),
    "wide": ({"layers": 4, "hidden": 1024, "inner": 2816, "heads": 16, "kv_heads": 4, "vocabulary": 2048}, SHORT),
}
# Larger ones on a card, where small products take as long as a launch.
CARD_MODELS = {
    "1b": (
        {"layers": 4, "hidden": 2048, "inner": 5632, "heads": 16, "kv_heads": 8, "vocabulary": 32000},
        ServeWorkload(prompts=8, prompt_tokens=256, new_tokens=64),
    ),
    "8b": (
        {"layers": 4, "hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "vocabulary": 32000},
        ServeWorkload(prompts=16, prompt_tokens=512, new_tokens=64),
    ),
}
PHASES = ("prefill", "decode")


def main() -> None:
    """Measure, leave out, fill, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--place", default="cpu", help="cpu, or a card such as cuda:0")
    parser.add_argument("--device", default="Intel Xeon, 1 thread")
    parser.add_argument("--other", default="AMD EPYC, 1 thread")
    parser.add_argument("--profiles", type=Path)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "serving-holes.json")
    arguments = parser.parse_args()
    models = MODELS if arguments.place == "cpu" else CARD_MODELS
    rounds = {
        name: [measured(name, model, k, arguments.place, arguments.profiles) for k in range(arguments.rounds)]
        for name, model in models.items()
    }
    errors: dict[tuple[str, str, str], list[float]] = {}
    rows: list[dict[str, Any]] = []
    for name, profiles in rounds.items():
        profile = middle(profiles)
        for way, kind, scheme, phase, table in estimates(profile, models[name][1], arguments.device, arguments.other):
            truth = profile.costs[kind][scheme].of(phase)
            signed = [table.at(count, length) / value - 1 for count, length, value in points(truth)]
            errors.setdefault((way, kind, phase), []).extend(map(abs, signed))
            if way in ("learned", "learned from nothing"):
                rows.append(
                    {"model": name, "way": way, "kind": kind, "scheme": scheme, "phase": phase,
                     "median_signed_error": round(statistics.median(signed), 4)}
                )  # fmt: skip
    ways = list(dict.fromkeys(way for way, _, _ in errors))
    summary = [
        {"way": way, "kind": kind, "phase": phase, **quantiles(errors[way, kind, phase])}
        for way in ways
        for kind in KINDS
        for phase in PHASES
        if (way, kind, phase) in errors
    ]
    whole = {
        way: quantiles([e for (w, _, _), values in errors.items() if w == way for e in values]) for way in ways
    }  # fmt: skip
    data = {
        **results_head(
            processors() if arguments.place == "cpu" else torch.cuda.get_device_name(), {"torch": torch.__version__}
        ),
        "device": arguments.device,
        "models": {name: sizes for name, (sizes, _) in models.items()},
        "asked": [
            asked_row(
                "median error of a scheme that was left out",
                "less than the roofline's",
                f"{whole['learned']['median']:.1%} and {whole['roofline']['median']:.1%}",
                whole["learned"]["median"] < whole["roofline"]["median"],
            )
        ],
        "repeat": repeat(rounds),
        "ways": whole,
        "records": summary,
        "schemes": rows,
    }
    write_json(arguments.output, data)
    for way, values in whole.items():
        print(f"{way}: median {values['median']:.1%}, 90th percentile {values['p90']:.1%}")
    print("repeat:", data["repeat"])


def measured(
    name: str, model: tuple[dict[str, int], ServeWorkload], k: int, place: str, folder: Path | None
) -> ServingProfile:
    """A profile of one round, from the folder if it has it."""
    path = None if folder is None else folder / f"{name}-{k}.json"
    if path is not None and path.exists():
        return load_serving_profile(path)
    sizes, workload = model
    profile = profile_serving(config_from_json(sample_config(**sizes)), workload, device=place, name=f"this {place}")
    print(f"{name}, round {k}: measured", flush=True)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    return profile


def estimates(
    profile: ServingProfile, workload: ServeWorkload, device: str, other: str
) -> Iterator[tuple[str, str, str, str, Table]]:
    """Way, kind, scheme, phase and the table that is compared with the measured one."""
    vector, model = known_device(device), shipped_model()
    lawless = without_laws(model)
    schemes = profile.schemes
    nothing = {
        "learned from nothing": learned_serving_profile(profile.model, vector, workload, schemes=schemes),
        "roofline from nothing": learned_serving_profile(profile.model, vector, workload, lawless, schemes=schemes),
    }
    for scheme in schemes:
        near = min(
            (s for s in schemes if s != scheme), key=lambda s: abs(math.log(SCHEME_BITS[s] / SCHEME_BITS[scheme]))
        )
        rest, one = only(profile, [s for s in schemes if s != scheme]), only(profile, [near])
        filled = {
            "learned": fill_serving_profile(rest, vector, schemes=[scheme]),
            "learned from one": fill_serving_profile(one, vector, schemes=[scheme]),
            "learned as another": fill_serving_profile(rest, known_device(other), schemes=[scheme]),
            "roofline": fill_serving_profile(rest, vector, lawless, schemes=[scheme]),
            **nothing,
        }
        for kind in KINDS:
            for phase in PHASES:
                for way, each in filled.items():
                    yield way, kind, scheme, phase, each.costs[kind][scheme].of(phase)
                yield "copy", kind, scheme, phase, profile.costs[kind][near].of(phase)
            half = only(profile, [s for s in schemes if s != scheme], kinds=[kind])
            scaled = fill_serving_profile(half, vector, schemes=[scheme])
            yield "scaled", kind, scheme, "prefill", scaled.costs[kind][scheme].of("prefill")


def only(profile: ServingProfile, schemes: list[str], kinds: Sequence[str] = KINDS) -> ServingProfile:
    """The profile with these schemes alone, in these kinds."""
    costs = {k: {s: c for s, c in t.items() if s in schemes or k not in kinds} for k, t in profile.costs.items()}
    weights = {k: {s: w for s, w in t.items() if s in costs[k]} for k, t in profile.weights_kib.items()}
    return dataclasses.replace(profile, costs=costs, weights_kib=weights)


def points(table: Table) -> Iterator[tuple[int, int, int]]:
    """Rows, length and value of every entry but those that took less than the clock tells."""
    for rows, line in zip(table.rows, table.values, strict=True):
        for length, value in zip(table.lengths, line, strict=True):
            if value > 0:
                yield rows, length, value


def quantiles(errors: list[float]) -> dict[str, float]:
    """Median and 90th percentile."""
    return {
        "median": round(statistics.median(errors), 4),
        "p90": round(statistics.quantiles(errors, n=10)[-1], 4),
        "count": len(errors),
    }


def middle(profiles: Sequence[ServingProfile]) -> ServingProfile:
    """The first profile with the median of all in every entry of its tables."""

    def median(kind: str, scheme: str, phase: str) -> Table:
        tables = [each.costs[kind][scheme].of(phase).values for each in profiles]
        values = tuple(
            tuple(round(statistics.median(entry)) for entry in zip(*lines, strict=True))
            for lines in zip(*tables, strict=True)
        )
        return dataclasses.replace(profiles[0].costs[kind][scheme].of(phase), values=values)

    costs = {
        kind: {s: PhaseCosts(prefill=median(kind, s, "prefill"), decode=median(kind, s, "decode")) for s in table}
        for kind, table in profiles[0].costs.items()
    }
    return dataclasses.replace(profiles[0], costs=costs)


def repeat(rounds: dict[str, list[ServingProfile]]) -> dict[str, float]:
    """How far the entries of one round are from the median of all rounds."""
    differences = [
        abs(profile.costs[kind][scheme].of(phase).at(count, length) / value - 1)
        for profiles in rounds.values()
        for center in [middle(profiles)]
        for profile in profiles
        for kind in KINDS
        for scheme in profile.schemes
        for phase in PHASES
        for count, length, value in points(center.costs[kind][scheme].of(phase))
    ]
    return quantiles(differences)


if __name__ == "__main__":
    main()
