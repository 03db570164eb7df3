"""Freeze all imported objects, so that forked ranks do not garbage-collect them.

tests/ranks.py lists this module last. Without it, the first collection of each rank writes to every
object's header and thereby copies its memory page, which takes a third of a second.
"""

import gc

gc.collect()
gc.freeze()
