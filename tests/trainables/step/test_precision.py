"""Number formats: accuracy after training, dtypes of weights, and non-finite losses."""

import copy
import math
import threading
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.gloo import on_ranks
from trainables.data.fashion_mnist import SAMPLE, read_sample
from trainables.data.loader import endless_batches
from trainables.measure.run import run
from trainables.registry import PRECISIONS, load, names_with
from trainables.step.context import RankSetup, build_context
from trainables.step.parallel import in_callers_autocast
from trainables.step.precision import (
    Precision,
    Updater,
    bf16,
    cast_model,
    convert_linear_layers,
    fp8,
    fp16,
    fp16_master,
    fp16_pure,
    unmet_by,
)
from trainables.step.process import settings_for
from trainables.step.step import training_step
from trainables.step.timing import no_mark
from trainables.trial import Trial

CPU = torch.device("cpu")
TRAINING = Trial(model="mlp", parallel="none", batch_per_gpu=64, learning_rate=0.05)
STEPS, ACCURACY = 200, 0.75
"""minimum accuracy on the sample's 2,000 test images after 200 steps of 64 images; chance is 0.1"""


def accuracy_after_training(trial: Trial) -> float:
    precision: Precision = load(PRECISIONS[trial.precision])
    with settings_for(trial, precision):
        context = build_context(trial, RankSetup(0, CPU))
        workload = context.workload
        step = training_step(context, workload.model)
        for batch in islice(endless_batches(trial, workload, 0), STEPS):
            step(batch, no_mark)
        images, labels = read_sample(str(SAMPLE), "test")
        inputs = workload.prepare(torch.from_numpy(images)).to(precision.parameters or torch.float32)
        with (
            torch.no_grad(),
            torch.autocast("cpu", precision.autocast or torch.bfloat16, enabled=bool(precision.autocast)),
        ):
            predictions = workload.model(inputs).argmax(1)
        return float((predictions == torch.from_numpy(labels)).float().mean())


@pytest.mark.parametrize("name", names_with(PRECISIONS, "needs_gpu", False))
def test_every_precision_learns_the_bundled_sample(name: str) -> None:
    assert accuracy_after_training(TRAINING.but(precision=name)) >= ACCURACY


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 2))


def test_autocast_applies_in_the_threads_of_replicas() -> None:
    model, inputs = nn.Linear(4, 2), torch.randn(3, 4)
    types = []

    def in_a_thread(function: Any) -> None:
        thread = threading.Thread(target=lambda: types.append(function(inputs).dtype))
        thread.start()
        thread.join()

    with torch.autocast("cpu", torch.float16):
        in_a_thread(in_callers_autocast(model, "cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        in_a_thread(in_callers_autocast(model, "cpu"))
        in_a_thread(model)
    in_a_thread(in_callers_autocast(model, "cpu"))
    assert types == [torch.float16, torch.bfloat16, torch.float32, torch.float32]


def test_only_master_weights_keep_batch_normalisation_in_fp32() -> None:
    types = {
        name: [parameter.dtype for parameter in cast_model(convolution(), precision).parameters()]
        for name, precision in (("fp16", fp16), ("master", fp16_master), ("pure", fp16_pure))
    }
    half, full = torch.float16, torch.float32
    assert types["fp16"] == 6 * [full]
    assert types["master"] == [half, half, full, full, half, half]
    assert types["pure"] == 6 * [half]


def test_master_weights_accumulate_updates_below_fp16_resolution() -> None:
    weight = nn.Parameter(torch.ones(1, dtype=torch.float16))
    updater = Updater(fp16_master, lambda given: torch.optim.SGD(given, lr=2e-4), [weight], "cpu")
    for _ in range(8):
        weight.grad = updater.scaled(torch.full((1,), 0.5)).half()
        scale = updater.update()
        assert scale is not None
    assert weight.item() == torch.tensor(1 - 8e-4, dtype=torch.float16).item() < 1
    alone = torch.ones(1, dtype=torch.float16)
    for _ in range(8):
        alone -= torch.tensor(1e-4, dtype=torch.float16)
    assert alone.item() == 1, "a single update is below the resolution of fp16"


SPOILED = """
import torch
from itertools import count
from torch import nn
from torch.utils.data import TensorDataset
from trainables.workload import Workload

def build(trial):
    steps = count()
    def loss(output, target):
        value = 0.01 * nn.functional.mse_loss(output.float(), target)  # small, so that its gradients fit fp16
        return value * float("inf") if next(steps) == 3 else value
    return Workload(
        model=nn.Linear(4, 1), dataset=TensorDataset(torch.ones(64, 4), torch.ones(64, 1)), loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, fused=True),
    )
"""


def spoiled(rank: int, folder: str, precision: str) -> list[dict[str, Any]]:
    trial = Trial(
        workload=f"{folder}/spoiled_{precision}.py:build", parallel="none", precision=precision, warmup_steps=2, steps=4
    )
    return run(trial, RankSetup(rank=0, device=CPU)).tables["steps"]


def test_a_non_finite_loss_is_null_and_skips_the_step_at_half_the_scale(tmp_path: Path) -> None:
    (tmp_path / "spoiled_fp16.py").write_text(SPOILED)
    [rows] = on_ranks(1, spoiled, str(tmp_path), "fp16")
    assert [row["loss"] is None for row in rows[:6]] == [False, False, False, True, False, False]
    scales = [row["loss_scale"] for row in rows]
    assert scales[:6] == [65536.0, 65536.0, 65536.0, 32768.0, 32768.0, 32768.0]
    assert all(math.isfinite(row["loss"]) for row in rows[4:]), "the skipped step did not change the weights"


def test_without_loss_scaling_a_non_finite_step_corrupts_the_weights(tmp_path: Path) -> None:
    (tmp_path / "spoiled_fp32.py").write_text(SPOILED)
    [rows] = on_ranks(1, spoiled, str(tmp_path), "fp32")
    assert not any("loss_scale" in row for row in rows)
    assert [row["loss"] is None for row in rows] == [False] * 3 + [True] * (len(rows) - 3)


# ------------------------------------------------------------------------------------------------------------- fp8


def test_only_gpus_with_fp8_products_can_run_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    for capability, can_run in (((8, 0), False), ((8, 9), True), ((9, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert (unmet_by(fp8, gpu) is None) == can_run
        assert unmet_by(bf16, gpu) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "NVIDIA A100-SXM4-40GB" in str(unmet_by(fp8, gpu))
    assert "a CPU" in str(unmet_by(fp8, CPU))


def test_linear_layers_but_the_last_round_their_products_to_fp8() -> None:
    pytest.importorskip("torchao")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 20), nn.Tanh(), nn.Linear(20, 16))
    inputs = torch.randn(64, 32)
    results = []
    for converted in (model, convert_linear_layers(copy.deepcopy(model), emulate=True)):
        converted(inputs).square().mean().backward()
        results.append([parameter.grad for parameter in converted.parameters() if parameter.grad is not None])
    names = [type(module).__name__ for module in converted.children() if hasattr(module, "weight")]
    assert names == ["Float8Linear", "Linear", "Linear"], "20 is no multiple of 16, and the last layer is the output"
    errors = [float((mine - exact).norm() / exact.norm()) for exact, mine in zip(*results, strict=True)]
    assert 1e-3 < errors[0] < 0.1
