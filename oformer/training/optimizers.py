"""The optimizers, their rates, clipping, and the running average of the weights."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from oformer.errors import unknown_name
from oformer.models.base import Operator


@dataclass(frozen=True)
class Optimizer:
    """Which optimizer, and its settings."""

    kind: Literal["adamw", "adam", "muon"] = "adamw"  # adam: weight decay coupled into the gradient, as released
    rate: float = 1e-3  # peak, of everything that Muon does not take
    matrix_rate: float = 2e-3  # peak, of the hidden matrices under Muon
    weight_decay: float = 1e-4
    amsgrad: bool = False
    clip: tuple[tuple[str, float], ...] = ()  # (part of the model, largest gradient norm); part "all" for the whole


class Muon(torch.optim.Optimizer):
    """Momentum, made orthogonal (Jordan et al., 2024): each matrix moves by the nearest orthogonal direction.

    All matrices of one shape are treated at once, as a stack, so that a model of many small matrices costs few kernel
    launches. The step is scaled by 0.2 sqrt(longer side) (Liu et al., 2025), the typical size of an AdamW step.
    """

    def __init__(self, matrices: list[nn.Parameter], lr: float, weight_decay: float = 0.0, momentum: float = 0.95):
        """Take two-dimensional parameters only."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Move every matrix once."""
        for group in self.param_groups:
            by_shape: dict[tuple[int, ...], list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    by_shape.setdefault(tuple(p.shape), []).append(p)
            for (rows, columns), matrices in by_shape.items():
                gradients = [p.grad for p in matrices if p.grad is not None]
                moments: list[Tensor] = [self.state[p].setdefault("momentum", torch.zeros_like(p)) for p in matrices]
                torch._foreach_lerp_(moments, gradients, 1 - group["momentum"])
                looked_ahead = torch._foreach_lerp(gradients, moments, group["momentum"])
                directions = orthogonalize(torch.stack(list(looked_ahead)))
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                size = 0.2 * math.sqrt(max(rows, columns))
                torch._foreach_add_(matrices, list(directions.unbind()), alpha=-group["lr"] * size)


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """The nearest (semi-)orthogonal matrices, roughly: singular values land between about 0.7 and 1.2.

    A fifth-order Newton-Schulz iteration; the coefficients are Muon's, chosen to lift small singular values fast.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()  # the iteration corrects itself, and bfloat16 is many times faster there
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = x.to(matrices.dtype)
    return x.mT if tall else x


class Descent:
    """One or two torch optimizers that are stepped as one."""

    def __init__(self, operator: Operator, settings: Optimizer):
        """Share the parameters out: hidden matrices to Muon where it is asked for, the rest to Adam."""
        self.settings = settings
        self.parts = {"all": list(operator.model.parameters()), **operator.model.parts()}
        for part, _ in settings.clip:
            if part not in self.parts:
                raise unknown_name("part of the model to clip", part, self.parts)
        rest, matrices = self.parts["all"], []
        if settings.kind == "muon":
            matrices = operator.model.hidden_matrices()
            taken = {id(p) for p in matrices}
            rest = [p for p in rest if id(p) not in taken]
        kind = torch.optim.Adam if settings.kind == "adam" else torch.optim.AdamW
        on_gpu = self.parts["all"][0].is_cuda
        self.optimizers: list[torch.optim.Optimizer] = [
            kind(
                rest,
                lr=settings.rate,
                betas=(0.9, 0.999),
                weight_decay=settings.weight_decay,
                amsgrad=settings.amsgrad,
                fused=on_gpu,
            )
        ]
        if matrices:
            self.optimizers.append(Muon(matrices, settings.matrix_rate, settings.weight_decay))

    def step(self, factor: float, beta1: float) -> None:
        """Clip, move, and forget the gradients.

        Args:
            factor: of the peak rates.
            beta1: Adam's first decay; Muon keeps its own.
        """
        for part, norm in self.settings.clip:
            nn.utils.clip_grad_norm_(self.parts[part], norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if isinstance(optimizer, Muon):
                    group["lr"] = self.settings.matrix_rate * factor
                else:
                    group["lr"], group["betas"] = self.settings.rate * factor, (beta1, 0.999)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """All moments as named tensors."""
        return {
            f"{n}.{index}.{name}": value
            for n, optimizer in enumerate(self.optimizers)
            for index, entry in optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Take the moments back."""
        for n, optimizer in enumerate(self.optimizers):
            entries: dict[int, dict[str, Tensor]] = {}
            for key, value in state.items():
                owner, index, name = key.split(".")
                if int(owner) == n:
                    entries.setdefault(int(index), {})[name] = value
            optimizer.load_state_dict({"state": entries, "param_groups": optimizer.state_dict()["param_groups"]})


class Average:
    """An exponential moving average of the weights, which often predicts better than the weights themselves."""

    def __init__(self, operator: Operator, decay: float):
        """Start from the weights as they are."""
        self.decay = decay
        self.parameters: list[Tensor] = list(operator.model.parameters())
        self.shadow = [p.detach().clone() for p in self.parameters]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Follow the weights; the first updates follow faster, so that the start is forgotten."""
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self.parameters], 1 - decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Put the average in place of the weights for a while."""
        kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.shadow)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self.parameters, kept)
