"""Process-wide state: set for a trial and restored after it, whatever the trial did."""

import gc
import random
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.gloo import on_ranks
from tests.support.system import needs
from trainables.registry import PRECISIONS, load
from trainables.step import precision as formats
from trainables.step.process import rehearse, settings_for
from trainables.trial import Trial


@pytest.fixture(scope="module", autouse=True)
def quick_collections() -> Iterator[None]:
    """Exclude imported modules from garbage collection, which runs in every trial."""
    clean_state()
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def state() -> dict[str, Any]:
    """Return all process settings that affect a trial's results or speed."""
    backends: Any = torch.backends
    switches = {
        "all": backends,
        "cuda.matmul": backends.cuda.matmul,
        "cudnn": backends.cudnn,
        "cudnn.conv": backends.cudnn.conv,
        "cudnn.rnn": backends.cudnn.rnn,
        "mkldnn": backends.mkldnn,
        "mkldnn.matmul": backends.mkldnn.matmul,
        "mkldnn.conv": backends.mkldnn.conv,
        "mkldnn.rnn": backends.mkldnn.rnn,
    }
    return {
        "threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "default_device": torch.get_default_device(),
        "grad": torch.is_grad_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn.enabled": backends.cudnn.enabled,
        "cudnn.benchmark": backends.cudnn.benchmark,
        "cudnn.deterministic": backends.cudnn.deterministic,
        "collector": gc.isenabled(),
        **{f"{name}.fp32_precision": switch.fp32_precision for name, switch in switches.items()},
    }


def clean_state() -> dict[str, Any]:
    """Return the state after an ordinary trial."""
    with settings_for(Trial(), formats.fp32):
        pass
    return state()


MEDDLING: dict[str, Any] = {
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "no gradients": lambda: torch.set_grad_enabled(False),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "no cudnn": lambda: setattr(torch.backends.cudnn, "enabled", False),
    "no cudnn benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", False),
    "cudnn deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "medium matmuls": lambda: torch.set_float32_matmul_precision("medium"),
    "high matmuls": lambda: torch.set_float32_matmul_precision("high"),
    "tf32 in cuda": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "tf32 everywhere": lambda: setattr(torch.backends, "fp32_precision", "tf32"),
    "tf32 in cudnn": lambda: setattr(torch.backends.cudnn, "fp32_precision", "tf32"),
    "bf16 in oneDNN": lambda: setattr(vars(torch.backends)["mkldnn"].matmul, "fp32_precision", "bf16"),
}


@pytest.mark.parametrize("raising", [False, True], ids=["returns", "raises"])
@pytest.mark.parametrize("meddle", MEDDLING.values(), ids=MEDDLING)
def test_settings_changed_by_a_users_code_are_restored(meddle: Any, raising: bool) -> None:
    clean = clean_state()
    try:
        with settings_for(Trial(), formats.fp32):
            before = state()
            meddle()
            assert state() != before, "`state` does not cover this setting"
            if raising:
                raise ArithmeticError
    except ArithmeticError:
        pass
    assert state() == clean
    assert torch.get_float32_matmul_precision() == "highest"
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_settings_of_a_trial_apply_only_during_it(name: str, deterministic: bool) -> None:
    clean = clean_state()
    trial = Trial(precision=name, deterministic=deterministic, cpus_per_rank=clean["threads"] + 1)
    with settings_for(trial, load(PRECISIONS[name])):
        within = state()
    arithmetic = "tf32" if name == "tf32" else "ieee"
    assert within == clean | {
        "threads": clean["threads"] + 1,
        "deterministic": deterministic,
        "cudnn.benchmark": not deterministic,
        "cudnn.deterministic": deterministic,
        "cuda.matmul.fp32_precision": arithmetic,
        "cudnn.conv.fp32_precision": arithmetic,
        "cudnn.rnn.fp32_precision": arithmetic,
        "mkldnn.matmul.fp32_precision": "tf32" if name == "tf32" else "none",
    }
    assert state() == clean


@pytest.mark.parametrize("name", PRECISIONS)
def test_torchs_older_switches_can_be_read(name: str) -> None:
    with settings_for(Trial(precision=name), load(PRECISIONS[name])):
        with torch.backends.cudnn.flags(enabled=False):
            assert not torch.backends.cudnn.enabled
        assert torch.backends.cudnn.allow_tf32 == (name == "tf32")
        assert torch.get_float32_matmul_precision() == ("high" if name == "tf32" else "highest")
        assert torch.backends.cuda.matmul.allow_tf32 == (name == "tf32")


def drawn(trial: Trial) -> list[float]:
    """Return the first random numbers of a trial, from torch, numpy and Python."""
    with settings_for(trial, formats.fp32):
        return [nn.Linear(1, 1).weight.item(), float(np.random.rand()), random.random()]


def test_random_numbers_depend_only_on_seed_and_repeat() -> None:
    first = drawn(Trial())
    torch.rand(3), np.random.rand(3), random.random()
    assert drawn(Trial()) == first
    for other in (Trial(repeat=1), Trial(seed=1), Trial(repeat=2**40, seed=2**31 - 1)):
        assert all(a != b for a, b in zip(drawn(other), first, strict=True))


def test_reference_cycles_are_freed_when_a_trial_ends() -> None:
    with settings_for(Trial(), formats.fp32):
        model = nn.Linear(1, 1)
        model.itself = [model]  # type: ignore[assignment]
        left = weakref.ref(model)
        del model
    assert left() is None


def _rehearses(rank: int) -> None:
    before = state()
    rehearse(torch.device("cpu"), None)
    assert state() == before


def test_a_rehearsal_changes_no_setting() -> None:
    on_ranks(2, _rehearses)


def test_kernels_of_attention_and_graphs_per_bucket_are_chosen_only_during_a_trial() -> None:
    def chosen() -> tuple[bool, bool, Any]:
        cuda: Any = torch.backends.cuda
        return cuda.flash_sdp_enabled(), cuda.math_sdp_enabled(), torch._dynamo.config.optimize_ddp

    before = chosen()
    trial = Trial(model="gpt2_tiny", dataset="token_sample", attention="math", execution="compile", split_graph=False)
    with settings_for(trial, load(PRECISIONS[trial.precision])):
        assert chosen() == (False, True, False)
    assert chosen() == before == (True, True, before[2]) and before[2]


def _attends(query: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)


@needs("g++")
def test_compiled_code_that_is_stored_for_other_kernels_of_attention_is_not_reused() -> None:
    kernels = {}
    for attention in ("auto", "math"):
        trial = Trial(model="gpt2_tiny", dataset="token_sample", attention=attention, execution="compile")
        with settings_for(trial, load(PRECISIONS[trial.precision])):
            query = torch.randn(2, 4, 32, 16, requires_grad=True)
            step = torch.compile(_attends)
            step(query).sum().backward()
            with torch.profiler.profile() as recorded:
                step(query).sum().backward()
        kernels[attention] = {event.key for event in recorded.key_averages()}
    assert any("flash" in name for name in kernels["auto"])
    assert not any("flash" in name for name in kernels["math"])
