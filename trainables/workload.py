"""What is trained: model, data, loss and optimizer, from the registries or from a user's own file."""

import hashlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from trainables.registry import DATASETS, MODELS, load
from trainables.trial import Trial


class WorkloadError(Exception):
    """A user's workload file that cannot be used, in one line: what, where, what to do."""


def identity(value: Any) -> Any:
    """The value itself: the collate function of data sets that already deliver batches."""
    return value


def sgd(trial: Trial) -> Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]:
    """SGD with momentum 0.9 and weight decay 5e-4; one fused kernel for all parameters on CUDA."""

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        fused = trial.device == "cuda"
        return torch.optim.SGD(parameters, lr=trial.learning_rate, momentum=0.9, weight_decay=5e-4, fused=fused)

    return build


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Everything of a training step that is not the study's own.

    A batch is a pair (inputs, targets) of tensors, or of tuples, lists or dicts of tensors:
    step = `loss(model(prepare(inputs)), targets)`, backward, optimizer.
    """

    model: nn.Module
    dataset: Dataset
    loss: Callable[[Any, Any], torch.Tensor]
    """(model's output, targets) -> scalar, averaged over the rank's batch"""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    collate: Callable[[Any], Any] = default_collate
    """turns the data set's samples into a batch, in the loader process"""
    prepare: Callable[[Any], Any] = identity
    """applied to the inputs on the device; timed as part of the forward pass"""
    resident: bool = False
    """the data set's tensors are on the device already: no loader, no copy"""


def build_workload(trial: Trial, device: torch.device, source: str | None = None) -> Workload:
    """The trial's workload, its model still on the CPU.

    `source` is the text of a user's workload file, for hosts on which the file itself does not exist.
    Raises WorkloadError, or the data source's DataError.
    """
    if trial.workload:
        workload = load_user_workload(trial.workload, source)(trial)
        if not isinstance(workload, Workload):
            raise WorkloadError(
                f"workload {trial.workload!r} returned {type(workload).__name__}; it must return a trainables.workload.Workload"
            )
        return workload
    data = load(DATASETS[trial.dataset])(trial)
    model = load(MODELS[trial.model])(data.classes, data.channels, data.image_size)
    return Workload(
        model=model,
        dataset=data.dataset,
        loss=nn.functional.cross_entropy,
        optimizer=sgd(trial),
        collate=identity,
        prepare=_normalise(trial.memory_format),
        resident=trial.dataset == "synthetic",
    )


def _normalise(memory_format: str) -> Callable[[torch.Tensor], torch.Tensor]:
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format

    def normalise(images: torch.Tensor) -> torch.Tensor:
        """uint8 [n, c, h, w] to float32 in [-1, 1]; floats pass."""
        if images.dtype == torch.uint8:
            images = images.to(torch.float32, memory_format=layout).div_(127.5).sub_(1.0)
        return images

    return normalise


def load_user_workload(spec: str, source: str | None = None) -> Callable[[Trial], Workload]:
    """The function that `FILE.py:NAME` names.

    The file is imported as a module of its own name with its folder on the path, so that loader processes, which
    import it again, find it and what lies beside it. Where the file does not exist, `source` is written to a
    temporary folder and stands in for it. Raises WorkloadError.
    """
    file_name, _, name = spec.rpartition(":")
    path = Path(file_name)
    if not path.is_file():
        if source is None:
            raise WorkloadError(f"workload file {file_name} does not exist; give --workload path/to/file.py:name")
        digest = hashlib.sha256(source.encode()).hexdigest()[:8]
        path = Path(tempfile.gettempdir()) / f"scaling-study-workload-{digest}" / path.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    if not path.stem.isidentifier():
        raise WorkloadError(
            f"workload file {path} cannot be imported under the name {path.stem!r}; rename it to letters, digits and underscores"
        )
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = sys.modules.get(path.stem)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if module is None or getattr(module, "_workload_digest", None) != digest:
        sys.modules.pop(path.stem, None)
        importlib.invalidate_caches()
        try:
            module = importlib.import_module(path.stem)
        except Exception as error:  # whatever a user's file raises on import is the user's to see in one line
            raise WorkloadError(f"workload file {path} does not import: {type(error).__name__}: {error}") from error
        if Path(module.__file__ or "").resolve() != path.resolve():
            raise WorkloadError(
                f"workload file {path}: another module named {path.stem!r} is found first ({module.__file__}); rename the file"
            )
        vars(module)["_workload_digest"] = digest
    function = getattr(module, name, None)
    if not callable(function):
        offered = [
            key for key, value in vars(module).items() if callable(value) and value.__module__ == module.__name__
        ]
        raise WorkloadError(
            f"workload file {path} has no function {name!r}; it defines: {', '.join(offered) or 'none'}"
        )
    return function
