"""Read the Parquet tables of a results folder, all at once or in portions."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from analysis.read.errors import RESTORE, RUN_AGAIN, ResultsError, line

ROWS_AT_ONCE = 250_000
"""Rows of steps that one reader holds in memory: 22 columns of 8 bytes, and as much again while they are reduced."""


def dataset_of(
    system: pafs.FileSystem, base: str | None, paths: Sequence[str], schema: pa.Schema, required: Sequence[str]
) -> ds.Dataset:
    """Open these files as one data set.

    The trial id comes from the name of a file's folder in `base`. If `base` is None, the files are packed and have a
    column trial_id. Raises ResultsError if a file lacks a required column.
    """
    if base is None:
        required = ("trial_id", *required)
        dataset = ds.dataset(list(paths), schema=schema, filesystem=system, format="parquet")
    else:
        folder = ds.DirectoryPartitioning(pa.schema([("trial_id", pa.string())]), segment_encoding="none")
        dataset = ds.dataset(
            list(paths),
            schema=schema,
            filesystem=system,
            format="parquet",
            partitioning=folder,
            partition_base_dir=base,
        )
    for fragment in dataset.get_fragments():
        try:
            present = fragment.physical_schema.names
        except (pa.ArrowException, OSError) as error:
            raise _corrupt(fragment, error) from None
        if missing := [name for name in required if name not in present]:
            raise ResultsError(f"{fragment.path}: missing columns {', '.join(missing)}; {_fix(fragment)}")
    return dataset


def frame_of(dataset: ds.Dataset | None, schema: pa.Schema) -> pd.DataFrame:
    """Read everything into memory. An empty frame if there is no data set. Raises ResultsError for a damaged file."""
    if dataset is None:
        return schema.empty_table().to_pandas()
    try:
        return dataset.to_table().to_pandas(split_blocks=True, self_destruct=True)
    except (pa.ArrowException, OSError):
        for fragment in dataset.get_fragments():
            _read_fragment(fragment, schema)
        raise


def _read_fragment(fragment: ds.Fragment, schema: pa.Schema) -> pa.Table:
    """Read one file and add the trial id. Raises ResultsError if it is damaged."""
    try:
        table = fragment.to_table(schema=schema, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise _corrupt(fragment, error) from None
    trial_id = _trial_id(fragment)
    if trial_id is None:
        return table
    name = pa.DictionaryArray.from_arrays(np.zeros(len(table), dtype=np.int32), [trial_id])
    return table.set_column(table.schema.get_field_index("trial_id"), "trial_id", name)


def portions(dataset: ds.Dataset | None) -> Iterator[list[ds.Fragment]]:
    """Yield groups of files of about `ROWS_AT_ONCE` rows. No group splits a trial."""
    portion: list[ds.Fragment] = []
    rows = 0
    for fragment in _row_groups(dataset) if dataset else ():
        portion.append(fragment)
        rows += fragment.count_rows()
        if rows >= ROWS_AT_ONCE:
            yield portion
            portion, rows = [], 0
    if portion:
        yield portion


def read_portion(fragments: Sequence[ds.Fragment], schema: pa.Schema) -> pd.DataFrame:
    """Read these files into columns that are fast to group by: strings become categories, booleans become numbers."""
    table = pa.concat_tables([_read_fragment(fragment, schema) for fragment in fragments]).unify_dictionaries()
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(i, field.name, table[i].dictionary_encode().unify_dictionaries())
        elif pa.types.is_boolean(field.type):
            table = table.set_column(i, field.name, table[i].cast(pa.int8()))
    return table.to_pandas(split_blocks=True, self_destruct=True)


def _row_groups(dataset: ds.Dataset) -> Iterator[ds.Fragment]:
    """Yield the files of trials, or the row groups of a packed file. Raises ResultsError if those split a trial."""
    for fragment in dataset.get_fragments():
        if _trial_id(fragment) is not None:
            yield fragment
            continue
        last = ""
        for group in fragment.split_by_row_group():
            ids = (group.row_groups[0].statistics or {}).get("trial_id")
            if group.count_rows() and (ids is None or ids["min"] <= last):
                raise ResultsError(f"{fragment.path}: row groups split a trial or are out of order; {RESTORE}")
            last = ids["max"] if ids else last
            yield group


def _trial_id(fragment: ds.Fragment) -> str | None:
    """Return the trial id of a file. None for a packed file."""
    return ds.get_partition_keys(fragment.partition_expression).get("trial_id")


def _fix(fragment: ds.Fragment) -> str:
    return RESTORE if _trial_id(fragment) is None else RUN_AGAIN


def _corrupt(fragment: ds.Fragment, error: Exception) -> ResultsError:
    return ResultsError(f"{fragment.path}: not readable as Parquet ({line(error)}); {_fix(fragment)}")
