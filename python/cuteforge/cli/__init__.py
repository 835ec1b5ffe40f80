"""The commands of `python -m cuteforge`: one module each, with `run(**options) -> exit status`.

commands.py lists them.
"""
