"""Convert an image set to another storage format: resumable, atomic, and verified against its source.

1. Images are read from the source once, in parts, and written to `DST.partial`. Every image is decoded, so that a
   damaged one is reported by name; the conversion then fails and skips nothing. The digest of each part is recorded.
2. A conversion that was killed resumes with the first part that is not recorded.
3. At the end, everything written is read again and compared with the digests.
4. The manifest is written last, and the folder is renamed to DST. So a DST with a manifest is complete.

A checksum is the sha256 of the stored content: the bytes of the JPEG files, or the pixels of `arrow_raw` (see
`trainables.data.images.records.part_digest`). A split's checksum is the sha256 of its parts' digests, in order.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from trainables.data.image_layout import FORMAT, MANIFEST, VERSION, kind_of, manifest_error, read_manifest, stored_side
from trainables.data.images.decode import centre_square, pil_square, reason
from trainables.data.images.open import open_folder, splits_in
from trainables.data.images.records import Records, Sample, fingerprint, hash_samples, part_digest
from trainables.data.source import DataError
from trainables.registry import STORAGES, load

PART_IMAGES = 4096
"""images per part, and per Arrow file"""

NOTES = "conversion.json"
"""in DST.partial: the planned manifest, and the digests of the parts on the disk"""

Report = Callable[[str, int, int], None]
"""called with the phase (converting or verifying), the images done and the total"""


def convert(
    source: Path,
    destination: Path,
    storage: str,
    image_size: int = 224,
    part_images: int = PART_IMAGES,
    report: Report = lambda phase, done, total: None,
) -> dict[str, Any]:
    """Convert the set in `source` and return the manifest of the set in `destination`.

    Does nothing if that set already exists. `image_size` only matters for `arrow_raw`. Raises DataError.
    """
    plan, sources = _plan(source, storage, image_size, part_images)
    existing = read_manifest(destination)
    if existing is not None:
        if _without_checksums(existing) != plan:
            raise DataError(f"{destination} already has another converted set; remove it, or choose another DST")
        return existing
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise DataError(f"{destination} exists and is not a converted set; choose a DST that does not exist")
    partial_folder = destination.with_name(f"{destination.name}.partial")
    partial_folder.mkdir(parents=True, exist_ok=True)
    with _locked(partial_folder):
        digests = _recorded_digests(partial_folder, plan)
        total = sum(map(len, sources.values()))
        _write_parts(partial_folder, plan, sources, digests, lambda done: report("converting", done, total))
        _verify(partial_folder, plan, digests, lambda done: report("verifying", done, total))
        for split, part_digests in digests.items():
            plan["splits"][split]["sha256"] = hashlib.sha256("".join(part_digests).encode()).hexdigest()
        _write_json(partial_folder / MANIFEST, plan)
        partial_folder.rename(destination)
    (destination / NOTES).unlink()
    return plan


def _plan(source: Path, storage: str, image_size: int, part_images: int) -> tuple[dict[str, Any], dict[str, Records]]:
    """Return the planned manifest, without checksums, and the source's splits."""
    if error := manifest_error(source):
        raise DataError(error)
    manifest = read_manifest(source)
    if manifest is None and (not source.is_dir() or kind_of(source) is None):
        raise DataError(
            f"no images in {source}; expected SRC/train/CLASS/*.JPEG and SRC/val/CLASS/*.JPEG, SRC/CLASS/*.JPEG, "
            "Tiny-ImageNet, or a converted set"
        )
    if manifest is not None and manifest["storage"] == "arrow_raw":
        raise DataError(f"{source} has pixels, which cannot be converted back to JPEG; convert the original images")
    splits, sources = splits_in(source), {}
    for split in splits:
        sources[split], classes = open_folder(source, split)
    raw = {"image_size": image_size, "stored_side": stored_side(image_size), "decoder": "pil"}
    plan = {
        "format": FORMAT,
        "version": VERSION,
        "storage": storage,
        **(raw if storage == "arrow_raw" else {}),
        "checksum_of": "pixels" if storage == "arrow_raw" else "the JPEG files' bytes",
        "part_images": part_images,
        "source": {split: fingerprint(records) for split, records in sources.items()},
        "splits": {split: {"count": len(records)} for split, records in sources.items()},
        "classes": list(classes),
    }
    return plan, sources


def _without_checksums(manifest: dict[str, Any]) -> dict[str, Any]:
    splits = {split: {"count": entry["count"]} for split, entry in manifest["splits"].items()}
    return manifest | {"splits": splits}


def _write_parts(
    folder: Path,
    plan: dict[str, Any],
    sources: dict[str, Records],
    digests: dict[str, list[str]],
    report: Callable[[int], None],
) -> None:
    """Write the parts that `digests` lacks, and record each."""
    write = load(STORAGES[plan["storage"]]).write
    part = plan["part_images"]
    done_before = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for split, records in sources.items():
            for first in range(len(digests[split]) * part, len(records), part):
                numbers = range(first, min(first + part, len(records)))
                digest = hashlib.sha256()
                samples = _contents(
                    records,
                    numbers,
                    plan.get("stored_side"),
                    pool,
                    lambda done: report(done_before + done),  # noqa: B023
                )
                write(folder, split, first, hash_samples(samples, digest), plan)
                digests[split].append(digest.hexdigest())
                _write_json(folder / NOTES, {"plan": plan, "digests": digests})
            done_before += len(records)
            report(done_before)


def _contents(
    records: Records, numbers: range, side: int | None, pool: ThreadPoolExecutor, report: Callable[[int], None]
) -> Iterator[Sample]:
    """Yield the content to store of these records. Each is decoded once, in chunks, so that memory stays bounded."""
    chunk_size = 4 * (os.cpu_count() or 1)
    for start in range(numbers.start, numbers.stop, chunk_size):
        chunk = range(start, min(start + chunk_size, numbers.stop))
        samples = [records[number] for number in chunk]
        contents = pool.map(
            partial(_checked_content, side=side), (content for content, _ in samples), map(records.name, chunk)
        )
        yield from zip(contents, (label for _, label in samples), strict=True)
        report(chunk.stop)


def _checked_content(content: Any, name: str, side: int | None) -> Any:
    """Decode an image, and return its pixels if `side` is given, else its content. Raises DataError with its name."""
    try:
        if side:
            return pil_square(content, centre_square, side)
        with Image.open(BytesIO(content)) as image:
            image.load()
        return content
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(f"cannot decode {name} ({reason(error)}); replace or remove it, then convert again") from error


def _verify(folder: Path, plan: dict[str, Any], digests: dict[str, list[str]], report: Callable[[int], None]) -> None:
    """Read everything written and compare it with the digests of the source. Raises DataError."""
    done_before = 0
    for split, expected in digests.items():
        records = load(STORAGES[plan["storage"]]).read(folder, split, plan)
        count = plan["splits"][split]["count"]
        if len(records) != count:
            raise DataError(
                f"{folder} has {len(records)} images in {split!r}, its source has {count}; {_restart_advice(folder)}"
            )
        for number, digest in enumerate(expected):
            start = number * plan["part_images"]
            end = min(start + plan["part_images"], count)
            if part_digest(records[index] for index in range(start, end)) != digest:
                raise DataError(
                    f"checksum mismatch in the part that starts at {records.name(start)}: it differs from the source; "
                    f"{_restart_advice(folder)}"
                )
            report(done_before + end)
        done_before += count


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Raises DataError if another process holds it."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"another process is writing {folder}; wait for it, or choose another DST") from None
    finally:
        os.close(descriptor)


def _recorded_digests(folder: Path, plan: dict[str, Any]) -> dict[str, list[str]]:
    """Return the digests of the parts that an earlier run wrote, by split.

    Raises DataError if that run was a different conversion.
    """
    try:
        notes = json.loads((folder / NOTES).read_text())
    except FileNotFoundError:
        return {split: [] for split in plan["splits"]}  # nothing yet, or an incomplete first part
    except ValueError as error:
        raise DataError(f"{folder / NOTES} is damaged ({error}); {_restart_advice(folder)}") from None
    if notes["plan"] != plan:
        raise DataError(
            f"{folder} is an unfinished conversion of other files or to another format; {_restart_advice(folder)}"
        )
    return notes["digests"]


def _restart_advice(folder: Path) -> str:
    return f"remove {folder} and convert again"


def _write_json(path: Path, value: Any) -> None:
    """Write a temporary file, flush it to the disk, and rename it."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
