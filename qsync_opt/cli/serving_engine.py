"""The commands that carry serving plans out: ``run`` an endpoint, ``bench`` it, ``export`` to other engines."""

from __future__ import annotations

import contextlib
import importlib
import shlex
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from qsync_opt.cli.console import EXIT_DIFFERENT, EXIT_OK, Json, Quiet, Verbose, choice, option, print_json
from qsync_opt.errors import ProblemError

app = typer.Typer(rich_markup_mode=None)
_RUNTIME = "qsync_opt.runtimes.torch.serving"  # runtimes are reached by name

ModelPath = Annotated[
    str, typer.Argument(metavar="MODEL", help="folder with config.json and safetensors, or .gguf file")
]
ServingPlan = Annotated[str | None, option("FILE", "serving plan; all layers on one device by default", "--plan")]
Scheme = Annotated[
    str | None, option("NAME", "weight scheme where there is no plan: W4, W4H, W4A8, W8, W8A8, W16, W32")
]
Dtype = Annotated[str | None, option("NAME", "float32 (default on CPUs), bfloat16 (on cards), float16")]
KvBits = Annotated[
    int | None, option("BITS", "8 keeps keys and values in 8 bits; as the dtype by default", "--kv-bits")
]
Head = Annotated[str | None, option("NAME", "weight scheme of the head, such as W8; as the dtype by default", "--head")]
Devices = Annotated[
    list[str] | None,
    option("NAME=PLACE", "torch's device of a device of the plan: cpu, cuda:0; once for each", "--device"),
]
Threads = Annotated[list[str] | None, option("NAME=N", "threads of a device of the plan; once for each", "--threads")]
Context = Annotated[int, option("N", "most tokens of a request, prompt and new ones", "--context", min=1)]
Running = Annotated[int, option("N", "most requests that run at once", "--max-running", min=1)]
Waiting = Annotated[int, option("N", "most requests that wait; more are answered 429", "--max-waiting", min=0)]
Cached = Annotated[int | None, option("N", "tokens that caches hold in all (default: 4 times the context)", min=1)]
Speculate = Annotated[
    str,
    option(
        "auto|off|lookup:N|A8:N|FILE",
        "drafts: what followed the latest tokens earlier in the text, or the model's own at activations of 8 bits; "
        "auto and a file of 'decoding measure' choose by what pays",
        "--speculate",
    ),
]
Reproducible = Annotated[
    bool,
    typer.Option("--reproducible", help="tokens do not depend on what else runs, to the last bit; slower"),
]
Timeout = Annotated[float, option("S", "longest wait for a pass through the stages", "--timeout")]


@app.command()
def run(
    model: ModelPath,
    plan: ServingPlan = None,
    host: Annotated[str, option("ADDRESS", "address to listen on")] = "127.0.0.1",
    port: Annotated[int, option("N", "port to listen on; 0: any that is free")] = 8000,
    name: Annotated[
        str | None, option("NAME", "the model's name in requests; its file's or folder's by default")
    ] = None,
    scheme: Scheme = None,
    dtype: Dtype = None,
    kv_bits: KvBits = None,
    head: Head = None,
    reproducible: Reproducible = False,
    device: Devices = None,
    threads: Threads = None,
    context: Context = 4096,
    max_running: Running = 32,
    max_waiting: Waiting = 128,
    cache_tokens: Cached = None,
    speculate: Speculate = "off",
    timeout: Timeout = 120.0,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> int:
    """Serve a model over HTTP as OpenAI's API: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics."""
    runtime = importlib.import_module(_RUNTIME)
    runtime.check_speculation(speculate)
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(runtime.bind(host, port))  # a taken port is said before the model is loaded
        stages = _stages(model, plan, scheme, dtype, kv_bits, head, reproducible, device, threads, timeout, quiet)
        stack.callback(stages.close)
        limits = _limits(runtime, stages, context, max_running, max_waiting, cache_tokens)
        tokenizer = runtime.load_tokenizer(model, stages.config)
        engine = stack.enter_context(_engine(runtime, model, stages, limits, speculate, quiet))
        for line in runtime.describe(stages):
            print(line, file=sys.stderr)
        if tokenizer is None:
            print("the model's folder has no tokenizer: prompts must be token numbers", file=sys.stderr)
        label = name or Path(model).stem
        app = runtime.make_app(engine, tokenizer, label)
        address = f"[{host}]" if ":" in host else host
        print(f"serving {label!r} at http://{address}:{listening.getsockname()[1]}/v1; Ctrl-C ends it", file=sys.stderr)
        runtime.serve(app, engine, listening)
    return EXIT_OK


@app.command()
def bench(
    model: ModelPath,
    plan: ServingPlan = None,
    problem: Annotated[
        str | None, option("FILE", "problem of the plan: its prediction is shown beside what is measured")
    ] = None,
    scheme: Scheme = None,
    dtype: Dtype = None,
    kv_bits: KvBits = None,
    head: Head = None,
    reproducible: Reproducible = False,
    device: Devices = None,
    threads: Threads = None,
    prompts: Annotated[int, option("N", "prompts of the batch", min=1)] = 8,
    prompt_tokens: Annotated[int, option("N", "tokens of each prompt", min=1)] = 128,
    new_tokens: Annotated[
        int | None, option("N", "new tokens of each prompt (default: the problem's, or 32)", min=2)
    ] = None,
    rounds: Annotated[int, option("N", "batches; the median counts", min=1)] = 3,
    clients: Annotated[int, option("N", "clients of the load test over loopback; 0: none", min=0)] = 0,
    seconds: Annotated[float, option("S", "seconds of the load test")] = 30.0,
    context: Context = 1024,
    max_running: Running = 32,
    max_waiting: Waiting = 128,
    cache_tokens: Cached = None,
    speculate: Speculate = "off",
    timeout: Timeout = 120.0,
    quiet: Quiet = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Measure tokens per second of both phases in a batch, and, with clients, what they wait for at the endpoint."""
    if problem is not None and plan is None:
        raise ProblemError("a problem is given without a plan; give the plan that was made for it by --plan")
    runtime = importlib.import_module(_RUNTIME)
    runtime.check_speculation(speculate)
    option_, predicted = _prediction(problem, plan)
    new_tokens = new_tokens or (32 if predicted is None else predicted["new_tokens"])
    with contextlib.ExitStack() as stack:
        stages = _stages(model, plan, scheme, dtype, kv_bits, head, reproducible, device, threads, timeout, quiet)
        stack.callback(stages.close)
        batch = runtime.measure_batches(
            stages, prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds,
            prefill=option_[0], decode=option_[1],
        )  # fmt: skip
        result: dict[str, Any] = {"batch": batch, "predicted": predicted}
        if clients:
            limits = _limits(runtime, stages, context, max_running, max_waiting, cache_tokens)
            engine = stack.enter_context(_engine(runtime, model, stages, limits, speculate, quiet or json))
            with _served(runtime, engine) as port, runtime.MemoryWatch(stages.pids, every_s=0.5) as memory:
                load = runtime.load_test(
                    "127.0.0.1", port, clients=clients, seconds=seconds, vocabulary=stages.config.vocabulary
                )
            result["load"] = {"clients": clients, **load.to_json(), "memory_mib": memory.summary()}
    if json:
        print_json(result)
    else:
        _print_bench(result)
    lost = result.get("load", {}).get("errors")
    return EXIT_DIFFERENT if lost else EXIT_OK


@app.command()
def export(
    model: ModelPath,
    plan: Annotated[str, option("FILE", "serving plan", "--plan")],
    target: Annotated[
        str, option("NAME", "vllm (from safetensors) or llama.cpp (from GGUF)", "--to", **choice("vllm", "llama.cpp"))
    ],
    output: Annotated[str, option("PATH", "folder (vllm) or file (llama.cpp) to write", "--output")],
    quiet: Quiet = False,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Write a model in a plan's schemes for another engine, and say how to start that with the plan's stages."""
    from qsync_opt.io import reporting
    from qsync_opt.serving import load_plan

    runtime = importlib.import_module(_RUNTIME)
    write = runtime.export_vllm if target == "vllm" else runtime.export_llama_cpp
    with reporting(False if quiet else None, "writing") as progress:
        result = write(model, load_plan(plan), output, progress=progress)
    if json:
        data = {"path": str(result.path), "environment": dict(result.environment), "arguments": list(result.arguments)}
        print_json(data)
    else:
        print(f"written to {result.path}; start it by")
        settings = [f"{name}={value}" for name, value in result.environment.items()]
        print(" ".join([*settings, *(shlex.quote(word) for word in result.arguments)]))
    return EXIT_OK


def _print_bench(result: dict[str, Any]) -> None:
    batch, predicted = result["batch"], result["predicted"]
    for phase in ("prefill", "decode"):
        line = f"{phase:<8} {batch[f'{phase}_tokens_per_s']:.1f} tokens/s, {1e3 * batch[f'{phase}_s']:.2f} ms"
        if predicted is not None:
            expected = predicted[f"{phase}_s"]
            line += f"; predicted {1e3 * expected:.2f} ms ({batch[f'{phase}_s'] / expected - 1:+.1%})"
        print(line)
    if (load := result.get("load")) is None:
        return
    print(
        f"{load['clients']} clients for {load['seconds']:.1f} s: {load['completed']} answers, "
        f"{load['refused']} refused, {sum(load['errors'].values())} lost, {load['tokens_per_s']:.1f} tokens/s"
    )
    for name, label in (
        ("first_token_s", "first token"), ("between_tokens_s", "between tokens"), ("whole_s", "whole answer"),
    ):  # fmt: skip
        if load[name]:
            print(f"{label:<15} " + ", ".join(f"{p} {1e3 * value:.1f} ms" for p, value in load[name].items()))
    for error, count in load["errors"].items():
        print(f"lost {count}: {error}")
    if load["memory_mib"]:
        print(f"memory of the stages: {load['memory_mib']['begin']:.1f} MiB at first, {load['memory_mib']['end']:.1f} "
              f"at last, {load['memory_mib']['most']:.1f} at most")  # fmt: skip


def _prediction(problem: str | None, plan: str | None) -> tuple[tuple[int | None, int | None], dict[str, Any] | None]:
    """Micro-batches of both phases, and what the evaluation says of the plan."""
    if problem is None or plan is None:
        return (None, None), None
    from qsync_opt.serving import evaluate, load_plan, load_problem

    given, chosen = load_problem(problem), load_plan(plan)
    evaluation, counts = evaluate(given, chosen), given.microbatches[chosen.microbatch]
    predicted = {
        "new_tokens": given.new_tokens,
        "prefill_s": evaluation.prefill_ns * 1e-9,
        "decode_s": evaluation.decode_ns * 1e-9,
    }
    return (counts.prefill, counts.decode), predicted


@contextlib.contextmanager
def _served(runtime: Any, engine: Any) -> Iterator[int]:
    """The engine behind an endpoint on a free port of loopback."""
    with runtime.bind("127.0.0.1", 0) as listening:
        app = runtime.make_app(engine, None, "model")
        thread = threading.Thread(target=runtime.serve_quietly, args=(app, engine, listening), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            engine.on_failure("the load test is over")
            thread.join()


def _engine(runtime: Any, model: str, stages: Any, limits: Any, speculate: str, quiet: bool) -> Any:
    """An engine, after its speculation was measured where that is asked for; says what is drafted."""
    say = None if quiet else lambda text: print(text, file=sys.stderr, flush=True)
    started = runtime.start_speculation(speculate, model, stages, limits, say=say)
    for line in () if quiet else started.lines:
        print(line, file=sys.stderr)
    return runtime.start_engine(stages, limits, started.speculation)


def _limits(runtime: Any, stages: Any, context: int, running: int, waiting: int, cached: int | None) -> Any:
    return runtime.EngineLimits(
        context=context,
        running=running,
        waiting=waiting,
        cached=cached or 4 * context,
        microbatches=len(stages.plan.stages),
    )


def _stages(
    model: str,
    plan: str | None,
    scheme: str | None,
    dtype: str | None,
    kv_bits: int | None,
    head: str | None,
    reproducible: bool,
    device: list[str] | None,
    threads: list[str] | None,
    timeout: float,
    quiet: bool,
) -> Any:
    from qsync_opt.io import reporting
    from qsync_opt.serving import load_plan

    runtime = importlib.import_module(_RUNTIME)
    counts = {}
    for name, value in _pairs(threads, "--threads").items():
        if not value.isdigit() or int(value) < 1:
            raise ProblemError(f"--threads {name}={value}: the number must be at least 1")
        counts[name] = int(value)
    with reporting(False if quiet else None, "loading") as progress:
        return runtime.start_stages(
            model,
            None if plan is None else load_plan(plan),
            scheme=scheme,
            dtype=dtype,
            kv_bits=kv_bits,
            head=head,
            reproducible=reproducible,
            devices=_pairs(device, "--device"),
            threads=counts,
            timeout_s=timeout,
            progress=progress,
        )


def _pairs(texts: list[str] | None, option_name: str) -> dict[str, str]:
    pairs = {}
    for text in texts or []:
        name, separator, value = text.rpartition("=")
        if not (separator and name and value):
            raise ProblemError(
                f"{option_name} {text!r} must read NAME=VALUE; the name is a device of the plan, or 'here'"
            )
        pairs[name] = value
    return pairs
