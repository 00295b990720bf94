"""The effects of torch operations on the entries of labels, by the operation's name."""

from typing import Any

# fmt: off
#: Operations that move the first argument's entries, as the other arguments say.
MOVING = frozenset((
    "H", "T", "adjoint", "alias", "as_subclass", "atleast_1d", "atleast_2d", "atleast_3d", "broadcast_to",
    "chunk", "clone", "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "flip", "fliplr",
    "flipud", "gather", "getitem", "hsplit", "index_select", "iter", "mH", "mT", "masked_select", "moveaxis",
    "movedim", "narrow", "pad", "permute", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as",
    "roll", "rot90", "select", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "take",
    "take_along_dim", "tensor_split", "tile", "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "view",
    "view_as", "vsplit",
))
#: Operations that join a list of tensors.
JOINING = frozenset((
    "cat", "column_stack", "concat", "concatenate", "dstack", "hstack", "row_stack", "stack", "vstack",
))
#: Operations that give masks, which select entries but do not hold their values.
COMPARING = frozenset((
    "eq", "ge", "greater", "greater_equal", "gt", "isfinite", "isin", "isnan", "le", "less", "less_equal", "lt",
    "ne", "not_equal",
))
#: Operations that change the type or the device.
CASTING = frozenset((
    "bfloat16", "bool", "cpu", "cuda", "double", "float", "half", "int", "long", "short", "to", "type", "type_as",
))
#: Operations that compute one value per entry.
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
    """Return the name of a torch function: ``masked_fill`` for ``Tensor.masked_fill_``, ``add`` for ``Tensor.__add__``."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # of a property, such as Tensor.T
        name = getattr(getattr(func, "__self__", None), "__name__", "")
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name.rstrip("_")
