"""Multiplicative LSTM over bytes (Krause, Lu, Murray and Renals 2016, https://arxiv.org/abs/1609.07959).

One layer, as Radford, Jozefowicz and Sutskever 2017 (https://arxiv.org/abs/1704.01444) train it with 4096 units on Amazon
reviews: an embedding of 64, the mLSTM, a linear layer. Weight normalisation is left out. With x the embedded token, `*`
element by element and the biases b:

    m_t = (W_mx x_t) * (W_mh h_{t-1})
    i_t, f_t, o_t = sigmoid(W_ix x_t + W_im m_t + b_i), ...     g_t = tanh(W_gx x_t + W_gm m_t + b_g)
    c_t = f_t * c_{t-1} + i_t * g_t                             h_t = o_t * tanh(c_t)

Training is truncated back-propagation through time: row n of a batch goes on where row n of the batch before it ended, with
that batch's last h and c, and no gradient flows back into it.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from trainables.trial import Trial

EMBEDDING = 64


def mlstm64(vocabulary: int, trial: Trial) -> nn.Module:
    """64 units, to test with."""
    return MultiplicativeLSTM(vocabulary, 64, trial.batch_per_gpu)


def mlstm1024(vocabulary: int, trial: Trial) -> nn.Module:
    """1024 units: 6 million weights."""
    return MultiplicativeLSTM(vocabulary, 1024, trial.batch_per_gpu)


def mlstm2048(vocabulary: int, trial: Trial) -> nn.Module:
    """2048 units: 22 million weights."""
    return MultiplicativeLSTM(vocabulary, 2048, trial.batch_per_gpu)


def mlstm4096(vocabulary: int, trial: Trial) -> nn.Module:
    """4096 units, the size of Radford et al.: 86 million weights."""
    return MultiplicativeLSTM(vocabulary, 4096, trial.batch_per_gpu)


def mlstm8192(vocabulary: int, trial: Trial) -> nn.Module:
    """8192 units: 340 million weights."""
    return MultiplicativeLSTM(vocabulary, 8192, trial.batch_per_gpu)


class MultiplicativeLSTM(nn.Module):
    """Embedding, mLSTM, linear layer."""

    def __init__(self, vocabulary: int, units: int, batch: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, EMBEDDING)
        self.layer = Layer(EMBEDDING, units, batch)
        self.head = nn.Linear(units, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, integers [n, t], to logits [n, t, vocabulary]; n and what is carried as `Layer` says."""
        # time first, so that each step's part is in one piece
        outputs = self.layer(self.embedding(tokens.t().int()))
        return self.head(outputs.transpose(0, 1))


class Layer(nn.Module):
    """The mLSTM; in training it carries its state from one batch to the next.

    The state is each rank's own. It is no buffer, for data-parallel wrappers broadcast those; it is fp32 whatever autocast
    says, allocated once and overwritten in place, so that a CUDA graph carries it on as well. The weights are this
    module's own, so that what gathers a module's weights for its forward pass gathers them.
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
        self.hidden = torch.zeros(batch, units)
        self.cell = torch.zeros(batch, units)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Inputs [t, n, width] to every h [t, n, units].

        In training n is the batch that the layer was made for. In evaluation it may be any: every batch begins with zeros,
        and what training carries stays. Raises ValueError for another batch in training.
        """
        hidden, cell = self._first_state(inputs.shape[1])
        # the products with x of all steps at once
        projected = functional.linear(inputs, self.inputs, functional.pad(self.bias, (self.units, 0)))
        outputs, hidden, cell = _Recurrence.apply(projected, self.factor, self.gates, hidden, cell)
        if self.training:
            self.hidden.copy_(hidden)
            self.cell.copy_(cell)
        return outputs

    def _first_state(self, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """h and c before the first step: fp32 [batch, units].

        Copies: compiled code would keep these for its backward pass, and meet there what the forward pass left in them.
        """
        if not self.training:
            return self.hidden.new_zeros(batch, self.units), self.cell.new_zeros(batch, self.units)
        if batch != len(self.hidden):
            raise ValueError(f"the model carries the state of {len(self.hidden)} rows; this batch has {batch}")
        return self.hidden.clone(), self.cell.clone()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves the state along with the weights: `to`, `cuda` and their like end here."""
        super()._apply(fn, recurse)
        self.hidden, self.cell = fn(self.hidden), fn(self.cell)
        return self


class _Recurrence(torch.autograd.Function):
    """The mLSTM's steps, with a backward pass of its own.

    Autograd would form the gradient of the recurrent weights at every step and add them up: t matrices of 4 units by units.
    Here the steps back in time compute only what the step before them needs; both weight gradients are then one product
    each over all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projected: torch.Tensor,
        factor: torch.Tensor,
        gates: torch.Tensor,
        hidden: torch.Tensor,
        cell: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`projected` [t, n, 5 units] in the type to compute in, weights [units, units] and [4 units, units], h and c
        [n, units]; gives every h [t, n, units] in the type to compute in, and the last h and c.
        """
        dtype, units = projected.dtype, len(factor)
        factor_t, gates_t = factor.to(dtype).t(), gates.to(dtype).t()
        hiddens, factors, products, sigmoids, tanhs, cells = [hidden.to(dtype)], [], [], [], [], [cell]
        for step in projected:
            factors.append(hiddens[-1] @ factor_t)
            products.append(step[:, :units] * factors[-1])
            summed = torch.addmm(step[:, units:], products[-1], gates_t)
            sigmoids.append(summed[:, : 3 * units].sigmoid())
            tanhs.append(summed[:, 3 * units :].tanh())
            enter, forget, leave = sigmoids[-1].chunk(3, dim=1)
            cells.append(forget * cells[-1] + enter * tanhs[-1])
            hidden = leave * cells[-1].tanh()
            hiddens.append(hidden.to(dtype))
        kept = [torch.stack(values) for values in (hiddens, factors, products, sigmoids, tanhs, cells)]
        ctx.save_for_backward(projected, factor, gates, *kept)
        ctx.mark_non_differentiable(hidden, cells[-1])
        return kept[0][1:], hidden, cells[-1]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        projected, factor, gates, hiddens, factors, products, sigmoids, tanhs, cells = ctx.saved_tensors
        dtype, units = projected.dtype, len(factor)
        factor_t, gates_t = factor.to(dtype), gates.to(dtype)
        enter, forget, leave = sigmoids.chunk(3, dim=-1)
        cell_tanhs = cells[1:].tanh()
        # d(i, f, o, g before their functions) over (dc, dc, dh, dc), and dc over dh: of all steps at once
        slopes = sigmoids * (1 - sigmoids)
        parts = torch.cat((tanhs, cells[:-1], cell_tanhs), dim=-1) * slopes
        to_gates = torch.cat((parts, enter * (1 - tanhs * tanhs)), dim=-1).to(dtype).unflatten(-1, (4, units))
        to_cell = leave * (1 - cell_tanhs * cell_tanhs)

        from_next = torch.zeros_like(cells[0])
        cell_gradient = torch.zeros_like(cells[0])
        of_factors, of_products, of_gates = [], [], []
        for step in reversed(range(len(projected))):
            of_hidden = gradients[0][step] + from_next
            of_cell = torch.addcmul(cell_gradient, of_hidden, to_cell[step])
            upstream = torch.stack((of_cell, of_cell, of_hidden, of_cell), dim=1)
            of_gates.append((upstream * to_gates[step]).to(dtype).flatten(1))
            of_products.append(of_gates[-1] @ gates_t)
            of_factors.append(of_products[-1] * projected[step, :, :units])
            from_next = of_factors[-1] @ factor_t
            cell_gradient = of_cell * forget[step]

        def in_order(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(values[::-1])

        d_factors, d_products, d_gates = in_order(of_factors), in_order(of_products), in_order(of_gates)
        d_projected = torch.cat((d_products * factors, d_gates), dim=-1)
        d_factor = d_factors.flatten(0, 1).t() @ hiddens[:-1].flatten(0, 1)
        d_weights = d_gates.flatten(0, 1).t() @ products.flatten(0, 1)
        return d_projected, d_factor.to(factor.dtype), d_weights.to(gates.dtype), None, None
