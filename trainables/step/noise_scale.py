"""Estimate the gradient noise scale during training: the batch size beyond which more samples improve little.

McCandlish et al. 2018 (https://arxiv.org/abs/1812.06162), equation 2.8 and appendix A.1: B_simple = tr(Sigma) / |G|^2,
with the covariance Sigma of a single sample's gradient and the true gradient G. Both are estimated from the squared
norms of gradients at two batch sizes: E|G_B|^2 = |G|^2 + tr(Sigma) / B.

With DistributedDataParallel, the small batch is a rank's own and the large batch is that of all ranks. A communication
hook computes the norm of the small one before the reduction. On one rank, the small batches are the accumulated parts
of a step. Usage, on every rank:

    noise = NoiseScale(trial, model, group)      # after the model is wrapped
    noise.attach(model)                          # the DDP wrapper must have no other communication hook
    each step:
        forward and backward of each part, each followed by noise.observe_part()
        noise.finish_step(loss_scale)            # after the reduction, before clipping and the update
        optimizer step
    each epoch: trace, norm2 = noise.read()      # collective; the only call that waits for the device; starts anew
    checkpoint: noise.state_dict()               # right after read(), when it is the same on every rank

All methods except `read` issue a few device operations without synchronising, and can be captured in a CUDA graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainables.registry import PARALLEL, names_with
from trainables.trial import Trial


class NoiseScale:
    """Sums of squared norms of small-batch and large-batch gradients since the last `read`. For usage see the module.

    Assumes equal batches on all ranks and in all parts, so the loop calls `skip_step` for a short step. Raises
    ValueError if the trial has gradients of only one batch size.
    """

    def __init__(self, trial: Trial, model: nn.Module, group: dist.ProcessGroup | None = None):
        self.over_ranks = trial.processes > 1
        if self.over_ranks and not PARALLEL[trial.parallel].ddp_wrapped:
            raise ValueError(
                f"noise_scale requires each rank's own gradients, which parallel {trial.parallel!r} does not expose; "
                f"use parallel {', '.join(names_with(PARALLEL, 'ddp_wrapped'))}"
            )
        if not self.over_ranks and trial.accumulation_steps < 2:
            raise ValueError(
                "noise_scale compares gradients of two batch sizes, but one rank with accumulation_steps 1 has only "
                "one; use accumulation_steps >= 2, or more ranks"
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
        """sum of this step's small squared norms so far, not corrected for the loss scale or the number of parts"""
        self._sums = torch.zeros(3, device=device, dtype=torch.float64)
        """sums of the small and the large squared norm, and number of their steps, since the last `read`"""
        self._before: list[torch.Tensor] = []

    def attach(self, model: nn.Module) -> None:
        """Register the hook that computes the norm of each bucket before DDP reduces it. No effect on one rank."""
        if self.over_ranks:
            assert isinstance(model, DistributedDataParallel)
            model.register_comm_hook(self, averaging_hook)

    @torch.no_grad()
    def observe_part(self) -> None:
        """Add the norm of a part's gradient. Call after its backward pass. No effect with several ranks.

        The part's gradient is the difference to the accumulated gradient before it.
        """
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
        """Add the step's norms to the sums. Call after the reduction and before the update.

        `loss_scale` is the factor of the loss, on the device. A step with non-finite gradients is ignored.
        """
        large = _squared_norm(self._gradients())
        # Each part's loss is divided by `parts`, so each summed norm is too small by parts^2. Their mean divides by
        # `parts`, which leaves a factor of `parts`.
        small = self._small if self.over_ranks else self._small * self.parts
        new = torch.stack([small, large])
        if loss_scale is not None:
            new = new / loss_scale.reshape(()).float() / loss_scale.reshape(()).float()
        sample = torch.cat([new, torch.ones_like(new[:1])])
        finite = torch.isfinite(sample).all()
        self._sums.add_(torch.where(finite, sample, torch.zeros_like(sample)))
        self.skip_step()

    def skip_step(self) -> None:
        """Ignore this step. Call instead of `finish_step`."""
        self._before = []

    def read(self) -> tuple[float | None, float | None]:
        """Return tr(Sigma) and |G|^2 of the steps since the last call, such as an epoch. None without such a step.

        Collective: averages the small norms over the ranks. Successive values have no step in common, so that blocks of
        epochs are independent samples. The estimates are unbiased, so |G|^2 may be negative if noise dominates. Their
        ratio is the noise scale in samples; compute it from averages.
        """
        if self.over_ranks:
            dist.all_reduce(self._sums[:1], group=self.group)
            self._sums[:1].div_(self.ranks)
        small, large, steps = self._sums.tolist()
        self._sums.zero_()
        if steps == 0:
            return None, None
        return estimates(small / steps, large / steps, self.small_batch, self.large_batch)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the sums. They are zero on every rank right after `read`."""
        return {"sums": self._sums.to("cpu", copy=True)}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a `state_dict`."""
        self._sums.copy_(state["sums"])

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]


def estimates(small_norm2: float, large_norm2: float, small_batch: float, large_batch: float) -> tuple[float, float]:
    """Return unbiased tr(Sigma) and |G|^2 from mean squared norms at two batch sizes.

    McCandlish et al. 2018, equation A.2.
    """
    trace = (small_norm2 - large_norm2) / (1 / small_batch - 1 / large_batch)
    norm2 = (large_batch * large_norm2 - small_batch * small_norm2) / (large_batch - small_batch)
    return trace, norm2


def averaging_hook(noise: NoiseScale, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Add the squared norm of a rank's own bucket to the step's, and average the bucket, bit for bit as DDP does.

    DDP multiplies by 1/N before it sums. PyTorch's compression hooks divide by N in the type that is sent.
    """
    buffer = bucket.buffer()
    if bucket.index() == 0:  # the first bucket of a step
        noise._small.zero_()
    noise._small.add_(torch.linalg.vector_norm(buffer, dtype=torch.float32).square())
    ranks = dist.get_world_size(noise.group)
    tensor = buffer.mul_(1.0 / ranks) if noise.sent_as is None else buffer.to(noise.sent_as).div_(ranks)
    work: Any = dist.all_reduce(tensor, group=noise.group, async_op=True)

    def reduced(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        return future.value()[0] if noise.sent_as is None else buffer.copy_(future.value()[0])

    return work.get_future().then(reduced)


def _squared_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all squares, in fp32."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float32)).square().sum()
