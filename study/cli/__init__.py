"""Turn a command line into a run.

In: arguments and YAML files. Out: lines on the terminal and an exit code.
"""
