"""Load tool for any OpenAI-compatible server: `python -m benchmarks.load --help`.

`workload` says what is sent, `patterns` when; `http_stream` sends it and stamps what comes back, `records` reads
those stamps, `summary` counts, `report` draws. `canned_server` answers faster than any engine, to show what the tool
can read.
"""
