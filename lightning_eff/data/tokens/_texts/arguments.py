"""The kinds of arguments that name tensors of a batch, and tokens."""

from typing import Annotated

from lightning_eff._core._arguments.batch import BatchKeys, TokenIds
from lightning_eff._core._arguments.kinds import Count

TokenId = Annotated[int, Count(at_least=0)]
SpecialTokens = Annotated[list[int], TokenIds(hint="Write a list, such as [101, 102].")]
TextKeys = Annotated[list[str | int], BatchKeys(2, hint="Write keys=['input_ids', 'labels'] or keys=[0, 1].")]
