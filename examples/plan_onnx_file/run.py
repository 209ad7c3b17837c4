"""From a model file and a cluster file to a plan, without a GPU: by the command line, then the same in Python.

Nothing was measured, so the costs come from data sheets and the sensitivities from the weights; both say so.
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from qsync_opt import build_problem, data_sheet, load_cluster, read_onnx, read_weights, roofline_profile, solve
from qsync_opt.cli import main as qsync_opt_command
from qsync_opt.sensitivity import FROM_WEIGHTS, weight_sensitivities

HERE = Path(__file__).resolve().parent


def by_command(model: Path, folder: Path) -> None:
    arguments = ["plan", str(model), str(HERE / "cluster.yaml"), "--slack", "0.05"]
    print(f"$ qsync-opt {' '.join(arguments)}", flush=True)
    started = time.perf_counter()
    status = qsync_opt_command([*arguments, "--output", str(folder / "plan.json")])
    print(f"exit status {status} after {time.perf_counter() - started:.1f} s\n")


def in_python(model: Path) -> None:
    graph = read_onnx(model)
    print(repr(graph))
    cluster = load_cluster(HERE / "cluster.yaml")
    profiles = {device.name: roofline_profile(graph, data_sheet(device.name)) for device in cluster.devices}
    table = weight_sensitivities(graph, profiles["T4"].formats, read_weights(model))
    problem = build_problem(graph, profiles, table, cluster, slack=0.05, sensitivity_estimate=FROM_WEIGHTS)
    print(repr(problem))
    print(repr(solve(problem)))


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = Path(sys.argv[1]) if len(sys.argv) > 1 else folder / "resnet50.onnx"
        if len(sys.argv) < 2:
            subprocess.run([sys.executable, str(HERE / "resnet50.py"), str(model)], check=True)
        by_command(model, folder)
        in_python(model)


if __name__ == "__main__":
    main()
