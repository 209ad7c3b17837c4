"""Functions that refuse operands of unlike types, behind planned operators; what must not be cast at all."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from qsync_opt.model import Role
from qsync_opt.runtimes.torch.capture import capture
from qsync_opt.runtimes.torch.execution import apply, undo
from qsync_opt.runtimes.torch.interception.functions import alike

ROWS = torch.arange(4)


class Around(nn.Module):
    """A function of a linear layer's output and the model's input."""

    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.function = nn.Linear(4, 4), function

    def forward(self, x):
        return self.function(self.up(x), x)


def written(x, write):
    result = x.clone()
    write(result)
    return result


FUNCTIONS = {
    "lerp": lambda h, x: torch.lerp(x, h, 0.3),
    "lerp by a tensor": lambda h, x: h.lerp(h + 1, x),
    "grid_sample": lambda h, x: F.grid_sample(h.view(1, 1, 4, 4), x.tanh().view(1, 4, 2, 2), align_corners=False),
    "cross": lambda h, x: torch.linalg.cross(h[:, :3], x[:, :3]),
    "sparse.mm": lambda h, x: torch.sparse.mm(torch.eye(4).to_sparse(), h),
    "mask": lambda h, x: written(x, lambda y: y.__setitem__(x > 0, h[x > 0])),
    "index": lambda h, x: written(x, lambda y: y.__setitem__(ROWS, h)),
    "index_add_": lambda h, x: written(x, lambda y: y.index_add_(0, ROWS, h)),
    "index_copy_": lambda h, x: written(x, lambda y: y.index_copy_(0, ROWS, source=h)),
    "scatter_": lambda h, x: written(x, lambda y: y.scatter_(0, ROWS[:, None].expand(4, 4), h)),
    "masked_scatter_": lambda h, x: written(x, lambda y: y.masked_scatter_(x > 0, h)),
    "addmm_": lambda h, x: written(x, lambda y: y.addmm_(h, x)),
    "written into 16 bits": lambda h, x: written(h, lambda y: y.index_copy_(0, ROWS, x)).float(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_operands_are_made_alike(name):
    x, model = torch.randn(4, 4), Around(FUNCTIONS[name])
    plain = model(x)
    apply(model, {"up/linear": "BF16"})
    for _ in range(2):  # the second pass is prepared
        result = model(x)
        assert result.dtype is torch.float32
        assert torch.allclose(result, plain, atol=0.05)
    result.sum().backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())


def test_coordinates_are_computed_and_sampled_at_in_full_precision():
    class Transformer(nn.Module):
        """Turns an image by an angle that a linear layer gives."""

        def __init__(self):
            super().__init__()
            self.up = nn.Linear(6, 6)

        def forward(self, theta, image):
            grid, turned = F.affine_grid(self.up(theta).view(1, 2, 3), image.shape, align_corners=False), self.up(image)
            return grid, F.grid_sample(turned, grid.to(turned.dtype), align_corners=False)

    torch.manual_seed(0)
    model, theta, image = Transformer(), torch.randn(1, 6), torch.randn(1, 1, 6, 6)
    graph = capture(model, (theta, image))
    apply(model, dict.fromkeys((o.name for o in graph.by_role(Role.ADJUSTABLE)), "BF16"), graph=graph)
    rounded = model.up(theta).detach().float()
    grid, sampled = model(theta, image)
    assert grid.dtype is sampled.dtype is torch.float32
    undo(model)
    assert torch.equal(grid, F.affine_grid(rounded.view(1, 2, 3), image.shape, align_corners=False))


def test_what_is_written_to_keeps_its_type():
    x, half = torch.zeros(4, 4), torch.ones(4, 4).bfloat16()
    args, kwargs = alike(Tensor.index_copy_, (half, 0, ROWS), {"source": x})
    assert args[0] is half
    assert args[2] is ROWS
    assert kwargs["source"].dtype is torch.bfloat16
    wider, _ = alike(torch.lerp, (half, x.double(), 0.5), {})
    assert [value.dtype for value in wider[:2]] == [torch.float64] * 2
    for args in ((x, x, 0.5), (x, x.double(), 0.5), (half, half, 0.5)):  # as the script wrote it
        assert alike(torch.lerp, args, {})[0] is args


def test_compiled():
    model = Around(lambda h, x: written(torch.lerp(x, h, 0.3), lambda y: y.__setitem__(ROWS, h)))
    apply(model, {"up/linear": "BF16"})
    x = torch.randn(4, 4)
    assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(x), model(x))


@pytest.mark.parametrize("function", [torch.mm, torch.matmul])
def test_results_reach_the_tensor_to_write_to(function):
    def into(h, x):
        result = torch.empty(0)
        with torch.no_grad():
            assert function(h.detach(), x, out=result) is result
        return result

    x, model = torch.randn(4, 4), Around(into)
    plain = model(x)
    apply(model, {"up/linear": "FP32", function.__name__: "BF16"})
    for _ in range(2):
        assert torch.allclose(model(x), plain, atol=0.05)


def test_a_fixed_operator_writes_into_16_bits():
    def into(h, x):
        result = torch.zeros_like(h)
        with torch.no_grad():
            torch.exp(h, out=result)
        return result

    x, model = torch.randn(4, 4), Around(into)
    plain = model(x)
    apply(model, {"up/linear": "BF16"})
    assert torch.allclose(model(x), plain, rtol=0.05)


@pytest.mark.parametrize("precision", ["FP32", "BF16"])
def test_what_a_script_computes_in_64_bits_stays_so(precision):
    model = Around(lambda h, x: x.double() @ x.double() + 0 * h.sum())
    x = torch.randn(4, 4)
    plain = model(x)
    apply(model, {"up/linear": precision, "matmul": "FP32"})
    for _ in range(3):  # whole pass decided, prepared, and at rest
        assert torch.equal(model(x), plain)


class Recurrent(nn.Module):
    def __init__(self, kind, call):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.cell, self.call = nn.Linear(4, 6), kind(6, 6), call

    def forward(self, x):
        return self.call(self.cell, self.up(x))


def packed(cell, h):
    return pad_packed_sequence(cell(pack_padded_sequence(h, torch.tensor([3, 2])))[0])[0]


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        (nn.GRU, packed),
        (nn.LSTM, packed),
        (nn.GRU, lambda cell, h: cell(input=h, hx=h[:1])[0]),
        (nn.LSTM, lambda cell, h: cell(h, hx=(h[:1], h[:1]))[0]),
        (nn.GRUCell, lambda cell, h: cell(h[0], hx=h[1])),
    ],
)
def test_recurrent_modules_get_full_precision_however_they_are_called(kind, call):
    x, model = torch.randn(3, 2, 4), Recurrent(kind, call)
    plain = model(x)
    apply(model, {"up/linear": "BF16"})
    for _ in range(2):
        assert torch.allclose(model(x), plain, atol=0.05)


class Resized(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv2d(2, 2, 1)

    def forward(self, x):
        return F.interpolate(self.up(x), size=(4, 4), mode="bilinear", antialias=True)


def test_interpolation_with_anti_aliasing_gets_full_precision_where_a_graph_has_it():
    x, model = torch.randn(2, 2, 8, 8), Resized()
    with pytest.warns(UserWarning, match="_upsample_bilinear2d_aa"):
        graph = capture(model, x)
    plain = model(x)
    apply(model, {"up/conv2d": "BF16"}, graph=graph)
    for _ in range(2):
        assert torch.allclose(model(x), plain, atol=0.05)  # not implemented for 16 bits on a CPU


LEAST = torch.finfo(torch.float32).min
FILLS = {
    "masked_fill": lambda h, mask: h.masked_fill(mask, LEAST),
    "masked_fill by name": lambda h, mask: h.masked_fill(mask=mask, value=LEAST),
    "masked_fill_": lambda h, mask: h.clone().masked_fill_(mask, LEAST),
    "torch.masked_fill": lambda h, mask: torch.masked_fill(h, mask, LEAST),
    "full_like": lambda h, mask: torch.where(mask, torch.full_like(h, LEAST), h),
    "infinity": lambda h, mask: h.masked_fill(mask, -torch.inf),
}


@pytest.mark.parametrize("name", FILLS)
def test_what_hides_in_fp32_hides_in_16_bits(name):
    x, mask = torch.randn(4, 4), torch.eye(4, dtype=torch.bool)
    model = Around(lambda h, x: FILLS[name](h, mask).softmax(-1))
    plain = model(x)
    apply(model, {"up/linear": "BF16"})
    for _ in range(2):  # the second pass is prepared
        result = model(x)
        assert torch.allclose(result, plain, atol=0.05)
        assert not result.diagonal().any()
    result.square().sum().backward()
    assert model.up.weight.grad.isfinite().all()
