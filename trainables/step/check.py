"""Check a user's workload on one rank, before a study starts a grid of trials with it."""

import traceback
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
from torch import nn

from trainables.data.loader import endless_batches
from trainables.messages import type_and_line
from trainables.registry import PARALLEL
from trainables.step.context import RankContext, RankSetup, rank_context
from trainables.step.step import ForwardResult, forward_pass, training_step
from trainables.step.timing import no_mark
from trainables.trial import Trial
from trainables.workload import WorkloadError

SHOWN_NAMES = 3


def check(trial: Trial, device: torch.device | None = None, source: str | None = None) -> str | None:
    """Build the trial's workload and run one step of it: one batch, forward, backward and optimizer.

    Returns one line that says why the workload cannot work and what to change. None if it can, or if memory runs out,
    which depends on the trial. Runs in this process alone, without a process group, compilation or loader processes.
    `source` is the text of the workload's file, for hosts without the file.
    """
    # not validated: fields that other strategies or executions require have no effect here
    alone = trial.model_copy(
        update={
            "world_size": 1, "nodes": 1, "parallel": "none", "execution": "eager", "loader_workers": 0,
            "accumulation_steps": 1, "copy_ahead": False, "sync_batch_norm": False, "pin_cores": False,
        }
    )  # fmt: skip
    try:
        with rank_context(alone, RankSetup(0, device or torch.device("cpu"), source=source)) as context:
            if trial.loader_workers:
                _send_to_loader(context)
            _first_step(context, trial)
    except WorkloadError as error:
        line = str(error)
        return line if trial.workload in line else f"workload {trial.workload!r}: {line}"
    except (torch.OutOfMemoryError, MemoryError):
        return None
    except Exception as error:  # a user's code may raise anything
        return _described(trial, error)
    return None


def _first_step(context: RankContext, trial: Trial) -> None:
    """Run one step. Raises WorkloadError if its loss or its gradients cannot be used."""
    batch = next(endless_batches(context.trial, context.workload, rank=0))
    model = context.workload.model
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise WorkloadError("model has no parameters to train; return one whose parameters require gradients")
    _check_loss(forward_pass(context, model)(batch, no_mark), context)
    _check_gradients(model, trial)
    model.zero_grad(set_to_none=True)
    training_step(context, model)(batch, no_mark)


def _check_loss(result: ForwardResult, context: RankContext) -> None:
    loss, name = result.loss, "loss" if context.workload.step is None else "step"
    if not isinstance(loss, torch.Tensor):
        raise WorkloadError(f"{name} must return a scalar tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise WorkloadError(f"{name} must return a scalar tensor, got shape {list(loss.shape)}; average it")
    if not loss.requires_grad:
        raise WorkloadError(f"{name} returned a tensor without gradient; do not detach it or disable gradients")
    loss.backward()


def _check_gradients(model: nn.Module, trial: Trial) -> None:
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    unused = [name for name, parameter in trainable if parameter.grad is None]
    if len(unused) == len(trainable):
        raise WorkloadError("no parameter of model gets a gradient; compute the loss from the outputs of model")
    waits = PARALLEL[trial.parallel].ddp_wrapped and not (trial.find_unused_parameters or trial.static_graph)
    if unused and waits:
        shown = ", ".join(unused[:SHOWN_NAMES]) + (
            f" and {len(unused) - SHOWN_NAMES} more" * (len(unused) > SHOWN_NAMES)
        )
        raise WorkloadError(
            f"parameters {shown} get no gradient, but parallel {trial.parallel!r} waits for every parameter; "
            "set find_unused_parameters=true, or freeze these parameters"
        )


def _send_to_loader(context: RankContext) -> None:
    """Raise WorkloadError if a loader process could not receive data set and collate function."""
    workload = context.workload
    if workload.loader is not None or workload.resident:
        return
    for name, value in (("collate", workload.collate), ("dataset", workload.dataset)):
        try:
            ForkingPickler.dumps(value)
        except Exception as error:  # pickling may run any code
            line = next(iter(str(error).splitlines()), type(error).__name__)
            raise WorkloadError(
                f"{name} cannot be sent to a loader process ({line}); define functions and classes at the top level of "
                "the file, not as a lambda or inside a function, or use loader_workers 0"
            ) from error


def _described(trial: Trial, error: Exception) -> str:
    """Return one line with the place in the user's code, or else in a library, where an exception was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    folder = Path(trial.workload.rpartition(":")[0]).resolve().parent
    of_user = [frame for frame in frames if folder in Path(frame.filename).resolve().parents]
    frame = (of_user or frames)[-1]
    place = f"{frame.filename}:{frame.lineno}"
    return f"workload {trial.workload!r} fails in its first step, at {place}: {type_and_line(error)}"
