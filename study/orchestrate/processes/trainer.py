"""Ray Train's trainer for a launch. That for forked ranks starts nothing that such ranks do not use.

Written for Ray 2.60. Another version that lacks a class uses Ray Train as it is, and takes seconds longer to start.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import ray

from study.plan.placement import ProcessKind

WARN_BLOCKING_GET = "RAY_WARN_BLOCKING_GET_INSIDE_ASYNC"
"""Ray Train switches this warning off in its controller."""


def make_trainer(kind: ProcessKind, train_loop: Callable[[dict[str, Any]], None], **options: Any) -> Any:
    """Return Ray Train's trainer for a launch. options: of TorchTrainer.

    With forked ranks it is TorchTrainer's base class, which does not import torch: the processes of the ranks have
    imported it, and make their process groups themselves. It starts nothing for Ray Data, which such ranks cannot use:
    Ray starts two actors per launch for data sets, and the launch waits for the first one. Nor do controller and
    workers have variables of their own, because Ray would then start a new process for each of them, one after the
    other, instead of taking one that it has ready.
    """
    if not kind.forks_ranks:
        from ray.train.torch import TorchConfig, TorchTrainer

        backend = TorchConfig(backend="nccl" if kind.device == "cuda" else "gloo")
        return TorchTrainer(train_loop, torch_config=backend, **options)
    try:
        from ray.train.v2._internal import constants
        from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
        from ray.train.v2._internal.constants import get_env_vars_to_propagate
        from ray.train.v2._internal.execution.controller import TrainController
        from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy
        from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    except ImportError:
        from ray.train.torch import TorchTrainer

        return TorchTrainer(train_loop, torch_config=_without_process_group(), **options)

    class FixedRanks(FixedScalingPolicy):
        """Requests nothing from an autoscaler: the ranks have their places, and a placement group holds them."""

        def after_controller_start(self, train_run_context: Any) -> None:
            pass

        def _maybe_send_resource_request(self) -> None:
            pass

    class Controller(TrainController):
        """Sets Train's variables in its process itself, and passes none to workers, which only fork ranks."""

        __qualname__ = TrainController.__qualname__  # its name in Ray's dashboard

        def __init__(self, variables: Mapping[str, str], **options: Any):
            os.environ.update(variables)
            constants.ENV_VARS_TO_PROPAGATE = set()
            super().__init__(**options)

    class TrainerOfForkedRanks(DataParallelTrainer):
        def _initialize_and_run_controller(self, **options: Any) -> Any:
            options["callbacks"] = [each for each in options["callbacks"] if not isinstance(each, DatasetsCallback)]
            options["scaling_policy"] = FixedRanks(options["scaling_policy"].scaling_config)
            variables = {WARN_BLOCKING_GET: "0"} | get_env_vars_to_propagate()
            here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
            controller = ray.remote(num_cpus=0, label_selector=here)(Controller).remote(variables, **options)
            ray.get(controller.run.remote())
            return ray.get(controller.get_result.remote())

    return TrainerOfForkedRanks(train_loop, backend_config=_without_process_group(), **options)


def _without_process_group() -> Any:
    """Return a backend that sets up nothing in Ray Train's workers but the devices that they share."""
    from ray.train.backend import Backend, BackendConfig

    class SharedDevices(Backend):
        share_cuda_visible_devices = True

    class NoProcessGroup(BackendConfig):
        backend = "none"

        @property
        def backend_cls(self) -> type[Backend]:
            return SharedDevices

        def to_dict(self) -> dict[str, Any]:
            return {}

    return NoProcessGroup()
