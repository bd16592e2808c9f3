"""The method: merge module, packing of spans, and every state that decoding passes through."""
