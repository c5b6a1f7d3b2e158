"""What the engine shows of itself while somebody looks: its steps, live on the page and as a trace file."""
