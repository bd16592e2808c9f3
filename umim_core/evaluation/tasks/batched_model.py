"""lm-eval's ``hf`` model with an automatic batch size that a CPU survives.

lm-eval finds ``batch_size=auto`` by trying until memory runs out. A CPU would swap or be killed
instead of raising an error, so there the batch holds a number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from lm_eval.models.huggingface import HFLM

_CPU_TOKENS: Final = 2048  # of a forward for batch_size=auto; more are no faster
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]


class BatchedModel(HFLM):  # type: ignore[misc]  # lm-eval ships no types
    """lm-eval's ``hf`` model; ``batch_size=auto`` counts tokens on a CPU."""

    def rows_per_forward(self, longest: int) -> int:
        """Return the batch size; ``auto`` is what fits for inputs of ``longest`` raw tokens."""
        if self.batch_size != "auto":
            return int(self.batch_size)
        return self._detect_batch_size([(None, [0] * longest, [0])])

    def _detect_batch_size(
        self, requests: Sequence[TokenRequest] | None = None, pos: int = 0
    ) -> int:
        """Return what ``auto`` is: tried on a GPU, counted on a CPU.

        Without requests, as for rolling windows, inputs are as long as the model takes.
        """
        if self.device.type != "cpu":
            return int(super()._detect_batch_size(requests, pos))
        limit = int(self.max_length)
        longest = min(sum(map(len, requests[pos][1:])), limit) if requests else limit
        return max(1, min(int(self.max_batch_size), _CPU_TOKENS // longest))
