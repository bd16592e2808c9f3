"""The processor's prefetch instruction for compiled loops, which numba does not offer."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_cgutils: Any = cgutils  # without types, like all of numba


def _fetch(context: Any, array: Any, index: Any) -> Any:
    """Fetch the cache line of ``array[index]`` without waiting for it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = signature.args[0]
        item = context.make_array(kind)(context, builder, arguments[0])
        pointer = _cgutils.get_item_pointer(
            context, builder, kind, item, [arguments[1]], wraparound=False
        )
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = _cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, word, word, word]),
            "llvm.prefetch.p0",
        )
        for_reading, keep_in_all_levels, data = word(0), word(3), word(1)
        builder.call(
            function, [builder.bitcast(pointer, byte), for_reading, keep_in_all_levels, data]
        )
        return context.get_dummy_value()

    return types.void(array, index), codegen


prefetch: Final[Any] = intrinsic(_fetch)
