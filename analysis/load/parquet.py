"""The Parquet tables of a results folder: what is read of them, and how, whole or in portions."""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs as pafs

from analysis.load.errors import RESTORE, RUN_AGAIN, ResultsError, line

ROWS_AT_ONCE = 250_000
"""Rows of steps that one reader has in memory; 22 columns of 8 bytes and as much again while they are reduced."""


def dataset_of(
    system: pafs.FileSystem, base: str | None, paths: Sequence[str], schema: pa.Schema, required: Sequence[str]
) -> ds.Dataset:
    """All these files as one; the trial's id comes from the name of its folder in `base`, or, if base is None, from the
    column trial_id of a packed file. Raises ResultsError if a file lacks a column."""
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
        lacking = [name for name in required if name not in present]
        if lacking:
            raise ResultsError(f"{fragment.path}: lacks {', '.join(lacking)}; {_fix(fragment)}")
    return dataset


def frame_of(dataset: ds.Dataset | None, schema: pa.Schema) -> pd.DataFrame:
    """Everything in memory; no row where there is no file."""
    if dataset is None:
        return schema.empty_table().to_pandas()
    try:
        return dataset.to_table().to_pandas(split_blocks=True, self_destruct=True)
    except (pa.ArrowException, OSError):
        for fragment in dataset.get_fragments():
            _read_fragment(fragment, schema)
        raise


def _read_fragment(fragment: ds.Fragment, schema: pa.Schema) -> pa.Table:
    """One file, with the trial's id. Raises ResultsError where it is damaged."""
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
    """Files of whole trials with about `ROWS_AT_ONCE` rows together."""
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
    """These files in memory, in columns that are quick to group by: trial_id and window are categories, bool is float."""
    table = pa.concat_tables([_read_fragment(fragment, schema) for fragment in fragments]).unify_dictionaries()
    for i, field in enumerate(table.schema):
        if pa.types.is_string(field.type):
            table = table.set_column(i, field.name, table[i].dictionary_encode().unify_dictionaries())
        elif pa.types.is_boolean(field.type):
            table = table.set_column(i, field.name, table[i].cast(pa.int8()))
    return table.to_pandas(split_blocks=True, self_destruct=True)


def _row_groups(dataset: ds.Dataset) -> Iterator[ds.Fragment]:
    """The files of trials, or the row groups of a packed file. Raises ResultsError if those divide a trial."""
    for fragment in dataset.get_fragments():
        if _trial_id(fragment) is not None:
            yield fragment
            continue
        last = ""
        for group in fragment.split_by_row_group():
            ids = (group.row_groups[0].statistics or {}).get("trial_id")
            if group.count_rows() and (ids is None or ids["min"] <= last):
                raise ResultsError(f"{fragment.path}: its row groups do not hold whole trials in order; {RESTORE}")
            last = ids["max"] if ids else last
            yield group


def _trial_id(fragment: ds.Fragment) -> str | None:
    """The trial that a file is of; None for a packed one."""
    return ds.get_partition_keys(fragment.partition_expression).get("trial_id")


def _fix(fragment: ds.Fragment) -> str:
    return RESTORE if _trial_id(fragment) is None else RUN_AGAIN


def _corrupt(fragment: ds.Fragment, error: Exception) -> ResultsError:
    return ResultsError(f"{fragment.path}: not readable as Parquet ({line(error)}); {_fix(fragment)}")
