"""Linear maps on float8 operands: scales, histories of amax, products by several backends, and CUDA's rules for them."""
