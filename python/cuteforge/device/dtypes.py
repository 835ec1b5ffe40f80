"""The compiler's types by the names that specs and compile keys use."""

import cutlass

DTYPES = {
    "bfloat16": cutlass.BFloat16,
    "float16": cutlass.Float16,
    "float32": cutlass.Float32,
    "uint8": cutlass.Uint8,
    "bool": cutlass.Uint8,  # compiled entries have no type for bools
    "int32": cutlass.Int32,
    "int64": cutlass.Int64,
}
