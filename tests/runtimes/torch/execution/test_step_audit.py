import logging
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from qsync_opt.errors import ProblemError
from qsync_opt.runtimes.torch.execution import AuditResult, StepAudit


def train(model, steps, pause_s=0.0):
    for _ in range(steps):
        model(torch.zeros(2, 4)).sum().backward()
        time.sleep(pause_s)


def test_steps_are_timed_from_pass_to_pass(caplog):
    model = nn.Linear(4, 2)
    audit = StepAudit(model, predicted_ns=10**12, predicted_bytes=1, steps=3, warm_up=2)
    with caplog.at_level(logging.INFO):
        train(model, 5, pause_s=0.02)
        assert audit.result is None
        train(model, 1)
    assert audit.result.steps == 3
    assert audit.result.measured_ns >= 20_000_000
    assert audit.result.measured_bytes is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    train(model, 5)
    assert len(caplog.records) == 1
    assert not model._forward_pre_hooks


def test_evaluation_does_not_count():
    model = nn.Linear(4, 2)
    audit = StepAudit(model, predicted_ns=1, predicted_bytes=1, steps=1, warm_up=0)
    model.eval()
    model(torch.zeros(2, 4))
    model(torch.zeros(2, 4))
    with torch.no_grad():
        model.train()(torch.zeros(2, 4))
    assert audit.result is None
    train(model, 2)
    assert audit.result is not None


def test_stopped_early_there_is_no_result():
    model = nn.Linear(4, 2)
    audit = StepAudit(model, predicted_ns=1, predicted_bytes=1, steps=1, warm_up=0)
    audit.stop()
    audit.stop()
    train(model, 3)
    assert audit.result is None


def test_a_result_in_words():
    result = AuditResult(
        predicted_ns=11_000_000, measured_ns=10_000_000, predicted_bytes=3 << 20, measured_bytes=2 << 20, steps=4
    )
    assert result.time_error == pytest.approx(0.1)
    assert "predicted 11.00 ms, measured 10.00 ms (+10.0%" in result.describe()
    assert "memory predicted 3 MiB, measured 2 MiB (+50.0%)" in result.describe()
    for name in ("predicted_bytes", "measured_bytes"):
        assert "memory" not in replace(result, **{name: None}).describe()


def test_counts_are_checked():
    with pytest.raises(ProblemError, match="steps"):
        StepAudit(nn.Linear(1, 1), predicted_ns=1, predicted_bytes=1, steps=0)
