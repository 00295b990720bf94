"""torch's operations on lists of tensors, one call for all of them. They have no public names, though all of
``torch.optim`` stands on them.
"""

# pyright: reportPrivateImportUsage=false

import torch

add_ = torch._foreach_add_
lerp = torch._foreach_lerp
lerp_ = torch._foreach_lerp_
mul = torch._foreach_mul
mul_ = torch._foreach_mul_
norm = torch._foreach_norm
