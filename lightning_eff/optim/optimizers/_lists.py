"""torch's operations on lists of tensors. They have no public names, but all of ``torch.optim`` is built on them."""

# pyright: reportPrivateImportUsage=false

import torch

abs = torch._foreach_abs
add_ = torch._foreach_add_
lerp = torch._foreach_lerp
lerp_ = torch._foreach_lerp_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
add = torch._foreach_add
pow = torch._foreach_pow
pow_ = torch._foreach_pow_
reciprocal_ = torch._foreach_reciprocal_
addcdiv_ = torch._foreach_addcdiv_
addcmul_ = torch._foreach_addcmul_
clamp_max_ = torch._foreach_clamp_max_
copy_ = torch._foreach_copy_
div = torch._foreach_div
div_ = torch._foreach_div_
sign_ = torch._foreach_sign_
sqrt = torch._foreach_sqrt
sub = torch._foreach_sub
sub_ = torch._foreach_sub_
