"""Converts an image set into another storage format: resumable, atomic, and verified against its source.

Images are taken in parts. Of each part the source is read once: every image is decoded, so that a damaged one is found
now and named (the conversion fails; nothing is passed over), its content's digest is kept, and the part is written to
`DST.partial`. A conversion that was killed goes on with the first part that is not noted there. In the end everything
written is read again and held against the digests, the manifest is written last, and the folder is renamed to DST: a
DST with a manifest is whole.

The checksum is sha256 over what is kept: the JPEG files' own bytes, or the pixels of `arrow_raw`; see
`trainables.data.images.records.part_digest`. A split's is sha256 over its parts' digests, in order.
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

from trainables.data.image_layout import FORMAT, MANIFEST, VERSION, kind_of, read_manifest, stored_side
from trainables.data.images.decode import centre_square, pil_square, reason
from trainables.data.images.open import open_folder, splits_in
from trainables.data.images.records import Records, Sample, fingerprint, hashed, part_digest
from trainables.data.source import DataError
from trainables.registry import STORAGES, load

PART_IMAGES = 4096
"""images of a part, and of an Arrow file"""

NOTES = "conversion.json"
"""in DST.partial: what is being converted, and the digests of the parts that are on the disk"""

Report = Callable[[str, int, int], None]
"""told what is done (converting, verifying), with how many images of how many"""


def convert(
    source: Path,
    destination: Path,
    storage: str,
    image_size: int = 224,
    part_images: int = PART_IMAGES,
    report: Report = lambda what, done, total: None,
) -> dict[str, Any]:
    """Converts the set in `source`; gives the manifest of the one that then is in `destination`.

    Does nothing where that is there already. `image_size` matters for `arrow_raw` only. Raises DataError.
    """
    plan, sources = _plan(source, storage, image_size, part_images)
    whole = read_manifest(destination)
    if whole is not None:
        if _without_checksums(whole) != plan:
            raise DataError(f"{destination} holds another converted set; remove it, or give another DST")
        return whole
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise DataError(f"{destination} is there already and is no converted set; give a DST that does not exist")
    beside = destination.with_name(f"{destination.name}.partial")
    beside.mkdir(parents=True, exist_ok=True)
    with _alone(beside):
        digests = _resumed(beside, plan)
        total = sum(map(len, sources.values()))
        _write_parts(beside, plan, sources, digests, lambda done: report("converting", done, total))
        _verify(beside, plan, digests, lambda done: report("verifying", done, total))
        for split, found in digests.items():
            plan["splits"][split]["sha256"] = hashlib.sha256("".join(found).encode()).hexdigest()
        _write_json(beside / MANIFEST, plan)
        beside.rename(destination)
    (destination / NOTES).unlink()
    return plan


def _plan(source: Path, storage: str, image_size: int, part_images: int) -> tuple[dict[str, Any], dict[str, Records]]:
    """The manifest to be, without checksums, and the source's splits."""
    held = read_manifest(source)
    if held is None and (not source.is_dir() or kind_of(source) is None):
        raise DataError(
            f"{source} holds no images; expected SRC/train/CLASS/*.JPEG and SRC/val/CLASS/*.JPEG, SRC/CLASS/*.JPEG, "
            "Tiny-ImageNet, or a converted set"
        )
    if held is not None and held["storage"] == "arrow_raw":
        raise DataError(f"{source} holds pixels, which cannot become JPEG files again: convert what it was made from")
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
    return manifest | {"splits": {split: {"count": found["count"]} for split, found in manifest["splits"].items()}}


def _write_parts(
    beside: Path,
    plan: dict[str, Any],
    sources: dict[str, Records],
    digests: dict[str, list[str]],
    report: Callable[[int], None],
) -> None:
    """Writes the parts that `digests` lacks, and notes each."""
    write = load(STORAGES[plan["storage"]]).write
    part = plan["part_images"]
    before = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for split, records in sources.items():
            for first in range(len(digests[split]) * part, len(records), part):
                numbers = range(first, min(first + part, len(records)))
                digest = hashlib.sha256()
                samples = _contents(records, numbers, plan.get("stored_side"), pool, lambda done: report(before + done))  # noqa: B023
                write(beside, split, first, hashed(samples, digest), plan)
                digests[split].append(digest.hexdigest())
                _write_json(beside / NOTES, {"plan": plan, "digests": digests})
            before += len(records)
            report(before)


def _contents(
    records: Records, numbers: range, side: int | None, pool: ThreadPoolExecutor, report: Callable[[int], None]
) -> Iterator[Sample]:
    """What is to be kept of these records, each decoded once; a few ahead of who asks, so that memory stays bounded."""
    ahead = 4 * (os.cpu_count() or 1)
    for begin in range(numbers.start, numbers.stop, ahead):
        chunk = range(begin, min(begin + ahead, numbers.stop))
        samples = [records[number] for number in chunk]
        kept = pool.map(partial(_checked, side=side), (content for content, _ in samples), map(records.name, chunk))
        yield from zip(kept, (label for _, label in samples), strict=True)
        report(chunk.stop)


def _checked(content: Any, name: str, side: int | None) -> Any:
    """The content itself, or its pixels where `side` asks for them. Raises DataError with the file's name."""
    try:
        if side:
            return pil_square(content, centre_square, side)
        with Image.open(BytesIO(content)) as image:
            image.load()
        return content
    except Exception as error:  # a damaged file raises nearly anything
        raise DataError(
            f"{name} cannot be decoded ({reason(error)}): replace or remove it, then convert again"
        ) from error


def _verify(beside: Path, plan: dict[str, Any], digests: dict[str, list[str]], report: Callable[[int], None]) -> None:
    """Reads everything that was written and holds it against what was read from the source. Raises DataError."""
    before = 0
    for split, expected in digests.items():
        records = load(STORAGES[plan["storage"]]).read(beside, split, plan)
        count = plan["splits"][split]["count"]
        if len(records) != count:
            raise DataError(
                f"{beside} holds {len(records)} images in {split!r}, its source {count}; {_start_again(beside)}"
            )
        for number, digest in enumerate(expected):
            begin = number * plan["part_images"]
            end = min(begin + plan["part_images"], count)
            if part_digest(records[index] for index in range(begin, end)) != digest:
                raise DataError(
                    f"{records.name(begin)} and the following are not what was read from the source; {_start_again(beside)}"
                )
            report(before + end)
        before += count


@contextmanager
def _alone(beside: Path) -> Iterator[None]:
    """Holds the folder's lock. Raises DataError where another process has it."""
    descriptor = os.open(beside, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"another process is writing {beside}: let it end, or give another DST") from None
    finally:
        os.close(descriptor)


def _resumed(beside: Path, plan: dict[str, Any]) -> dict[str, list[str]]:
    """Digests of the parts that an earlier run has written, by split. Raises DataError where that was another conversion."""
    try:
        notes = json.loads((beside / NOTES).read_text())
    except FileNotFoundError:
        return {split: [] for split in plan["splits"]}  # nothing yet, or a first part that is written again
    except ValueError as error:
        raise DataError(f"{beside / NOTES} is damaged ({error}); {_start_again(beside)}") from None
    if notes["plan"] != plan:
        raise DataError(
            f"{beside} is an unfinished conversion of other files, or to another format; {_start_again(beside)}"
        )
    return notes["digests"]


def _start_again(beside: Path) -> str:
    return f"remove {beside} and convert again"


def _write_json(path: Path, value: Any) -> None:
    """Writes beside and renames; on the disk when it returns."""
    partly = path.with_name(f"{path.name}.tmp")
    with partly.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    partly.replace(path)
