"""Random images that lie on the device before the first step: no loading, no copying, only training."""

import torch
from torch.utils.data import TensorDataset

from trainables.data import DataSource
from trainables.trial import Trial

CLASSES = 1000
CHANNELS = 3


def resident(trial: Trial) -> DataSource:
    """One batch of standard normal images and labels on the rank's device, used in every step.

    Images are float32 [batch_per_process, 3, image_size, image_size] in the trial's memory format. Random values, not zeros:
    zeros draw less power and run faster.
    """
    device = torch.device(trial.device, torch.cuda.current_device()) if trial.device == "cuda" else torch.device("cpu")
    layout = torch.channels_last if trial.memory_format == "channels_last" else torch.contiguous_format
    images = torch.randn(trial.batch_per_process, CHANNELS, trial.image_size, trial.image_size, device=device)
    labels = torch.randint(CLASSES, (trial.batch_per_process,), device=device)
    dataset = TensorDataset(images.contiguous(memory_format=layout), labels)
    return DataSource(dataset=dataset, classes=CLASSES, channels=CHANNELS, image_size=trial.image_size)
