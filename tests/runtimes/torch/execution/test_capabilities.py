import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.numerics import FORMATS, PrecisionFormats, formats_for
from qsync_opt.runtimes.torch.execution import device_formats, operator_precisions


def _same(name):
    return PrecisionFormats(output=name, gradient_input=name, gradient_output=name)


def test_cpu():
    assert device_formats("cpu") == {"INT8": _same("BF16"), "BF16": _same("BF16"), "FP32": _same("FP32")}


def test_borders_on_cards():
    assert formats_for(("INT8", "FP16", "FP32"), "FP16")["INT8"] == _same("FP16")
    ampere = formats_for(("INT8", "FP8", "TF32"), "BF16")
    assert ampere == {"INT8": _same("BF16"), "FP8": _same("BF16"), "TF32": _same("FP32")}


def test_operators():
    assert operator_precisions("conv2d", "cpu") == ("INT8", "BF16", "FP32")
    assert operator_precisions("scaled_dot_product_attention", "cpu") == ("BF16", "FP32")
    assert operator_precisions("softmax", "cpu") == ("FP32",)
    assert set(device_formats("cpu")) <= set(FORMATS)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("mps", "device 'mps': plans can be made for cpu and cuda"),
        ("warp", "device 'warp': plans can be made for cpu and cuda"),
        ("cuda:99", "device 'cuda:99': torch sees [0-9]+ CUDA devices here; name one of them, or cpu"),
    ],
)
def test_devices_that_are_not_there(device, message):
    with pytest.raises(UnsupportedError, match=message):
        device_formats(device)
