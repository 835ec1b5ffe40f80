"""The two ways a call is refused. Both are raised before anything is launched."""


class ContractError(ValueError):
    """The arguments of a call contradict each other or the signature of the op.

    The text names the argument first, then says what was wanted and what was got. It is raised before anything is
    launched.

    Examples:
        >>> from cuteforge import ContractError, TensorSpec
        >>> try:
        ...     TensorSpec((2, 3), "bfloat16", stride=(3,))
        ... except ContractError as error:
        ...     print(error)
        stride: wanted 2 strides for shape (2, 3), got (3,)
    """


class UnsupportedError(NotImplementedError):
    """A valid call that this kernel does not serve, or a GPU that it does not run on.

    The text names the limit. It is raised before anything is launched. `NotImplementedError` is a `RuntimeError`, so
    code that guards kernel calls with ``except RuntimeError`` catches it.

    Examples:
        >>> from cuteforge import GQADecode, TensorSpec, UnsupportedError
        >>> q, k = TensorSpec((1, 1, 8, 320), "bfloat16"), TensorSpec((1, 64, 8, 320), "bfloat16")
        >>> try:
        ...     GQADecode(q, k, k, q).check_support()
        ... except UnsupportedError as error:
        ...     print(error)
        q: the kernel serves D = 8, 16, ... 256, got D = 320
    """
