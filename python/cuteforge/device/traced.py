"""What the tracer is told about the Python objects of a kernel."""


class TraceConstant:
    """Base of helper objects that never change while a kernel runs.

    The tracer carries every object whose methods a run-time loop or branch calls through it, as something that may
    change. An object without run-time values of its own is carried as nothing.
    """

    def __extract_mlir_values__(self):
        return []

    def __new_from_mlir_values__(self, values):
        return self


class Operands(TraceConstant):
    """Gives a kernel its tensors as attributes: mQ, mPageTable and so on. One that the op does not have is None."""

    def __init__(self, names, given):
        for name, value in zip(names, given, strict=True):
            setattr(self, name, value)


def named_kernel(name: str, method: str = "kernel"):
    """Class decorator: profilers and disassemblies show a kernel of the class as `name`, with a number.

    The generated name spells out every operand, and "cutlass" in it has made an assembler spill (NVIDIA/cutlass#3389).
    """

    def rename(cls):
        getattr(cls, method).set_name_prefix(name, remove_cutlass_symbol=True, keep_mangled_name=False)
        return cls

    return rename
