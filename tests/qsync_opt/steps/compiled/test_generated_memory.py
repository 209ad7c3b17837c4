"""Memory of generated code, followed statement by statement."""

import pytest

from qsync_opt.errors import UnsupportedError
from qsync_opt.steps.compiled import PassCode, step_peak

KIB = 1024
FORWARD = """
def call(self, args):
    primals_1, primals_2 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
{body}
    return ({returned}, )
"""
BACKWARD = """
def call(self, args):
    {arguments}, = args
    args.clear()
{body}
    return ({returned}, )

def get_args():
    saved = rand_strided((256, ), (1, ), device='cuda:0', dtype=torch.float32)
    tangents_1 = rand_strided((1024, ), (1, ), device='cuda:0', dtype=torch.float32)
"""
EMPTY = "empty_strided_cuda(({}, ), (1, ), torch.float32)"


def forward(*lines, returned="loss, saved", sizes=None):
    body = "\n".join(f"        {line}" for line in lines)
    return PassCode(FORWARD.format(body=body, returned=returned), sizes or {})


def backward(*lines, arguments="saved, tangents_1", returned="gradient", sizes=None):
    body = "\n".join(f"    {line}" for line in lines)
    return PassCode(BACKWARD.format(body=body, returned=returned, arguments=arguments), sizes or {})


LOSS = f"loss = {EMPTY.format(128)}"
SAVED = f"saved = {EMPTY.format(256)}"
GRADIENT = f"gradient = {EMPTY.format(256)}"


def peak(first, second, held=False):
    return step_peak(first, second, tangents_held=held)


def test_what_is_saved_stays_until_the_backward_pass_deletes_it():
    early = peak(forward(SAVED, LOSS), backward("del saved", "del tangents_1", GRADIENT))
    late = peak(forward(SAVED, LOSS), backward("del tangents_1", GRADIENT, "del saved"))
    # The loss is given to the caller, who holds on to nothing of it here; its gradient has 4 KiB.
    assert early.peak_bytes == KIB + 4 * KIB
    assert late.peak_bytes == KIB + 4 * KIB
    assert peak(forward(SAVED, LOSS), backward(GRADIENT, "del saved")).peak_bytes == 6 * KIB


def test_gradients_of_results_may_stay_to_the_end():
    lines = ("del tangents_1", "del saved", f"gradient = {EMPTY.format(2048)}")
    assert peak(forward(SAVED, LOSS), backward(*lines)).peak_bytes == 8 * KIB
    assert peak(forward(SAVED, LOSS), backward(*lines), held=True).peak_bytes == 12 * KIB


def test_memory_that_is_used_again_is_not_counted_twice():
    big = f"a = {EMPTY.format(4096)}"
    again = forward(big, "b = reinterpret_tensor(a, (64, 64), (64, 1), 0); del a  # reuse", LOSS, SAVED)
    anew = forward(big, f"b = {EMPTY.format(4096)}", "del a", LOSS, SAVED)
    last = backward("del saved", "del tangents_1", GRADIENT)
    assert peak(again, last).peak_bytes == 16 * KIB + 512 + KIB
    assert peak(anew, last).peak_bytes == 32 * KIB
    assert peak(anew, last).phase == "forward"
    assert peak(anew, last).statement.startswith("b = empty_strided_cuda")


def test_results_of_libraries_have_the_sizes_that_are_given():
    """A call that delivers several comes into being with all of them; a view of bits is none; none is left out."""
    lines = ("both = torch.ops.aten.some.default(primals_1)", "saved = both[0]", "other = both[1]", "del both", LOSS)
    first = forward(
        *lines, "bits = torch.ops.aten.view.dtype(other, torch.int16)", sizes={"saved": 1000, "other": 5000}
    )
    assert peak(first, backward("del saved", "del tangents_1", GRADIENT)).peak_bytes == 1024 + 5120 + 512
    alone = forward("call = torch.ops.aten.some.default(primals_1)", "saved = call", "del call", sizes={"saved": 9000})
    assert peak(alone, backward("del tangents_1", "del saved", GRADIENT)).peak_bytes == 9216 + 4096
    with pytest.raises(UnsupportedError, match="size of other in both"):
        peak(forward(*lines, sizes={"saved": 1000}), backward(GRADIENT))


def test_a_sum_over_a_workspace_is_a_result_of_its_own():
    """So Inductor ends a sum over many rows."""
    lines = (
        f"workspace_0 = {EMPTY.format(2048)}",
        "saved = workspace_0[0 * (8) * (256) : (0 + 1) * (8) * (256)].view(8, 256).sum(dim=0)",
        "del workspace_0",
        LOSS,
    )
    first = forward(*lines, sizes={"saved": 1024})
    assert peak(first, backward("del saved", "del tangents_1", GRADIENT)).peak_bytes == 9 * KIB
    assert peak(first, backward(GRADIENT, "del saved")).phase == "forward"


def test_a_view_keeps_what_it_shows():
    lines = (f"whole = {EMPTY.format(2048)}", "saved = reinterpret_tensor(whole, (4, ), (1, ), 0)", "del whole", LOSS)
    assert peak(forward(*lines), backward("del tangents_1", GRADIENT, "del saved")).peak_bytes == 12 * KIB


def test_parameters_and_the_batch_are_there_already():
    first = forward("del primals_2", LOSS, returned="loss, primals_1")
    assert peak(first, backward("del saved", "del tangents_1", GRADIENT)).peak_bytes == 4 * KIB


def test_a_result_that_is_saved_too_stays():
    first = forward(f"loss = {EMPTY.format(2048)}", returned="loss, loss")
    assert peak(first, backward("del tangents_1", GRADIENT, "del saved")).peak_bytes == 12 * KIB


@pytest.mark.parametrize("text", ["", "def call(args):\n    return ()\n", "def call(:", "call = 1"])
def test_other_code_is_refused(text):
    with pytest.raises(UnsupportedError, match="the compiler's code cannot be followed"):
        peak(PassCode(text, {}), backward(GRADIENT))
