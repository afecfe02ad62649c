"""Checks of names of Kubernetes objects and images that no cluster accepts.

The CRD has the same patterns. Whether an object or an image exists is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rekindle.errors import Problem
from rekindle.topology.spec import TopologySpec

_LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
DNS_SUBDOMAIN = f"{_LABEL}([.]{_LABEL})*"
"""A DNS subdomain of RFC 1123: names that most objects of Kubernetes may have."""
MAX_NAME_CHARS = 253
_HOST_PART = "[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?"
_HOST = rf"({_HOST_PART}([.]{_HOST_PART})*|\[[a-fA-F0-9:]+\])(:[0-9]+)?"
_PATH_PART = "[a-z0-9]+(([.]|_|__|-+)[a-z0-9]+)*"
_TAG = "[a-zA-Z0-9_][-a-zA-Z0-9_.]{0,127}"
_DIGEST = "[a-zA-Z][a-zA-Z0-9]*([-_+.][a-zA-Z][a-zA-Z0-9]*)*:[0-9a-fA-F]{32,}"
IMAGE = f"({_HOST}/)?{_PATH_PART}(/{_PATH_PART})*(:{_TAG})?(@{_DIGEST})?"
"""A reference as container runtimes parse it."""
_IMAGE_PATTERN = re.compile(IMAGE)
_NAME_PATTERN = re.compile(DNS_SUBDOMAIN)


def check_object_names(spec: TopologySpec) -> Iterator[Problem]:
    named = [
        ("spec.checkpoint.secretRef", "Secret", spec.checkpoint.secret_ref),
        ("spec.checkpoint.volume", "PersistentVolumeClaim", spec.checkpoint.volume),
        ("spec.serviceAccountName", "ServiceAccount", spec.service_account_name),
    ]
    for at, secret in enumerate(spec.image_pull_secrets):
        named.append((f"spec.imagePullSecrets[{at}].name", "Secret", secret.get("name")))
    for path, kind, name in named:
        if name is not None and not (_NAME_PATTERN.fullmatch(name) and len(name) <= MAX_NAME_CHARS):
            what = f"{name!r} cannot be the name of a {kind}"
            hint = f"at most {MAX_NAME_CHARS} of a-z, 0-9, - and .; begin and end with a-z or 0-9"
            yield Problem(path, "InvalidName", what, hint)
    if spec.image is not None and not _IMAGE_PATTERN.fullmatch(spec.image):
        what = f"{spec.image!r} cannot be the name of an image"
        hint = "write it like registry.example/rekindle/pipelines:0.1.0"
        yield Problem("spec.image", "InvalidName", what, hint)
