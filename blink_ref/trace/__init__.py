"""Traces: what the kernel's scheduler did, as it wrote it down, for Perfetto and as a picture."""
