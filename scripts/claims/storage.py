"""Figures of docs/storage.md."""

from statistics import fmean

from scripts.claims.sources import (
    Cell,
    Entries,
    Value,
    cell,
    figure,
    goal,
    number,
    on_page,
    samples,
    summary,
)

says, stated, shows = on_page("docs/storage.md")

FIRST = (
    ("`arrow_raw` from disk", "storage", "arrow_raw"),
    ("`arrow_raw` from shared memory", "storage", "arrow_raw in shared memory"),
    ("JPEG files, torchvision", "storage", "jpeg torchvision"),
    ("LMDB, torchvision", "storage", "lmdb torchvision"),
    ("LMDB, Pillow", "storage", "lmdb pil"),
    ("`arrow_jpeg`, Pillow", "storage", "arrow_jpeg pil"),
    ("JPEG files, `nvjpeg`", "storage", "jpeg nvjpeg"),
    ("LMDB, `nvjpeg`", "storage", "lmdb nvjpeg"),
    ("`arrow_jpeg`, `nvjpeg`", "storage", "arrow_jpeg nvjpeg"),
)
EIGHT_QUEUES = "storage-nvimagecodec-8-queues"
LATER = (
    ("`arrow_raw` from disk, `copy_ahead`", "storage-ahead", "arrow_raw copied ahead"),
    ("`arrow_raw` from disk", "storage-ahead", "arrow_raw"),
    ("JPEG files, `nvjpeg_ahead`", "storage-ahead", "jpeg nvjpeg_ahead"),
    ("`arrow_jpeg`, torchvision", "storage-more", "arrow_jpeg torchvision"),
    ("LMDB, `nvjpeg`", "storage-more", "lmdb nvjpeg"),
    ("`arrow_jpeg`, `nvjpeg`", "storage-more", "arrow_jpeg nvjpeg"),
    ("JPEG files, `nvjpeg_ahead`, 8 queues", EIGHT_QUEUES, "jpeg nvjpeg_ahead"),
    ("LMDB, `nvjpeg_ahead`, 8 queues", EIGHT_QUEUES, "lmdb nvjpeg_ahead"),
    ("`arrow_jpeg`, `nvjpeg_ahead`, 8 queues", EIGHT_QUEUES, "arrow_jpeg nvjpeg_ahead"),
    ("JPEG files, `nvjpeg`, 8 queues", EIGHT_QUEUES, "jpeg nvjpeg"),
)
LIMITS = {
    "the step": "the step",
    "the loader": "the loaders",
    "copy and decoding on the device next to the step": "copy and decoding on the GPU",
}


def _rates(folder: str, case: str) -> list[tuple[int, float]]:
    """Return session and samples/s of each training of a case."""
    return [
        (row["session"], row["samples_per_s"])
        for row in samples(folder)
        if row["kind"] == "training" and row["case"] == case
    ]


def _relative(folder: str, case: str) -> Cell:
    """Return a path's rate relative to synthetic data of the same session, with an interval from several rounds."""
    if f"{case} / synthetic" in summary(folder):
        return cell("{:3}", figure(folder, f"{case} / synthetic"))
    [(session, rate)] = _rates(folder, case)
    return cell("{:2}", number(rate / fmean(value for which, value in _rates(folder, "synthetic") if which == session)))


def _alone(folder: str, case: str) -> Value:
    return figure(folder, f"{case}, loader alone")


def _rows(paths: tuple[tuple[str, str, str], ...]) -> list[tuple[str | Cell, ...]]:
    rows: list[tuple[str | Cell, ...]] = []
    for label, folder, case in paths:
        start = f"{case}, training, limited by "
        name = next(name for name in summary(folder) if name.startswith(start))
        rate, rounds = cell("{:0}", figure(folder, name)), str(len(_rates(folder, case)))
        rows.append((label, rate, _relative(folder, case), rounds, LIMITS[name.removeprefix(start)], f"`{folder}`"))
    return rows


HEADER = ("path", "samples/s", "relative to synthetic", "rounds", "limited by", "results")
SYNTHETIC = figure("storage-more", "synthetic, training")
RAW_ALONE = [
    row["samples_per_s"]
    for row in samples("storage-ahead")
    if row["kind"] == "loader alone" and row["case"].startswith("arrow_raw")
]

ENTRIES: Entries = [
    stated("20,000 photographs, page cache warm", "setting"),
    shows("storage", HEADER, _rows(FIRST)),
    stated("used 6,000 other photographs", "setting"),
    shows("storage-later", HEADER, _rows(LATER)),
    says(
        "reaches at least {}. Before the decoder allocated its memory for the first batch, decoding ahead missed it: "
        "{}",
        goal("storage-nvimagecodec", "best path (jpeg nvjpeg_ahead) / synthetic"),
        figure("storage-nvimagecodec", "best path (jpeg nvjpeg_ahead) / synthetic"),
    ),
    says("its loaders alone deliver only {} samples/s", _alone("storage-more", "jpeg pil")),
    says("What they can sustain is {} of synthetic data", _alone("storage-more", "jpeg pil") / SYNTHETIC),
    says("deliver {} to {} images/s", number(min(RAW_ALONE)), number(max(RAW_ALONE))),
    says("JPEG reaches {} of synthetic data", figure("storage-ahead", "jpeg nvjpeg_ahead / synthetic")),
    says("with 8 queues reached {}", figure("storage-gpu", "jpeg nvjpeg_ahead / synthetic")),
]
