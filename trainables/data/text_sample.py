"""English text that every installation has: the help topics of Python's language reference, about 0.5 MB.

They are the standard library's `pydoc_data.topics`, under the licence of the Python Software Foundation, and nothing of them
is shipped here. Their content differs between versions of Python, which every result records.
"""

from functools import lru_cache

import numpy as np

from trainables.data import DataError
from trainables.data.text import VOCABULARY, TextDataset, TextSource
from trainables.trial import Trial


def sample(trial: Trial, split: str = "train") -> TextSource:
    """All topics in alphabetical order, an empty line between them. Raises DataError. `trial.data_dir` is not used."""
    return TextSource(TextDataset(read_topics, "", split, trial.sequence_length), VOCABULARY)


@lru_cache(maxsize=1)
def read_topics(path: str) -> np.ndarray:
    """The text as bytes, uint8 [N]. Raises DataError where this Python came without it."""
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise DataError(
            f"dataset 'text_sample' reads Python's own help, which this Python lacks ({error}): install the whole "
            "standard library, or use dataset 'synthetic'"
        ) from error
    texts = [topics[name] for name in sorted(topics)]
    return np.frombuffer("\n".join(texts).encode(), dtype=np.uint8)
