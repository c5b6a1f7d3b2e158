"""Bytes that are no message of ours."""

GARBAGE = (b"\xc1\xff\x00", b"", b"\x81\xa4type\xa3wat", bytes(range(256)) * 16)
