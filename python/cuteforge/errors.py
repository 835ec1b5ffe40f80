"""The two ways a call is refused. Both are raised before anything is launched."""


class ContractError(ValueError):
    """The arguments contradict each other or the signature.

    The text names the argument first, then what was wanted and what was got.
    """


class UnsupportedError(NotImplementedError):
    """A valid call that this kernel does not serve, or a GPU it does not run on.

    The text names the limit. `NotImplementedError` is a `RuntimeError`, so code that guards kernel calls with
    ``except RuntimeError`` catches it.
    """
