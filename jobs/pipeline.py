"""Entrypoint of the pipeline for `ray job submit`: one run of a recipe, all stages.

ray job submit --working-dir . -- python jobs/pipeline.py jobs/recipes/quickstart.yaml
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("draftline") is None:  # shipped as a working directory: the actors find the package the same way
    package_root = str(Path(__file__).resolve().parents[1] / "platform")
    sys.path.insert(0, package_root)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))

from draftline.runs.job import main

if __name__ == "__main__":
    sys.exit(main())
