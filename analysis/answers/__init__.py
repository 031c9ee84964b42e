"""Answer the questions of the published studies in sentences, each with its number, interval and measured reason.

In: `ReportInputs`. Out: `Answer`. A study's questions are in its study.json; `registry` maps their keys to functions.
"""
