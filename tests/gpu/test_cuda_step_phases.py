"""On a card: copies from the host's memory, clipping and accumulated gradients, beside what is allocated."""

import pytest
import torch
from torch import nn

from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import apply, undo
from qsync_opt.runtimes.torch.steps import RecordingOptions, profile_steps
from qsync_opt.runtimes.torch.support import TrainingExample
from qsync_opt.steps import StepPredictor

pytestmark = pytest.mark.gpu


def test_copies_clipping_and_accumulated_gradients() -> None:
    torch.manual_seed(0)
    cuda = torch.device("cuda")
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024), nn.LayerNorm(1024)).to(cuda)
    x = torch.randn(4096, 1024).pin_memory()
    graph = capture(model, (x.to(cuda),))
    optimizer = torch.optim.AdamW(model.parameters())
    example = TrainingExample(model=model, args=(x,))
    options = RecordingOptions(warm_up=2, repeats=3, traced=2, clip_norm=1.0)
    costs = profile_steps(example, graph, optimizer, precisions=["BF16"], mixed=0, options=options, progress=False)
    copies, clip = costs.phases["copies"], costs.phases["clip"]
    # 16 MiB over PCI Express take between 0.1 and 10 ms.
    assert 100_000 < copies.device < 10_000_000
    assert clip.device > 0
    assert costs.phase_peaks["copies"] == 4 * x.numel()
    plan = {operator.name: "BF16" for operator in graph.by_role(Role.ADJUSTABLE)}
    apply(model, plan, graph=graph)
    try:
        for micro_batches in (1, 2, 3):
            for _ in range(2):
                for _ in range(micro_batches):
                    batch = x.to(cuda, non_blocking=True)
                    model(batch).float().sum().backward()
                    del batch
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated()
                torch.cuda.reset_peak_memory_stats()
            predictor = StepPredictor(graph, costs, micro_batches=micro_batches)
            predicted = predictor.memory(predictor.plan(plan)).peak_bytes
            assert -0.01 < predicted / peak - 1 < 0.05, (micro_batches, predicted, peak)
    finally:
        undo(model)
