"""Figures of docs/language-models.md: sizes and vocabularies, from the registry, and the bundled sample."""

import pyarrow.parquet as pq

from scripts.claims.sources import Entries, Value, number, on_page
from trainables.data.tokens import HEADER_BYTES, SAMPLE
from trainables.registry import GPT2_VOCABULARY, MODELS, SAMPLE_VOCABULARY

says, stated, shows = on_page("docs/language-models.md")


def _weights(name: str, unit: float) -> Value:
    return number(MODELS[name].million_weights / unit)


_LENGTH = number(MODELS["gpt2"].sequence_length or 0)

ENTRIES: Entries = [
    stated("24 of width 1,024", "context"),
    stated("50,257 token ids", "context"),
    says("padded to {}", number(GPT2_VOCABULARY)),
    says("{} and {} million |", _weights("gpt2", 1), _weights("gpt2_medium", 1)),
    says("{} and {} billion |", _weights("llama_1b", 1000), _weights("llama_8b", 1000)),
    says("| {} million |", _weights("gpt2_tiny", 1)),
    says("`sequence_length` is {} by default", _LENGTH),
    says("{} ids of the King James Bible", number(pq.read_metadata(SAMPLE).num_rows)),
    says("byte-pair encoding with {} ids", number(SAMPLE_VOCABULARY)),
    says("a header of {} bytes", number(HEADER_BYTES)),
]
