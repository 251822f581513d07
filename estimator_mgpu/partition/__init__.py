"""Divides a finished graph over devices: propagation makes a plan, towers and sums follow it."""
