"""Continue a text, or chat, in the terminal, with a run or with an exported model.

    python recipes/generate.py runs/tiny --prompt "def "
    python recipes/generate.py runs/7b/checkpoints/step-0100000 --temperature 0 --max-tokens 50
    python recipes/generate.py exported --chat

The first argument is one of these folders:
- a run folder, of which the newest undamaged checkpoint is loaded
- a checkpoint
- a model that transformers can load, such as an output of convert.py to-hf

Without --prompt, the command reads one prompt per line until Ctrl-D or Ctrl-C. transformers
generates the text token by token, on a GPU if there is one; for many users, use a server such as
vLLM.
Exit code 0: done; 2: a file or an option is rejected; 130: interrupted.
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # import from the repository's root, not from recipes/
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from threefold.runtime.exits import end_at_interrupt
    from threefold.runtime.output import silence_libraries

    end_at_interrupt()
    silence_libraries()

from threefold.commands.generate import main

if __name__ == "__main__":
    main(__doc__)
