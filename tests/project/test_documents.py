"""Generated documents match the code."""

from scripts.field_table import PAGE, page


def test_docs_fields_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "regenerate it: python -m scripts.field_table"
