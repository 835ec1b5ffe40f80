"""The commands of `python -m cuteforge`: one module each, with `run() -> exit status`."""
