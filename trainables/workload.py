"""What is trained: model, data, loss and optimizer, from the registries or from a user's own file."""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler, default_collate

from trainables.batch import identity
from trainables.data.augment import padded_crop_and_flip
from trainables.data.resident import all_on_device
from trainables.data.text import next_byte_loss, streams
from trainables.models.resnet import zero_last_gammas
from trainables.models.stem import rewrite_stem
from trainables.optimizers import make_optimizer
from trainables.precision import Precision, cast_model
from trainables.registry import DATASETS, MODELS, load
from trainables.trial import Trial


class WorkloadError(Exception):
    """A user's workload file that cannot be used, in one line: what, where, what to do."""

    exit_code = 2


@dataclass(frozen=True)
class OnHost:
    """A part of a batch that stays on the host: `prepare` gets it as the loader made it.

    It counts for nothing in the bytes copied to the device; what `prepare` copies is part of the forward pass.
    """

    value: Any


@dataclass(frozen=True)
class Held:
    """Samples that are never trained on; `loss` as a workload's, and `prepare`, which augments nothing."""

    dataset: Dataset
    loss: Callable[[Any, Any], torch.Tensor]
    prepare: Callable[[Any], Any] = identity


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
    ahead: Callable[[Any], torch.Tensor] | None = None
    """applied to the inputs of batches to come, in a thread and on the device beside the step (None: nothing is)"""
    resident: bool = False
    """the data set's tensors are on the device already: no loader, no copy"""
    blueprint: Callable[[], nn.Module] | None = None
    """makes the model once more, on the current device, so that its operations can be counted; None: not known"""
    batch_indices: Callable[[int], Sampler[list[int]]] | None = None
    """(rank) -> its endless batches of indices; None: shuffled samples, as `trainables.data.loader` does"""
    validation: Held | None = None
    """held-out samples, on which training by epochs is judged; None: it is not"""
    gathered: bool = False
    """`dataset.tensors` (inputs, targets) are on the device already, and a batch is a tensor of indices into them"""

    def select(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) of a batch on the device."""
        if not self.gathered:
            return batch
        inputs, targets = self.dataset.tensors  # type: ignore[attr-defined]
        return inputs[batch], targets[batch]


def build_workload(trial: Trial, device: torch.device, source: str | None = None) -> Workload:
    """The trial's workload; its model is made on the device, or on the CPU where the workload is a user's own.

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
    return (_text if MODELS[trial.model].reads == "text" else _images)(trial, device)


def _images(trial: Trial, device: torch.device) -> Workload:
    data = load(DATASETS[trial.dataset].images)(trial)
    blueprint = partial(load(MODELS[trial.model]), data.classes, data.channels, data.image_size)
    with device:
        model = blueprint()
    if trial.zero_gamma:
        zero_last_gammas(model)
    if trial.rewritten_stem:
        rewrite_stem(model)
    first, normalise = data.prepare, _normalise(trial.memory_format)
    if trial.augment == "device" and DATASETS[trial.dataset].in_memory:
        first = padded_crop_and_flip
    return Workload(
        model=model,
        blueprint=blueprint,
        dataset=all_on_device(data.dataset, device) if trial.resident_data else data.dataset,
        loss=partial(nn.functional.cross_entropy, label_smoothing=trial.label_smoothing),
        optimizer=make_optimizer(trial),
        collate=identity,
        prepare=_prepare(first, normalise),
        ahead=data.ahead,
        resident=DATASETS[trial.dataset].on_device,
        validation=_held(trial, device) if trial.epochs else None,
        gathered=trial.resident_data,
    )


def _held(trial: Trial, device: torch.device) -> Held:
    """The data set's part for tests, without augmentation; its loss is the plain cross entropy."""
    data = load(DATASETS[trial.dataset].images)(trial.but(augment="none"), "test")
    dataset = all_on_device(data.dataset, device) if trial.resident_data else data.dataset
    return Held(dataset, nn.functional.cross_entropy, _prepare(data.prepare, _normalise(trial.memory_format)))


def _text(trial: Trial, device: torch.device) -> Workload:
    data = load(DATASETS[trial.dataset].text)(trial)
    blueprint = partial(load(MODELS[trial.model]), data.vocabulary, trial)
    with device:
        model = blueprint()
    return Workload(
        model=model,
        blueprint=blueprint,
        dataset=data.dataset,
        loss=next_byte_loss,
        optimizer=make_optimizer(trial),
        collate=identity,
        resident=DATASETS[trial.dataset].on_device,
        batch_indices=partial(streams, trial, data.dataset),
    )


def _prepare(
    first: Callable[[Any], torch.Tensor] | None, normalise: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Any], torch.Tensor]:
    return normalise if first is None else lambda inputs: normalise(first(inputs))


def _normalise(memory_format: str) -> Callable[[torch.Tensor], torch.Tensor]:
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format

    def normalise(images: torch.Tensor) -> torch.Tensor:
        """uint8 [n, c, h, w] to float32 in [-1, 1]; floats pass."""
        if images.dtype == torch.uint8:
            images = torch.add(torch.tensor(-1.0), images.contiguous(memory_format=layout), alpha=1 / 127.5)
        return images

    return normalise


def on_device(workload: Workload, trial: Trial, precision: Precision, device: torch.device) -> Workload:
    """The workload with its model on the device, in training mode, in the trial's memory format and weights' type."""
    layout = torch.channels_last if trial.memory_format == "channels_last" else torch.contiguous_format
    model = cast_model(workload.model.to(device), precision)
    if any(parameter.dim() == 4 for parameter in model.parameters()):
        model = model.to(memory_format=layout)
    if trial.compiled:
        model.compile()  # before it is wrapped: then the compiler cuts its graph where DDP's buckets end
    return replace(workload, model=model.train())


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
        path = _stand_in(path.name, source)
    if not path.stem.isidentifier():
        raise WorkloadError(
            f"workload file {path} cannot be imported under the name {path.stem!r}; rename it to letters, digits and underscores"
        )
    digest = hashlib.sha256(str(path.resolve()).encode() + path.read_bytes()).hexdigest()
    module = sys.modules.get(path.stem)
    if module is None or vars(module).get("_workload_digest") != digest:
        if module is not None and "_workload_digest" not in vars(module):
            _refuse_another(path, module)
        module = _import(path)
        _refuse_another(path, module)
        vars(module)["_workload_digest"] = digest
    function = getattr(module, name, None)
    if not callable(function):
        offered = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise WorkloadError(
            f"workload file {path} has no function {name!r}; it defines: {', '.join(offered) or 'none'}"
        )
    return function


def _stand_in(file_name: str, source: str) -> Path:
    """The file with this text, in a temporary folder of this user; other ranks of the host may write it at the same time."""
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    path = Path(tempfile.gettempdir()) / f"scaling-study-workload-{os.getuid()}-{digest}" / file_name
    path.parent.mkdir(mode=0o700, exist_ok=True)
    owner = path.parent.lstat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) & 0o022 or path.parent.is_symlink():
        raise WorkloadError(f"{path.parent} can be written by others, and code would be run from it: remove it")
    partial = path.with_name(f".{file_name}.{os.getpid()}.partial")
    partial.write_text(source)
    partial.replace(path)
    return path


def _import(path: Path) -> ModuleType:
    """Imports a user's file anew, under its own name."""
    sys.modules.pop(path.stem, None)
    folder = str(path.parent)
    sys.path[:] = [folder, *(entry for entry in sys.path if entry != folder)]
    importlib.invalidate_caches()
    with contextlib.suppress(OSError):
        # compiled files are told apart by size and whole seconds only
        Path(importlib.util.cache_from_source(path)).unlink(missing_ok=True)
    try:
        return importlib.import_module(path.stem)
    except (Exception, SystemExit) as error:  # whatever a user's file raises is the user's to see, in one line
        line = next(iter(str(error).strip().splitlines()), "")
        kind = type(error).__name__
        raise WorkloadError(f"workload file {path} does not import: {f'{kind}: {line}' if line else kind}") from error


def _refuse_another(path: Path, module: ModuleType) -> None:
    """A module of that name which is not this file must stay what it is: others import it too."""
    where = getattr(module, "__file__", None)
    if where is None or Path(where).resolve() != path.resolve():
        raise WorkloadError(
            f"workload file {path}: another module named {path.stem!r} is found first ({where}); rename the file"
        )
