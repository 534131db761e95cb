"""Training: the step, the loop, and the files that a run reads and writes."""
