"""Python objects inside traced loops."""


class TraceConstant:
    """Base of helper objects that never change while a kernel runs.

    The tracer carries every object whose methods a run-time loop or branch calls through it, as something that may change. An object
    without run-time values of its own is carried as nothing.
    """

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self
