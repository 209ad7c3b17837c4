import torch

from qsync_opt.runtimes.torch.support import cuda_graphs


def test_a_model_that_is_not_to_notice_its_capture_is_told_that_there_is_none():
    truth = torch.cuda.is_current_stream_capturing
    assert cuda_graphs.is_capturing is truth
    for failing in (False, True):
        try:
            with cuda_graphs.hidden_capture():
                assert torch.cuda.is_current_stream_capturing is not truth
                assert torch.cuda.is_current_stream_capturing() is False
                if failing:
                    raise RuntimeError
        except RuntimeError:
            assert failing
        assert torch.cuda.is_current_stream_capturing is truth
