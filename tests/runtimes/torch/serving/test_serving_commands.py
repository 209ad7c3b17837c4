"""The commands ``serving run`` and ``serving bench``, and a load test of the endpoint."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from qsync_opt.cli import main  # noqa: E402
from qsync_opt.decoding import load_measurements  # noqa: E402
from qsync_opt.errors import ProblemError  # noqa: E402
from qsync_opt.runtimes.torch.serving import (  # noqa: E402
    Engine,
    EngineLimits,
    LocalWorkers,
    bind,
    load_test,
    make_app,
    percentiles,
    serve_quietly,
    start_speculation,
    start_stages,
)

WAIT_S = 120


@pytest.fixture
def plan_file(plan_of, tmp_path):
    path = tmp_path / "plan.json"
    plan_of(3).save(path)
    return path


def test_run_serves_a_plan_until_it_is_interrupted(talking_folder, plan_file):
    arguments = ["serving", "run", talking_folder, "--plan", plan_file, "--port", "0", "--context", "64"]
    command = [sys.executable, "-P", "-c", "import sys; from qsync_opt.cli import main; sys.exit(main())"]
    process = subprocess.Popen([*command, *map(str, arguments)], stderr=subprocess.PIPE, text=True)
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "serving " in line and "http" in line:
                break
        assert "stage d0 on cpu: 0.attn to 1.attn in W32" in "".join(lines)
        address = lines[-1].split(" at ")[1].split(";")[0]
        body = json.dumps({"prompt": "to be", "max_tokens": 5}).encode()
        with urllib.request.urlopen(f"{address}/completions", body, timeout=WAIT_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] <= 5
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) in (0, 130)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "d7=cpu"], "device names 'd7'.*devices are d0, d1"),
        (["--device", "d0=tpu"], "device 'tpu' is unknown"),
        (["--threads", "d0"], "must read NAME=VALUE"),
        (["--threads", "d0=0"], "must be at least 1"),
        (["--scheme", "W4"], "beside a plan"),
        (["--dtype", "float8"], "dtype is 'float8', but allowed are float32, bfloat16, float16"),
        (["--head", "W5"], "scheme is 'W5', but this runtime has W4"),
        (["--kv-bits", "3"], "KV bits are 3"),
        (["--context", "64", "--cache-tokens", "32"], "caches hold 32"),
        (["--speculate", "lookup"], "speculation is 'lookup', but allowed are off, auto, lookup:N, A8:N"),
    ],
)
def test_unusable_options_are_one_line(talking_folder, plan_file, capsys, arguments, text):
    status = main(["serving", "run", str(talking_folder), "--plan", str(plan_file), "--port", "0", *arguments])
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 2
    assert re.search(text, error), error


def test_a_taken_port_is_said_before_the_model_is_loaded(capsys):
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serving", "run", "no-such-model", "--port", str(port)]) == 2
    assert f"port {port}" in capsys.readouterr().err


def test_bench_measures_batches_and_many_clients(talking_folder, plan_file, capsys):
    arguments = [
        "--plan",
        str(plan_file),
        "--prompts",
        "3",
        "--prompt-tokens",
        "9",
        "--new-tokens",
        "4",
        "--rounds",
        "1",
    ]
    load = ["--clients", "12", "--seconds", "1", "--context", "128"]
    assert main(["serving", "bench", str(talking_folder), *arguments, *load, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["batch"]["prefill_tokens_per_s"] == pytest.approx(27 / result["batch"]["prefill_s"])
    assert result["batch"]["decode_tokens_per_s"] == pytest.approx(9 / result["batch"]["decode_s"])
    assert result["batch"]["decode_microbatches"] == 2
    assert result["load"]["errors"] == {}
    assert result["load"]["completed"] >= 12
    first = result["load"]["first_token_s"]
    assert 0 < first["p50"] <= first["p95"] <= first["p99"]
    assert main(["serving", "bench", str(talking_folder), *arguments]) == 0
    assert "tokens/s" in capsys.readouterr().out


def test_bench_shows_the_prediction_beside_the_measurement(talking_folder, plan_file, tmp_path, capsys):
    names = [f"{layer}.{kind}" for layer in range(4) for kind in ("attn", "mlp")]
    costs = {kind: {"W32": [[1000, 2000]]} for kind in ("attn", "mlp")}
    ends = {"first_kib": 1, "last_kib": 1, "first": [[1, 1]], "last": [[1, 1]]}
    problem = {
        "format": "qsync-serving/1", "name": "small", "new_tokens": 4, "schemes": ["W32"], "harm_limit": None,
        "microbatches": [{"prefill": 3, "decode": 1}],
        "devices": [{"name": "d0", "memory_kib": 1000}, {"name": "d1", "memory_kib": 1000}],
        "groups": [{"name": name, "kind": name.split(".")[1]} for name in names],
        "weights_kib": {kind: {"W32": 10} for kind in costs}, "state_kib": {kind: [5] for kind in costs},
        "costs": {"d0": costs, "d1": costs}, "ends": {"d0": ends, "d1": ends},
        "links": {"d0>d1": [[1, 1]], "d1>d0": [[1, 1]]}, "harm": {name: {"W32": 0.0} for name in names},
        "optimum": None,
    }  # fmt: skip
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem))
    arguments = ["--problem", str(path), "--prompts", "3", "--prompt-tokens", "5", "--rounds", "1"]
    assert main(["serving", "bench", str(talking_folder), "--plan", str(plan_file), *arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    # Stages of 3 and 5 groups with one link each and one end each.
    assert result["predicted"]["prefill_s"] == pytest.approx((3002 + 5002 + 2 * 5002) * 1e-9)
    assert result["predicted"]["decode_s"] == pytest.approx((2 * 16004 + 16004) * 1e-9)
    assert result["batch"]["decode_microbatches"] == 1
    assert result["batch"]["new_tokens"] == 4
    assert main(["serving", "bench", str(talking_folder), "--problem", str(path)]) == 2


def test_many_clients_are_refused_or_served_but_never_lost(load, llama):
    limits = EngineLimits(context=128, cached=512, running=4, waiting=8)
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(Engine(LocalWorkers(load(llama[1])), limits))
        listening = stack.enter_context(bind("127.0.0.1", 0))
        app = make_app(engine, None, "small")
        thread = threading.Thread(target=serve_quietly, args=(app, engine, listening), daemon=True)
        thread.start()
        result = load_test("127.0.0.1", listening.getsockname()[1], clients=40, seconds=2, vocabulary=97)
        engine.on_failure("the test is over")
        thread.join(WAIT_S)
        assert result.errors == {}
        assert result.completed > 0
        assert result.refused == engine.counts.refused > 0
        assert engine.counts.finished["length"] == result.completed
        assert engine.pages_used == 0


def test_percentiles_are_by_nearest_rank():
    assert percentiles([]) is None
    assert percentiles(list(range(1, 101))) == {"p50": 50, "p95": 95, "p99": 99}
    assert percentiles([3.0]) == {"p50": 3.0, "p95": 3.0, "p99": 3.0}


def test_stages_choose_their_defaults(llama):
    stages = start_stages(llama[1])
    with stages:
        assert stages.options.dtype is torch.float32
        assert set(stages.plan.schemes.values()) == {"W32"}
    with pytest.raises(ProblemError, match=r"torch sees \d+ cards"):
        start_stages(llama[1], devices={"here": "cuda:99"})


def test_what_decoding_measure_writes_is_what_run_speculates_by(talking_folder, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("to be or not to be\n\nto be\n")
    path = tmp_path / "measured.json"
    sizes = ["--batches", "1,2", "--contexts", "16", "--lengths", "1,2", "--new-tokens", "12", "--rounds", "1"]
    arguments = [str(talking_folder), "--scheme", "W4", "--prompts", str(tmp_path / "prompts.txt"), *sizes]
    assert main(["decoding", "measure", *arguments, "--output", str(path)]) == 0
    out = capsys.readouterr().out
    assert "batch 2, context 16: plain" in out and "95% interval" in out
    measured = load_measurements(path)
    assert [sorted(regime.verify_ns) for regime in measured.regimes] == [[1, 2, 3]] * 2
    with start_stages(talking_folder, scheme="W4") as stages:
        started = start_speculation(str(path), str(talking_folder), stages, EngineLimits(context=64, cached=64))
        assert started.speculation.regime(2, 10) == "batch 2, context 16"
        assert len(started.lines) == 2
    assert main(["decoding", "measure", *arguments, "--batches", "0", "--output", str(path)]) == 2
    assert "--batches is '0'" in capsys.readouterr().err
