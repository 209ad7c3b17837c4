"""The parts of a step with compressed gradients, predicted of a scheme that was not recorded, and measured.

Two gloo ranks, one thread each, train a model under every scheme of the menu. For each scheme the model of steps
(`qsync_opt.gradients.fit_reductions`) is fitted to the steps under the other schemes, and the scheme's own times and
slowdown are those of `measure_schemes(..., beside=True)`: a reduction alone, and beside a backward pass.
Predicted beside measured stand the step, the time of all reductions (codec and collectives), the part of it that the
backward pass does not hide, and by how much longer the backward pass takes than alone.

    python benchmarks/gradient_steps.py                        # writes benchmarks/results/gradient-steps.json
    python benchmarks/gradient_steps.py --links loopback --models MLP --output /tmp/smoke.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from gradient_mixtures import MENU, SETTLING, Job
from links import records_of_ranks
from results_head import processors, results_head

from qsync_opt.gradients import Reduction, fit_reductions
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.gradients import measure_schemes

HERE = Path(__file__).parent
LINKS, MODELS = ("loopback", "1"), ("GPT", "MLP", "CNN")
WITHIN = 0.1


def parts_ms(step: Sequence[Reduction], alone_ns: int) -> dict[str, float]:
    """What a step consists of, in milliseconds; ``alone_ns`` is all computation with nothing beside it."""
    whole, ready = step[-1].end_ns, step[-1].ready_ns
    parts = {
        "step": whole,
        "reductions": sum(each.time_ns for each in step),
        "exposed": whole - ready,
        "slowdown": max(0, ready - alone_ns),
    }
    return {name: round(value / 1e6, 3) for name, value in parts.items()}


def compared(model: str) -> list[dict[str, Any]]:
    """One record for each scheme."""
    job = Job(model)
    job.run(SETTLING)
    recorded = job.recorded()
    computation = job.computation()
    sizes = sorted({1 << 12, *(job.compression.elements or ())})
    times = measure_schemes(MENU, sizes, repeats=15, beside=True)
    result = []
    for name in MENU:
        others = [record for other in MENU if other != name for record in recorded[other]]
        fitted = fit_reductions(others, computation)
        own_ns = tuple(times.ns(name, size) for size in fitted.elements)
        whole = replace(
            fitted,
            times_ns={**fitted.times_ns, name: own_ns},
            slowdowns={**fitted.slowdowns, name: times.slowdowns[name]},
            stretches={name: times.stretches[name]},
        )
        alone_ns = sum(fitted.segments_ns)
        measured = [parts_ms(record.usual(), alone_ns) for record in recorded[name]]
        result.append(
            {
                "scheme": name,
                "predicted_ms": parts_ms(whole.predict(whole.single(name)), alone_ns),
                "measured_ms": {
                    part: round(statistics.fmean(row[part] for row in measured), 3) for part in measured[0]
                },
                "of_records_ms": [row["step"] for row in measured],
            }
        )
    return result


def worker(rank: int, address: str, output: str, link: str, models: list[str]) -> None:
    """One rank; rank 0 writes the records."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)
    records = [{"link": link, "model": model, **row} for model in models for row in compared(model)]
    if rank == 0:
        Path(output).write_text(json.dumps(records))
    dist.barrier()
    os._exit(0)  # threads of hooks still hold groups


def asked(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each part, as a share of the measured step."""
    rows = []
    for part in ("step", "reductions", "exposed", "slowdown"):
        errors = [
            abs(each["predicted_ms"][part] - each["measured_ms"][part]) / each["measured_ms"]["step"]
            for each in records
        ]
        kept = sum(error <= WITHIN for error in errors)
        rows.append(
            {
                "what": f"steps whose predicted {part} is off by at most {WITHIN:.0%} of the step",
                "asked": f"{len(records)} of {len(records)}",
                "measured": kept,
                "met": kept == len(records),
                "note": f"median {statistics.median(errors):.1%}, largest {max(errors):.1%}",
            }
        )
    return rows


def main() -> None:
    """Measure and write the file."""
    if sys.argv[1:2] == ["--worker"]:
        rank, address, output, link, models = sys.argv[2:]
        worker(int(rank), address, output, link, json.loads(models))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", default=",".join(LINKS), help="Gbit/s, or loopback")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gradient-steps.json")
    arguments = parser.parse_args()
    records: list[dict[str, Any]] = []
    for link in arguments.links.split(","):
        gigabits = None if link == "loopback" else float(link)
        inside = [json.dumps(arguments.models.split(","))]
        records += records_of_ranks(__file__, link, inside, port=29557, gigabits=gigabits, timeout_s=1200)
    head = results_head(processors(), {"torch": torch.__version__})
    rows = asked(records)
    write_json(arguments.output, {**head, "asked": rows, "records": records})
    for each in rows:
        print(f"{each['what']}: asked {each['asked']}, measured {each['measured']} ({each['note']})")


if __name__ == "__main__":
    main()
