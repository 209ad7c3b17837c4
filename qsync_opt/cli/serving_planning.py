"""The commands that plan serving: ``profile`` a model's layers, ``plan`` from profiles, and a ``demo`` of it all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from qsync_opt.cli.console import (
    EXIT_INFEASIBLE,
    EXIT_OK,
    Json,
    PlanOutput,
    Verbose,
    check_outputs,
    choice,
    estimates_json,
    option,
    print_estimates,
    print_json,
    print_table,
)
from qsync_opt.errors import ProblemError, UnsupportedError
from qsync_opt.io import near_match

if TYPE_CHECKING:
    from qsync_opt.serving import Prediction, ServeWorkload, ServingDevice, ServingProfile

app = typer.Typer(rich_markup_mode=None)
_MODEL_HELP = "model folder (config.json and safetensors) or .gguf file"
_RUNTIME = "qsync_opt.runtimes.torch.serving"
_BITS = "W4,W8,W16,W32"
_KIB_PER_MIB = 1024

Prompts = Annotated[int, option("N", "prompts of a batch", min=1)]
PromptTokens = Annotated[int, option("N", "tokens of the longest prompt", min=1)]
NewTokens = Annotated[int, option("N", "new tokens of each prompt", min=1)]


@app.command("profile")
def profile(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL_HELP)],
    output: Annotated[str, option("FILE", "where the profile is written", "--output")],
    name: Annotated[str | None, option("NAME", "name of the profile; by default the device's")] = None,
    device: Annotated[str, option("PLACE", "what is measured: cpu, or a card such as cuda:0")] = "cpu",
    prompts: Prompts = 8,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    schemes: Annotated[
        str | None, option("NAMES", f"weight schemes, with commas between; {_BITS} by default, W32 on a CPU only")
    ] = None,
    threads: Annotated[int, option("N", "threads of a stage on a CPU", min=1)] = 1,
    beside: Annotated[
        list[int] | None,
        option("N", "threads of a process that computes meanwhile, as another stage here will; once for each", min=1),
    ] = None,
    head: Annotated[
        str | None, option("NAME", "weight scheme of the head, such as W8, for 'run --head'; as the dtype by default")
    ] = None,
    learned: Annotated[
        str | None,
        option("HARDWARE", "measure nothing: estimate for a GPU with a data sheet, such as T4, or a known device"),
    ] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Measure what a model's layers cost on this CPU or a card, by kind, scheme and phase, or estimate it."""
    from qsync_opt.registry import attribute
    from qsync_opt.serving import ServeWorkload, profile_json

    check_outputs([output], [model])
    workload = ServeWorkload(prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens)
    chosen = None if schemes is None else _names(schemes)
    if learned is not None:
        if device != "cpu" or threads != 1 or beside or head is not None:
            raise ProblemError(
                f"--learned is {learned!r}, so nothing is measured; leave out --device, --threads, --beside and --head"
            )
        result = _estimated(model, workload, learned, chosen, name)
    else:
        measure = attribute(f"{_RUNTIME}:profile_serving")
        result = measure(
            model,
            workload,
            name=name,
            device=device,
            schemes=chosen,
            threads=threads,
            beside=beside or (),
            head=head,
        )
    result.save(output)
    if json:
        print_json(profile_json(result))
        return EXIT_OK
    where = "" if result.threads is None else f", {threads} threads"
    print(f"{result.name}: {result.model.name}, {result.model.layers} layers{where}, written to {output}")
    rows = []
    for kind, table in result.costs.items():
        for scheme, costs in table.items():
            prefill = costs.prefill.at(prompts, prompt_tokens)
            decode = costs.decode.at(prompts, prompt_tokens + new_tokens // 2)
            weights = result.weights_kib[kind][scheme]
            rows.append(
                (kind, scheme, f"{weights / _KIB_PER_MIB:.2f} MiB", f"{prefill / 1e6:.3f} ms", f"{decode / 1e6:.3f} ms")
            )
    print_table(("kind", "scheme", "weights", f"prefill of {prompts}", f"decode of {prompts}"), rows)
    if result.estimated_by is not None:
        print(f"note: these costs are estimates: {result.estimated_by}")
    return EXIT_OK


@app.command("plan")
def plan(
    device: Annotated[
        list[str],
        option(
            "NAME=PROFILE:MIB",
            "a device: its name, its profile's file, and its memory in MiB; once for each",
            "--device",
        ),
    ],
    prompts: Prompts = 8,
    prompt_tokens: PromptTokens = 128,
    new_tokens: NewTokens = 64,
    schemes: Annotated[
        str | None, option("NAMES", "weight schemes, with commas between; all that are profiled by default")
    ] = None,
    harm: Annotated[str | None, option("FILE", "harm by group and scheme, measured by measure_harm")] = None,
    harm_limit: Annotated[
        float | None, option("H", "most harm in all; without a file of harms all groups in 4 bits have 1")
    ] = None,
    costs: Annotated[
        str,
        option(
            "NAME",
            "of schemes that a device's profile lacks but others have, or --schemes names: measured (refuse), learned",
            **choice("measured", "learned"),
        ),
    ] = "measured",
    hardware: Annotated[
        list[str] | None,
        option(
            "NAME=HARDWARE", "what a device is, for learned costs, such as gpu0=T4; by default its profile's name says"
        ),
    ] = None,
    method: Annotated[str, option("NAME", "default, exact, ilp, llm-pq")] = "default",
    time_limit: Annotated[float | None, option("S", "seconds for the solve")] = None,
    problem: Annotated[str | None, option("FILE", "write the problem that is solved to this file", "--problem")] = None,
    output: PlanOutput = None,
    report: Annotated[str | None, option("FILE", "write a page about the plan (HTML) to this file", "--report")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Plan from profiles: stages, weight schemes and micro-batches, with what they should do."""
    from qsync_opt.report import write_serving_report
    from qsync_opt.serving import ServeWorkload, load_harm, plan_serving

    devices = [_device(text) for text in device]
    check_outputs([problem, output, report], [*(text.partition("=")[2].rpartition(":")[0] for text in device), harm])
    chosen = None if schemes is None else _names(schemes)
    if costs == "learned":
        devices = _filled(devices, chosen, hardware or [])
    elif hardware:
        raise ProblemError(f"--hardware is {hardware[0]!r}, but costs are {costs!r}; give --costs learned with it")
    result = plan_serving(
        devices[0].profile.model,
        devices,
        ServeWorkload(prompts=prompts, prompt_tokens=prompt_tokens, new_tokens=new_tokens),
        schemes=chosen,
        harm=None if harm is None else load_harm(harm).groups,
        harm_limit=harm_limit,
        method=method,
        time_limit_s=time_limit,
    )
    if problem is not None:
        result.problem.save(problem)
    if result.plan is None:
        if json:
            print_json(result.solution.to_json())
        else:
            print(f"no plan: {result.reason}")
        return EXIT_INFEASIBLE
    prediction = result.predict()
    if output is not None:
        result.plan.save(output)
    if report is not None:
        write_serving_report(result, report)
    if json:
        print_json(
            {**result.solution.to_json(), "prediction": prediction.to_json(), **estimates_json(result.problem.extras)}
        )
        return EXIT_OK
    gap = result.solution.gap
    proof = "" if gap is None else f", at most {gap:.1%} above the best"
    print(f"{result.problem.name}: {result.solution.termination} by {result.solution.method}{proof}")
    option_ = result.problem.microbatches[result.plan.microbatch]
    print(f"micro-batches: {option_.prefill} of prompts, {option_.decode} while decoding")
    print_prediction(prediction)
    print_estimates(result.problem.extras)
    if harm is None:
        print(
            "note: harm is assumed from the bits alone; measure it with qsync_opt.runtimes.torch.serving.measure_harm"
        )
    return EXIT_OK


def print_prediction(prediction: Prediction) -> None:
    """Stages and predicted rates, for people."""
    print_table(
        ("stage", "groups", "schemes", "prefill", "decode", "memory"),
        [
            (
                stage.device,
                f"{stage.groups[0]} to {stage.groups[-1]}",
                ", ".join(f"{count} {scheme}" for scheme, count in stage.schemes.items()),
                f"{1e3 * stage.prefill_s:.2f} ms",
                f"{1e3 * stage.decode_s:.2f} ms",
                f"{stage.memory_kib / _KIB_PER_MIB:.1f} MiB",
            )
            for stage in prediction.stages
        ],
    )
    decode = prediction.decode_tokens_per_s
    after = "no token is decoded" if decode is None else f"decode {decode:.1f} tokens/s"
    print(f"predicted: prefill {prediction.prefill_tokens_per_s:.1f} tokens/s, {after}")


@app.command("demo")
def demo(
    model: Annotated[
        str | None, option("MODEL", f"{_MODEL_HELP}; a small seeded one is made by default", "--model")
    ] = None,
    threads: Annotated[tuple[int, int], option("A B", "threads of the two stages' processes")] = (1, 1),
    seed: Annotated[int, option("N", "of the model that is made")] = 0,
    report: Annotated[str | None, option("FILE", "write a page about the plan (HTML) to this file", "--report")] = None,
    json: Json = False,
    verbose: Verbose = False,
) -> int:
    """Measure, plan and serve on two processes of this machine, one with half the memory of the other."""
    from qsync_opt.registry import attribute
    from qsync_opt.report import write_serving_report

    check_outputs([report], [model])
    if min(threads) < 1:
        raise ProblemError(f"threads are {threads[0]} and {threads[1]}, but each must be at least 1")
    run = attribute(f"{_RUNTIME}:run_serving_demo")
    result = run(model, threads=threads, seed=seed, say=None if json else lambda text: print(text, flush=True))
    if report is not None:
        write_serving_report(result.planned, report, measured=result.measured[0])
    if json:
        print_json(result.to_json())
        return EXIT_OK
    print_prediction(result.planned.predict())
    print_table(*result.table())
    return EXIT_OK


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ProblemError(f"schemes is {text!r}, but it must name at least one, such as W4,W8")
    return names


def _estimated(
    model: str, workload: ServeWorkload, hardware: str, schemes: tuple[str, ...] | None, name: str | None
) -> ServingProfile:
    """The profile of a device of which nothing was measured."""
    from qsync_opt.costs.learned import known_device
    from qsync_opt.registry import attribute
    from qsync_opt.serving import learned_serving_profile

    vector = known_device(hardware)
    config = attribute(f"{_RUNTIME}:open_model")(model)[0]
    sizes = attribute(f"{_RUNTIME}:serve_model")(config, Path(model).name)
    schemes = schemes or ("W4", "W8", "W16", *(["W32"] if vector.kind == "cpu" else []))
    return learned_serving_profile(sizes, vector, workload, schemes=schemes, name=name)


def _filled(
    devices: Sequence[ServingDevice], schemes: tuple[str, ...] | None, hardware: Sequence[str]
) -> list[ServingDevice]:
    """Devices whose profiles have all the schemes, by default those that any profile has."""
    from qsync_opt.costs.learned import known_device
    from qsync_opt.serving import fill_serving_profile

    names = [device.name for device in devices]
    kinds = dict(_hardware(text, names) for text in hardware)
    wanted = schemes or tuple(dict.fromkeys(s for device in devices for s in device.profile.schemes))
    result = []
    for device in devices:
        if any(scheme not in device.profile.schemes for scheme in wanted):
            what = kinds.get(device.name, device.profile.name)
            try:
                vector = known_device(what)
            except UnsupportedError as failure:
                raise UnsupportedError(
                    f"device {device.name!r}: {failure}; say what it is with --hardware {device.name}=NAME"
                ) from None
            device = replace(device, profile=fill_serving_profile(device.profile, vector, schemes=wanted))
        result.append(device)
    return result


def _hardware(text: str, names: Sequence[str]) -> tuple[str, str]:
    name, _, what = text.partition("=")
    if not name or not what:
        raise ProblemError(f"hardware is {text!r}, but it must read NAME=HARDWARE, such as gpu0=T4")
    if name not in names:
        raise ProblemError(f"hardware names the device {name!r}{near_match(name, names)}; there are {', '.join(names)}")
    return name, what


def _device(text: str) -> ServingDevice:
    from qsync_opt.serving import ServingDevice, load_serving_profile

    name, _, rest = text.partition("=")
    path, _, size = rest.rpartition(":")
    if not name or not path or not size.isdecimal():
        raise ProblemError(f"device is {text!r}, but it must read NAME=PROFILE:MIB, such as gpu0=gpu0.json:9000")
    return ServingDevice(name=name, memory_kib=int(size) * _KIB_PER_MIB, profile=load_serving_profile(Path(path)))
