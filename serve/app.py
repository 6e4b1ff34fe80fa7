"""A target and its draft behind an OpenAI-compatible endpoint, for Ray Serve's own command line.

    serve run serve.app:build target=/models/smollm2 draft=/runs/quickstart/draft model_name=smollm2
    serve run serve/quickstart.yaml

The arguments are the fields of `draftline.serving.config.ServeConfig`. A cluster whose nodes have draftline installed
can name `draftline.serving.app:build` instead, as the config file does, and needs nothing of this folder.
"""

from draftline.serving.app import build

__all__ = ["build"]
