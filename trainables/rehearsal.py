"""Steps that are taken back: what compiling and capturing a step need before the training that counts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainables.noise_scale import NoiseScale
from trainables.precision import Updater


@contextmanager
def taken_back(model: nn.Module, updater: Updater, noise: NoiseScale | None) -> Iterator[None]:
    """Whatever is trained inside: weights, buffers, the optimizer's state and the noise scale are put back afterwards,
    into the same memory.

    A buffer that the optimizer made on the way becomes zero, where all optimizers of the registry begin.
    """
    before = {name: value.clone() for name, value in model.state_dict().items()}
    masters = [master.detach().clone() for master in updater.masters]
    states = {id(value): (value, value.clone()) for value in _states(updater.own)}
    scaler = updater.scaler.state_dict() if updater.scaler else None
    remembered = {name: value.clone() for name, value in noise.state_dict().items()} if noise else None
    yield
    model.load_state_dict(before)
    with torch.no_grad():
        for master, kept in zip(updater.masters, masters, strict=True):
            master.copy_(kept)
        for value in _states(updater.own):
            if id(value) in states:
                value.copy_(states[id(value)][1])
            else:
                value.zero_()
    if updater.scaler and scaler is not None:
        updater.scaler.load_state_dict(scaler)
    if noise and remembered is not None:
        noise.load_state_dict(remembered)


def _states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
