from cuteforge.tensor_spec import *  # placeholder until the room moves
from cuteforge.tensor_spec import Operand, Signature, TensorSpec
