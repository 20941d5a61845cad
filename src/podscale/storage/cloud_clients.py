"""Clients of buckets: endpoints, credentials and time limits, found where each cloud's own tools find them.

S3: the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, AWS_REGION, AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, ...), the shared
files `~/.aws/config` and `~/.aws/credentials`, then the roles of containers and machines. Google: application default
credentials; or none, for the server that STORAGE_EMULATOR_HOST names. Azure: the environment
(AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_CONNECTION_STRING, ...), then `az login`.
"""

import configparser
import json
import os
import shutil
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from podscale.errors import UserError
from podscale.storage.cloud_errors import CREDENTIALS
from podscale.storage.locations import Location

RETRY_VARIABLE = "PODSCALE_STORE_RETRY_S"
RETRY_S = 180.0  # seconds during which a request that failed is repeated
CONNECT_S, READ_S, REQUEST_S = 10, 30, 600  # seconds to connect, to wait for the next bytes, and for a whole request
FILE_LIFETIME = timedelta(minutes=10)  # after which keys in a shared file are read again: tools renew them there


def make_client(location: Location) -> Any:
    """Return obstore's client of a bucket or web server.

    Raises:
        UserError: obstore or xxhash is not installed, or the configuration makes no sense.
    """
    try:
        import xxhash  # noqa: F401 (for the disk cache; better now than after the index)
        from obstore import exceptions, store
    except ImportError as error:
        raise UserError(f"{location} needs {error.name}; install it: pip install 'podscale[cloud]'") from error
    environment = os.environ
    limits: dict[str, Any] = {"client_options": _make_client_options(location), "retry_config": _make_retry_config()}
    try:
        if location.scheme == "s3":
            config, provider = find_s3_settings(environment)
            limits["client_options"]["allow_http"] = config.get("endpoint", "").startswith("http://")
            return store.S3Store(location.bucket, config=config, credential_provider=provider, **limits)
        if location.scheme == "gs":
            config = find_google_settings(environment)
            limits["client_options"]["allow_http"] = config.get("base_url", "").startswith("http://")
            return store.GCSStore(location.bucket, config=config, **limits)
        if location.scheme == "az":
            config = find_azure_settings(environment)
            limits["client_options"]["allow_http"] = config.get("endpoint", "http://").startswith("http://")
            return store.AzureStore(location.bucket, config=config, **limits)
        return store.HTTPStore.from_url(f"{location.scheme}://{location.bucket}", **limits)
    except (exceptions.BaseError, ValueError) as error:
        why = str(error).partition("\n")[0]
        if why.endswith("Account must be specified"):
            raise UserError(f"cannot open {location}: no account is named; {CREDENTIALS['az']}") from None
        raise UserError(f"cannot open {location}: {why}; check the settings in the environment") from None


def get_retry_s() -> float:
    """Return the seconds during which a request that failed is repeated: $PODSCALE_STORE_RETRY_S, or else `RETRY_S`."""
    text = os.environ.get(RETRY_VARIABLE, "")
    try:
        seconds = float(text or RETRY_S)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 3600:
        raise UserError(f"{RETRY_VARIABLE} is {text}; it must be a number of seconds from 0 to 3600")
    return seconds


def _make_client_options(location: Location) -> dict[str, Any]:
    return {
        "connect_timeout": timedelta(seconds=CONNECT_S),
        "read_timeout": timedelta(seconds=READ_S),
        "timeout": timedelta(seconds=REQUEST_S),
        "allow_http": location.scheme == "http",
        "user_agent": "podscale",
    }


def _make_retry_config() -> dict[str, Any]:
    backoff = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2}
    return {"max_retries": 1000, "retry_timeout": timedelta(seconds=get_retry_s()), "backoff": backoff}


# --- Amazon S3 -----------------------------------------------------------------------------------------------------


def find_s3_settings(environment: Mapping[str, str]) -> tuple[Any, Any]:
    """Return obstore's settings for S3 and, where keys are in a shared file, a function that reads them there."""
    profile = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    folder = Path(os.path.expanduser("~/.aws"))
    config = _read_profile(environment.get("AWS_CONFIG_FILE") or folder / "config", profile)
    keys_file = environment.get("AWS_SHARED_CREDENTIALS_FILE") or folder / "credentials"
    endpoint = (
        environment.get("AWS_ENDPOINT_URL_S3")
        or environment.get("AWS_ENDPOINT_URL")
        or environment.get("AWS_ENDPOINT")
        or config.get("endpoint_url", "")
    )
    region = environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION") or config.get("region", "")
    settings = {key: value for key, value in (("endpoint", endpoint.rstrip("/")), ("region", region)) if value}
    has_own = any(
        environment.get(name)
        for name in (
            "AWS_ACCESS_KEY_ID",
            "AWS_WEB_IDENTITY_TOKEN_FILE",
            "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
            "AWS_CONTAINER_CREDENTIALS_FULL_URI",
            "AWS_SKIP_SIGNATURE",
        )
    )
    if has_own or not _read_keys(keys_file, config, profile):
        return settings, None

    def provide() -> dict[str, Any]:
        keys = _read_keys(keys_file, config, profile)
        if not keys:
            raise UserError(f"{keys_file} has no keys for the profile {profile} any more; put them back")
        return keys | {"expires_at": datetime.now(UTC) + FILE_LIFETIME}

    return settings, provide


def _read_keys(path: str | Path, config: Mapping[str, str], profile: str) -> dict[str, Any]:
    """Return a profile's keys, from the file of credentials or else the one of settings; empty if it has none."""
    for section in (_read_profile(path, profile), config):
        if "aws_access_key_id" in section and "aws_secret_access_key" in section:
            return {
                "access_key_id": section["aws_access_key_id"],
                "secret_access_key": section["aws_secret_access_key"],
                "token": section.get("aws_session_token"),
            }
    return {}


def _read_profile(path: str | Path, profile: str) -> Mapping[str, str]:
    parser = configparser.RawConfigParser()
    try:
        parser.read(path, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError, OSError) as error:
        why = str(error).partition("\n")[0]
        raise UserError(f"cannot read {path}: {why}; correct it, or set AWS_ACCESS_KEY_ID") from None
    name = next((name for name in (profile, f"profile {profile}") if parser.has_section(name)), "")
    return parser[name] if name else {}


# --- Google --------------------------------------------------------------------------------------------------------


def find_google_settings(environment: Mapping[str, str]) -> Any:
    """Return obstore's settings for another server than Google's, which needs no credentials."""
    address = environment.get("STORAGE_EMULATOR_HOST", "")
    if not address:
        return {}
    address = address if "://" in address else f"http://{address}"
    address = address.rstrip("/")
    account = {
        "gcs_base_url": address,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    return {"base_url": address, "service_account_key": json.dumps(account)}


# --- Azure ---------------------------------------------------------------------------------------------------------


def find_azure_settings(environment: Mapping[str, str]) -> Any:
    """Return obstore's settings for Azure that it does not find in the environment by itself."""
    settings: dict[str, Any] = {}
    pairs = environment.get("AZURE_STORAGE_CONNECTION_STRING", "").split(";")
    connection = dict(pair.partition("=")[::2] for pair in pairs if pair)
    names = {"AccountName": "account_name", "AccountKey": "account_key", "SharedAccessSignature": "sas_key"}
    settings |= {names[key]: value for key, value in connection.items() if key in names}
    if "BlobEndpoint" in connection:
        settings["endpoint"] = connection["BlobEndpoint"]
    account = environment.get("AZURE_STORAGE_ACCOUNT_NAME") or environment.get("AZURE_STORAGE_ACCOUNT")
    if account and "account_name" not in settings:
        settings["account_name"] = account
    if environment.get("AZURE_STORAGE_KEY"):
        settings["account_key"] = environment["AZURE_STORAGE_KEY"]
    has_key = any("KEY" in name or "TOKEN" in name or "CLIENT" in name for name in environment if "AZURE_" in name)
    if not connection and not has_key and shutil.which("az"):
        settings["use_azure_cli"] = True
    return settings
