"""llama.cpp's server on loopback, from the prebuilt package xllamacpp, one thread.

python llama_server.py MODEL.gguf PORT CONTEXT

Its cache is float32.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    model, port, context = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, int(context), 1
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    del server


if __name__ == "__main__":
    main()
