"""The real scheduler under a virtual clock: traces in, latencies and timelines out."""
