"""Benchmarks: pcpkit's operators beside the kernels their users run today."""
