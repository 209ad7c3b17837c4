"""Compile the plans of compiled cases ahead, so that a run of the predictor's benchmark finds them in Inductor's cache.

Runs beside ``predictor.py --workers 1`` on the same card, on cores of its own, while that one records other plans. It
takes one step of every plan and measures nothing; but that step can fall into one that the other process times. A
solver's plan is not known to it.

    python benchmarks/predictor_ahead.py --only bert-short:16:compiled [--precisions INT8 BF16] [--graphs DIR]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))

from predictor_cases import COMBINATIONS, in_turn, plans
from predictor_worker import precisions_of

from qsync_opt.runtimes.torch.execution import ApplyOptions, apply, undo
from qsync_opt.runtimes.torch.steps import compiled_inside
from qsync_opt.runtimes.torch.support import TrainingExample


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--only", required=True, help="name of a combination")
    parser.add_argument("--precisions", nargs="+", help="as of predictor.py")
    parser.add_argument("--graphs", type=Path, help="folder of captured graphs")
    arguments = parser.parse_args()
    combination = next(c for c in COMBINATIONS if c.name == arguments.only)
    if arguments.precisions:
        combination = replace(combination, precisions=tuple(arguments.precisions))
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    graph = combination.subject.graph(arguments.graphs)
    model, kwargs = combination.subject.build(device)
    example = TrainingExample(model=model, kwargs=kwargs)
    cases = plans(combination, graph, precisions_of(combination, graph, device, ()))
    begin = time.perf_counter()
    for label in sorted(cases, key=in_turn):
        apply(model, cases[label], graph=graph, options=ApplyOptions())
        try:
            with compiled_inside(model):
                example.forward().backward()
        finally:
            undo(model)
            model.zero_grad()
        print(f"[{time.perf_counter() - begin:6.1f}] compiled {label}", flush=True)


if __name__ == "__main__":
    main()
