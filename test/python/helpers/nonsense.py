"""Values of every type that hardly any argument wants, by name, and the sentence that refuses them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cuteforge.errors import ContractError, UnsupportedError

NONSENSE = {
    "None": None,
    "text": "ab",
    "bytes": b"ab",
    "float": 1.5,
    "whole_float": 0.0,
    "nan": float("nan"),
    "bool": True,
    "complex": 1j,
    "huge": 2**70,
    "negative": -1,
    "object": object(),
    "function": print,
    "class": int,
    "ellipsis": ...,
    "dict": {0: 1},
    "set": {0, 1},
    "empty": [],
    "tuple": (),
    "lists": [[0], [1]],
    "texts": ["0", "1"],
    "floats": [0.0, 1.0],
    "bools": [False, True],
    "nones": [None, None],
    "huge_ints": [2**70, 2**70],
    "tensor": torch.tensor(0),
    "bool_tensor": torch.tensor(True),
    "float_tensor": torch.tensor(2.5),
    "tensors": [torch.tensor(0), torch.tensor(1)],
    "int_tensor": torch.tensor([0, 1]),
    "matrix": torch.ones(2, 2),
    "sparse": torch.eye(2).to_sparse(),
    "meta": torch.ones(2, device="meta"),
    "numpy_float": np.float64(0),
    "numpy_bool": np.bool_(True),
    "numpy_floats": np.zeros(2),
    "numpy_matrix": np.zeros((2, 2), dtype=np.int64),
    "numpy_texts": np.array(["a", "b"]),
    "numpy_scalar_array": np.array(1.0),
}


def refusal(call: Callable, *args: Any, **kwargs: Any) -> str:
    """The sentence that refuses a call; empty where it is served."""
    try:
        call(*args, **kwargs)
    except (ContractError, UnsupportedError) as error:
        return str(error)
    return ""
