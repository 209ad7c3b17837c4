"""Pieces of the benchmark of whole steps in 8 bits: its models and the figures made of its records."""

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def bench():
    sys.path.insert(0, BENCHMARKS)
    import eight_bit_training

    yield eight_bit_training
    sys.path.remove(BENCHMARKS)


@pytest.mark.parametrize("kind", ["GPT tiny", "Llama tiny"])
def test_both_ways_to_write_the_loss_are_the_same_model(bench, kind):
    sizes = bench.TINY[kind]
    torch.manual_seed(0)
    plain, chunked = bench.Decoder(sizes, loss_layer=False), bench.Decoder(sizes, loss_layer=True)
    chunked.load_state_dict(plain.state_dict())
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.length))
    torch.testing.assert_close(chunked(tokens), plain(tokens))
    plan = bench.uniform_plan(chunked, tokens, "INT8-BWD8")
    assert plan["head/linear"] == "INT8-BWD8" and plan["tokens/embedding"] == "BF16"


def test_figures_are_medians_over_rounds_and_say_what_is_missing(bench):
    def record(candidate, step_ms, peak_mib=100.0):
        return {"subject": "GPT 2048", "candidate": candidate, "step_ms": step_ms, "peak_mib": peak_mib}

    records = [
        *(record(bench.BY_HAND, step_ms) for step_ms in (12.0, 13.0, 99.0)),
        record("INT8", 10.0, 80.0),
        record("FP8", 11.0, 80.0),
        {"subject": "GPT 2048", "candidate": "torchao rowwise", "failure": "torchao is not installed"},
    ]
    speed, against, memory, *others = bench.asked(records)
    assert (speed["measured"], speed["met"], speed["note"]) == (1.3, True, "of the plans the faster is INT8")
    assert (against["measured"], against["met"], against["note"]) == (None, False, "not measured")
    assert (memory["measured"], memory["met"]) == (0.8, True)
    assert not any(row["met"] for row in others)
