"""Measurements that run in processes of their own, started by the benchmarks."""
