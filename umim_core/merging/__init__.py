"""The merge module, packing of merged sequences, and inference with rollback."""
