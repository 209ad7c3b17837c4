import dataclasses
import io
import json

import pytest
from rich.console import Console

from qsync_opt.cli import main
from qsync_opt.runtimes.torch.demo import (
    INFERENCE,
    TRAINER,
    DemoOptions,
    GptConfig,
    others_words,
    result_json,
    run_demo,
)
from qsync_opt.training import evaluate, load_plan, load_problem


@pytest.mark.slow
@pytest.mark.timeout(600)  # beside other tests and compilers
def test_a_small_demo_runs_from_end_to_end(tmp_path):
    sizes = GptConfig(context=32, width=32, heads=2, layers=1)
    options = DemoOptions(steps=20, batch=4, learning_rate=1e-2, model=sizes)
    shown = io.StringIO()
    result = run_demo(tmp_path, options, Console(file=shown, width=120))

    problem, plan = load_problem(tmp_path / "problem.json"), load_plan(tmp_path / "plan.json")
    evaluation = evaluate(problem, plan)
    assert evaluation.feasible
    assert evaluation.objective == result.solved[0].objective
    exact = result.solved[1]
    assert exact.termination == "optimal"
    assert exact.objective <= evaluation.objective * (1 + 1e-9)

    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {
        f"{TRAINER} (one of 1)",
        f"{INFERENCE} (one of 1)",
    }
    assert set(result.measured) == {"FP32", "plan", "uniform lowest"}
    for run in result.measured.values():
        assert len(run.losses) == options.steps
        assert run.losses[-1] < run.losses[0]
        assert 0 <= run.others_share < 1
        assert min(run.pair_s, *run.alone_s.values(), *run.peak_bytes.values(), run.held_out_loss) > 0
    # The same weights and batches, so the first FP32 loss of the first worker is the same in every run.
    assert len({run.losses[0] for run in result.measured.values()}) == 1
    assert result.seconds > 0
    assert result.processor_seconds > 0
    report = (tmp_path / "report.md").read_text()
    for text in (report, shown.getvalue()):
        assert "predicted" in text.lower()
        assert "blocks.0.qkv/linear" in text

    for share, said in ((0.01, False), (0.5, True)):
        runs = {label: dataclasses.replace(run, others_share=share) for label, run in result.measured.items()}
        assert ("for up to 50 % of the time" in others_words(dataclasses.replace(result, measured=runs))) is said

    written = json.loads(json.dumps(result_json(result), allow_nan=False))
    assert written["plan"]["devices"] == {INFERENCE: dict(plan.devices[INFERENCE])}
    assert [solution["method"] for solution in written["solved"]] == ["greedy", "exact"]
    for label, run in result.measured.items():
        assert written["runs"][label]["measured_ns"] == pytest.approx(1e9 * run.pair_s)
        assert written["runs"][label]["workers"][INFERENCE]["measured_bytes"] == run.peak_bytes[INFERENCE]
        assert written["runs"][label]["predicted_ns"] > 0


@pytest.mark.parametrize(("arguments", "stream"), [(["--json"], "err"), (["--json", "--quiet"], None), ([], "out")])
def test_json_goes_to_standard_output_alone(tmp_path, monkeypatch, capsys, arguments, stream):
    def shown(folder, options, console):
        console.print("a step")
        return "result"

    monkeypatch.setattr("qsync_opt.runtimes.torch.demo.run_demo", shown)
    monkeypatch.setattr("qsync_opt.runtimes.torch.demo.result_json", lambda result: {"was": result})
    assert main(["demo", "--output", str(tmp_path), *arguments]) == 0
    captured = capsys.readouterr()
    if "--json" in arguments:
        assert json.loads(captured.out) == {"was": "result"}
    assert [name for name in ("out", "err") if "a step" in getattr(captured, name)] == ([stream] if stream else [])
