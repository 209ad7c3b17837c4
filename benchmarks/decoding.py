"""Speculative decoding on a CPU with a real model: how often drafts are accepted, and what that is worth.

    python benchmarks/decoding.py acceptance --model gemma-3-270m-q4_k_m.gguf
    python benchmarks/decoding.py lookup --model gemma-3-270m-q4_k_m.gguf
    python benchmarks/decoding.py speed --model gemma-3-270m-q4_k_m.gguf --llama-cpp llama-batched-bench

Weights have 4 bits (W4H: with rotated inputs) and activations 32, the head 8 and 32. Drafts of the model itself have
activations of INT8 (A8), FP8 (F8) or 4 bits (A4), or read the upper halves of a cache of 8 bits (K4, A8K4). Prompts are
texts of CPython's manual (``pydoc_data.topics``): ``topics`` their beginnings, ``repeats`` a piece that stands there
three times, as in summaries and edits of code.

``acceptance`` generates plainly and replays drafts over the answers, which are those of plain decoding whatever is
drafted (`decoding_replay`). Every second text predicts the tokens per cycle of the others by one acceptance per length;
beside its error stands that which the choice of texts alone makes, for tokens of one text are alike. ``lookup`` does
so for prompt look-up alone, which needs many more texts: prompts are pieces from all over the manual.
``speed`` times answers to the same prompts, the ways of decoding in turn; ``auto`` has a problem
measured in the same process before. Peers are transformers in FP32, plain and with its own prompt look-up, and, in turn
with ours, llama.cpp on the file as it is (where its program comes from, `serving_peers` says): prompts and answers of
the same numbers of tokens, whatever they say.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from decoding_replay import AT_ONCE, fill, replay_lookup, replay_self
from llama_cpp_peer import timed_batch
from results_head import asked_row, results_head

from qsync_opt.decoding import (
    AcceptanceCounts,
    build_problem,
    clustered_interval,
    expected_tokens,
    explain,
    tokens_deviation,
)
from qsync_opt.io import write_json
from qsync_opt.runtimes.torch.serving import (
    SELF_DRAFTS,
    AdaptiveSpeculation,
    FixedSpeculation,
    LocalWorkers,
    Precision,
    Result,
    StageModel,
    Tokenizer,
    answer,
    first_differences,
    load_tokenizer,
    measure_speculation,
    open_model,
    uniform_plan,
)
from qsync_opt.systems import solve

RESULTS = Path(__file__).parent / "results"
SCHEME, HEAD = "W4", "W8"
LEVEL = 0.95
TWO_SIDED = statistics.NormalDist().inv_cdf((1 + LEVEL) / 2)
SELF_LENGTH, LOOKUP_LENGTH = 6, 8
CACHE_BITS = 8
SERVED: Mapping[str, Mapping[str, Precision]] = {
    "W4H": {**SELF_DRAFTS, "A4": Precision("A4")},
    "W4": {"A8": SELF_DRAFTS["A8"], "F8": SELF_DRAFTS["F8"], "A4": Precision("A4")},
}
"""Scheme, and what drafts there."""
ASKED_DRAFTED, ASKED_ERROR, ASKED_SPEEDUP, ASKED_COST = 5000, 0.03, 0.99, 0.005


def load(model: str, scheme: str = SCHEME, kv_bits: int | None = None) -> tuple[list[StageModel], Tokenizer]:
    """The model as one stage in this process, and its tokenizer."""
    config, source = open_model(model)
    plan = uniform_plan(config, scheme)
    stages = [StageModel(config, source, plan.stages[0], plan.schemes, head=HEAD, kv_bits=kv_bits)]
    tokenizer = load_tokenizer(model, config)
    assert tokenizer is not None, "the file has no tokenizer"
    return stages, tokenizer


def topics(tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """The first tokens of so many texts, spread over all."""
    texts = [text for _, text in sorted(pydoc_data.topics.topics.items()) if len(text) > 8 * tokens]
    chosen = texts[:: max(1, len(texts) // count)][:count]
    return [tokenizer.encode(text[: 8 * tokens])[:tokens] for text in chosen]


def pieces(tokenizer: Tokenizer, count: int, tokens: int) -> list[list[int]]:
    """So many pieces of the texts, spread over all.

    Raises:
        SystemExit: There are fewer.
    """
    encoded = (tokenizer.encode(text) for _, text in sorted(pydoc_data.topics.topics.items()))
    whole = [text[at : at + tokens] for text in encoded for at in range(0, len(text) - tokens + 1, tokens)]
    if len(whole) < count:
        raise SystemExit(f"--prompts is {count}, but the texts have {len(whole)} pieces of {tokens} tokens")
    return [whole[len(whole) * k // count] for k in range(count)]


def _acceptance_record(served: str, draft: str, drafted: int, by_text: Sequence[AcceptanceCounts]) -> dict[str, Any]:
    """Acceptance by length, and what one half of the texts predicts of the other."""
    halves = by_text[::2], by_text[1::2]
    whole, second = AcceptanceCounts.summed(by_text), AcceptanceCounts.summed(halves[1])
    lengths = []
    for length in range(1, len(whole.judged) + 1):
        interval, measured = clustered_interval(by_text, length, LEVEL), second.measured_tokens(length)
        tokens = whole.interval(length, LEVEL)
        expected = expected_tokens(float(clustered_interval(halves[0], length, LEVEL).mid or 0), length)
        # By how much two halves differ by chance, relative to their tokens.
        deviations = [tokens_deviation(half, length) for half in halves]
        chance = None
        if measured is not None and None not in deviations:
            chance = TWO_SIDED * math.hypot(*(float(value or 0) for value in deviations)) / measured
        lengths.append(
            {
                "length": length, "acceptance": interval.mid, "interval": [interval.low, interval.high],
                "interval_of_independent_tokens": [tokens.low, tokens.high],
                "drafts_accepted": (whole.measured_tokens(length) or 1.0) / length - 1 / length,
                "predicted_tokens": expected, "measured_tokens": measured,
                "error": None if measured is None else expected / measured - 1, "error_by_chance": chance,
            }
        )  # fmt: skip
    return {
        "served": served, "draft": draft, "drafted": drafted, "cycles": whole.judged[0], "judged": whole.judged,
        "accepted": whole.accepted, "lengths": lengths,
        "by_text": [{"judged": found.judged, "accepted": found.accepted} for found in by_text],
    }  # fmt: skip


def _acceptance_asked(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    least = min(r["drafted"] for r in records)
    rows = [
        asked_row("drafted tokens of every choice, Gemma 3 270M", f">= {ASKED_DRAFTED}", least, least >= ASKED_DRAFTED)
    ]
    for record in records:
        measured = [at for at in record["lengths"] if at["error"] is not None]
        worst = max(measured, key=lambda at: abs(at["error"]))
        error, chance = abs(worst["error"]), worst["error_by_chance"]
        what = f"tokens per cycle of {record['draft']} on {record['served']}, half of the texts predicting the others"
        note = f"the largest relative error over lengths of 1 to {len(record['lengths'])}, here {worst['length']}"
        if chance is not None:
            texts = len(record["by_text"])
            note += f"; 95 % of errors by the choice of texts alone are within {chance:.3f}"
            if chance > ASKED_ERROR:
                note += (
                    f", within {ASKED_ERROR} with {math.ceil(texts * (chance / ASKED_ERROR) ** 2)} texts, not {texts}"
                )
        rows.append(asked_row(what, f"<= {ASKED_ERROR}", error, error <= ASKED_ERROR, note))
    return rows


def _lookup_record(served: str, texts: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, Any]:
    """Of look-up, which reads the answers alone."""
    cycles = [replay_lookup(*pair, LOOKUP_LENGTH) for pair in zip(texts, answers, strict=True)]
    counts = [AcceptanceCounts.of_cycles([agreed for _, agreed in found], LOOKUP_LENGTH) for found in cycles]
    return _acceptance_record(served, "lookup", sum(n for found in cycles for n, _ in found), counts)


def lookup(model: str, prompts: int, new_tokens: int) -> dict[str, Any]:
    """The part ``lookup``."""
    (stage,), tokenizer = load(model, "W4H")
    texts, answers = pieces(tokenizer, prompts, 64), []
    for first in range(0, prompts, AT_ONCE):
        some = texts[first : first + AT_ONCE]
        answers += answer(LocalWorkers([stage]), some, new_tokens, running=len(some))[0]
        print(f"{len(answers)} of {prompts} answers", flush=True)
    record = _lookup_record("W4H", texts, answers)
    return {"asked": _acceptance_asked([record]), "records": [record]}


def acceptance(model: str, prompts: int, new_tokens: int, keep: Callable[[dict[str, Any]], None]) -> None:
    """The part ``acceptance``; what there is is kept after every draft."""
    records: list[dict[str, Any]] = []
    began = time.perf_counter()

    def add(record: dict[str, Any]) -> None:
        records.append(record)
        print(f"{time.perf_counter() - began:.0f} s: {record}", flush=True)
        keep({"asked": _acceptance_asked(records), "records": records})

    for scheme, drafts in SERVED.items():
        (stage,), tokenizer = load(model, scheme, CACHE_BITS)
        texts = topics(tokenizer, prompts, 64)
        answers, _ = answer(LocalWorkers([stage]), texts, new_tokens, running=prompts)
        print(f"{time.perf_counter() - began:.0f} s: {prompts} answers of {scheme}", flush=True)
        add(_lookup_record(scheme, texts, answers))
        filled = fill(stage, texts, answers)
        for draft, precision in drafts.items():
            counts = replay_self(stage, filled, texts, precision, SELF_LENGTH, ASKED_DRAFTED)
            drafted = SELF_LENGTH * sum(c.judged[0] for c in counts)
            add(_acceptance_record(scheme, draft, drafted, counts))


class _NoWork:
    """Stages that answer at once, for the time of the engine itself."""

    def __init__(self, workers: LocalWorkers) -> None:
        self.config, self.stage_count, self.draft_refusals = workers.config, 1, {}
        self._results: list[Result] = []

    def reserve(self, pages: int) -> None:
        """Nothing."""

    def submit(self, step: Any) -> None:
        """Choose token 1 everywhere."""
        self._results.append(Result(step.number, (1,) * len(step.choices)))

    def result(self) -> Result:
        """The oldest."""
        return self._results.pop(0)

    def close(self) -> None:
        """Nothing."""


def speed(model: str, new_tokens: int, rounds: int, llama_cpp: str | None) -> dict[str, Any]:
    """The part ``speed``; ``llama_cpp`` is the program of that peer."""
    stages, tokenizer = load(model)
    workers, texts = LocalWorkers(stages), {"topics": topics(tokenizer, 4, 128)}
    texts["repeats"] = [[*prompt[:48], *prompt[1:48], *prompt[1:24]] for prompt in texts["topics"]]
    measured = measure_speculation(
        workers, texts["topics"], batches=(1, 4), contexts=(160,), lengths=(1, 2, 3), new_tokens=48, rounds=3,
        say=lambda text: print(text, flush=True),
    )  # fmt: skip
    problem = build_problem(measured)
    plan = solve(problem).plan
    assert plan is not None
    reasons = explain(problem, plan)
    print(reasons, flush=True)
    ways: dict[str, Any] = {
        "plain": lambda: None,
        "auto": lambda: AdaptiveSpeculation(problem),
        "lookup:3": lambda: FixedSpeculation("lookup", 3),
        "A8:3": lambda: FixedSpeculation("A8", 3),
    }
    records = []
    for kind, prompts in texts.items():
        for batch in (1, 4):
            rates: dict[str, list[float]] = {way: [] for way in ways}
            answers: dict[str, list[list[int]]] = {}
            by_llama_cpp: list[float] = []
            for turn in range(rounds):
                if llama_cpp is not None:
                    peer_batch = timed_batch(
                        model, llama_cpp, prompts=batch, prompt_tokens=len(prompts[0]), new_tokens=new_tokens,
                        threads=torch.get_num_threads(),
                    )  # fmt: skip
                    by_llama_cpp.append(batch * new_tokens / (peer_batch["t_pp"] + peer_batch["t_tg"]))
                for way in ways if turn % 2 == 0 else reversed(ways):
                    if way == "A8:3" and turn:
                        continue  # it loses by far
                    tokens, seconds = answer(
                        workers, prompts[:batch], new_tokens, speculation=ways[way](), running=batch
                    )
                    rates[way].append(sum(map(len, tokens)) / seconds)
                    answers[way] = tokens
            for way, values in rates.items():
                same = sum(a == b for a, b in zip(answers[way], answers["plain"], strict=True))
                differences = first_differences(stages, prompts[:batch], answers["plain"], answers[way])
                records.append(
                    {
                        "kind": kind, "batch": batch, "way": way, "tokens_per_s": values,
                        # Of each turn alone: what slows a whole turn cancels out.
                        "speedup": statistics.median(a / b for a, b in zip(values, rates["plain"], strict=False)),
                        "answers_equal_plain": f"{same} of {batch}",
                        "margins": [found.margin for found in differences],
                    }
                )  # fmt: skip
                print(records[-1], flush=True)
            if by_llama_cpp:
                turns = zip(by_llama_cpp, rates["plain"], strict=True)
                record = {"kind": kind, "batch": batch, "way": "llama.cpp", "tokens_per_s": by_llama_cpp}
                records.append({**record, "speedup": statistics.median(a / b for a, b in turns)})
                print(records[-1], flush=True)
    host = {
        way: min(
            answer(_NoWork(workers), [[2, 3]], 2000, speculation=chosen(), running=1)[1] / 2000 for _ in range(3)
        )
        for way, chosen in {"off": lambda: None, "declining": lambda: AdaptiveSpeculation(problem, refused=
                            dict.fromkeys(problem.drafts, "for the benchmark"))}.items()
    }  # fmt: skip
    pass_s = measured.regimes[0].verify_ns[1] * 1e-9
    cost = (host["declining"] - host["off"]) / pass_s
    autos = [r["speedup"] for r in records if r["way"] == "auto"]
    same = all(
        r["answers_equal_plain"].split(" of ")[0] == str(r["batch"]) for r in records if "answers_equal_plain" in r
    )
    peers = {(r["kind"], r["batch"]): r for r in records if r["way"] == "llama.cpp"}
    over = {
        f"{r['kind']}, batch {r['batch']}": r["speedup"] / peers[r["kind"], r["batch"]]["speedup"]
        for r in records
        if r["way"] == "auto" and peers
    }
    rows = [
        asked_row("tokens/s of auto over plain, the least of topics and repeats at batches 1 and 4",
            f">= {ASKED_SPEEDUP}", min(autos), min(autos) >= ASKED_SPEEDUP),
        asked_row("time of the engine for a controller that declines, as a share of a pass", f"< {ASKED_COST}", cost,
            cost < ASKED_COST),
        asked_row("answers equal to plain decoding's", "all", "all" if same else "not all", same,
            "FP32, not in the mode that is equal by construction"),
        asked_row("tokens/s of auto over llama.cpp, the least", "stated", min(over.values(), default=None), bool(over),
            ", ".join(f"{case}: {ratio:.2f}" for case, ratio in over.items()) or "no llama.cpp was given"),
    ]  # fmt: skip
    result = {"asked": rows, "reasons": reasons, "measured": measured.to_json(), "host_s": host, "records": records}
    return {**result, "peer": peer(model, texts, new_tokens)}


def peer(model: str, texts: dict[str, list[list[int]]], new_tokens: int) -> list[dict[str, Any]]:
    """transformers in FP32 at batch 1, plain and with prompt look-up."""
    import transformers

    config, source = open_model(model)
    kinds = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    rope = {kind: {"rope_type": "default", "rope_theta": config.rotary[kinds.index(kind)].theta} for kind in set(kinds)}
    network = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma3TextConfig(
            vocab_size=config.vocabulary, hidden_size=config.hidden, intermediate_size=config.inner,
            num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
            head_dim=config.head_size, rms_norm_eps=config.epsilon, layer_types=kinds, rope_parameters=rope,
            sliding_window=next(w for w in config.windows if w), query_pre_attn_scalar=round(config.query_scale**-2),
            max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, pad_token_id=0,
        )
    ).eval()  # fmt: skip
    missing = network.load_state_dict({name: source.read(name) for name in source.names()}, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    records = []
    for kind, prompts in texts.items():
        rates: dict[str, list[float]] = {"plain": [], "lookup:3": []}
        for prompt in prompts[:2]:
            for way, more in (("plain", {}), ("lookup:3", {"prompt_lookup_num_tokens": 3})):
                began = time.perf_counter()
                out = network.generate(torch.tensor([prompt]), max_new_tokens=new_tokens, do_sample=False, **more)
                rates[way].append((out.shape[1] - len(prompt)) / (time.perf_counter() - began))
        for way, values in rates.items():
            records.append(
                {
                    "kind": kind, "batch": 1, "way": f"transformers {way}", "tokens_per_s": values,
                    "speedup": statistics.median(values) / statistics.median(rates["plain"]),
                }
            )  # fmt: skip
            print(records[-1], flush=True)
    return records


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["acceptance", "lookup", "speed"])
    parser.add_argument("--model", required=True, help="a .gguf file or a folder, with a tokenizer")
    parser.add_argument("--output", help="default: a file of benchmarks/results")
    parser.add_argument("--prompts", type=int, help="of acceptance (48) and lookup (1680)")
    parser.add_argument("--new-tokens", type=int, help="of each prompt; 64 for speed, else 128")
    parser.add_argument("--rounds", type=int, default=7, help="of speed")
    parser.add_argument("--llama-cpp", metavar="PROGRAM", help="llama.cpp's llama-batched-bench, for speed")
    parser.add_argument("--threads", type=int, help="of torch; as many as processors by default")
    options = parser.parse_args()
    torch.set_num_threads(options.threads or len(os.sched_getaffinity(0)))
    hardware = f"{platform.machine()} CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    name = "decoding.json" if options.part == "speed" else f"decoding-{options.part}.json"

    def keep(result: dict[str, Any]) -> None:
        head = results_head(hardware, {"torch": torch.__version__})
        write_json(options.output or RESULTS / name, {**head, **result})

    if options.part == "acceptance":
        acceptance(options.model, options.prompts or 48, options.new_tokens or 128, keep)
    elif options.part == "lookup":
        keep(lookup(options.model, options.prompts or 1680, options.new_tokens or 128))
    else:
        keep(speed(options.model, options.new_tokens or 64, options.rounds, options.llama_cpp))


if __name__ == "__main__":
    main()
