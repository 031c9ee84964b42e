"""Documents that are made from the code say what the code says."""

from scripts.field_table import PAGE, page


def test_the_page_of_fields_is_that_of_a_trial_as_it_is() -> None:
    assert PAGE.read_text() == page(), "make it again: python -m scripts.field_table"
