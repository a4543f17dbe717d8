"""Profiles of the AWS command line's files: obstore reads the environment only."""

from __future__ import annotations

import configparser
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from deltaformat.errors import ErrorCode, StoreError

__all__ = ["ProfileOptions", "profile_options"]

_KEYS: Final = {
    "aws_access_key_id": "access_key_id",
    "aws_secret_access_key": "secret_access_key",
    "aws_session_token": "session_token",
}
_ELSEWHERE: Final = ("sso_session", "sso_start_url", "role_arn", "credential_process", "credential_source")


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What a profile gives: options of obstore's, and who renews credentials that are not in the files."""

    config: dict[str, str] = field(default_factory=dict, repr=False)
    provider: Any = field(default=None, repr=False)


def profile_options(given: Mapping[str, object], environment: Mapping[str, str]) -> ProfileOptions:
    """Read the profile that AWS_PROFILE names, or `default`, as the AWS command line does.

    Credentials that are given or in the environment come first; so does a role of the machine, unless
    AWS_PROFILE is set or the files have keys. Keys in the files need nothing; what must be fetched (single
    sign-on, roles, processes) needs boto3.

    Args:
        given: Options that the caller gave, by obstore's names without the prefix `aws_`.
        environment: Environment variables.

    Raises:
        StoreError: AWS_PROFILE names a profile that is not there, or one that needs boto3, which is not.
    """
    named = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")
    name = named or "default"
    credentials = _section(environment.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials", name)
    settings = _section(
        environment.get("AWS_CONFIG_FILE") or "~/.aws/config",
        name if name == "default" else f"profile {name}",
    )
    has_keys = any("access_key" in key or key in ("session_token", "skip_signature") for key in given) or any(
        environment.get(key)
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    )
    merged = {**settings, **credentials}
    if named and not merged and not has_keys:
        raise StoreError(
            ErrorCode.STORE_FAILED,
            f"there is no AWS profile {name!r} in the files below ~/.aws",
            where="AWS_PROFILE",
        )
    config: dict[str, str] = {}
    if merged.get("region") and not (environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")):
        config["region"] = merged["region"]
    if merged.get("endpoint_url") and not any(
        environment.get(key) for key in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    ):
        config["endpoint"] = merged["endpoint_url"]
    if has_keys:
        return ProfileOptions(config)
    if "aws_access_key_id" in merged:
        config |= {ours: merged[theirs] for theirs, ours in _KEYS.items() if merged.get(theirs)}
        return ProfileOptions(config)
    if any(key in merged for key in _ELSEWHERE):
        return ProfileOptions(config, _boto3_provider(name))
    return ProfileOptions(config)


def _section(path: str, name: str) -> dict[str, str]:
    parser = configparser.RawConfigParser()
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        return {}  # nobody's home: a container's user that no file knows, say
    try:
        parser.read(found, encoding="utf-8")
        return dict(parser[name]) if parser.has_section(name) else {}
    except (OSError, UnicodeError, configparser.Error) as error:
        # Its text may quote a line of the file.
        raise StoreError(
            ErrorCode.STORE_FAILED, f"this file cannot be read ({type(error).__name__})", where=path
        ) from None


def _boto3_provider(name: str) -> Any:
    try:
        import boto3
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        raise StoreError(
            ErrorCode.STORE_FAILED,
            f"the AWS profile {name!r} fetches its credentials, which needs boto3: pip install boto3",
            where="AWS_PROFILE",
        ) from None
    return Boto3CredentialProvider(boto3.session.Session(profile_name=name))
