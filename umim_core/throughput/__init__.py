"""Throughput of base and UMIM on one backbone, bounded by the device's roofline."""
