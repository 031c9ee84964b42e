"""All claims, of all pages."""

from scripts.claims import evidence

ENTRIES = [*evidence.ENTRIES]
