"""Time the CUDA kernels and write one record per shape and implementation to ``benchmarks/results/kernels.json``.

python benchmarks/kernels.py [--section quantize] [--quick] [--only TEXT] [--output PATH]

Each section is a module of ``kernel_bench`` with ``records(quick)``, a list or an iterator; sections not run keep the
records that the output file holds already.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent / "kernel_bench"))

from qsync_opt.io import write_json
from qsync_opt.kernels.compilation import find_toolchain

SECTIONS = ("quantize", "product", "layer", "peer", "convolution", "trained_convolution", "model")
FORMAT = "qsync-bench-kernels/1"


def _environment() -> dict[str, Any]:
    device = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.date.today().isoformat(),
        "hardware": device.name,
        "multiprocessors": device.multi_processor_count,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nvcc": find_toolchain().nvcc_version,
        },
    }


def _previous(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    data = json.loads(path.read_text())
    if data.get("format") != FORMAT:
        raise SystemExit(f"{path} holds format {data.get('format')!r}, not {FORMAT!r}: name another --output")
    sections: dict[str, Any] = data["sections"]
    return sections


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = [name for name in SECTIONS if (Path(__file__).parent / "kernel_bench" / f"{name}.py").is_file()]
    parser.add_argument("--section", action="append", choices=here, help="default: all")
    parser.add_argument("--quick", action="store_true", help="fewer variants")
    parser.add_argument("--only", default="", help="with --section model: models whose name has this in it")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "kernels.json")
    arguments = parser.parse_args()
    if arguments.only and arguments.section != ["model"]:
        parser.error("--only chooses among models: give --section model with it")
    if not torch.cuda.is_available():
        raise SystemExit("torch sees no CUDA card: the kernels are timed on one")
    sections = _previous(arguments.output)
    for name in arguments.section or here:
        kept = sections.get(name, {}).get("records", []) if arguments.only else []
        records: list[dict[str, Any]] = [record for record in kept if arguments.only not in record["model"]]
        section = {**_environment(), "command": " ".join(["python", *sys.argv]), "records": records}
        choice = {"only": arguments.only} if arguments.only else {}
        for record in importlib.import_module(name).records(arguments.quick, **choice):
            # Written at once: time on a card is dear, and a run that is cut short has measured something.
            records.append(record)
            write_json(arguments.output, {"format": FORMAT, "sections": {**sections, name: section}})
            print(name, json.dumps(record), flush=True)
        sections[name] = section
    return 0


if __name__ == "__main__":
    sys.exit(main())
