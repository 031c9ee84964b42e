"""A study's trials in an experiment tracker: python -m analysis.export DIR --tensorboard DIR2 | --mlflow URI | --wandb PROJECT

One run a trial: its fields as parameters, its measures as metrics, and the loss and the time of each step over the steps.
Each tracker's own client writes; the clients are optional.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.load.errors import line
from analysis.load.results import Results, ResultsError, load
from analysis.measure.configurations import trial_fields
from analysis.measure.measures import MEASURES, summaries

SERIES = {"loss": "plain", "step_s": "phases"}
"""What is exported step by step, and of which window."""

CLIENTS = {"tensorboardX": "tensorboardX>=2.6", "mlflow": "mlflow-skinny>=3.1", "wandb": "wandb>=0.20"}
"""Modules of the clients, and what to install for each."""


class ExportError(Exception):
    """A study cannot be exported: one line with what is wrong and what to do."""


@dataclass(frozen=True)
class Run:
    """A trial as trackers keep it. params: fields that are set. metrics: measures that are known. series: for each name,
    (step, value), the median over ranks. began_s, ended_s: seconds since 1970, None where the trial never ran."""

    trial_id: str
    status: str
    params: dict[str, Any]
    metrics: dict[str, float]
    series: dict[str, list[tuple[int, float]]]
    tags: dict[str, str]
    began_s: float | None
    ended_s: float | None


def runs(results: Results) -> Iterator[Run]:
    """Every trial of the study, in the order of their ids; those without a result have no metric."""
    measured = summaries(results.trials, results.windows).set_index("trial_id")[list(MEASURES)].astype(object)
    steps = {trial_id: rows for trial_id, rows in results.steps.groupby("trial_id")}
    fields = trial_fields(results.trials)
    for _, trial in results.trials.iterrows():
        trial_id = str(trial["trial_id"])
        values = measured.loc[trial_id].dropna().to_dict() if trial_id in measured.index else {}
        began_s = None if pd.isna(trial["started_at"]) else float(trial["started_at"])
        lasted_s = 0.0 if pd.isna(trial["duration_s"]) else float(trial["duration_s"])
        tags = {name: trial[name] for name in ("status", "reason", "worker_group", "device_name", "hosts")}
        yield Run(
            trial_id=trial_id,
            status=str(trial["status"]),
            params={name: _plain(trial[name]) for name in fields if trial[name] != "" and not pd.isna(trial[name])},
            metrics={str(name): float(value) for name, value in values.items()},
            series=_series(steps[trial_id]) if trial_id in steps else {},
            tags={name: str(value) for name, value in tags.items() if isinstance(value, str) and value},
            began_s=began_s,
            ended_s=None if began_s is None else began_s + lasted_s,
        )


def _series(steps: pd.DataFrame) -> dict[str, list[tuple[int, float]]]:
    found = {}
    for name, window in SERIES.items():
        values = steps[steps["window"] == window].groupby("step")[name].median().dropna()
        if len(values):
            found[name] = [(int(step), float(value)) for step, value in zip(values.index, values, strict=True)]
    return found


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def to_tensorboard(results: Results, directory: str | os.PathLike[str]) -> int:
    """Writes event files below `directory`, a folder a trial, its fields as hyperparameters; gives how many trials.

    Files of an earlier export stay, and TensorBoard shows both. Raises ExportError without tensorboardX.
    """
    client = _client("tensorboardX")
    count = 0
    for count, run in enumerate(runs(results), 1):
        with client.SummaryWriter(f"{os.fspath(directory)}/{run.trial_id}") as writer:
            # Not writer.add_hparams: its second writer opens a file of the same name in the same second.
            for part in client.summary.hparams(run.params | {"status": run.status}, run.metrics):
                writer.file_writer.add_summary(part)
            for name, value in run.metrics.items():
                writer.add_scalar(name, value)
            for name, values in run.series.items():
                for step, value in values:
                    writer.add_scalar(f"steps/{name}", value, step)
    return count


def to_mlflow(results: Results, tracking_uri: str) -> int:
    """Writes a run for each trial into the experiment of the study's name; gives how many were new.

    A trial that the experiment has already, told by the tag `trial_id`, is left alone. Raises ExportError without MLflow.
    """
    if tracking_uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3.x refuses folders without it
    mlflow = _client("mlflow")
    try:
        return _to_mlflow(results, mlflow.MlflowClient(tracking_uri=tracking_uri))
    except mlflow.exceptions.MlflowException as error:
        raise ExportError(f"MLflow at {tracking_uri}: {line(error)}") from None


def _to_mlflow(results: Results, client: Any) -> int:
    from mlflow.entities import Metric, Param, RunTag

    name = _study_name(results)
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    count = 0
    for run in runs(results):
        if client.search_runs([experiment_id], f"tags.trial_id = '{run.trial_id}'", max_results=1):
            continue
        began_ms = int(1000 * (run.began_s or 0))
        made = client.create_run(experiment_id, start_time=began_ms, run_name=run.trial_id)
        tags = run.tags | {"trial_id": run.trial_id}
        metrics = [Metric(name, value, began_ms, 0) for name, value in run.metrics.items()]
        for series, values in run.series.items():
            metrics += [Metric(f"steps.{series}", value, began_ms, step) for step, value in values]
        client.log_batch(
            made.info.run_id,
            params=[Param(name, str(value)) for name, value in run.params.items()],
            tags=[RunTag(name, value) for name, value in tags.items()],
        )
        for start in range(0, len(metrics), _MLFLOW_BATCH):
            client.log_batch(made.info.run_id, metrics=metrics[start : start + _MLFLOW_BATCH])
        client.set_terminated(
            made.info.run_id, "FINISHED" if run.status == "done" else "FAILED", int(1000 * (run.ended_s or 0))
        )
        count += 1
    return count


_MLFLOW_BATCH = 1000
"""Metrics that one request may hold."""


def to_wandb(results: Results, project: str, offline: bool = False, directory: str | os.PathLike[str] = ".") -> int:
    """Makes a run for each trial in the project, grouped by the study; gives how many.

    offline: runs are files below `directory`/wandb, which `wandb sync` sends later. A run has its trial's id, so that a
    second export replaces the first. Raises ExportError without the client.
    """
    wandb = _client("wandb")
    try:
        return _to_wandb(wandb, results, project, offline, directory)
    except wandb.errors.Error as error:
        raise ExportError(f"Weights & Biases: {line(error)}") from None


def _to_wandb(wandb: Any, results: Results, project: str, offline: bool, directory: str | os.PathLike[str]) -> int:
    count = 0
    for count, run in enumerate(runs(results), 1):
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_meta=True)
        with wandb.init(
            project=project,
            id=run.trial_id,
            name=run.trial_id,
            group=_study_name(results),
            config=run.params,
            tags=[run.status],
            mode="offline" if offline else "online",
            dir=os.fspath(directory),
            settings=settings,
        ) as made:
            for name, values in run.series.items():
                made.define_metric(f"steps/{name}", step_metric="step")
                for step, value in values:
                    made.log({"step": step, f"steps/{name}": value})
            made.summary.update(run.metrics)
    return count


def _study_name(results: Results) -> str:
    return str(results.study.get("name") or "study")


def _client(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ExportError(f'{module} is not installed; install it: pip install "{CLIENTS[module]}"') from None


def main(arguments: Sequence[str]) -> int:
    """Runs the command and gives its exit code; a user's mistake is one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.export", description=__doc__.partition("\n")[0])
    parser.add_argument("results", metavar="DIR", help="results folder of a study, or its URI")
    to = parser.add_mutually_exclusive_group(required=True)
    to.add_argument("--tensorboard", metavar="DIR2", help="folder for event files")
    to.add_argument("--mlflow", metavar="URI", help="tracking server, or file:FOLDER")
    to.add_argument("--wandb", metavar="PROJECT", help="project of Weights & Biases")
    parser.add_argument("--offline", action="store_true", help="with --wandb: write files, for `wandb sync` to send")
    options = parser.parse_args(arguments)
    for name in ("tensorboard", "mlflow", "wandb"):
        if getattr(options, name) == "":
            parser.error(f"--{name} is empty")
    try:
        results = load(options.results)
        if options.tensorboard is not None:
            count = to_tensorboard(results, options.tensorboard)
        elif options.mlflow is not None:
            count = to_mlflow(results, options.mlflow)
        else:
            count = to_wandb(results, options.wandb, options.offline)
    except (ResultsError, ExportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{count} trials exported")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
