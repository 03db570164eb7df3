"""Tokenize text into a corpus: token files, their tokenizer and a manifest.

Without arguments, the command prepares the Python sources of this interpreter's standard library,
on which recipes/tiny.toml trains.

    python recipes/prepare_data.py
    python recipes/prepare_data.py --source books.jsonl --output data/books --vocab-size 32000
    python recipes/prepare_data.py --source 'crawl/*.jsonl.zst' --tokenizer data/books/tokenizer \\
        --output data/crawl --skip utf-8 --skip empty
    python recipes/prepare_data.py --source wikitext --config wikitext-103-raw-v1 \\
        --validation-split validation --tokenizer gpt2 --output data/wikitext --skip empty
    python recipes/prepare_data.py --source c4/train --validation-source c4/validation \\
        --tokenizer gpt2 --output data/c4

After an interruption, rerun the same command to resume. To use several machines with a shared file
system, run the command with --shard 0/16, --shard 1/16, ... When all shards are done, run it once
without --shard to join them.

List the documents and tokens that a step of a recipe reads, and compare a corpus with its manifest:

    python recipes/prepare_data.py show recipes/tiny.toml --step 17 --text
    python recipes/prepare_data.py show runs/mine/recipe.toml --step 17 --text
    python recipes/prepare_data.py verify data/books

Make a task for evaluation.tasks from the validation documents of a corpus (`tasks --help`):

    python recipes/prepare_data.py tasks next-line data/stdlib --output data/tasks/next_line.jsonl

Exit code 0: done; 1: a corpus is damaged; 2: a source, a file or an option is rejected.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt

    end_at_interrupt()

from threefold.commands.prepare_data import main

if __name__ == "__main__":
    main(__doc__)
