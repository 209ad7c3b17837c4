"""The speculation of a server from its specification, and the measurements of a model: what the commands do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from qsync_opt.decoding import Measurements, Problem, build_problem, explain, load_speculation
from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.serving.engine import EngineLimits
from qsync_opt.runtimes.torch.serving.identity import fingerprint
from qsync_opt.runtimes.torch.serving.launching import start_stages
from qsync_opt.runtimes.torch.serving.speculation import (
    AdaptiveSpeculation,
    Speculation,
    parse_speculation,
)
from qsync_opt.runtimes.torch.serving.speculation_measuring import measure_speculation, random_prompts
from qsync_opt.runtimes.torch.serving.tokens import load_tokenizer
from qsync_opt.runtimes.torch.serving.workers import StageProcesses
from qsync_opt.systems import solve

_KEY = ("x-model",)
_PROMPTS, _PROMPT_TOKENS = 4, 32
_QUICK_TOKENS, _QUICK_ROUNDS, _QUICK_LENGTHS = 32, 3, (1, 2, 4)


class StartedSpeculation(NamedTuple):
    """What a server drafts, None for nothing, and lines that say why."""

    speculation: Speculation | None
    lines: tuple[str, ...]


def start_speculation(
    text: str, model: str, stages: StageProcesses, limits: EngineLimits, *, say: Callable[[str], None] | None = None
) -> StartedSpeculation:
    """The speculation of a specification: ``off``, ``auto``, ``lookup:N``, ``A8:N``, or a file.

    Where a draft cannot run or cannot gain, or where a file was measured of other weights, decoding is plain, and a
    line says why.

    Args:
        text: ``auto`` measures these stages briefly; a file holds measurements or a problem for them.
        model: What the stages serve.
        stages: They run nothing else yet.
        limits: Of the server.
        say: Called with a line before every step of ``auto``.

    Raises:
        ProblemError: The specification is none.
        StageError: A stage failed.
    """
    if text == "auto":
        measured = _measure_briefly(model, stages, limits, say)
        return _adaptive(build_problem(measured), stages)
    if _is_file(text):
        problem = load_speculation(text)
        served, measured_of = fingerprint(model, stages.plan, stages.options), problem.extras.get(_KEY)
        if measured_of != served:
            return StartedSpeculation(
                None,
                (
                    f"plain decoding: {text} was measured of {measured_of or 'an unknown model'}, but {served} is "
                    "served; measure again by 'decoding measure'",
                ),
            )
        return _adaptive(problem, stages)
    fixed = parse_speculation(text)
    if fixed is None:
        return StartedSpeculation(None, ())
    for draft in fixed.drafts & stages.draft_refusals.keys():
        reason = stages.draft_refusals[draft]
        return StartedSpeculation(None, (f"plain decoding: {text} cannot gain, because {reason}",))
    return StartedSpeculation(fixed, (f"speculates with {text} always, whether it gains or not",))


def check_speculation(text: str) -> None:
    """Refuse what `start_speculation` would, as far as that is known without a model.

    Raises:
        ProblemError: The specification is none, or its file cannot be read.
    """
    if _is_file(text):
        load_speculation(text)
    elif text != "auto":
        parse_speculation(text)


def _is_file(text: str) -> bool:
    return text.endswith(".json") or os.path.sep in text


def _adaptive(problem: Problem, stages: StageProcesses) -> StartedSpeculation:
    refused = {draft: reason for draft, reason in stages.draft_refusals.items() if draft in problem.drafts}
    speculation = AdaptiveSpeculation(problem, refused=refused)
    lines = [f"{draft} is left out: {reason}" for draft, reason in refused.items()]
    plan = solve(problem).plan
    if plan is not None:
        lines += [f"{regime}: at first {reason}" for regime, reason in explain(problem, plan).items()]
    return StartedSpeculation(speculation, tuple(lines))


def _measure_briefly(
    model: str, stages: StageProcesses, limits: EngineLimits, say: Callable[[str], None] | None
) -> Measurements:
    batches = [size for size in (1, 4, 16) if size <= limits.running]
    room = limits.cached // max(batches) - max(_QUICK_LENGTHS) - 1  # no larger caches than the server will have
    context = max(1, min(limits.context // 2, room))
    new_tokens = max(2, min(_QUICK_TOKENS, limits.context // 2))
    prompts = random_prompts(
        stages.config.vocabulary, _PROMPTS, max(1, min(_PROMPT_TOKENS, limits.context - new_tokens))
    )
    return measure_speculation(
        stages,
        prompts,
        name=Path(model).stem,
        batches=batches,
        contexts=[context],
        lengths=_QUICK_LENGTHS,
        new_tokens=new_tokens,
        rounds=_QUICK_ROUNDS,
        served=fingerprint(model, stages.plan, stages.options),
        say=say,
    )


def measure_model(
    model: str,
    *,
    prompts: Sequence[str] | None = None,
    batches: Sequence[int] = (1, 4),
    contexts: Sequence[int] = (128, 1024),
    lengths: Sequence[int] = (1, 2, 4, 8),
    new_tokens: int = 128,
    rounds: int = 7,
    scheme: str | None = None,
    dtype: str | None = None,
    kv_bits: int | None = None,
    head: str | None = None,
    device: str | None = None,
    threads: int | None = None,
    name: str | None = None,
    say: Callable[[str], None] | None = None,
) -> Measurements:
    """Measure a model on this machine, in one stage and in the process that would serve it.

    Args:
        model: A model folder or a ``.gguf`` file.
        prompts: Texts of the kind that will be served; random tokens by default.
        batches: See `measure_speculation`, as for the next four.
        contexts: Cached tokens of a sequence.
        lengths: Drafted tokens of a cycle.
        new_tokens: Of each prompt.
        rounds: Of every pass.
        scheme: See `start_stages`, as for the next three.
        dtype: Of hidden states, caches and norms.
        kv_bits: 8 for caches of 8 bits.
        head: Weight scheme of the head.
        device: torch's device.
        threads: Of the stage.
        name: Of the measurements; the model's by default.
        say: Called with a line before every step.

    Raises:
        ProblemError: Prompts are given and the model has no tokenizer, or an option does not fit.
        StageError: The stage failed.
    """
    stages = start_stages(
        model, scheme=scheme, dtype=dtype, kv_bits=kv_bits, head=head,
        devices={} if device is None else {"here": device}, threads={} if threads is None else {"here": threads},
    )  # fmt: skip
    with stages:
        if prompts is None:
            tokens = random_prompts(stages.config.vocabulary, _PROMPTS, _PROMPT_TOKENS)
        else:
            tokenizer = load_tokenizer(model, stages.config)
            if tokenizer is None:
                raise ProblemError(f"prompts are texts, but {model} has no tokenizer; leave them out or add it")
            tokens = [tokenizer.encode(prompt) for prompt in prompts]
        return measure_speculation(
            stages,
            tokens,
            name=name or Path(model).stem,
            batches=batches,
            contexts=contexts,
            lengths=lengths,
            new_tokens=new_tokens,
            rounds=rounds,
            served=fingerprint(model, stages.plan, stages.options),
            say=say,
        )
