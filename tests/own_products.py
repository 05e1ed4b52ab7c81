"""Products of other code made as the engine makes them on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from workers import tile_products

_BATCHED = (torch.bmm, torch.matmul, torch.Tensor.matmul)


class OwnProducts(TorchFunctionMode):
    """While it is on, torch's batched products in bf16 have the bits of the engine's.

    Where the engine has the library's bits that is so anyway. Linear layers are another matter:
    see `workers.exact_linear.make_exact`.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func in _BATCHED and tile_products.widens() and args[0].dtype == torch.bfloat16:
            a, b = args
            if a.dim() >= 3:
                pairs = zip(a.flatten(0, -3), b.flatten(0, -3), strict=True)
                products = [tile_products.widened(y.T.contiguous(), None)(x) for x, y in pairs]
                return torch.stack(products).view(*a.shape[:-1], -1)
        return func(*args, **(kwargs or {}))
