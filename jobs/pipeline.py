"""Entrypoint of the pipeline for `ray job submit`: one run of a recipe, all stages.

ray job submit --working-dir . -- python jobs/pipeline.py jobs/recipes/quickstart.yaml
"""

import sys
from pathlib import Path

# The code beside this script is the one to run, even where another version is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "platform"))

from draftline.runs.job import main

if __name__ == "__main__":
    sys.exit(main())
