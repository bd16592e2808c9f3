"""Raw ids of rows as tensors that grow by what is new, for whoever looks at them every token.

Shapes: B rows, T raw ids of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

_FIRST_CAPACITY: Final = 64


class History:
    """Keep the ids of B rows, so that a token costs one id to copy and not T.

    Args:
        device: Where the tensors are wanted.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._known: dict[int, tuple[Tensor, int]] = {}

    def row(self, number: int, raw_ids: Sequence[int]) -> Tensor:
        """Return a row's ids [1, T].

        Args:
            number: Of the row.
            raw_ids: Its ids [T]; those of earlier calls come first and are not read again.
        """
        buffer, known = self._known.get(
            number, (torch.empty(0, dtype=torch.int64, device=self._device), 0)
        )
        length = len(raw_ids)
        if length > len(buffer):
            larger = torch.empty(
                max(_FIRST_CAPACITY, 2 * length), dtype=torch.int64, device=self._device
            )
            larger[:known] = buffer[:known]
            buffer = larger
        new = torch.tensor(raw_ids[known:], dtype=torch.int64, device=self._device)
        buffer[known:length] = new
        self._known[number] = (buffer, length)
        return buffer[None, :length]
