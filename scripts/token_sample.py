"""Write the bundled sample of token ids: `python -m scripts.token_sample TEXT`.

TEXT is a public-domain text. The bundled sample is the first part of the King James Bible, in Debian's package
bible-kjv: `bible -f 'Gen1:1-Rev22:21' > TEXT`. A byte-level byte-pair encoding is learned from the text itself, with
`SAMPLE_VOCABULARY` ids.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from trainables.data.tokens import SAMPLE
from trainables.registry import SAMPLE_VOCABULARY

MOST_TOKENS = 600_000
"""ids that are kept: enough for 128 rows of 1,024 on each of four ranks, in about 1 MB"""


def encode(text: str) -> tuple[np.ndarray, Tokenizer]:
    """Learn an encoding from a text and return its ids, uint16 [N], and the tokenizer, which decodes them."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=SAMPLE_VOCABULARY, initial_alphabet=ByteLevel.alphabet(), show_progress=False, special_tokens=[]
    )
    tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
    ids = [id_ for line in text.splitlines(keepends=True) for id_ in tokenizer.encode(line).ids]
    return np.array(ids, dtype=np.uint16), tokenizer


def main(path: str) -> None:
    """Encode the text and write `SAMPLE`."""
    ids, _ = encode(Path(path).read_text())
    table = pa.table({"token": pa.array(ids[:MOST_TOKENS])})
    pq.write_table(table, SAMPLE, compression="zstd", compression_level=22, use_dictionary=False)
    print(f"{SAMPLE.name}: {len(table)} of {len(ids)} token ids, {SAMPLE.stat().st_size} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
