"""A target from the hub: its folder in the hub's local cache."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftline.errors import InputError

_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def download(label: str, hub_id: str, revision: str | None, *, with_code: bool) -> Path:
    """Downloads what an engine needs of a hub model, or finds it in the cache; returns its folder.

    `with_code` fetches the model's own Python files too. `label` begins the InputError raised when the model cannot be
    had.
    """
    patterns = [*_FILES, "*.py"] if with_code else _FILES
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns, ignore_patterns="original/*"))
    except HFValidationError as error:
        found = "a URL or a name with a password" if re.search("[@:?#]", hub_id) else hub_id
        raise InputError(f"{label}: found {found}; allowed: a hub id such as owner/name") from error
    except GatedRepoError as error:
        raise InputError(f"{label}: {hub_id} asks for its terms to be accepted on the hub, and for a token") from error
    except RevisionNotFoundError as error:
        raise InputError(f"{label}: {hub_id} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise InputError(f"{label}: the hub has no {hub_id}, or it is private and a token is needed") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, httpx.TransportError) as error:
        raise InputError(
            f"{label}: found no copy of {hub_id} on this machine, and the hub cannot be reached; allowed: a machine "
            "with access to the hub, a copy in the hub's cache, or a local folder as target.path"
        ) from error
    except HfHubHTTPError as error:
        raise InputError(f"{label}: the hub refused {hub_id}: {error}") from error
