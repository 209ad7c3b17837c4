"""How much loss does rounding cost a training run? What it costs at once, and what its noise in the gradient costs.

Two things raise the loss of a model that is trained with an operator in low precision.

*At once.* Noise of variance v on a tensor t of the forward pass raises the expected loss by ``R = v * trace(H_t) / 2``.
A model that is trained so minimizes ``L + R``; along a trajectory by gradients of ``L + R``, L itself ends higher by
what R has grown since the beginning, whether it is evaluated with rounding or without.

*Through the gradient.* A step of a preconditioned method moves the weights by ``eta * P * g``, so that variance ``Var``
of the gradient raises the expected loss by ``eta^2 * sum(H * P^2 * Var) / 2``, again in every step.

Both need curvatures H, of activations and of weights. For losses that are a mean of n log-likelihoods, the Gauss-Newton
part of either is the Fisher information, which is n times the mean square of the batch's gradient g: ``H = n g^2``. The
first part is then ``n / 2`` times the score that is called ``fisher`` here, ``F = sum(g_t^2 * v)``. For Adam, whose P
is one over the root of the mean square of g, P and H cancel in the second, and what is left is the plain variance of
the gradient, V, as the indicator ``probed`` has it:

    increase of the loss = n / 2 * (F + horizon * V),    horizon = sum of eta^2 over the steps to come.

For SGD, with P = 1, curvature is taken to be spread evenly over the weights: ``horizon`` then has the mean square of
the gradient's elements as a factor. n is the same for all operators and left out. Everything but the horizon is
measured, and the horizon follows from the learning rate and the number of steps: nothing is fitted.

*What this leaves out for Adam.* P itself depends on the noise: with ``v`` the mean of the gradient's recent squares, a
step is ``eta * mean / sqrt(v)``, and noise of variance s on a weight's gradient raises v by s and leaves the mean
alone. The step stays as long as before, and less of it points downhill:

    eta * sum(mean^2 / sqrt(v + s))  =  eta * sum(mean^2 / sqrt(v)) - eta * sum(mean^2 / sqrt(v) * s / (2 v)) + ...

To first order in eta noise *dilutes* the signal; that the step also scatters more is of second order, and smaller by
``eta * n * sqrt(v)``, a thousandth in the models measured here. With the signal's share of a gradient's square,
``mean^2 / v``, taken as equal everywhere, the share of the step's progress that is lost is

    sum(s / (2 sqrt(v))) / sum(sqrt(v)),

v being the mean over each parameter's elements, as the square of one element in one batch says little about it. This is
the indicator ``progress``, a pure number that adds up over operators: 0.02 for a plan means about 2 % more steps, to be
compared with the time that the plan saves. Noise counts by how large it is *beside the gradient of the same parameter*,
so that parameters with small gradients count as much as others, and rounding in the backward pass counts in full.
"""

from __future__ import annotations

import math

from qsync_opt.errors import UnsupportedError


def check_horizon(horizon: float) -> float:
    """The horizon, if it is one.

    Raises:
        UnsupportedError: It is negative or not finite.
    """
    if isinstance(horizon, bool) or not isinstance(horizon, int | float) or not 0 <= horizon < math.inf:
        raise UnsupportedError(
            f"horizon is {horizon!r}: a finite number of at least 0 is needed; qsync_opt.noise_horizon(optimizer, "
            "steps=...) gives it"
        )
    return float(horizon)


def horizon_of(*, learning_rate: float, steps: int, momentum: float = 0.0, mean_square_gradient: float = 1.0) -> float:
    """By how much variance of the gradient counts against what rounding costs at once.

    Args:
        learning_rate: Mean over the steps, as root mean square if it changes.
        steps: To come.
        momentum: Of SGD; it multiplies the effective rate by ``1 / (1 - momentum)``. 0 for Adam, which averages.
        mean_square_gradient: Of the elements of one batch's gradient, for SGD; 1 for Adam.

    Returns:
        The factor of the variance, ``steps * (learning_rate / (1 - momentum))^2 * mean_square_gradient``.

    Raises:
        UnsupportedError: An argument is out of its range.

    Source:
        Ours; see the module's text.
    """
    if not 0 <= momentum < 1:
        raise UnsupportedError(f"momentum is {momentum!r}: allowed are numbers from 0 to below 1")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise UnsupportedError(f"steps is {steps!r}: allowed are whole numbers of at least 0")
    return check_horizon(steps * (learning_rate / (1 - momentum)) ** 2 * mean_square_gradient)
