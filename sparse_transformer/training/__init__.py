"""Training: the step, the loop, and what a run reads and writes."""
