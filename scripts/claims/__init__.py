"""The measured figures of README.md and docs/*.md, each with its source in benchmarks/results. One module per topic.

Comes in: summaries, samples and tables of committed results (`sources`). Goes out: `CLAIMS`, which
`scripts.check_claims` compares with the pages.
"""
