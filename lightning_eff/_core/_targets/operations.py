"""What operations of torch do with the entries of labels, by the name of the operation."""

from typing import Any

# fmt: off
#: The first argument's entries, in other places; the other arguments say where.
MOVING = frozenset((
    "H", "T", "adjoint", "alias", "as_subclass", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to",
    "chunk", "clone", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "flip", "fliplr",
    "flipud", "gather", "getitem", "hsplit", "index_select", "iter", "mH", "mT", "masked_select", "moveaxis",
    "movedim", "narrow", "pad", "permute", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as",
    "roll", "rot90", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "take",
    "take_along_dim", "tensor_split", "tile", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as", "vsplit",
))
#: Lists of tensors, put together.
JOINING = frozenset((
    "cat", "column_stack", "concat", "concatenate", "dstack", "hstack", "row_stack", "stack", "vstack",
))
#: Masks that say which entries count, and not what they are.
COMPARING = frozenset((
    "eq", "ge", "greater", "greater_equal", "gt", "isfinite", "isin", "isnan", "le", "less", "less_equal", "lt",
    "ne", "not_equal",
))
#: The same values in another type, or elsewhere.
CASTING = frozenset((
    "bfloat16", "bool", "cpu", "cuda", "double", "float", "half", "int", "long", "short", "to", "type", "type_as",
))
#: A value for each entry.
POINTWISE = COMPARING | CASTING | frozenset((
    "abs", "absolute", "add", "and", "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "ceil", "clamp",
    "clamp_max", "clamp_min", "clip", "div", "divide", "exp", "expm1", "floor", "floor_divide", "floordiv",
    "fmod", "iadd", "imul", "invert", "isub", "itruediv", "lerp", "log", "log1p", "logical_and", "logical_not",
    "logical_or", "logical_xor", "logit", "masked_fill", "maximum", "minimum", "mod", "mul", "multiply",
    "nan_to_num", "neg", "negative", "or", "pow", "radd", "rand", "rdiv", "reciprocal", "remainder", "rfloordiv",
    "rmod", "rmul", "ror", "round", "rpow", "rsub", "rtruediv", "rxor", "sigmoid", "sign", "sqrt", "square",
    "sub", "subtract", "tanh", "true_divide", "truediv", "trunc", "where", "xor",
))
# fmt: on


def name_of(func: Any) -> str:
    """The name of a function of torch: ``masked_fill`` for ``Tensor.masked_fill_``, ``add`` for ``Tensor.__add__``."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property, such as Tensor.T
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name.rstrip("_")
