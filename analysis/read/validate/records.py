"""The records of a results folder as typed values: study.json and trial.json."""

import json
import re
import shlex
from collections.abc import Mapping, Sized
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from analysis.read.errors import ResultsError
from analysis.read.schema import SCHEMA_VERSION, STATUSES

MAX_RANKS = 2**16
MAX_STEPS = 2**24
MAX_ROWS = 10_000_000
MAX_FIELDS = 256
"""Largest accepted counts: ranks of a trial, steps of a window, rows of one table of a trial, and fields of a trial.

The latter is also that of a script's flags, variables or entries, because each is a column of every table."""

_RESERVED = re.compile(
    r".*_(s|s_\d+|low|high|more|bytes|ratio|share|percent|per_s|sd|samples|per_epoch|target|rank|bound)"
    r"|(throughput|speed_up|critical_batch|held|reference|scaling|efficiency)(_.*)?|after|against|balance|baseline"
    r"|bucket|buckets|bytes|calls|caveat|command|configuration|each|exposed|final_loss|global_batch|groups|holds|host"
    r"|ideal|index|late|law|level_\d|link|log|loss|hfu|mfu(_unmasked)?|share_of_.*|n|operation|outcome|parameters|place"
    r"|power_w.*|problem|rank|ranks"
    r"|ratio|reading|relative|rest|recipe|sample|samples|seconds|series|setting|side|sizes|skipped_steps|status"
    r"|step|step_flops|trial_ids?|utilisation|value|verdict|weight|window|reason|environment|hosts|device_name"
    r"|busy_fraction|concurrent|worker_group|started_at|trace_paths|own_code"
    r"|(.*_)?(variance|degrees|difference|error|losses|top1|top5)|(train|epoch)_loss|lossless_batch(_.*)?"
    r"|(epochs|early|longest|is|previous|failing|own)_.*|critical_from|change|how|gain|machine|made_of"
    r"|plain_efficiency|lane|kind|log_mean|outlying|group_names|not_resolved|beats_naive|residual|loss_scale"
    r"|first_is_slowest|outliers|dip_p|rare(_times)?|plain_steps|within_noise|reached|runs|in_order|traced"
)
"""Columns that the analysis adds to the fields of a trial."""

_DECLARED_LIKE_IT = (
    "reference_batch", "sweep_bytes", "tokens_per_sample", "batch_per_gpu", "cpus_per_rank", "window_limit_s",
    "shard_ranks",
)  # fmt: skip

Count = Annotated[int, Field(ge=0, le=2**40)]
Positive = Annotated[int, Field(ge=1, le=2**40)]
Amount = Annotated[int | float, Field(ge=0, le=1e30)]
Text = Annotated[str, Field(max_length=4096)]
Arguments = Annotated[str, Field(max_length=2**17)]
Names = Annotated[list[Text], Field(max_length=1000)]
Scalar = Text | Annotated[int, Field(ge=-(2**53), le=2**53)] | float | bool | None

Values = Annotated[dict[str, Scalar], Field(max_length=10_000)]


def is_reserved(name: str) -> bool:
    """Return True if the analysis has a column of this name, so that it cannot be a field of a trial."""
    return bool(_RESERVED.fullmatch(name)) and name not in _DECLARED_LIKE_IT


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


def _few(value: str, entries: Sized) -> str:
    """Return the value. Raises ValueError if it has more entries than a trial may have fields."""
    if len(entries) > 2 * MAX_FIELDS:  # a flag and its value are two
        raise ValueError(f"has {len(entries)} entries; at most {2 * MAX_FIELDS} are read")
    return value


class Fields(_Part):
    """The fields of a trial. Those that the analysis computes with have limits."""

    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    nodes: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    batch_per_gpu: Annotated[int, Field(ge=1, le=2**30)]
    device: Text
    accumulation_steps: Annotated[int, Field(ge=1, le=2**12)] = 1
    steps: Annotated[int, Field(ge=1, le=MAX_STEPS)] = 1
    warmup_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    communication_steps: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    loader_workers: Annotated[int, Field(ge=0, le=2**16)] = 0
    prefetch_batches: Annotated[int, Field(ge=0, le=2**16)] = 0
    epochs: Annotated[int, Field(ge=0, le=MAX_STEPS)] = 0
    cpus_per_rank: Positive = 1
    image_size: Positive = 1
    sequence_length: Positive = 1
    reference_batch: Positive = 1
    sweep_bytes: Count = 0
    repeat: Count = 0
    seed: Count = 0
    bucket_mb: Annotated[float, Field(gt=0, le=1e9)] = 25.0
    first_bucket_mb: Annotated[float, Field(gt=0, le=1e9)] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=1e30)] = 1.0
    warmup_epochs: Amount = 0.0
    window_limit_s: Annotated[float, Field(gt=0)] | None = None
    median_width: Annotated[float, Field(gt=0, lt=1)] | None = None
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    tokens_per_sample: Positive | None = None
    shard_ranks: Positive | None = None
    script: Text = ""
    train_function: Text = ""
    script_arguments: Arguments = ""
    script_flags: Arguments = ""
    script_env: Arguments = ""
    function_config: Arguments = ""
    bindings: Arguments = ""

    __pydantic_extra__: dict[str, Scalar]

    @field_validator("bindings", "script_env")
    @classmethod
    def _pairs(cls, value: str) -> str:
        entries = shlex.split(value)
        if not all(name and equals for name, equals, _ in (entry.partition("=") for entry in entries)):
            raise ValueError("is no list of NAME=VALUE")
        return _few(value, entries)

    @field_validator("script_flags")
    @classmethod
    def _arguments(cls, value: str) -> str:
        return _few(value, shlex.split(value))

    @field_validator("function_config")
    @classmethod
    def _mapping(cls, value: str) -> str:
        config = json.loads(value or "{}")
        if not (isinstance(config, dict) and all(isinstance(item, _SCALARS) for item in config.values())):
            raise ValueError("is no mapping of numbers and texts")
        return _few(value, config)

    @model_validator(mode="after")
    def _layout(self) -> "Fields":
        if len(self.model_extra or ()) > MAX_FIELDS:
            raise ValueError(f"has {len(self.model_extra or ())} unknown fields")
        if self.nodes > self.world_size:
            raise ValueError(f"{self.nodes} nodes for {self.world_size} ranks")
        return self


_SCALARS = (str, int, float, bool, type(None))


class _Gpu(_Part):
    name: Text | None = None
    uuid: Text | None = None
    driver: Text | None = None
    memory_bytes: Count | None = None
    pcie_generation: Count | None = None
    pcie_width: Count | None = None
    nvlinks: Count | None = None
    nvlink_version: Text | None = None


class _Node(_Part):
    node_id: Text | None = None
    host: Text | None = None
    cpu_model: Text | None = None
    cpu_count: Annotated[int | float, Field(ge=0, le=1e6)] | None = None
    memory_bytes: Count | None = None
    gpus: Annotated[list[_Gpu], Field(max_length=1000)] | None = None
    versions: Values | None = None


class _Reading(_Part):
    load_average_1min: Amount | None = None
    sm_clock_mhz: Amount | None = None
    memory_clock_mhz: Amount | None = None
    power_w: Amount | None = None
    temperature_c: Annotated[int | float, Field(ge=-300, le=1e4)] | None = None
    energy_j: Amount | None = None
    at: Amount | None = None
    throttle_reasons: Names | None = None


class _PlainWindow(_Part):
    before: Annotated[list[_Reading], Field(max_length=10_000)]
    after: Annotated[list[_Reading], Field(max_length=10_000)]
    steps: Positive | None = None

    @model_validator(mode="after")
    def _equally_long(self) -> "_PlainWindow":
        if len(self.before) != len(self.after):
            raise ValueError("before and after differ in length")
        return self


class _Probe(_Part):
    samples_per_step: Annotated[int | float, Field(ge=0, le=2**30)] | None = None
    tokens_per_step: Amount | None = None
    micro_batches: Annotated[int, Field(ge=0, le=2**16)] | None = None
    losses: Annotated[list[float | None], Field(max_length=MAX_STEPS)] = []
    nulls: dict[str, Text | None] | None = None


class _Rank(_Part):
    rank: Count | None = None
    node_id: Text | None = None
    device: Text | None = None
    gpu_uuid: Text | None = None
    threads: Count | None = None
    affinity: Annotated[list[Count], Field(max_length=MAX_RANKS)] | None = None
    niceness: Annotated[int, Field(ge=-100, le=100)] | None = None
    before: _Reading | None = None
    after: _Reading | None = None
    plain_window: _PlainWindow | None = None
    probe: _Probe | None = None
    step_flops: Amount | None = None
    causal_attention_flops: Amount | None = None
    recomputed_flops: Amount | None = None
    matmul_flops_per_s: dict[Text, Amount] | None = None
    dataset_samples: Count | None = None
    tokens_per_sample: Amount | None = None
    concurrent: Count | None = None
    unread_fields: Names | None = None
    peak_memory_by_device_bytes: Annotated[list[Count], Field(max_length=1000)] | None = None


class _Git(_Part):
    commit: Text | None = None
    dirty: bool | None = None


class _Group(_Part):
    asked_at: Amount
    opened_at: Amount


class Environment(_Part):
    """What a trial ran on."""

    nodes: Annotated[list[_Node], Field(max_length=MAX_RANKS)] = []
    ranks: Annotated[list[_Rank], Field(max_length=MAX_RANKS)] = []
    versions: Values | None = None
    variables: Values | None = None
    set_by_study: Names | None = None
    measuring_code: Text | None = None
    git: _Git | None = None
    other_studies: Names | None = None
    group: _Group | None = None

    @field_validator("group", mode="before")
    @classmethod
    def _opened(cls, value: Any) -> Any:
        """Return None for the empty record of a group that never opened."""
        return value or None


class TrialRecord(BaseModel):
    """The part of trial.json that is read, as single values."""

    model_config = ConfigDict(extra="ignore", strict=True)

    schema_version: int
    trial_id: Annotated[str, Field(min_length=1, max_length=255)]
    trial: Fields
    status: str
    reason: str | None = None
    worker_group: Text | None = None
    started_at: Annotated[float, Field(ge=0, le=1e11)] | None = None
    duration_s: float | None = None
    environment: Environment
    log: Text | None = None

    @field_validator("status")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in STATUSES:
            raise ValueError(f"is none of {', '.join(STATUSES)}")
        return value

    @field_validator("duration_s")
    @classmethod
    def _positive(cls, value: float | None) -> float | None:
        """Return None for a negative duration: the clock was set back during the trial."""
        return value if value is not None and 0 <= value <= 1e11 else None


class TrialFile(TrialRecord):
    """A record that the analysis reads. Its ranks are those of its trial."""

    @model_validator(mode="after")
    def _ranks(self) -> "TrialFile":
        ranks, world_size = len(self.environment.ranks), self.trial.world_size
        if self.status == "done" and ranks not in (1, world_size):
            raise ValueError(f"environment.ranks lists {ranks} ranks, but world_size is {world_size}")
        return self

    @property
    def processes(self) -> int:
        """Number of processes that wrote rows: one per rank, or one that drives all GPUs."""
        return len(self.environment.ranks) if self.status == "done" else self.trial.world_size

    @property
    def most_plain_steps(self) -> int:
        """Largest number of steps of the plain window, which is longer if loader processes feed it."""
        ahead = self.trial.loader_workers * self.trial.prefetch_batches + _DECODED_AHEAD
        return max(self.trial.steps, 10 * ahead)

    @property
    def fewest_plain_steps(self) -> int:
        """Smallest number of steps of the plain window of a trial that is done."""
        trial = self.trial
        return 1 if self.is_own_code or trial.median_width or trial.window_limit_s else trial.steps

    @property
    def is_own_code(self) -> bool:
        """True if the trial ran a user's own script or train function."""
        return bool(self.trial.script or self.trial.train_function)


_DECODED_AHEAD = 3
"""Largest number of batches that a rank decodes or copies ahead of its step."""


class _FieldRecord(_Part):
    kind: Text = ""
    default: Scalar = None
    order: list[Scalar] = []
    table: Text = ""
    option: Text | None = None
    only_with: dict[str, list[Scalar]] = {}
    any_door: bool = False
    label: Text = ""
    header: Text = ""


class StudyFile(_Part):
    """The part of study.json that the analysis reads. `StudyRecord` reads its other entries."""

    schema_version: int = SCHEMA_VERSION
    name: Text | None = None
    question: Text | None = None
    command: str | None = None
    fields: Annotated[dict[str, _FieldRecord], Field(max_length=MAX_FIELDS)] | None = None

    @field_validator("fields")
    @classmethod
    def _unreserved(cls, value: dict[str, _FieldRecord] | None) -> dict[str, _FieldRecord] | None:
        if reserved := [name for name in value or () if is_reserved(name)]:
            raise ValueError(f"{reserved[0]!r} cannot be the name of a field: the analysis has such a column")
        return value


_Model = TypeVar("_Model", bound=BaseModel)


def check_study(record: Mapping[str, Any], where: str, fix: str) -> None:
    """Raise ResultsError if study.json is malformed."""
    _validated(StudyFile, record, where, fix)


def trial_file(record: Mapping[str, Any], declared: Mapping[str, Any], where: str, fix: str) -> TrialFile:
    """Return the typed content of trial.json. Raises ResultsError, one line, if it is malformed.

    declared: default of each field that study.json describes. A field has the type of its default.
    """
    file = _validated(TrialFile, record, where, fix)
    for name, value in record["trial"].items():
        if name in declared:
            if not _same_kind(value, declared[name]):
                raise ResultsError(f"{where}: trial.{name}: {value!r} has another type than {declared[name]!r}; {fix}")
        elif is_reserved(name):
            raise ResultsError(f"{where}: trial.{name}: no field of a trial can have this name; {fix}")
    return file


def _same_kind(value: Any, default: Any) -> bool:
    if default is None:
        return value is None or isinstance(value, int | float)
    if isinstance(default, float) and not isinstance(value, bool):
        return isinstance(value, int | float)
    return type(value) is type(default)


def _validated(model: type[_Model], record: Mapping[str, Any], where: str, fix: str) -> _Model:
    try:
        return model.model_validate(record)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        what = problem["msg"].removeprefix("Value error, ")
        raise ResultsError(f"{where}: {f'{name}: ' if name else ''}{what}; {fix}") from None
