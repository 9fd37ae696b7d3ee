"""A fragment: tensors that local steps exchange together, their anchors, and the exchange in flight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import torch

from hvdcompress._torch.compressor import TensorCompressor


class Fragment:
    """Tensors of the model that are exchanged together: some of the parameters, or the buffers.

    Args:
        current: returns the tensors by name. A module may replace a buffer by another tensor in each step.
        names: the names of those that are exchanged.
        offset: the fragment's exchanges begin at steps t with t mod ``every`` = offset.

    Attributes:
        anchors: the tensors at the last exchange, by name; equal on all ranks.
        compressor: exchanges the pseudo-gradients.
        optimizer: updates the anchors with the averages; by default it sets the tensors to their average.
        gradients: the pseudo-gradients in flight by name; their averages after the exchange.
        pending: the exchange in flight; None if there is none.
        due: the step in which its result is applied.
        agreed: the step after which the tensors were equal on all ranks.
    """

    compressor: TensorCompressor

    def __init__(self, current: Callable[[], Mapping[str, torch.Tensor]], names: Iterable[str], offset: int):
        self.current = current
        self.offset = offset
        now = current()
        self.anchors = {name: torch.nn.Parameter(now[name].detach().clone()) for name in names}
        self._averaging = torch.optim.SGD(self.anchors.values(), lr=1.0)
        self.optimizer: torch.optim.Optimizer = self._averaging
        self.gradients: dict[str, torch.Tensor] = {}
        self.pending: Future[None] | None = None
        self.due = 0
        self.agreed = 0

    @torch.no_grad()
    def begin(self) -> None:
        """Compute the pseudo-gradients."""
        now = self.current()
        self.gradients = {name: anchor - now[name] for name, anchor in self.anchors.items()}

    @torch.no_grad()
    def end(self, compressed: bool, mixing: float) -> bool:
        """Wait for the exchange, let the optimizer update the anchors, and move the tensors to them.

        Args:
            compressed: whether the exchange was compressed. Otherwise the tensors become their average.
            mixing: the tensors become ``mixing`` times themselves plus (1 - ``mixing``) times the anchors.

        Returns:
            False if a tensor of some rank was Inf or NaN: then they return to the last exchange.
        """
        assert self.pending is not None
        self.pending.result()
        self.pending = None
        # After a NaN on any rank, all averages are NaN on all ranks
        is_finite = all(bool(each.isfinite().all()) for each in self.gradients.values())
        if is_finite:
            # The optimizer updates the anchors that have a gradient: only those of this fragment
            for name, anchor in self.anchors.items():
                anchor.grad = self.gradients[name]
            optimizer = self.optimizer if compressed else self._averaging
            optimizer.step()
            optimizer.zero_grad()
        self.gradients = {}
        self.pull(mixing if is_finite else 0.0)
        return is_finite

    @torch.no_grad()
    def pull(self, mixing: float) -> None:
        """Move the tensors to the anchors; ``mixing`` is the share of their present values."""
        now = self.current()
        for name, anchor in self.anchors.items():
            if mixing:
                now[name].lerp_(anchor, 1.0 - mixing)
            else:
                now[name].copy_(anchor)


def parts_of(parameters: Mapping[str, torch.nn.Parameter], count: int) -> list[dict[str, torch.nn.Parameter]]:
    """Cut parameters into at most ``count`` parts of consecutive parameters and about equal size."""
    total = sum(each.numel() for each in parameters.values())
    parts: dict[int, dict[str, torch.nn.Parameter]] = {}
    done = 0
    for name, each in parameters.items():
        parts.setdefault(done * count // (total or 1), {})[name] = each
        done += each.numel()
    return list(parts.values())
