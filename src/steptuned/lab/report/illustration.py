"""Figure 1: how the sign of the curvature decides the step. It needs no runs."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes

from steptuned import rule
from steptuned.lab.report.figures import save

NU = 2.2
START = 0.45
MODELS = (("q⁻", "#D55E00"), ("q⁺", "#0072B2"))


def curvature_illustration(folder: Path) -> list[Path]:
    """A step where the curvature is negative, then one where it is positive.

    Both are computed with the rule of the library.
    """
    points = [START]
    for _ in MODELS:
        points.append(_step(points[-1]))
    figure, axis = plt.subplots(figsize=(7, 4.2), layout="constrained")
    grid = np.linspace(-0.6, 5, 400)
    axis.plot(grid, _J(grid), color="black", label="J")
    for i, (name, colour) in enumerate(MODELS):
        t, after = points[i], points[i + 1]
        kind = "negative" if _bend(t) < 0 else "positive"
        _draw_model(axis, t, colour, f"{name}: model at θ{'₀₁'[i]}, {kind} curvature")
        arrow = {"arrowstyle": "->", "color": colour, "connectionstyle": "arc3,rad=-0.3"}
        axis.annotate("", (after, _J(after)), (t, _J(t)), arrowprops=arrow)
    for i, t in enumerate(points):
        axis.plot(t, _J(t), "o", color="black")
        where: dict[str, Any] = {"textcoords": "offset points", "xytext": (6, 8)}
        axis.annotate(f"θ{'₀₁₂'[i]}", (t, _J(t)), **where)
    axis.set(xlabel="θ", ylabel="J", ylim=(-1.5, 1.6))
    axis.legend(fontsize=8, frameon=False)
    title = "a large step where J is concave, the model's minimum where it is convex"
    figure.suptitle(f"figure-1: {title}", fontsize=9)
    return save(figure, folder / "figure-1")


def _J(t: Any) -> Any:
    return np.cos(1.2 * t) + 0.04 * (t - 1) ** 2


def _slope(t: float) -> float:
    return float(-1.2 * np.sin(1.2 * t) + 0.08 * (t - 1))


def _bend(t: float) -> float:
    return float(-1.44 * np.cos(1.2 * t) + 0.08)


def _step(t: float) -> float:
    """One step of Algorithm 1.

    Along d = -g the curvature of the model is h g^2, and |d|^2 = g^2. So gamma is 1 / h where h is
    positive, and nu elsewhere.
    """
    g, h = _slope(t), _bend(t)
    return t - rule.gamma(torch.tensor(g * g), torch.tensor(h * g * g), NU).item() * g


def _draw_model(axis: Axes, t: float, colour: str, label: str) -> None:
    """The quadratic model of J at a point, near that point."""
    near = np.linspace(t - 1.3, t + 1.6, 200)
    model = _J(t) + _slope(t) * (near - t) + _bend(t) * (near - t) ** 2 / 2
    axis.plot(near, model, "--", color=colour, label=label)
