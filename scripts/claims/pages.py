"""All claims, of all pages."""

from scripts.claims import evidence, others, outlook, performance, resnet50, scaling_out, storage, truth

ENTRIES = [
    entry
    for module in (others, evidence, outlook, resnet50, performance, storage, scaling_out, truth)
    for entry in module.ENTRIES
]
