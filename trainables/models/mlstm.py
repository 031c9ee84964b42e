"""Multiplicative LSTM over bytes (Krause, Lu, Murray and Renals 2016, https://arxiv.org/abs/1609.07959).

The network of Radford, Jozefowicz and Sutskever 2017 (https://arxiv.org/abs/1704.01444), who train it with 4096 units
on Amazon reviews: an embedding of 64, one mLSTM layer, a linear layer. Weight normalisation is omitted. With the
embedded token x, biases b and element-wise products `*`:

    m_t = (W_mx x_t) * (W_mh h_{t-1})
    i_t, f_t, o_t = sigmoid(W_ix x_t + W_im m_t + b_i), ...     g_t = tanh(W_gx x_t + W_gm m_t + b_g)
    c_t = f_t * c_{t-1} + i_t * g_t                             h_t = o_t * tanh(c_t)

Training uses truncated back-propagation through time: row n of a batch continues row n of the previous batch, from its
last h and c, and no gradient flows back into the previous batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import nn
from torch.nn import functional

from trainables.trial import Trial

EMBEDDING = 64

COMPILED_STEPS = 16
"""Time steps that are compiled together. All others use their code.

To compile the 256 steps of a sequence took minutes on an H100, and more than a minute in each further process."""


def mlstm64(vocabulary: int, trial: Trial) -> nn.Module:
    """Create an mLSTM with 64 units, for tests."""
    return MultiplicativeLSTM(vocabulary, 64, trial.batch_per_gpu)


def mlstm1024(vocabulary: int, trial: Trial) -> nn.Module:
    """Create an mLSTM with 1024 units: 6 million weights."""
    return MultiplicativeLSTM(vocabulary, 1024, trial.batch_per_gpu)


def mlstm2048(vocabulary: int, trial: Trial) -> nn.Module:
    """Create an mLSTM with 2048 units: 22 million weights."""
    return MultiplicativeLSTM(vocabulary, 2048, trial.batch_per_gpu)


def mlstm4096(vocabulary: int, trial: Trial) -> nn.Module:
    """Create an mLSTM with 4096 units, as in Radford et al.: 86 million weights."""
    return MultiplicativeLSTM(vocabulary, 4096, trial.batch_per_gpu)


def mlstm8192(vocabulary: int, trial: Trial) -> nn.Module:
    """Create an mLSTM with 8192 units: 340 million weights."""
    return MultiplicativeLSTM(vocabulary, 8192, trial.batch_per_gpu)


class MultiplicativeLSTM(nn.Module):
    """Embedding, mLSTM, linear layer."""

    def __init__(self, vocabulary: int, units: int, batch: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.layer = Layer(EMBEDDING, units, batch)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map integer tokens [n, t] to logits [n, t, vocabulary]. For n and the carried state see `Layer`."""
        # time first, so that the slice of each step is contiguous
        outputs = self.layer(self.embedding(tokens.t().int()))
        return self.head(outputs.transpose(0, 1))

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the time steps, `COMPILED_STEPS` of them at once. The arguments are those of torch.compile."""
        self.layer.runs = _Runs(
            torch.compile(_advance, *args, dynamic=False, **kwargs),
            torch.compile(_retreat, *args, dynamic=False, **kwargs),
            COMPILED_STEPS,
        )


class State(NamedTuple):
    """h and c after the last step: fp32 [batch, units]."""

    hidden: torch.Tensor
    cell: torch.Tensor


class Layer(nn.Module):
    """The mLSTM layer. During training it carries its state from batch to batch.

    Each rank has its own state. It is not registered as a buffer, because data-parallel wrappers broadcast buffers. It
    is fp32 regardless of autocast, and is allocated once and overwritten in place, so that CUDA graphs carry it too.
    The weights belong to this module directly, so that FSDP gathers them for its forward pass. DataParallel makes new
    replicas of this module at every step. They share its attributes, so the state of each device is in a dict.
    """

    def __init__(self, width: int, units: int, batch: int) -> None:
        super().__init__()
        self.units = units
        self.inputs = nn.Parameter(torch.empty(5 * units, width))  # W_mx, then those of i, f, o and g
        self.factor = nn.Parameter(torch.empty(units, units))  # W_mh
        self.gates = nn.Parameter(torch.empty(4 * units, units))  # W_im, W_fm, W_om, W_gm
        self.bias = nn.Parameter(torch.zeros(4 * units))
        for weight in (self.inputs, self.factor, self.gates):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)  # as nn.Linear
        first = State(torch.zeros(batch, units), torch.zeros(batch, units))
        self.states = {first.hidden.device: first}
        self.runs = _Runs()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs [t, n, width] to all h [t, n, units].

        In training n must be the batch size given to the constructor; otherwise raises ValueError. In evaluation any n
        is allowed: every batch starts from zeros, and the training state is not changed.
        """
        state = self._state(inputs.device)
        hidden, cell = self._first(state, inputs.shape[1])
        # the products with x do not depend on h, so those of all steps are computed at once
        projected = functional.linear(inputs, self.inputs, functional.pad(self.bias, (self.units, 0)))
        outputs, hidden, cell = _Recurrence.apply(projected, self.factor, self.gates, hidden, cell, self.runs)
        if self.training:
            state.hidden.copy_(hidden)
            state.cell.copy_(cell)
        return outputs

    def _state(self, device: torch.device) -> "State":
        """Return the state of this device, which is zero at first."""
        if device not in self.states:  # threads of DataParallel add different keys
            first = next(iter(self.states.values()))
            self.states[device] = State(*(torch.zeros_like(values, device=device) for values in first))
        return self.states[device]

    def _first(self, state: "State", batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies of h and c before the first step: fp32 [batch, units].

        Without copies, compiled code would save the state itself for its backward pass, after which the forward pass
        overwrites it.
        """
        if not self.training:
            return state.hidden.new_zeros(batch, self.units), state.cell.new_zeros(batch, self.units)
        if batch != len(state.hidden):
            raise ValueError(f"the model carries the state of {len(state.hidden)} rows, got a batch of {batch}")
        return state.hidden.clone(), state.cell.clone()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Move the state together with the weights. `to`, `cuda` and similar methods call this."""
        super()._apply(fn, recurse)
        moved = [State(*map(fn, state)) for state in self.states.values()]
        self.states = {state.hidden.device: state for state in moved}
        return self


class _Recurrence(torch.autograd.Function):
    """The steps of the mLSTM, with a custom backward pass.

    Autograd would compute and add the gradient of the recurrent weights at every step: t matrices of [4 units, units].
    Here each backward step computes only what the previous time step needs. Each weight gradient is then a single
    product over all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: torch.Tensor,
        factor: torch.Tensor,
        gates: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor,
        runs: "_Runs",
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return all h [t, n, units] in the dtype of `projected`, and the last h and c [n, units].

        Takes `projected` [t, n, 5 units], whose dtype is used to compute, the weights `factor` [units, units] and
        `gates` [4 units, units], the first h and c [n, units], and what computes runs of steps.
        """
        dtype = projected.dtype
        factor_t, gates_t = factor.to(dtype).t(), gates.to(dtype).t()
        of_runs = []
        for run in projected.split(runs.steps or len(projected)):
            *values, hidden, cell = runs.advance(run, factor_t, gates_t, hidden, cell)
            of_runs.append(values)
        hiddens, cells, *others = (list(values) for values in zip(*of_runs, strict=True))
        # h and c before each run are the last ones of the run before it
        saved = [_joined(states[:1] + [state[1:] for state in states[1:]]) for states in (hiddens, cells)]
        saved += [_joined(values) for values in others]
        ctx.save_for_backward(projected, factor, gates, *saved)
        ctx.runs = runs
        ctx.mark_non_differentiable(hidden, cell)
        return saved[0][1:], hidden, cell

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, factor, gates, hiddens, cells, factors, products, sigmoids, tanhs = ctx.saved_tensors
        dtype, units = projected.dtype, len(factor)
        factor_t, gates_t = factor.to(dtype), gates.to(dtype)
        enter, forget, leave = sigmoids.chunk(3, dim=-1)
        cell_tanhs = cells[1:].tanh()
        # derivatives of (c, c, h, c) with respect to the pre-activations of (i, f, o, g), and of h with respect to c,
        # for all steps at once
        slopes = sigmoids * (1 - sigmoids)
        parts = torch.cat((tanhs, cells[:-1], cell_tanhs), dim=-1) * slopes
        to_gates = torch.cat((parts, enter * (1 - tanhs * tanhs)), dim=-1).to(dtype).unflatten(-1, (4, units))
        to_cell = leave * (1 - cell_tanhs * cell_tanhs)

        carried = torch.zeros_like(hiddens[0]), torch.zeros_like(cells[0])
        of_steps = (gradients[0], to_cell, to_gates, forget, projected[:, :, :units])
        split = [values.split(ctx.runs.steps or len(projected)) for values in of_steps]
        of_runs = []
        for run in list(zip(*split, strict=True))[::-1]:
            *values, from_next, cell_gradient = ctx.runs.retreat(*run, factor_t, gates_t, *carried)
            carried = from_next, cell_gradient
            of_runs.append(values)
        d_factors, d_products, d_gates = (_joined(list(values)) for values in zip(*of_runs[::-1], strict=True))
        d_projected = torch.cat((d_products * factors, d_gates), dim=-1)
        d_factor = d_factors.flatten(0, 1).t() @ hiddens[:-1].flatten(0, 1)
        d_weights = d_gates.flatten(0, 1).t() @ products.flatten(0, 1)
        return d_projected, d_factor.to(factor.dtype), d_weights.to(gates.dtype), None, None, None


def _joined(values: list[torch.Tensor]) -> torch.Tensor:
    return values[0] if len(values) == 1 else torch.cat(values)


def _advance(
    projected: torch.Tensor,
    factor_t: torch.Tensor,
    gates_t: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Run the steps of `projected`. Returns what the backward pass needs of them, then the last h and c.

    h and c start with those before the first step. Then follow W_mh h, m, the sigmoids of i, f and o, and the tanh of g
    of each step.
    """
    units = len(factor_t)
    hiddens, factors, products, sigmoids, tanhs, cells = [hidden.to(projected.dtype)], [], [], [], [], [cell]
    for step in projected:
        factors.append(hiddens[-1] @ factor_t)
        products.append(step[:, :units] * factors[-1])
        summed = torch.addmm(step[:, units:], products[-1], gates_t)
        sigmoids.append(summed[:, : 3 * units].sigmoid())
        tanhs.append(summed[:, 3 * units :].tanh())
        enter, forget, leave = sigmoids[-1].chunk(3, dim=1)
        cells.append(forget * cells[-1] + enter * tanhs[-1])
        hidden = leave * cells[-1].tanh()
        hiddens.append(hidden.to(projected.dtype))
    values = (hiddens, cells, factors, products, sigmoids, tanhs)
    return *(torch.stack(value) for value in values), hidden, cells[-1]


def _retreat(
    gradient: torch.Tensor,
    to_cell: torch.Tensor,
    to_gates: torch.Tensor,
    forget: torch.Tensor,
    projected: torch.Tensor,
    factor_t: torch.Tensor,
    gates_t: torch.Tensor,
    from_next: torch.Tensor,
    cell_gradient: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Run the backward steps of some time steps, the last one first.

    Returns the gradients of W_mh h, m and the pre-activations of the gates of each step, then those of h and c before
    the first one. `projected`: the products W_mx x.
    """
    of_factors, of_products, of_gates = [], [], []
    for step in reversed(range(len(projected))):
        of_hidden = gradient[step] + from_next
        of_cell = torch.addcmul(cell_gradient, of_hidden, to_cell[step])
        upstream = torch.stack((of_cell, of_cell, of_hidden, of_cell), dim=1)
        of_gates.append((upstream * to_gates[step]).to(projected.dtype).flatten(1))
        of_products.append(of_gates[-1] @ gates_t)
        of_factors.append(of_products[-1] * projected[step])
        from_next = of_factors[-1] @ factor_t
        cell_gradient = of_cell * forget[step]
    stacked = (torch.stack(values[::-1]) for values in (of_factors, of_products, of_gates))
    return *stacked, from_next, cell_gradient


class _Runs(NamedTuple):
    """What computes runs of time steps: forward and backward, and how many steps a run has; 0: all of them."""

    advance: Callable[..., tuple[torch.Tensor, ...]] = _advance
    retreat: Callable[..., tuple[torch.Tensor, ...]] = _retreat
    steps: int = 0
