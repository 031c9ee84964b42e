"""All claims, of all pages."""

from scripts.claims import (
    causes,
    evidence,
    improve,
    language_models,
    others,
    outlook,
    performance,
    reliability,
    resnet50,
    scaling_out,
    storage,
    tools,
)

ENTRIES = [
    entry
    for module in (
        language_models,
        others,
        evidence,
        reliability,
        improve,
        causes,
        outlook,
        resnet50,
        performance,
        storage,
        scaling_out,
        tools,
    )
    for entry in module.ENTRIES
]
