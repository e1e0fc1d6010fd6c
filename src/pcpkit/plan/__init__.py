"""Pure planning: what a step computes and where it writes, from the global batch alone."""
