"""What crosses a wire or a disk: documents, topics, policy, codecs, errors, clocks, durable files.

This room imports nothing of ours; every other room may import it.
"""
