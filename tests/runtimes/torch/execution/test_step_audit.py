import itertools
import logging
import time

import pytest
import torch
from torch import nn

from qsync_opt.runtimes.torch.execution import StepAudit


def train(model, steps, pause_s=0.0):
    for _ in range(steps):
        model(torch.zeros(2, 4)).sum().backward()
        time.sleep(pause_s)


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def test_steps_are_timed_from_pass_to_pass(log):
    model = nn.Linear(4, 2)
    StepAudit(model, predicted_ns=10**12, predicted_bytes=1, steps=3, warm_up=2)
    train(model, 5, pause_s=0.02)
    assert not log.records
    train(model, 1)
    (record,) = log.records
    assert record.levelno == logging.WARNING
    text = record.getMessage()
    assert "predicted 1000000.00 ms, measured " in text and "median of 3 steps" in text
    assert float(text.split("measured ")[1].split(" ms")[0]) >= 20
    assert "memory" not in text
    train(model, 5)
    assert len(log.records) == 1
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    ("predicted_ns", "level"),
    [
        (1_000, logging.INFO),
        (1_149, logging.INFO),
        (851, logging.INFO),
        (1_151, logging.WARNING),
        (849, logging.WARNING),
        (2_000, logging.WARNING),
        (1, logging.WARNING),
    ],
)
def test_from_fifteen_percent_on_the_log_warns(log, monkeypatch, predicted_ns, level):
    """On a clock by which every step takes 1000 ns."""
    ticks = itertools.count(0, 1_000)
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(ticks))
    model = nn.Linear(4, 2)
    StepAudit(model, predicted_ns=predicted_ns, predicted_bytes=None, steps=3, warm_up=1)
    train(model, 5)
    (record,) = log.records
    assert record.levelno == level
    assert "measured 0.00 ms" in record.getMessage()


def test_evaluation_does_not_count(log):
    model = nn.Linear(4, 2)
    StepAudit(model, predicted_ns=1, predicted_bytes=1, steps=1, warm_up=0)
    model.eval()
    model(torch.zeros(2, 4))
    model(torch.zeros(2, 4))
    with torch.no_grad():
        model.train()(torch.zeros(2, 4))
    assert not log.records
    train(model, 2)
    assert len(log.records) == 1


def test_stopped_early_there_is_no_result(log):
    model = nn.Linear(4, 2)
    audit = StepAudit(model, predicted_ns=1, predicted_bytes=1, steps=1, warm_up=0)
    audit.stop()
    audit.stop()
    train(model, 3)
    assert not log.records


def test_a_result_in_words():
    text = StepAudit.describe(11_000_000, 10_000_000.0, 4, 3 << 20, 2 << 20)
    assert text.startswith("iteration predicted 11.00 ms, measured 10.00 ms (+10.0%, median of 4 steps)")
    assert "memory predicted 3 MiB, measured 2 MiB (+50.0%)" in text
    assert "memory" not in StepAudit.describe(11_000_000, 10_000_000.0, 4, None, 2 << 20)
