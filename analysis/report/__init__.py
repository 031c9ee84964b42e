"""Write the report of a results folder.

In: a results folder. Out: index.html, report.md, CSV, LaTeX, SVG and PNG files.
"""
