"""Does the indicator tell the truth, and do its plans train better? Writes ``benchmarks/results/quality.json``.

    python benchmarks/quality.py --part NAME [--part NAME ...] --folder FOLDER [--device cuda] [--scale full]
    python benchmarks/quality.py --merge FOLDER [--join] [--output PATH]

Every part writes a file of its own into FOLDER, again after every record, and ends when its time is used up, so that
parts can run side by side and nothing is lost; ``--merge`` makes one file of them, and with ``--join`` keeps the
repeats and runs that the file has of the same subject. Parts: operators[:MODEL], whole-model[:MODEL], cost[:MODEL],
harm:MODEL:SHARD[:own|sgd[:eight[:falling[:shared]]]] (small-gpt, cnn; shards have repeats of their own; by the own
optimizer or by SGD; backward in 16 bits or in 8; at a constant rate or one that falls to zero; errors of each run, or
those of one run in all), noise:MODEL[:eight] (beside each parameter's gradient), plan-noise:MODEL (gpt, cnn; what plans
of one time add to the gradient's variance), train:MODEL[:SHARD] (gpt, cnn; shards have seeds of their own; goes on
where its file in FOLDER ends).
"""

from __future__ import annotations

import argparse
import datetime
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "quality_bench"))

import cost
import harm
import operators
import parameter_noise
import plan_noise
import runs
import training
import whole_model
from plans import COST_MODEL
from work import Clock, significant

from qsync_opt.io import read_json, write_json

FORMAT = "qsync-bench-quality/1"
PART = "qsync-bench-quality-part/1"
RESULTS = Path(__file__).parent / "results" / "quality.json"


def environment(device: torch.device, folder: Path) -> dict[str, Any]:
    """Where and with what a part was run; whatever the folder is called."""
    cuda = device.type == "cuda"
    arguments = ["parts" if argument == str(folder) else argument for argument in sys.argv[1:]]
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": torch.cuda.get_device_name() if cuda else platform.machine(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(["python benchmarks/quality.py", *arguments]),
    }


def run_part(part: str, device: torch.device, arguments: argparse.Namespace) -> None:
    """Run one part and keep its records as they come."""
    scale, folder = arguments.scale, arguments.folder
    kind, *rest = part.split(":")
    path = folder / f"{part.replace(':', '-')}.json"
    clock, begin = Clock(arguments.seconds), time.monotonic()
    found: Iterator[dict[str, Any]]
    if kind == "train":
        found = train(rest[0], int((rest[1:] or ["0"])[0]), device, clock, arguments, before=path)
    elif kind == "harm":
        found = harm.section(
            device,
            scale,
            clock,
            name=rest[0],
            shard=int(rest[1]),
            factor=arguments.factor,
            steps=arguments.steps,
            optimizer=(rest[2:] or ["own"])[0],
            backward=(rest[3:] or ["half"])[0],
            rate=(rest[4:] or ["constant"])[0],
            errors=(rest[5:] or ["own"])[0],
            captured=not arguments.eager,
        )
    elif kind == "noise":
        found = parameter_noise.section(
            device, scale, clock, rest[0], arguments.factor, backward=(rest[1:] or ["half"])[0]
        )
    elif kind == "plan-noise":
        name, steps = rest[0], arguments.steps
        found = plan_noise.section(device, scale, clock, name=name, factor=arguments.factor, folder=folder, steps=steps)
    elif kind == "operators":
        found = operators.section(device, scale, clock, rest or operators.MODELS)
    else:
        sections = {"whole-model": whole_model.section, "cost": cost.section}
        found = sections[kind](device, scale, clock, rest or None)
    records: list[dict[str, Any]] = []
    for record in found:
        if kind in ("train", "harm", "plan-noise"):
            records = [record]  # each holds all that is known so far
        elif kind == "cost":
            records = [*(known for known in records if known["model"] != record["model"]), record]
        else:
            records.append(record)
        data = {"format": PART, "part": part, **environment(device, folder), "seconds": time.monotonic() - begin}
        write_json(path, {**data, "records": records})
        print(f"{part}: record {len(records)} after {time.monotonic() - begin:.0f} s", flush=True)


def train(
    name: str, shard: int, device: torch.device, clock: Clock, arguments: argparse.Namespace, before: Path
) -> Iterator[dict[str, Any]]:
    """Runs of one model over the seeds of a shard; every record holds all that is known so far."""
    steps = arguments.steps
    comparison = training.Comparison(name, device, arguments.scale, arguments.folder, steps)
    known = read_json(before, (PART,))["records"][-1]["runs"] if before.is_file() else []
    sign = -1.0 if training.better_when_higher(name) else 1.0
    chosen = comparison.compared_at(arguments.factor)
    record: dict[str, Any] = {
        "model": name,
        "what": comparison.what,
        "score": "accuracy on held-out fonts" if sign < 0 else "held-out loss, nats per byte",
        "steps": steps,
        "cost_model": COST_MODEL,
        "runs": known,
        "unfinished": [],
        "chosen": chosen.name,
        "horizon": comparison.horizon,
        "plans": comparison.planned(chosen),
    }
    yield record
    done_before = {training.key(run) for run in known}
    seeds = range(shard * arguments.seeds, (shard + 1) * arguments.seeds)
    every = training.jobs(
        comparison, seeds, steps, not arguments.eager, chosen, [p for p in arguments.policies.split(",") if p]
    )
    jobs = [job for job in every if training.key(job) not in done_before]
    if not jobs:
        return
    for found in runs.Training(jobs).run(time.monotonic() + clock.left()):
        found = significant(found, 6)
        record["runs"] = known + [run for run in found if run["steps"] == steps]
        record["unfinished"] = [run for run in found if run["steps"] != steps]
        yield record


def merge(folder: Path, output: Path, join: bool = False) -> None:
    """One file from all parts; what no part has measured anew is kept as the output has it.

    Args:
        folder: Of the parts.
        output: The file.
        join: Also keep the repeats and runs of what was measured anew, together with the new ones.
    """
    sections: dict[str, Any] = {}
    if output.is_file():
        sections = dict(read_json(output, (FORMAT,))["sections"])
    parts = [read_json(path, (PART,)) for path in sorted(folder.glob("*.json")) if not path.stem.endswith("-graph")]
    for kind in ("operators", "whole-model", "cost", "harm", "noise", "plan-noise", "train"):
        chosen = [part for part in parts if part["part"].split(":")[0] == kind]
        if not chosen:
            continue
        # Parts may come from several machines; what a card measured comes first.
        chosen.sort(key=lambda part: "NVIDIA" not in part["hardware"])
        records = [
            {"hardware": part["hardware"], "date": part["date"], **record}
            for part in chosen
            for record in part["records"]
        ]
        before = sections.get(kind, {"records": [], "command": ""})
        present = before["records"] if join else []
        if kind == "harm":
            records = _harm_records(records, present)
        elif kind == "train":
            subjects = {_subject(record) for record in records}
            records = training.merged([*(r for r in present if _subject(r) in subjects), *records])
            for record in records:
                record["summary"] = _train_summary(record, record["runs"])
                record["unfinished_summary"] = _train_summary(record, record.get("unfinished", []))
        measured = {_subject(record) for record in records}
        kept = [{"date": before["date"], **r} for r in before["records"] if _subject(r) not in measured]
        head = {key: chosen[0][key] for key in ("date", "versions")}
        hardware = ", ".join(dict.fromkeys(record["hardware"] for record in [*records, *kept]))
        commands = [part["command"] for part in chosen] + (before["command"].split("; ") if kept or present else [])
        section = {**head, "hardware": hardware, "command": "; ".join(dict.fromkeys(commands))}
        sections[kind] = {**section, "records": [*records, *kept]}
    write_json(output, {"format": FORMAT, "sections": sections})


def _subject(record: dict[str, Any]) -> tuple[str, ...]:
    """What a record is about: one of the same replaces it."""
    keys = ("hardware", "model", "case", "factor", "optimizer", "backward", "steps")
    return (
        *(str(record.get(key)) for key in keys),
        str(record.get("rate", "constant")),
        str(record.get("errors", harm.ERRORS["own"])),
    )


def _harm_records(records: list[dict[str, Any]], present: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Shards of one subject as one record, with those that the output has."""
    before = {_subject(record): harm.as_shard(record) for record in present}
    found = []
    for subject in dict.fromkeys(map(_subject, records)):
        group = [r for r in records if _subject(r) == subject]
        group += [shard for shard in [before.get(subject)] if shard is not None]
        if any(r["indicators"] for r in group):
            found.append(harm.merged(group))
    return found


def _train_summary(record: dict[str, Any], found: list[dict[str, Any]]) -> dict[str, Any]:
    sign = -1.0 if training.better_when_higher(record["model"]) else 1.0
    settings = [s.name for s in training.SETTINGS[record["model"]]]
    return {setting: significant(training.summary(found, setting, sign)) for setting in settings} if found else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", default=[])
    parser.add_argument("--folder", type=Path, help="where parts write their files")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", choices=("full", "small", "tiny"), default="full", help="small: for a CPU")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each part")
    parser.add_argument("--eager", action="store_true", help="training steps launched by the host, not as CUDA graphs")
    parser.add_argument("--seeds", type=int, default=4, help="training runs of every policy, per shard")
    parser.add_argument("--steps", type=int, default=500, help="of a training run or a repeat of harm")
    parser.add_argument(
        "--factor",
        type=float,
        default=8.0,
        help="by which errors are magnified: for harm, and where plans are compared",
    )
    parser.add_argument("--policies", default="", help="train these alone, separated by commas; default: all")
    parser.add_argument("--merge", type=Path, metavar="FOLDER")
    parser.add_argument("--join", action="store_true", help="merge: keep repeats and runs of the same subject")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if arguments.merge is not None:
        merge(arguments.merge, arguments.output, arguments.join)
        return 0
    if not arguments.part or arguments.folder is None:
        parser.error("give --part and --folder, or --merge")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for part in arguments.part:
        run_part(part, torch.device(arguments.device), arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
