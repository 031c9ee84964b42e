"""The gradient noise scale while training: how large a batch is before more samples stop improving its gradient.

McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162), equation 2.8 and appendix A.1: B_simple = tr(Sigma) / |G|^2, with
Sigma the covariance of one sample's gradient and G the true gradient. Both come from squared norms of gradients of two batch
sizes: E|G_B|^2 = |G|^2 + tr(Sigma) / B.

Where ranks average gradients with DistributedDataParallel, the small batch is a rank's own, whose norm a communication
hook takes before the reduction; the large one is that of all ranks. On one rank the small batches are the accumulated
parts of a step. A loop uses it so, on every rank:

    noise = NoiseScale(trial, model, group)      # after the model is wrapped
    noise.attach(model)                          # a DDP wrapper without another communication hook; else nothing
    each step:
        forward and backward of each part, each followed by noise.observe_part()
        noise.finish_step(loss_scale)            # gradients reduced, not yet clipped or updated
        optimizer step
    each epoch: trace, norm2 = noise.read()      # all ranks together; the only call that waits for the device
    checkpoint: noise.state_dict() after read(), the same on every rank

All but `read` issues a few operations to the device and waits for nothing, and may be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainables.registry import PARALLEL, names_with
from trainables.trial import Trial

SMOOTHING = 0.99
"""share of what is remembered that a step keeps: a reading averages about the last hundred steps"""


class NoiseScale:
    """Smoothed squared norms of a step's small and large gradients; see this module for how a loop uses it.

    Equal batches on all ranks and in all parts are taken for granted, so the loop leaves out steps that are short (and calls
    `skip_step`). Raises ValueError where the trial has gradients of one batch size only.
    """

    def __init__(self, trial: Trial, model: nn.Module, group: dist.ProcessGroup | None = None):
        self.over_ranks = trial.processes > 1
        if self.over_ranks and not PARALLEL[trial.parallel].ddp_wrapped:
            raise ValueError(
                f"noise_scale with parallel {trial.parallel!r}: no hook sees a rank's own gradient there; "
                f"use parallel {', '.join(names_with(PARALLEL, 'ddp_wrapped'))}"
            )
        if not self.over_ranks and trial.accumulation_steps < 2:
            raise ValueError(
                "noise_scale compares gradients of two batch sizes; one rank with accumulation_steps 1 has one: "
                "use accumulation_steps 2 or more, or 2 ranks"
            )
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.group = group
        self.parts = trial.accumulation_steps
        self.ranks = trial.processes
        sent_as = PARALLEL[trial.parallel].sent_as
        self.sent_as = getattr(torch, sent_as) if sent_as else None
        self.large_batch = trial.global_batch
        self.small_batch = self.large_batch // (self.ranks if self.over_ranks else self.parts)
        device = self.parameters[0].device
        self._small = torch.zeros((), device=device)
        """squared norms of this step's small gradients so far, in the units that they have when they are taken"""
        self._smoothed = torch.zeros(3, device=device)
        """of the small and the large squared norm, and of 1, which corrects the begin at zero (Kingma and Ba 2015)"""
        self._before: list[torch.Tensor] = []

    def attach(self, model: nn.Module) -> None:
        """Takes the norm of each bucket before DDP reduces it. Nothing where the small batches are a rank's parts."""
        if self.over_ranks:
            assert isinstance(model, DistributedDataParallel)
            model.register_comm_hook(self, averaging_hook)

    @torch.no_grad()
    def observe_part(self) -> None:
        """After each part's backward pass: its gradient is what it added to those before it. Nothing over ranks."""
        if self.over_ranks:
            return
        gradients = self._gradients()
        if self._before:
            self._small.add_(_squared_norm(torch._foreach_sub(gradients, self._before)))
            torch._foreach_copy_(self._before, gradients)
        else:
            self._small.copy_(_squared_norm(gradients))
            self._before = [gradient.clone() for gradient in gradients]

    @torch.no_grad()
    def finish_step(self, loss_scale: torch.Tensor | None = None) -> None:
        """After the reduction, before the update. loss_scale: what the loss was multiplied by, still on the device.

        A step whose gradient is not finite counts for nothing.
        """
        large = _squared_norm(self._gradients())
        # a part's loss is divided by the number of parts, so its own gradient is that many times what it added; the mean
        # of `parts` squared norms, each `parts` squared times what was summed
        small = self._small if self.over_ranks else self._small * self.parts
        new = torch.stack([small, large])
        if loss_scale is not None:
            new = new / loss_scale.reshape(()).float() / loss_scale.reshape(()).float()
        taken = torch.cat([new, torch.ones_like(new[:1])])
        finite = torch.isfinite(taken).all()
        self._smoothed.copy_(torch.where(finite, torch.lerp(taken, self._smoothed, SMOOTHING), self._smoothed))
        self.skip_step()

    def skip_step(self) -> None:
        """In place of `finish_step` for a step that is not to count."""
        self._before = []

    def read(self) -> tuple[float | None, float | None]:
        """tr(Sigma) of one sample's gradient and |G|^2, both smoothed; None before the first step.

        All ranks of the group together: their small norms are averaged. The estimates are unbiased, so |G|^2 may come
        out negative where noise drowns it. Their ratio is the noise scale in samples; take it of averages.
        """
        if self.over_ranks:
            dist.all_reduce(self._smoothed[:1], group=self.group)
            self._smoothed[:1].div_(self.ranks)
        small, large, weight = self._smoothed.double().tolist()
        if weight == 0:
            return None, None
        return estimates(small / weight, large / weight, self.small_batch, self.large_batch)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What is remembered; the same on every rank right after `read`."""
        return {"smoothed": self._smoothed.to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Goes on from a `state_dict`."""
        self._smoothed.copy_(state["smoothed"])

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def estimates(small_norm2: float, large_norm2: float, small_batch: float, large_batch: float) -> tuple[float, float]:
    """tr(Sigma) and |G|^2, unbiased, from mean squared norms at two batch sizes (McCandlish et al. 2018, equation A.2)."""
    trace = (small_norm2 - large_norm2) / (1 / small_batch - 1 / large_batch)
    norm2 = (large_batch * large_norm2 - small_batch * small_norm2) / (large_batch - small_batch)
    return trace, norm2


def averaging_hook(noise: NoiseScale, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Adds the squared norm of a rank's own bucket to the step's, and averages it bit for bit as DDP does without a hook.

    DDP multiplies by 1/N before it sums; gradients that are sent in another type are divided in it, as PyTorch's own
    compressing hooks do.
    """
    own = bucket.buffer()
    if bucket.index() == 0:  # the first to be handed over
        noise._small.zero_()
    noise._small.add_(torch.linalg.vector_norm(own, dtype=torch.float32).square())
    ranks = dist.get_world_size(noise.group)
    tensor = own.mul_(1.0 / ranks) if noise.sent_as is None else own.to(noise.sent_as).div_(ranks)
    work: Any = dist.all_reduce(tensor, group=noise.group, async_op=True)

    def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return future.value()[0] if noise.sent_as is None else own.copy_(future.value()[0])

    return work.get_future().then(reduced)


def _squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum of all squares, in fp32."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square().sum()
