"""Exempt the objects of all imports from garbage collection in the processes that are forked later.

The fork server of tests/ranks.py imports this module last. Otherwise the first collection of each
rank would visit, and thereby copy, all of these objects, which takes a third of a second.
"""

import gc

gc.collect()
gc.freeze()
