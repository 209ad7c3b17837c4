"""The page that sets the paper beside this package says what its record says."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.capture import capture

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def paper():
    """The benchmark's modules import each other by their bare names."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("paper")
    sys.path.remove(str(FOLDER))


def test_the_page_is_that_of_the_record(paper) -> None:
    record = json.loads(paper.RESULT.read_text(encoding="utf-8"))
    assert paper.PAGE.read_text(encoding="utf-8") == paper.page(record)
    assert "simulat" in record["hardware"]
    assert {row["cluster"] for row in record["plans"]} == {"A", "B"}


def test_a_graph_at_another_batch_is_that_of_a_capture_with_it(paper) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5))
    graphs = [capture(model, (torch.randn(batch, 3, 6, 6),)) for batch in (paper.CAPTURED, 12)]
    scaled, captured = paper.at_batch(graphs[0], 12), graphs[1]
    for ours, theirs in zip(scaled, captured, strict=True):
        assert (ours.input_specs, ours.output_specs) == (theirs.input_specs, theirs.output_specs)
        assert (ours.flops, ours.num_bytes) == (theirs.flops, theirs.num_bytes)
