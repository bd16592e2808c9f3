"""llama.cpp's server on loopback, from the prebuilt package xllamacpp, one thread.

python llama_server.py MODEL.gguf PORT CONTEXT [TYPE]

The cache is float32; one of a ggml type, such as q8_0, is read by flash attention.
"""

from __future__ import annotations

import signal
import sys

import xllamacpp


def main() -> None:
    model, port, context, *kinds = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel = model, int(context), 1
    params.hostnames, params.port = ["127.0.0.1"], int(port)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    kind, flash = (kinds[0].upper(), "ENABLED") if kinds else ("F32", "DISABLED")
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type[f"GGML_TYPE_{kind}"]
    params.flash_attn_type = xllamacpp.llama_flash_attn_type[f"LLAMA_FLASH_ATTN_TYPE_{flash}"]
    server = xllamacpp.Server(params)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    del server


if __name__ == "__main__":
    main()
