"""Weights from the Hugging Face hub: `hub:OWNER/NAME`, downloaded once, cached and checked by their digest.

The client is huggingface_hub (extra `hub`). It names what it caches by the digest that the hub declares, so a file is
checked against its own name whenever it is used, with or without a network.
"""

import hashlib
import os
import re
from pathlib import Path

from podscale.errors import UserError, get_first_line

PREFIX = "hub:"
FILE = "model.safetensors"
_SHA256, _SHA1 = (re.compile(f"[0-9a-f]{{{digits}}}") for digits in (64, 40))


def is_hub(source: str) -> bool:
    """Return whether a source of weights is on the hub.

    >>> is_hub("hub:timm/vit_small_patch16_224.augreg_in1k"), is_hub("weights/vit.safetensors")
    (True, False)
    """
    return source.startswith(PREFIX)


def fetch_weights(source: str, cache: str | Path | None = None) -> Path:
    """Return the local path of a repository's weights, downloaded unless they are cached.

    Args:
        source: `hub:OWNER/NAME`, or `hub:OWNER/NAME@REVISION` for a branch, tag or commit.
        cache: folder of downloaded files; by default huggingface_hub's own.

    Raises:
        UserError: the package is not installed, the weights do not exist, cannot be downloaded and are not cached, or
            are damaged.
    """
    try:
        import huggingface_hub
        from huggingface_hub import constants, errors  # submodules: attributes of the package once they are imported
    except ImportError:
        raise UserError(f"{source} needs huggingface_hub, which is not installed; install podscale[hub]") from None
    repository, _, revision = source.removeprefix(PREFIX).partition("@")
    endpoint = os.environ.get("HF_ENDPOINT") or constants.ENDPOINT
    try:
        path = huggingface_hub.hf_hub_download(
            repository, FILE, revision=revision or None, cache_dir=cache, endpoint=endpoint
        )
    except errors.HFValidationError:
        raise UserError(f"{source} names no repository; write hub:OWNER/NAME") from None
    except errors.RevisionNotFoundError:
        raise UserError(f"{repository} at {endpoint} has no revision {revision!r}") from None
    except errors.RepositoryNotFoundError:
        raise UserError(f"there is no repository {repository} at {endpoint}, or it is not public") from None
    except errors.LocalEntryNotFoundError:
        raise UserError(
            f"cannot reach {endpoint} for {source}, and its weights are not cached on this machine"
        ) from None
    except errors.EntryNotFoundError:
        raise UserError(f"{repository} at {endpoint} has no {FILE}") from None
    except (errors.HfHubHTTPError, OSError) as error:
        raise UserError(f"cannot download {source} from {endpoint}: {get_first_line(error)}") from None
    _check_digest(Path(path), source)
    return Path(path)


def _check_digest(path: Path, source: str) -> None:
    """Compare a cached file with the digest that is its name: SHA-256, or git's SHA-1 of a small file."""
    stored = path.resolve()
    with stored.open("rb") as file:
        if _SHA256.fullmatch(stored.name):
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        elif _SHA1.fullmatch(stored.name):
            header = hashlib.sha1(f"blob {stored.stat().st_size}\0".encode(), usedforsecurity=False)
            digest = hashlib.file_digest(file, lambda: header).hexdigest()
        else:
            return  # the server declares no digest
    if digest != stored.name:
        raise UserError(f"the weights of {source} are damaged: delete {stored} and start again to download them")
