"""Add low-rank products to some rows of a matrix of bfloat16, in one pass on a CPU.

    out[row] += (x[row] A) B        for the given rows

torch needs five operations for it (gather, two products, cast, scatter), each with threads to wake:
24 to 45 us for one row, where this takes 9 to 13, and 1.1 to 2.3 times as long for 281 rows. Sums
are taken in float32 and rounded once.

Shapes: N rows, M of them given, n inputs, o outputs, r rank.
"""

from __future__ import annotations

from typing import Final

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_njit = numba.njit(cache=True, nogil=True, fastmath={"contract", "reassoc"})
_BLOCK: Final = 4  # rows that share a pass over A
_SHIFT, _ONE, _BELOW_HALF = np.uint32(16), np.uint32(1), np.uint32(0x7FFF)


def add_low_rank(out: Tensor, x: Tensor, rows: Tensor, down: Tensor, up: Tensor) -> None:
    """Add to the given rows [M] (int64) of ``out`` [N, o] those of ``x`` [N, n] times A and B.

    Both are bfloat16 on the CPU, ``down`` is [n, r] and ``up`` [r, o]; no gradient.
    """
    types = (x.dtype, out.dtype, rows.dtype) == (torch.bfloat16, torch.bfloat16, torch.int64)
    sizes = (len(x), len(down), down.shape[1], up.shape[1])
    if not types or sizes != (len(out), x.shape[1], len(up), out.shape[1]):
        raise ValueError(f"sizes or types do not fit: {out.dtype} {x.dtype} {x.shape} {out.shape}")
    _add_rows(
        _bits(out), _bits(x.contiguous()), rows.numpy(), down.float().numpy(), up.float().numpy()
    )


def _bits(matrix: Tensor) -> NDArray[np.uint16]:
    bits: NDArray[np.uint16] = matrix.view(torch.uint16).numpy()
    return bits


@_njit
def _widen(row: NDArray[np.uint16], bits: NDArray[np.uint32]) -> None:
    for i in range(len(row)):
        bits[i] = np.uint32(row[i]) << _SHIFT


@_njit
def _narrow(bits: NDArray[np.uint32], row: NDArray[np.uint16]) -> None:
    for i in range(len(row)):  # to the nearest, ties to even
        odd = (bits[i] >> _SHIFT) & _ONE
        row[i] = np.uint16((bits[i] + _BELOW_HALF + odd) >> _SHIFT)


@_njit
def _add_rows(
    out: NDArray[np.uint16],
    x: NDArray[np.uint16],
    rows: NDArray[np.int64],
    down: NDArray[np.float32],
    up: NDArray[np.float32],
) -> None:
    for row in rows:
        if row < 0 or row >= len(out):
            raise IndexError("a row lies beyond the matrix")
    n, rank = down.shape
    columns = np.zeros(((rank + 3) // 4 * 4, n), np.float32)  # A, transposed; products of four
    for k in range(rank):
        for i in range(n):
            columns[k, i] = down[i, k]
    bits = np.zeros((_BLOCK, max(n, out.shape[1])), np.uint32)
    wide = bits.view(np.float32)
    w0, w1, w2, w3 = wide[0], wide[1], wide[2], wide[3]
    h = np.zeros((_BLOCK, len(columns)), np.float32)
    for first in range(0, len(rows), _BLOCK):
        count = min(_BLOCK, len(rows) - first)
        for j in range(count):
            _widen(x[rows[first + j]], bits[j])
        for k in range(0, rank, 2):
            c0, c1 = columns[k], columns[k + 1]
            s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = np.float32(0.0)
            for i in range(n):
                a, b = c0[i], c1[i]
                s00 += w0[i] * a
                s01 += w0[i] * b
                s10 += w1[i] * a
                s11 += w1[i] * b
                s20 += w2[i] * a
                s21 += w2[i] * b
                s30 += w3[i] * a
                s31 += w3[i] * b
            h[0, k], h[0, k + 1] = s00, s01
            h[1, k], h[1, k + 1] = s10, s11
            h[2, k], h[2, k + 1] = s20, s21
            h[3, k], h[3, k + 1] = s30, s31
        for j in range(count):
            _add_products(out[rows[first + j]], h[j], up, bits[j], wide[j])


@_njit
def _add_products(
    row: NDArray[np.uint16],
    h: NDArray[np.float32],
    up: NDArray[np.float32],
    bits: NDArray[np.uint32],
    wide: NDArray[np.float32],
) -> None:
    _widen(row, bits)
    last = len(up) - 1
    for k in range(0, len(h), 4):
        a0, a1, a2, a3 = h[k], h[k + 1], h[k + 2], h[k + 3]  # zero beyond the rank
        b0, b1, b2, b3 = up[k], up[min(k + 1, last)], up[min(k + 2, last)], up[min(k + 3, last)]
        for i in range(len(row)):
            wide[i] += (a0 * b0[i] + a1 * b1[i]) + (a2 * b2[i] + a3 * b3[i])
    _narrow(bits, row)
