"""Export the trials of a study to TensorBoard, MLflow or Weights & Biases.

python -m analysis.export DIR --tensorboard DIR2 | --mlflow URI | --wandb PROJECT

Each trial becomes one run: its fields as parameters, its measures as metrics, and loss and time per step as series.
The trackers' clients are optional dependencies.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.measure.configurations import trial_fields
from analysis.measure.measures import MEASURES, summaries
from analysis.read.errors import line
from analysis.read.results import Results, ResultsError, load

SERIES = {"loss": "plain", "step_s": "phases"}
"""Columns exported per step, with the window that they are taken from."""

CLIENTS = {"tensorboardX": "tensorboardX>=2.6", "mlflow": "mlflow-skinny>=3.1", "wandb": "wandb>=0.20"}
"""Module of each client, and the requirement that installs it."""


class ExportError(Exception):
    """The study cannot be exported; the message is one line with the cause and the fix."""


@dataclass(frozen=True)
class Run:
    """A trial in the form that trackers store.

    params: fields that are set. metrics: known measures. series: (step, value) per name, median over ranks.
    started_s, ended_s: seconds since 1970; None if the trial never ran.
    """

    trial_id: str
    status: str
    params: dict[str, Any]
    metrics: dict[str, float]
    series: dict[str, list[tuple[int, float]]]
    tags: dict[str, str]
    started_s: float | None
    ended_s: float | None


def runs(results: Results) -> Iterator[Run]:
    """Yield every trial of the study, ordered by id; trials without a result have no metrics."""
    measured = summaries(results.trials, results.windows).set_index("trial_id")[list(MEASURES)].astype(object)
    steps = {trial_id: rows for trial_id, rows in results.steps.groupby("trial_id")}
    fields = trial_fields(results.trials)
    for _, trial in results.trials.iterrows():
        trial_id = str(trial["trial_id"])
        values = measured.loc[trial_id].dropna().to_dict() if trial_id in measured.index else {}
        started_s = None if pd.isna(trial["started_at"]) else float(trial["started_at"])
        duration_s = 0.0 if pd.isna(trial["duration_s"]) else float(trial["duration_s"])
        tags = {name: trial[name] for name in ("status", "reason", "worker_group", "device_name", "hosts")}
        yield Run(
            trial_id=trial_id,
            status=str(trial["status"]),
            params={name: _plain(trial[name]) for name in fields if trial[name] != "" and not pd.isna(trial[name])},
            metrics={str(name): float(value) for name, value in values.items()},
            series=_series(steps[trial_id]) if trial_id in steps else {},
            tags={name: str(value) for name, value in tags.items() if isinstance(value, str) and value},
            started_s=started_s,
            ended_s=None if started_s is None else started_s + duration_s,
        )


def _series(steps: pd.DataFrame) -> dict[str, list[tuple[int, float]]]:
    series = {}
    for name, window in SERIES.items():
        values = steps[steps["window"] == window].groupby("step")[name].median().dropna()
        if len(values):
            series[name] = [(int(step), float(value)) for step, value in zip(values.index, values, strict=True)]
    return series


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def to_tensorboard(results: Results, directory: str | os.PathLike[str]) -> int:
    """Write event files with hyperparameters, one folder per trial below `directory`; return the number of trials.

    Files of an earlier export remain, and TensorBoard shows both. Raises ExportError if tensorboardX is missing.
    """
    client = _client("tensorboardX")
    exported = list(runs(results))
    for run in exported:
        with client.SummaryWriter(f"{os.fspath(directory)}/{run.trial_id}") as writer:
            # writer.add_hparams would open a second file with the same name within the same second.
            for part in client.summary.hparams(run.params | {"status": run.status}, run.metrics):
                writer.file_writer.add_summary(part)
            for name, value in run.metrics.items():
                writer.add_scalar(name, value)
            for name, values in run.series.items():
                for step, value in values:
                    writer.add_scalar(f"steps/{name}", value, step)
    return len(exported)


def to_mlflow(results: Results, tracking_uri: str) -> int:
    """Write one run per trial into the experiment named after the study; return the number of new runs.

    Skips trials that the experiment already has, identified by the tag `trial_id`. Raises ExportError if MLflow is
    missing or fails.
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
        started_ms = int(1000 * (run.started_s or 0))
        made = client.create_run(experiment_id, start_time=started_ms, run_name=run.trial_id)
        tags = run.tags | {"trial_id": run.trial_id}
        metrics = [Metric(name, value, started_ms, 0) for name, value in run.metrics.items()]
        for series, values in run.series.items():
            metrics += [Metric(f"steps.{series}", value, started_ms, step) for step, value in values]
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
"""Maximum metrics per request."""


def to_wandb(results: Results, project: str, offline: bool = False, directory: str | os.PathLike[str] = ".") -> int:
    """Write one run per trial into the project, grouped by study; return the number of trials.

    offline: write files below `directory`/wandb, to be sent by `wandb sync`. Runs use the trial's id, so a second
    export replaces the first. Raises ExportError if the client is missing or fails.
    """
    wandb = _client("wandb")
    try:
        return _to_wandb(wandb, results, project, offline, directory)
    except wandb.errors.Error as error:
        raise ExportError(f"Weights & Biases: {line(error)}") from None


def _to_wandb(wandb: Any, results: Results, project: str, offline: bool, directory: str | os.PathLike[str]) -> int:
    exported = list(runs(results))
    for run in exported:
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
    return len(exported)


def _study_name(results: Results) -> str:
    return str(results.study.get("name") or "study")


def _client(module: str) -> Any:
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ExportError(f'{module} is not installed; fix: pip install "{CLIENTS[module]}"') from None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit code; report user errors as one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m analysis.export", description=__doc__.partition("\n")[0])
    parser.add_argument("results", metavar="DIR", help="results folder of a study, or its URI")
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--tensorboard", metavar="DIR2", help="folder for event files")
    target.add_argument("--mlflow", metavar="URI", help="tracking server, or file:FOLDER")
    target.add_argument("--wandb", metavar="PROJECT", help="Weights & Biases project")
    parser.add_argument("--offline", action="store_true", help="with --wandb: write files for `wandb sync`")
    options = parser.parse_args(arguments)
    for name in ("tensorboard", "mlflow", "wandb"):
        if getattr(options, name) == "":
            parser.error(f"--{name} must not be empty")
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
