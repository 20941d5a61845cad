"""Errors of obstore as errors of the system, each with one sentence and the object's URL."""

import errno
import re
from types import MappingProxyType

from podscale.storage.locations import Location
from podscale.storage.store import ObjectChangedError

_STATUS = re.compile(r"status code: (\d{3}[^:]*)")
_METADATA_HOSTS = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
CREDENTIALS = MappingProxyType(
    {
        "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true if it is "
        "public",
        "gs": "run `gcloud auth application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS",
        "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run `az login`",
    }
)
EXPIRED = "the credentials have expired; renew them and start again"
WRONG = "the credentials are wrong"
REFUSED = "the store refuses access; check that the credentials may list, read and, where needed, write there"


def is_refusal(problem: str) -> bool:
    """Return whether a problem is that a store refuses what this process asks for, which waiting does not change.

    >>> is_refusal(EXPIRED), is_refusal("No space left on device")
    (True, False)
    """
    return problem.startswith((EXPIRED, WRONG, REFUSED))


def translate_error(error: Exception, where: Location) -> Exception:
    """Return the `OSError` (see `podscale.storage.store`) that an exception of obstore amounts to; others unchanged."""
    from obstore import exceptions

    name, result = str(where), error
    if isinstance(error, FileNotFoundError):
        result = FileNotFoundError(errno.ENOENT, _describe_absence(str(error)), name)
    elif isinstance(error, exceptions.AlreadyExistsError):
        result = FileExistsError(errno.EEXIST, "there is an object of this name already", name)
    elif isinstance(error, exceptions.PreconditionError | exceptions.NotModifiedError):
        result = ObjectChangedError(name)
    elif isinstance(error, exceptions.PermissionDeniedError | exceptions.UnauthenticatedError):
        result = PermissionError(errno.EACCES, _explain_refusal(str(error), where), name)
    elif isinstance(error, exceptions.BaseError):
        result = _explain_failure(str(error).partition("\n\nDebug source:")[0], where)
    return result


def _describe_absence(text: str) -> str:
    is_bucket = "NoSuchBucket" in text or "ContainerNotFound" in text  # S3's and Azure's codes
    return "there is no such bucket" if is_bucket else "there is no such object"


def _has_expired(text: str) -> bool:
    return "ExpiredToken" in text or "TokenRefreshRequired" in text


def _explain_refusal(text: str, where: Location) -> str:
    if _has_expired(text):
        return EXPIRED
    if "InvalidAccessKeyId" in text or "SignatureDoesNotMatch" in text:
        return f"{WRONG}; {CREDENTIALS.get(where.scheme, 'check them')}"
    return REFUSED


def _explain_failure(text: str, where: Location) -> OSError:
    """Return the error of a request that failed for another reason, or too often."""
    if any(host in text for host in _METADATA_HOSTS):
        return PermissionError(
            errno.EACCES, f"no credentials were found; {CREDENTIALS.get(where.scheme, 'check them')}", str(where)
        )
    status = _STATUS.search(text)
    code = int(status[1][:3]) if status else 0
    answer = f"the store answers {status[1].strip()}" if status else "the store does not answer"
    if code in (401, 403) or (code == 400 and _has_expired(text)):  # 400 is S3's own answer to that
        return PermissionError(errno.EACCES, _explain_refusal(text, where), str(where))
    if code == 404:
        return FileNotFoundError(errno.ENOENT, _describe_absence(text), str(where))
    if code in (301, 307):
        return OSError(errno.EINVAL, "the bucket is in another region; set AWS_REGION", str(where))
    if code and code < 500 and code not in (408, 429):
        return OSError(errno.EIO, answer, str(where))
    seconds = re.search(r" in ([0-9.]+)s", text)
    tried = f" (tried for {float(seconds[1]):.0f} s)" if seconds else ""
    return TimeoutError(errno.ETIMEDOUT, f"{answer}{tried}; check the address and the network", str(where))
